"""Convert a checkpoint to another dtype without keeping its file in memory.

transformers maps the file and converts its tensors one by one. The pages that it has read stay resident until the file
is closed, so a model in bfloat16 would take the memory of its float32 file as well.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from mezo_cli.system import environment, release_file_pages

SEQUENTIAL = "HF_DEACTIVATE_ASYNC_LOAD"  # of transformers: tensors are read in this thread, each when it is needed


@contextmanager
def releasing_file() -> Iterator[None]:
    """Release the pages of a mapped file tensor by tensor, as these are converted in this thread.

    Without Linux's /proc, and for tensors that need no conversion, nothing is released.
    """
    with environment({SEQUENTIAL: "1"}), _ReleaseConverted():
        yield


class _ReleaseConverted(TorchFunctionMode):
    """Releases the mapped pages of a tensor after `Tensor.to` has returned a copy of it."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is Tensor.to and result is not args[0]:
            release_file_pages(args[0])
        return result
