"""Errors of the device, as one line."""

import contextlib
import re
from collections.abc import Iterator

from mezo_cli.errors import RunFailed, UserError, first_line

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
