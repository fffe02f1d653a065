"""The compiled kernels: bitwise identical to the eager form, alone and in a run; what happens where compiling fails."""

import json
import logging
import os
import subprocess
import sys
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch

from mezo_cli.perturb.noise import Direction, Noise, counter, make_noise, simd
from mezo_cli.perturb.noise.compiled import Kernel
from tests import tiny
from tests.command_line import mezo, small
from tests.perturb.flat import perturb, update_

ROOT = Path(__file__).resolve().parents[2]
Z = Direction(seed=42, step=7)
KERNELS = {"gaussian": counter.GAUSSIAN, "rademacher": counter.RADEMACHER}
CHUNK = max(kernels.tile * kernels.max_tiles for kernels in KERNELS.values())


@pytest.fixture(params=list(KERNELS))
def noise(request: pytest.FixtureRequest) -> Noise:
    return make_noise(request.param)


@pytest.mark.sample(4)
@pytest.mark.parametrize("n", [1, 256, 5000, CHUNK + 5])
def test_eager_and_compiled_are_bitwise_identical_on_any_number_of_threads(
    noise: Noise, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    theta = torch.randn(n, generator=torch.Generator().manual_seed(n)) * torch.logspace(-6, 3, n)
    results, before = [], torch.get_num_threads()
    for flag, threads in (("1", 1), ("0", 1), ("0", 2)):
        monkeypatch.setenv("MEZO_EAGER", flag)
        torch.set_num_threads(threads)
        low, updated, pair = torch.empty(n, dtype=torch.bfloat16), theta.clone(), (torch.empty(n), torch.empty(n))
        perturb(noise, Z, "w", theta, 1e-3, low)
        perturb(noise, Z, "w", theta, 1e-3, *pair)
        update_(noise, "w", updated, [(Z, -1.7e-3), (Direction(1, 2, 3), 0.3)], [0.999, 1.0])
        results.append((low, *pair, updated))
    torch.set_num_threads(before)
    for compiled in results[1:]:
        assert all(map(torch.equal, compiled, results[0]))


@pytest.mark.sample(1)
def test_a_compiled_run_ends_in_the_bits_of_an_eager_run(
    noise: Noise, roberta: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tiny.movie_folder(tmp_path / "movies")
    for name, eager in (("compiled", "0"), ("eager", "1")):
        monkeypatch.setenv("MEZO_EAGER", eager)
        words = [f"optimizer.noise={noise.name}", "optimizer.weight_decay=0.1", "checkpoint=full"]
        result = mezo("train", *small(roberta, data, tmp_path / name, *words))
        assert result.code == 0, result
        assert json.loads((tmp_path / name / "run.json").read_text())["noise_kernels"] == name
    assert Kernel.compiler_error is None
    kernels = KERNELS[noise.name]
    assert all(kernel.compiled for kernel in (kernels.perturb_pair, kernels.add, kernels.shrink))
    for name in ("trajectory.bin", "checkpoints/last/model.safetensors", "checkpoints/best/model.safetensors"):
        assert (tmp_path / "compiled" / name).read_bytes() == (tmp_path / "eager" / name).read_bytes(), name


def kernels_of(kind: str) -> list[Kernel]:
    return [kernel for kernel in vars(KERNELS[kind]).values() if isinstance(kernel, Kernel)]


@pytest.mark.parametrize("name", simd.instruction_sets())
def test_every_instruction_set_has_every_kernel(noise: Noise, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEZO_EAGER", "0")
    monkeypatch.setenv("MEZO_SIMD", name)
    for kernel in kernels_of(noise.name):
        monkeypatch.setattr(kernel, "compiled", {})
    theta = torch.linspace(-3, 3, 5000)
    for stored, out in product((torch.float32, torch.bfloat16, torch.float16), repeat=2):
        outs = torch.empty(5000, dtype=out), torch.empty(5000, dtype=out)
        perturb(noise, Z, "w", theta.to(stored), 1e-3, *outs)
        perturb(noise, Z, "w", theta.to(stored), 1e-3, outs[0])
    update_(noise, "w", theta, [(Z, -1.7e-3), (Direction(1, 2, 3), 0.3)], [0.999, 1.0])
    assert Kernel.compiler_error is None
    # `flat.lay_out` stores theta in float32
    assert sum(len(kernel.compiled) for kernel in kernels_of(noise.name)) == 3 + 3 + 2


def test_every_code_of_the_table_and_every_coefficient_give_the_bits_of_the_eager_form(
    noise: Noise, monkeypatch: pytest.MonkeyPatch
) -> None:
    n = 1 << 19  # eight draws per entry of the table
    for c in (1.0, -3e-5, 0.0, 1e-42):
        results = []
        for flag in ("0", "1"):
            monkeypatch.setenv("MEZO_EAGER", flag)
            out, low = torch.empty(n), torch.empty(n, dtype=torch.bfloat16)
            perturb(noise, Z, "w", torch.zeros(n), c, out, torch.empty(n))
            perturb(noise, Z, "w", torch.full((n,), 1 / 3), c, low)
            results.append((out, low))
        assert torch.equal(results[0][0].view(torch.int32), results[1][0].view(torch.int32)), c
        assert torch.equal(results[0][1].view(torch.int16), results[1][1].view(torch.int16)), c


@pytest.mark.slow
def test_without_a_compiler_the_bits_are_the_same_and_one_warning_says_that_it_is_slow() -> None:
    code = """
import torch
from mezo_cli.perturb.noise import Direction, make_noise
from tests.perturb.flat import update_
theta = torch.zeros(3000)
for kind in ("gaussian", "rademacher"):
    noise = make_noise(kind)
    update_(noise, "w", theta, [(Direction(1, 2), 0.5)], [1.0])
assert noise.describe_kernels()[0] == "eager"
print(float(theta.double().sum()))
"""
    environment = {**os.environ, "CXX": "/no/such/compiler", "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("warning: the noise is not compiled, and 10 to 30 times slower: ") == 1, done.stderr
    theta = torch.zeros(3000)
    for kind in KERNELS:
        update_(make_noise(kind), "w", theta, [(Direction(1, 2), 0.5)], [1.0])
    assert float(done.stdout) == float(theta.double().sum())


def fresh_kernel() -> Kernel:
    tile = counter.RADEMACHER.tile
    return Kernel(counter.RADEMACHER.add.function, 1, tile, 64, partial(simd.compile_kernel, "rademacher", "add", tile))


def added(kernel: Kernel) -> torch.Tensor:
    theta = torch.linspace(-2, 2, 3 * kernel.tile)
    c = torch.tensor(0.25)
    keys = torch.tensor([1, 1 << 40, -7])
    kernel(theta, torch.arange(5, 8, dtype=torch.int32), keys, torch.tensor([3, 4]), c)
    return theta


def is_wrong(theta: torch.Tensor, *_: object) -> None:
    theta.add_(0.25)


def test_code_that_was_compiled_wrongly_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected, kernel = added(fresh_kernel()), fresh_kernel()
    monkeypatch.setattr(Kernel, "compiler_error", None)  # and back to what it was, after the test
    monkeypatch.setattr(kernel, "native", lambda arrays: is_wrong)
    with caplog.at_level(logging.WARNING, "mezo"):
        assert torch.equal(added(kernel), expected)
    assert "slower: the compiled code gives other numbers" in caplog.text
    assert Kernel.compiler_error is not None
