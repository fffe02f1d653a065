"""Process and machine: versions, git commit, device name, memory, signals."""

import contextlib
import ctypes
import gc
import hashlib
import io
import logging
import mmap
import os
import platform
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import IO, Any

from mezo_cli.errors import RunFailed, UserError, first_line, one_line, without_credentials

LIBRARY_DEFAULTS = {
    # Threads that wait by spinning take the cores from each other when a machine is shared.
    "OMP_WAIT_POLICY": "PASSIVE",
    # Large blocks in huge pages: activations are allocated and freed at every layer (docs/measurements/step.md).
    "THP_MEM_ALLOC_ENABLE": "1",
}
IN_SWEEP = "MEZO_IN_SWEEP"  # set for the processes of jobs: the process of the sweep says how to go on
PACKAGE = Path(__file__).resolve().parent


def set_library_defaults() -> None:
    """Set what torch's native libraries read from the environment when it is imported; what the user has set stays."""
    if "torch" not in sys.modules:
        for name, value in LIBRARY_DEFAULTS.items():
            os.environ.setdefault(name, value)


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside the block, for this process and those that it starts."""
    before = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)
        os.environ.update(before)


@contextlib.contextmanager
def keeping_matmul_precision(inside: str | None = None) -> Iterator[None]:
    """Let torch's precision of float32 matrix products be `inside` (None: as it is) in the block, then as before."""
    torch = sys.modules.get("torch")
    before = "highest" if torch is None else torch.get_float32_matmul_precision()  # it may be imported inside
    if torch is not None and inside is not None:
        torch.set_float32_matmul_precision(inside)
    try:
        yield
    finally:
        torch = sys.modules.get("torch")
        if torch is not None:
            torch.set_float32_matmul_precision(before)


def package_version() -> str:
    """Return the version of this package."""
    return versions().get("mezo-runner", "(not installed)")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that a run depends on."""
    versions_by_name = {"python": platform.python_version()}
    for name in ("mezo-runner", "torch", "transformers", "datasets", "hydra-core", "numpy", "peft", "optuna"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions_by_name[name] = metadata.version(name)
    return versions_by_name


def source_digest() -> str:
    """Return the sha256 over the names and the content of this package's source files."""
    total = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        total.update(f"{path.relative_to(PACKAGE)}\n".encode() + path.read_bytes())
    return total.hexdigest()


def git_state() -> tuple[str | None, bool | None]:
    """Return the commit of the checkout that the package runs from, and whether its tracked files differ from it.

    Both are None if it is not in a checkout.
    """
    if not (PACKAGE.parent / ".git").exists():
        return None, None
    command = ["git", "-C", str(PACKAGE), "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None, None
    commit, *lines = done.stdout.splitlines()
    return commit.removeprefix("# branch.oid "), any(not line.startswith("#") for line in lines)


def device_name(device: Any) -> str:
    """Return a description of a torch device: `cuda (NVIDIA H100)`, `cpu (2 threads)`."""
    import torch

    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    if device.type == "cpu":
        count = torch.get_num_threads()
        return f"{device} ({count} thread{'' if count == 1 else 's'})"
    return str(device)


def describe_arithmetic(device: Any, dtype: str) -> dict[str, str]:
    """Return what the bits of a forward depend on besides weights and rows: device, threads, CPU, torch and dtype."""
    import torch

    cpu = torch.backends.cpu.get_cpu_capability()
    return {"device": device_name(device), "CPU capability": cpu, "torch": torch.__version__, "dtype": dtype}


def visible_gpus() -> list[str]:
    """Return the GPUs that this process may use: those of CUDA_VISIBLE_DEVICES, or else all that torch finds."""
    setting = os.environ.get("CUDA_VISIBLE_DEVICES")
    if setting is None:
        import torch

        return [str(index) for index in range(torch.cuda.device_count())]
    names = [name.strip() for name in setting.split(",")]
    invalid = [not name or name.startswith("-") for name in names]
    return names[: invalid.index(True)] if True in invalid else names  # CUDA ignores what follows one that is not valid


def trim_malloc() -> None:
    """Return freed memory to the system, where the C library can (glibc's malloc_trim).

    glibc keeps freed memory in pieces too small for the next tensor: up to a fifth more memory, growing as batches
    change their lengths (docs/measurements/step.md). A call takes 2 to 4 ms for a model of 355M parameters.
    """
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def mapped_files() -> list[tuple[int, int, int, str]]:
    """Return first and last + 1 address, offset and path of each file mapped privately here; none outside Linux."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []
    fields = [line.split(maxsplit=5) for line in lines]
    private = [(one[0].split("-"), one[2], one[5]) for one in fields if one[1][-1] == "p" and one[4] != "0"]
    return [(int(first, 16), int(last, 16), int(offset, 16), path) for (first, last), offset, path in private]


def release_mapped_pages(address: int, size: int, mapped: list[tuple[int, int, int, str]]) -> None:
    """Release the memory of a part of one of the mapped files, `size` bytes at `address`; ignore other memory.

    A checkpoint is mapped as a whole, and its pages stay in memory while any tensor of it is in use. Written ones have
    been copied. Only whole pages inside the part are released; to read them again reads the file.
    """
    if any(low <= address and address + size <= high for low, high, *_ in mapped):
        give_pages_back(address, size)


def give_pages_back(address: int, size: int) -> None:
    """Release the memory of the whole pages in a part of a file that is mapped, and that nothing has written to."""
    first, last = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, (address + size) // mmap.PAGESIZE * mmap.PAGESIZE
    if first < last:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)


def release_file_pages(tensor: Any) -> None:
    """Release the memory of a tensor of a mapped checkpoint that has been converted, if it is one of 64 kB or more."""
    if tensor.device.type == "cpu" and tensor.nbytes >= 1 << 16 and tensor.is_contiguous():
        release_mapped_pages(tensor.data_ptr(), tensor.nbytes, mapped_files())


def reset_peak_memory() -> None:
    """Let `peak_memory` count from now on; on Linux alone: elsewhere the peak is that of the process."""
    gc.collect()  # a model and its hooks refer to each other; what was before is no part of this peak
    trim_malloc()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        for index in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(index)


def peak_memory(device: Any) -> int:
    """Return the peak memory in bytes: of torch's allocator on a GPU, of the whole process otherwise."""
    import torch

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with contextlib.suppress(OSError):  # that of getrusage begins with the peak of the process that started this one
        peak = re.search(r"(?m)^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
        if peak is not None:
            return int(peak[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def prepare_standard_streams() -> None:
    """Open the standard streams that the process was started without, and let every character be printed.

    Else the next file to be opened would get the descriptor of a closed stream, and what C libraries print. A
    character that the encoding of the output lacks (the locale C) becomes an escape: `\\xe9`.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # each opens the lowest free descriptor
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115 (it stays open)
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def discard_output(stream: IO[str]) -> None:
    """Discard what is written to a stream from now on, and what it has buffered: its reader or its terminal is gone."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


@contextlib.contextmanager
def logs_without_credentials() -> Iterator[None]:
    """Cut credentials from every log record made inside the block: libraries log the addresses that they ask."""
    before = logging.getLogRecordFactory()

    def make(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = before(*args, **kwargs)
        with contextlib.suppress(Exception):  # a record that cannot be formatted is its handler's to report
            record.msg, record.args = without_credentials(record.getMessage()), ()
        return record

    logging.setLogRecordFactory(make)
    try:
        yield
    finally:
        logging.setLogRecordFactory(before)


_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory", "alloc_failed")
_TOO_LARGE = ("storage size calculation overflowed", "numel: integer multiplication overflow")
_DEVICE = ("cuda error", "cuda driver error", "cublas_status", "cudnn_status", "cusparse_status", "triton error")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory ran out: torch's, that of its CPU allocator, or Python's own."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error).lower()
    return isinstance(error, (RuntimeError, OSError)) and any(part in text for part in (*_MEMORY, *_TOO_LARGE))


def is_device_error(error: BaseException) -> bool:
    """Return whether an error comes from the device, not from the code that ran on it: no memory, or CUDA failed."""
    if is_out_of_memory(error) or type(error).__name__ == "AcceleratorError":
        return True
    return isinstance(error, RuntimeError) and any(part in str(error).lower() for part in _DEVICE)


@contextlib.contextmanager
def explain_device_errors(what: str, advice: str, raises: type[UserError | RunFailed] = UserError) -> Iterator[None]:
    """Turn an error of the device inside the block into one line, without torch's advice; any other stays as it is.

    Args:
        what: was done: "loading model.path=demo". Left out of the line when empty.
        advice: what to do when memory ran out, after "try".
        raises: `UserError` before training begins, `RunFailed` after.
    """
    try:
        yield
    except Exception as error:
        if not is_device_error(error):
            raise
        # The CPU allocator begins with its own place in C++.
        reason = re.sub(r"^\[enforce fail[^]]*\][^.]*\. ", "", first_line(error)).split(". ")[0]
        where, full = f"{what}: " if what else "", is_out_of_memory(error)
        said = f"out of memory: {reason}; try {advice}" if full else f"the device failed: {reason}"
        raise raises(where + said) from error


ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def signal_handlers(signals: Iterable[signal.Signals], handler: Callable[[int, Any], Any]) -> Iterator[None]:
    """Handle signals by `handler` inside the block, except those that are ignored, as SIGHUP is under nohup.

    Outside the main thread, where handlers cannot be set, they stay.
    """
    is_main = threading.current_thread() is threading.main_thread()
    before: dict[signal.Signals, Any] = {number: signal.getsignal(number) for number in signals} if is_main else {}
    before = {number: old for number, old in before.items() if old not in (signal.SIG_IGN, None)}
    for number in before:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def termination_as_keyboard_interrupt() -> contextlib.AbstractContextManager[None]:
    """Treat SIGTERM and SIGHUP like Ctrl-C inside the block, so that an interrupted run records its status."""
    return signal_handlers(ENDING_SIGNALS[1:], signal.default_int_handler)


def import_torch() -> None:
    """Import torch, before any module that imports it; an ending signal meanwhile is acted on when that is done.

    An exception during the initialization of torch's C++ libraries would abort the process.
    """
    came: list[int] = []
    with signal_handlers(ENDING_SIGNALS, lambda number, _: came.append(number)):
        try:
            import torch  # noqa: F401
        except (ImportError, OSError, MemoryError) as error:  # little memory, a broken installation
            raise UserError(f"torch cannot be imported: {one_line(error)}") from error
    if came:
        raise KeyboardInterrupt
