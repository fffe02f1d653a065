"""The compiled kernels: bitwise identical to the eager form, alone and in a run; what happens where compiling fails.

The results of the eager form for each instruction set of `simd.cpp` are stored as CRCs.

    python -m tests.perturb.test_compiled > tests/perturb/simd_vectors.txt

writes them. `simd_vectors.cpp` makes the same inputs, so it needs no Python, and runs for other machines under qemu.
"""

import json
import logging
import os
import shutil
import subprocess
import sys
import zlib
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mezo_cli.perturb.noise import Direction, Noise, compiled, counter, make_noise
from mezo_cli.perturb.noise.compiled import Kernel
from mezo_cli.perturb.noise.rounding import kernel, update_kernel
from tests import tiny
from tests.command_line import mezo, ok, small
from tests.perturb.flat import perturb, update_

HERE = Path(__file__).resolve().parent
STORED = HERE / "simd_vectors.txt"
KERNELS = {"gaussian": counter.GAUSSIAN, "rademacher": counter.RADEMACHER}  # in the order of `compiled.KINDS`
ROUND = compiled.OPERATIONS.index("round_bfloat16")  # and float16 next
CROSS = ("aarch64-linux-gnu-g++", "qemu-aarch64")
# The inputs of simd_vectors.cpp.
NUMBERS = torch.tensor([5, 6, 1 << 26], dtype=torch.int32)
KEYS = torch.tensor([0x123456789ABCDEF0, 0x123456789ABCDEF0, -7])
STEP_SAMPLE, ROUNDING = torch.tensor([3, 1]), torch.tensor([3, 0xFFFFFFFF])
NUMBER = torch.tensor(1 - 1 / 1024, dtype=torch.float64)
SCALED = ((2 * torch.arange(65536) - 65535) / 1048576, torch.tensor(0.0234375))


def theta_of(kind: int, numel: int) -> Tensor:
    """Return elements of many sizes, all finite, in the type of that number."""
    h = (torch.arange(numel) * 2654435761 + 12345) & 0xFFFFFFFF
    exponent = 100 + 3 * (h >> 23 & 15)
    if kind == 0:
        return ((h & 0x807FFFFF) | exponent << 23).to(torch.int32).view(torch.float32)
    bits = (h >> 16 & 0x807F) | exponent << 7 if kind == 1 else (h >> 16 & 0x83FF) | h % 31 << 10
    return bits.to(torch.int16).view(compiled.TYPES[kind])


def cases() -> Iterator[tuple[tuple[int, ...], Kernel, list[Tensor]]]:
    """Yield (numbers of the case, its kernel, the inputs after the arrays) for every kernel and all of its types."""
    for kind, (kernels, scaled) in enumerate(zip(KERNELS.values(), SCALED, strict=True)):
        draw, blocks = [NUMBERS, KEYS, STEP_SAMPLE, scaled], kernels.tile // compiled.BLOCK
        for theta, out in product(range(3), repeat=2):
            yield (kind, 0, theta, out, 2, blocks), kernels.perturb, draw
            yield (kind, 0, theta, out, 3, blocks), kernels.perturb_pair, draw
        for operation, theta in product(("add", "decay", "shrink"), range(3)):
            if operation == "decay" and theta:
                continue  # what decays by a factor is a moment, in float32
            number = (kind, compiled.OPERATIONS.index(operation), theta, theta, 1, blocks)
            more = [NUMBER][: operation != "add"]
            if theta == 0:
                yield number, getattr(kernels, operation), [*draw, *more]
            else:
                yield number, update_kernel(kernels, operation), [*draw, ROUNDING, *more]
        for i in range(2):
            number = (compiled.KINDS.index("none"), ROUND + i, 0, 0, 1, blocks)
            yield number, kernel(compiled.TYPES[1 + i], kernels.tile), [NUMBERS, KEYS, ROUNDING]


def lines() -> Iterator[str]:
    """Yield the lines of the file, by the eager form."""
    for number, function, inputs in cases():
        _, _, theta, out, arrays, _ = number
        data = [theta_of(theta, len(NUMBERS) * function.tile)]
        data += [torch.empty(len(data[0]), dtype=compiled.TYPES[out]) for _ in range(1, arrays)]
        function.function(*data, *inputs)
        crc = 0
        for array in data[arrays > 1 :]:
            crc = zlib.crc32(array.view(torch.uint8).numpy().tobytes(), crc)
        yield " ".join([*map(str, number), f"{crc:08x}"])


def test_the_stored_results_are_those_of_the_eager_form() -> None:
    assert list(lines()) == STORED.read_text().splitlines()


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", list(compiled.FLAGS))
def test_every_kernel_has_the_bits_of_the_eager_form(name: str, tmp_path: Path) -> None:
    compiler, run = ["g++"], []
    if name not in compiled.INSTRUCTION_SETS:
        if name != "neon" or not all(map(shutil.which, CROSS)):
            pytest.skip(f"{name}: not on this machine, or not without {' and '.join(CROSS)}")
        compiler, run = [CROSS[0], "-static"], [CROSS[1]]
    sources, program = [str(compiled.SOURCE), str(HERE / "simd_vectors.cpp")], str(tmp_path / "program")
    subprocess.run([*compiler, "-std=c++17", "-O3", "-w", *compiled.FLAGS[name], *sources, "-o", program], check=True)
    done = subprocess.run([*run, program, str(STORED)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", ["avx9", "neon"])
def test_unknown_instruction_sets(name: str, roberta: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "INSTRUCTION_SETS", ("generic", "avx2"))
    monkeypatch.setenv("MEZO_SIMD", name)
    data = tiny.movie_folder(tmp_path / "movies")
    result = mezo("train", *small(roberta, data, tmp_path / "run"))
    assert result.code == 2, result
    assert f"MEZO_SIMD={name}: on this machine it can be eager, generic, avx2" in result.err


def test_code_of_another_user_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr(compiled.tempfile, "gettempdir", lambda: str(tmp_path))
    assert compiled._cache_folder().stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(compiled.os, "getuid", partial(int, os.getuid() + 1))
    (tmp_path / f"mezo_{compiled.os.getuid()}").mkdir()
    with pytest.raises(PermissionError, match="belongs to another user"):
        compiled._cache_folder()


Z = Direction(seed=42, step=7)
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
    for by_compiler in results[1:]:
        assert all(map(torch.equal, by_compiler, results[0]))


@pytest.mark.sample(1)
def test_a_compiled_run_ends_in_the_bits_of_an_eager_run(
    noise: Noise, roberta: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tiny.movie_folder(tmp_path / "movies")
    for name, eager in (("compiled", "0"), ("eager", "1")):
        monkeypatch.setenv("MEZO_EAGER", eager)
        words = [f"optimizer.noise={noise.name}", "optimizer.weight_decay=0.1", "checkpoint=full"]
        ok("train", *small(roberta, data, tmp_path / name, *words))
        assert json.loads((tmp_path / name / "run.json").read_text())["noise_kernels"] == name
    assert Kernel.compiler_error is None
    kernels = KERNELS[noise.name]
    assert all(kernel.compiled for kernel in (kernels.perturb_pair, kernels.add, kernels.shrink))
    for name in ("trajectory.bin", "checkpoints/last/model.safetensors", "checkpoints/best/model.safetensors"):
        assert (tmp_path / "compiled" / name).read_bytes() == (tmp_path / "eager" / name).read_bytes(), name


def kernels_of(kind: str) -> list[Kernel]:
    return [kernel for kernel in vars(KERNELS[kind]).values() if isinstance(kernel, Kernel)]


@pytest.mark.parametrize("name", compiled.INSTRUCTION_SETS)
def test_every_instruction_set_has_every_kernel(noise: Noise, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEZO_EAGER", "0")
    monkeypatch.setenv("MEZO_SIMD", name)
    for one in kernels_of(noise.name):
        monkeypatch.setattr(one, "compiled", {})
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
        [sys.executable, "-c", code], cwd=HERE.parents[1], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("warning: the noise is not compiled, and 10 to 30 times slower: ") == 1, done.stderr
    theta = torch.zeros(3000)
    for kind in KERNELS:
        update_(make_noise(kind), "w", theta, [(Direction(1, 2), 0.5)], [1.0])
    assert float(done.stdout) == float(theta.double().sum())


def fresh_kernel() -> Kernel:
    tile = counter.RADEMACHER.tile
    return Kernel(
        counter.RADEMACHER.add.function, 1, tile, 64, partial(compiled.compile_native, "rademacher", "add", tile)
    )


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


if __name__ == "__main__":
    print("\n".join(lines()))
