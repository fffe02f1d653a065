"""The kernels of `simd.cpp` for each instruction set, against results of the eager form that are stored as CRCs.

    python -m tests.perturb.test_simd > tests/perturb/simd_vectors.txt

writes them. `simd_vectors.cpp` makes the same inputs, so it needs no Python, and runs for other machines under qemu.
"""

import os
import shutil
import subprocess
import zlib
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mezo_cli.perturb.noise import compiled, counter
from mezo_cli.perturb.noise.compiled import Kernel
from mezo_cli.perturb.noise.rounding import kernel, update_kernel
from tests import tiny
from tests.command_line import mezo, small

HERE = Path(__file__).parent
STORED = HERE / "simd_vectors.txt"
KERNELS = (counter.GAUSSIAN, counter.RADEMACHER)  # in the order of `compiled.KINDS`
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
    for kind, (kernels, scaled) in enumerate(zip(KERNELS, SCALED, strict=True)):
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


if __name__ == "__main__":
    print("\n".join(lines()))
