"""The noise's kernels for a GPU, by Triton's interpreter: the bits of the tensor operations (`make test-triton`)."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mezo_cli.perturb.noise import gaussian, simd
from mezo_cli.perturb.noise.compiled import Kernel
from tests.perturb.test_simd import KEYS, NUMBER, NUMBERS, STEP_SAMPLE, cases, theta_of

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("`make test-triton` runs it, in an environment of its own", allow_module_level=True)

from mezo_cli.perturb.noise import gpu

CASES = list(cases())
SPECIAL = [
    0.0,
    -0.0,
    torch.inf,
    -torch.inf,
    torch.nan,
    1e-45,
    6e-8,
    65504.0,
    65519.9,
    -65520.0,
    3.3e38,
    1e-30,
    2.0**-14,
]
# Compiled for a GPU that is not there.
COMPILE = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from mezo_cli.perturb.noise import gpu
types = {"theta": TYPE, "out": TYPE, "minus": TYPE, "tiles": "*i32", "keys": "*i64", "step_sample": "*i64"}
types |= {"scaled": "*fp32", "rounding": "*i64", "number": "*fp64", "count": "i32"}
chosen = {"KIND": KIND, "OPERATION": OPERATION, "ROUNDS_TO": TO, "PAIR": OPERATION == "perturb"}
chosen |= {"BLOCKS": BLOCKS, "TILES": gpu.TILES[KIND]}
source = ASTSource(fn=gpu._noise, signature=types | dict.fromkeys(chosen, "constexpr"), constexprs=chosen)
print(compile(source, target=GPUTarget("cuda", 80, 32), options={"enable_fp_fusion": False}).asm["ptx"])
"""


def compare(case: tuple[int, ...], kernel: Kernel, inputs: list[Tensor], theta: Tensor) -> None:
    kind, operation, _, out, arrays, _ = case
    expected = [theta, *(torch.zeros(len(theta), dtype=simd.TYPES[out]) for _ in range(1, arrays))]
    actual = [array.clone() for array in expected]
    kernel.function(*expected, *inputs)
    compiled = gpu.compile_kernel(simd.KINDS[kind], simd.OPERATIONS[operation], kernel.tile, tuple(actual))
    compiled(*actual, *inputs)
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a.isnan(), b.isnan())
        assert torch.equal(a.nan_to_num(0.0).view(torch.uint8), b.nan_to_num(0.0).view(torch.uint8))
        assert torch.equal(a.isinf(), b.isinf())


@pytest.mark.parametrize(("case", "kernel", "inputs"), CASES, ids=[" ".join(map(str, case)) for case, *_ in CASES])
def test_every_kernel_gives_the_bits_of_the_tensor_operations(
    case: tuple[int, ...], kernel: Kernel, inputs: list[Tensor]
) -> None:
    theta = theta_of(case[2], len(NUMBERS) * kernel.tile)
    compare(case, kernel, inputs, theta.clone())
    theta[: 64 * len(SPECIAL)] = torch.tensor(SPECIAL).repeat(64)[: len(theta)].to(theta.dtype)
    compare(case, kernel, inputs, theta)


@pytest.mark.parametrize("c", [1.0, -3e-5, 0.0, 1e-42])
def test_the_table_is_read_by_its_symmetry(c: float) -> None:
    """Of 65,536 elements; the last tiles have blocks beyond 2^32."""
    count = 256
    numbers = torch.arange(count, dtype=torch.int32) + ((1 << 31) - count)
    inputs = [numbers, KEYS[:1].expand(count).contiguous(), STEP_SAMPLE, gaussian.scaled_table(c, torch.device("cpu"))]
    kernels = gaussian.KERNELS
    compare((0, 0, 0, 0, 3, 1), kernels.perturb_pair, inputs, torch.linspace(-1, 1, count * kernels.tile))
    compare((0, 3, 0, 0, 1, 1), kernels.shrink, [*inputs, NUMBER], torch.zeros(count * kernels.tile))


@pytest.mark.parametrize(
    "chosen",
    [
        {"KIND": "gaussian", "OPERATION": "perturb", "TO": "", "TYPE": "*i16", "BLOCKS": 1},
        {"KIND": "gaussian", "OPERATION": "shrink", "TO": "", "TYPE": "*fp32", "BLOCKS": 1},
        {"KIND": "gaussian", "OPERATION": "add", "TO": "bfloat16", "TYPE": "*i16", "BLOCKS": 1},
        {"KIND": "rademacher", "OPERATION": "decay", "TO": "", "TYPE": "*fp32", "BLOCKS": 16},
        {"KIND": "rademacher", "OPERATION": "shrink", "TO": "float16", "TYPE": "*fp16", "BLOCKS": 16},
        {"KIND": "none", "OPERATION": "round_float16", "TO": "float16", "TYPE": "*fp32", "BLOCKS": 16},
    ],
    ids=str,
)
def test_it_compiles_for_a_gpu_without_a_fused_multiply_add(chosen: dict[str, Any], tmp_path: Path) -> None:
    settings = "".join(f"{name} = {value!r}\n" for name, value in chosen.items())
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    code, place = settings + COMPILE, {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.getcwd()}
    done = subprocess.run([sys.executable, "-c", code], env=environment | place, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert ".target sm_80" in done.stdout
    assert "mul.hi.u32" in done.stdout
    assert "fma." not in done.stdout
    assert "shared" not in done.stdout  # no element goes through shared memory
