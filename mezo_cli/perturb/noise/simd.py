"""Compile `simd.cpp` for the instruction set of this CPU, and call its kernels.

MEZO_SIMD in the environment selects the instruction set; without it, it is the best that the CPU has.
"""

import ctypes
import hashlib
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from mezo_cli.errors import UserError

SOURCE = Path(__file__).with_suffix(".cpp")
EAGER = "eager"  # the tensor operations
FLAGS = {
    "generic": ("-DMEZO_GENERIC",),
    "avx2": ("-mavx2",),
    "avx512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"),
    "neon": (),
}
OPENMP = ("-Xclang", "-fopenmp", "-undefined", "dynamic_lookup") if sys.platform == "darwin" else ("-fopenmp",)
# In the order of the enumerations in the source.
KINDS = ("gaussian", "rademacher", "none")
OPERATIONS = ("perturb", "add", "decay", "shrink", "round_bfloat16", "round_float16")
TYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCK = 256  # elements, as in the source


def instruction_sets() -> tuple[str, ...]:
    """Return what the kernels can be compiled for on this machine, the best last."""
    if platform.machine() in ("aarch64", "arm64"):
        return "generic", "neon"
    capability = torch.backends.cpu.get_cpu_capability()
    return {"AVX512": ("generic", "avx2", "avx512"), "AVX2": ("generic", "avx2")}.get(capability, ("generic",))


def instruction_set() -> str:
    """Return what the kernels are compiled for: MEZO_SIMD, or the best that the CPU has."""
    allowed = (EAGER, *instruction_sets())
    name = os.environ.get("MEZO_SIMD") or allowed[-1]
    if name not in allowed:
        raise UserError(f"MEZO_SIMD={name}: on this machine it can be {', '.join(allowed)}")
    return name


def compile_kernel(noise: str, operation: str, tile: int, arrays: tuple[Tensor, ...]) -> Callable[..., None]:
    """Return a kernel of the source, called as its tensor operations are.

    Args:
        noise: one of `KINDS`; empty for a kind of noise that is not in the source.
        operation: one of `OPERATIONS`.
        tile: elements per tile.
        arrays: theta, then the outputs, on a CPU: for their dtypes.

    Raises:
        NotImplementedError: if the source does not have this kind.
        Exception: if the compiler is missing or fails, or its code cannot be stored or loaded.
    """
    if noise not in KINDS:
        raise NotImplementedError("this kind of noise has no kernels for CPUs")
    run = _library(instruction_set()).mezo_noise
    types = TYPES.index(arrays[0].dtype), TYPES.index(arrays[-1].dtype)
    fixed = (KINDS.index(noise), OPERATIONS.index(operation), *types, len(arrays), tile // BLOCK)
    number, threads = len(arrays), torch.get_num_threads()

    def kernel(*tensors: Tensor) -> None:
        pointers = (ctypes.c_void_p * len(tensors))(*[tensor.data_ptr() for tensor in tensors])
        run(*fixed, tensors[number].shape[0], threads, pointers)

    return kernel


@cache
def _library(name: str) -> ctypes.CDLL:
    compiler = shlex.split(os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++"))
    command = [*compiler, "-std=c++17", "-O3", "-w", "-shared", "-fPIC", *OPENMP, *FLAGS[name]]
    digest = hashlib.sha256("\0".join([platform.machine(), *command, SOURCE.read_text()]).encode()).hexdigest()
    file = _cache_folder() / f"noise_{name}_{digest[:32]}.so"
    if not file.exists():
        new = file.with_suffix(f".{os.getpid()}")
        done = subprocess.run([*command, str(SOURCE), "-o", str(new)], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{compiler[0]} ended with {done.returncode}: {done.stderr.strip()}")
        new.replace(file)
    library = ctypes.CDLL(str(file))  # a call of its functions lets other Python threads run
    library.mezo_noise.argtypes = [*[ctypes.c_int] * 5, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    library.mezo_noise.restype = None
    return library


def _cache_folder() -> Path:
    """Return the folder for compiled code: that of torch's compiler if it was chosen, else the user's own below /tmp.

    Raises:
        OSError: if it cannot be made, or belongs to somebody else, whose code would be run.
    """
    chosen = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if chosen:
        folder = Path(chosen) / "mezo"
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    folder = Path(tempfile.gettempdir()) / f"mezo_{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.lstat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
    return folder
