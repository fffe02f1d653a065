"""Memory of this process, giving it back and its peak; and a device's errors, most of which say that it ran out."""

import contextlib
import ctypes
import mmap
import re
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mezo_cli.errors import RunFailed, UserError, first_line

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
CGROUP_FILES = {  # controllers of a hierarchy -> its files of the limit and of what is in use, in bytes: versions 2, 1
    "": ("memory.max", "memory.current"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes"),
}


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


def give_pages_back(address: int, size: int) -> None:
    """Release the memory of the whole pages in a part of a file that is mapped, and that nothing has written to."""
    first, last = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, (address + size) // mmap.PAGESIZE * mmap.PAGESIZE
    if first < last:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)


def release_file_pages(tensor: Any, mapped: list[tuple[int, int, int, str]] | None = None) -> None:
    """Release the memory of a tensor of a mapped checkpoint that has been copied, if it is one of 64 kB or more.

    A checkpoint is mapped as a whole, and its pages stay in memory while any tensor of it is in use. Only whole pages
    inside the tensor are released; to read them again reads the file. `mapped` is what `mapped_files` returned.
    """
    if tensor.device.type == "cpu" and tensor.nbytes >= 1 << 16 and tensor.is_contiguous():
        first, last = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        if any(low <= first and last <= high for low, high, *_ in (mapped_files() if mapped is None else mapped)):
            give_pages_back(first, tensor.nbytes)


def free_memory() -> int:
    """Return the bytes that this process may still take: the least that the machine or one of its cgroups has free.

    Pages of files that are not in use count as free.
    """
    import psutil  # type: ignore[import-untyped]

    groups, free = "", [psutil.virtual_memory().available]
    with contextlib.suppress(OSError):  # Linux alone has them
        groups = (PROC / "self/cgroup").read_text(encoding="utf-8")
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        root, names = CGROUPS / controllers, CGROUP_FILES[controllers]
        for folder in [group := root / path.lstrip("/"), *group.parents]:
            if not folder.is_relative_to(root):
                break
            with contextlib.suppress(OSError, ValueError):  # no such limit, or `max`
                limit, used = (int((folder / name).read_text()) for name in names)
                cached = re.search(r"(?m)^(?:total_)?inactive_file (\d+)", (folder / "memory.stat").read_text())
                free.append(limit - used + (int(cached[1]) if cached else 0))
    return max(0, min(free))


def reset_peak_memory() -> None:
    """Let `peak_memory` count from now on; on Linux alone: elsewhere the peak is that of the process."""
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


# --- errors of the device ---

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
        failure = f"out of memory: {reason}; try {advice}" if full else f"the device failed: {reason}"
        raise raises(where + failure) from error
