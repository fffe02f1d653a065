"""The noise's kernels compiled, and checked against their eager form; without a compiler, the eager form runs.

On a CPU a kernel is compiled from C++, `simd.cpp`, for the instruction set of this CPU: MEZO_SIMD in the environment
selects it; without it, it is the best that the CPU has. On a GPU a kernel is compiled by Triton (`gpu.py`).

Every call of a kernel is one call of the operator `mezo::noise`, so profilers and counters see one operation.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from mezo_cli.errors import UserError, first_line

log = logging.getLogger("mezo")

Function = Callable[..., None]
Native = Callable[[tuple[Tensor, ...]], Function]  # arrays -> the compiled function, as `compile_native`
EAGER = "eager"  # in MEZO_SIMD: the tensor operations
CHECKED_TILES = 3  # compiled code must be bitwise identical on as many tiles before it is used


class Kernel:
    """One function over tiles (at least two), compiled at its first call per device, dtype and number of threads.

    MEZO_EAGER=1 or MEZO_SIMD=eager in the environment selects the eager form: bitwise identical, 10 to 30 times slower.

    Args:
        function: takes tensors only: first `arrays` tensors with `tile` elements per tile (theta, then the
            outputs), then the numbers (int32 [T]) and keys (int64 [T]) of the tiles, then tensors whose sizes do not
            depend on T.
        arrays: 1 for theta <- f(theta), one more per output.
        tile: elements per tile.
        max_tiles: tiles per call at most, on a CPU.
        native: compiles the kernel for arrays like the given ones.
    """

    # Why the kernels are not compiled. Shared by all: one failure shows that there is no compiler, or that its
    # interfaces have changed.
    compiler_error: ClassVar[str | None] = None

    def __init__(self, function: Function, arrays: int, tile: int, max_tiles: int, native: Native) -> None:
        self.function, self.arrays, self.tile, self.max_tiles = function, arrays, tile, max_tiles
        self.native = native
        self.compiled: dict[Any, Function] = {}  # by device, dtype and number of threads
        self._number = len(_ALL)
        _ALL.append(self)

    def __call__(self, *tensors: Tensor) -> None:
        """Run the kernel; all tensors are on one device."""
        if self.find(*tensors) is self.function:
            self._prepare(*tensors)  # here, because an operator is no place to compile in
        torch.ops.mezo.noise(self._number, tensors[: self.arrays], tensors[self.arrays :])

    def find(self, *tensors: Tensor) -> Function:
        """Return the compiled function, or the eager one while there is none."""
        return self.function if _eager() else self.compiled.get(self._key(*tensors), self.function)

    def _prepare(self, *tensors: Tensor) -> None:
        """Compile the function, and compare it with the eager one on a few tiles; if that fails, say so in the log."""
        if Kernel.compiler_error is not None or _eager():
            return
        arrays, rest = tensors[: self.arrays], tensors[self.arrays + 2 :]
        try:
            compiled = self.native(arrays)
            actual, expected = self._example(arrays), self._example(arrays)
            compiled(*actual, *rest)
            self.function(*expected, *rest)
            if not all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True)):
                raise ValueError("the compiled code gives other numbers than the eager code")
        except Exception as error:  # a compiler fails in many ways, for which torch has no common type
            Kernel.compiler_error = first_line(error)
            log.warning("warning: %s", describe_kernels()[1])
            return
        self.compiled[self._key(*tensors)] = compiled

    def _key(self, *tensors: Tensor) -> Any:
        """Return what the compiled code depends on besides sizes."""
        last = tensors[self.arrays - 1]
        return last.device, tensors[0].dtype, last.dtype, torch.get_num_threads()

    def _example(self, arrays: tuple[Tensor, ...]) -> list[Tensor]:
        device = arrays[0].device
        theta = torch.linspace(-1, 1, CHECKED_TILES * self.tile, device=device).to(arrays[0].dtype)
        outs = [torch.empty_like(theta, dtype=array.dtype) for array in arrays[1:]]
        numbers = torch.arange(CHECKED_TILES, dtype=torch.int32, device=device)
        return [theta, *outs, numbers, numbers.long() * -0x61C8864680B583EB]  # any keys, of 64 bits


_ALL: list[Kernel] = []  # the operator takes the number of a kernel: its arguments are tensors and numbers


def _run(number: int, arrays: list[Tensor], rest: list[Tensor]) -> None:
    _ALL[number].find(*arrays)(*arrays, *rest)


def _run_eager(number: int, arrays: list[Tensor], rest: list[Tensor]) -> None:
    _ALL[number].function(*arrays, *rest)


_LIBRARY = torch.library.Library("mezo", "DEF")
_LIBRARY.define("noise(int kernel, Tensor(a!)[] arrays, Tensor[] rest) -> ()")
_LIBRARY.impl("noise", _run, "CompositeExplicitAutograd")
torch.library.register_fake("mezo::noise", _run_eager, lib=_LIBRARY)


def describe_kernels() -> tuple[str, str]:
    """Return how this process runs the kernels, and the reason if they are slower than they could be, else "".

    The first is `compiled` or `eager`.
    """
    if _eager():
        variable = "MEZO_SIMD=eager" if os.environ.get("MEZO_SIMD") == EAGER else "MEZO_EAGER"
        return "eager", f"the noise is not compiled, and 10 to 30 times slower: {variable} is set"
    if Kernel.compiler_error is not None:
        return "eager", f"the noise is not compiled, and 10 to 30 times slower: {Kernel.compiler_error}"
    return "compiled", ""


def _eager() -> bool:
    return os.environ.get("MEZO_EAGER", "") not in ("", "0") or os.environ.get("MEZO_SIMD") == EAGER


# --- on a CPU ---

SOURCE = Path(__file__).with_name("simd.cpp")
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
# What the kernels can be compiled for, the best last.
BY_CAPABILITY = {"AVX512": ("generic", "avx2", "avx512"), "AVX2": ("generic", "avx2")}  # without it generic alone
OF_X86 = BY_CAPABILITY.get(torch.backends.cpu.get_cpu_capability(), ("generic",))
INSTRUCTION_SETS = ("generic", "neon") if platform.machine() in ("aarch64", "arm64") else OF_X86


def instruction_set() -> str:
    """Return what the kernels are compiled for: MEZO_SIMD, or the best that the CPU has."""
    allowed = (EAGER, *INSTRUCTION_SETS)
    name = os.environ.get("MEZO_SIMD") or allowed[-1]
    if name not in allowed:
        raise UserError(f"MEZO_SIMD={name}: on this machine it can be {', '.join(allowed)}")
    return name


def compile_native(kind: str, operation: str, tile: int, arrays: tuple[Tensor, ...]) -> Function:
    """Return a kernel for the device of some arrays, called as its tensor operations are.

    Args:
        kind: of noise, one of `KINDS`; empty for a kind that is not in the sources.
        operation: one of `OPERATIONS`.
        tile: elements per tile.
        arrays: theta, then the outputs: for their dtypes.

    Raises:
        NotImplementedError: if the sources do not have this kind.
        Exception: if the compiler is missing or fails, or its code cannot be stored or loaded.
    """
    if arrays[0].device.type != "cpu":
        from mezo_cli.perturb.noise import gpu

        return gpu.compile_kernel(kind, operation, tile, arrays)
    if kind not in KINDS:
        raise NotImplementedError("this kind of noise has no kernels for CPUs")
    run = _library(instruction_set()).mezo_noise
    types = TYPES.index(arrays[0].dtype), TYPES.index(arrays[-1].dtype)
    fixed = (KINDS.index(kind), OPERATIONS.index(operation), *types, len(arrays), tile // BLOCK)
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
