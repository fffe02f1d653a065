"""The noise's kernels for a GPU, on one or by Triton's interpreter (`make test-triton`): the bits of the eager form."""

import os
import subprocess
import sys
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from mezo_cli.perturb.noise import counter
from mezo_cli.perturb.noise.compiled import KINDS, OPERATIONS, TYPES, Kernel
from tests.perturb.test_compiled import KEYS, NUMBERS, STEP_SAMPLE, cases, theta_of

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs a CUDA device, and `pytest -m cuda`; or `make test-triton`", allow_module_level=True)

gpu = import_module("mezo_cli.perturb.noise.gpu")  # which imports triton
pytestmark = [] if INTERPRETED else pytest.mark.cuda
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
CASES = list(cases())
SPECIAL = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-45, 6e-8, 65504.0, 65519.9, -65520.0, 3.3e38, 1e-30]
SPECIAL.append(2.0**-14)
# Compiled for a GPU that need not be there.
COMPILE = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from mezo_cli.perturb.noise import gpu
types = {"tiles": "*i32", "scaled": "*fp32", "number": "*fp64", "count": "i32"}
types |= dict.fromkeys(("keys", "step_sample", "rounding"), "*i64")
cases = [("gaussian", "perturb", "", True, 1), ("gaussian", "add", "bfloat16", False, 1)]
for case in [*cases, ("rademacher", "shrink", "float16", False, 16)]:
    own = dict.fromkeys(("theta", "out", "minus"), "*fp16" if "float16" in case else "*i16")
    chosen = dict(zip(("KIND", "OPERATION", "ROUNDS_TO", "PAIR", "BLOCKS", "TILES"), (*case, gpu.TILES[case[0]])))
    types |= {**own, **dict.fromkeys(chosen, "constexpr")}
    source = ASTSource(fn=gpu._noise, signature=types, constexprs=chosen)
    print(compile(source, target=GPUTarget("cuda", 80, 32), options={"enable_fp_fusion": False}).asm["ptx"])
"""


def compare(case: tuple[int, ...], kernel: Kernel, inputs: list[Tensor], theta: Tensor) -> None:
    kind, operation, _, out, arrays, _ = case
    expected = [theta, *(torch.zeros(len(theta), dtype=TYPES[out]) for _ in range(1, arrays))]
    actual, there = [array.clone().to(DEVICE) for array in expected], [value.to(DEVICE) for value in inputs]
    kernel.function(*expected, *inputs)
    gpu.compile_kernel(KINDS[kind], OPERATIONS[operation], kernel.tile, tuple(actual))(*actual, *there)
    for a, b in zip((array.cpu() for array in actual), expected, strict=True):
        for one in (torch.isnan, torch.isinf, lambda x: x.nan_to_num(0.0).view(torch.uint8)):
            assert torch.equal(one(a), one(b))


@pytest.mark.parametrize(("case", "kernel", "inputs"), CASES, ids=[" ".join(map(str, case)) for case, *_ in CASES])
def test_every_kernel_gives_the_bits_of_the_tensor_operations(case: Any, kernel: Kernel, inputs: list[Tensor]) -> None:
    theta = theta_of(case[2], len(NUMBERS) * kernel.tile)
    theta[: 40 * len(SPECIAL)] = torch.tensor(SPECIAL).repeat(40).to(theta.dtype)
    compare(case, kernel, inputs, theta)


@pytest.mark.parametrize("c", [1.0, -3e-5, 0.0, 1e-42])
def test_the_table_is_read_by_its_symmetry(c: float) -> None:
    """In 65,536 elements of tiles whose blocks lie beyond 2^32."""
    numbers, keys = torch.arange((1 << 31) - 256, 1 << 31).to(torch.int32), KEYS[:1].expand(256).contiguous()
    inputs = [numbers, keys, STEP_SAMPLE, counter.scaled_table(c, torch.device("cpu"))]
    compare((0, 0, 0, 0, 3, 1), counter.GAUSSIAN.perturb_pair, inputs, torch.linspace(-1, 1, 1 << 16))


def test_it_compiles_without_a_fused_multiply_add_or_shared_memory() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(".target sm_80") == 3
    assert "mul.hi.u32" in done.stdout
    assert not any(word in done.stdout for word in ("fma.", "shared"))
