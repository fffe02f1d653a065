"""Small tensors that kernels read, by key. Their memory is used again: at every step they are where they were before.

To make one takes longer than a kernel takes on a small tensor, so they are kept. And a recorded step (a CUDA graph)
reads the addresses of the step that was recorded.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable

import torch
from torch import Tensor


class SmallTensors:
    """A cache of tensors of one shape.

    Args:
        make: key -> a new tensor.
        most: the number of tensors that are kept.
    """

    def __init__(self, make: Callable[..., Tensor], most: int) -> None:
        self._make, self._most = make, most
        self._made: OrderedDict[Hashable, Tensor] = OrderedDict()  # the least recently used one first
        self._of_pass: set[Hashable] = set()

    def __len__(self) -> int:
        return len(self._made)

    def begin_pass(self) -> None:
        """Let tensors that were used before now be overwritten."""
        self._of_pass.clear()

    def get(self, *key: Hashable) -> Tensor:
        """Return the tensor of a key. It is valid until the next pass, or until `most` others were asked for."""
        tensor = self._made.get(key)
        if tensor is None:
            tensor = self._made[key] = self._place(key)
        else:
            self._made.move_to_end(key)
        self._of_pass.add(key)
        return tensor

    # Never in inference mode, whatever the caller's: inference tensors would make the kernels compile once more.
    @torch.inference_mode(False)
    def _place(self, key: tuple[Hashable, ...]) -> Tensor:
        """Return a new tensor, in the memory of one that is not used in this pass, if there is one."""
        new = self._make(*key)
        full = len(self._made) >= self._most
        old = next(
            (k for k, t in self._made.items() if (full or k not in self._of_pass) and t.device == new.device), None
        )
        if old is None:
            return new
        self._of_pass.discard(old)
        return self._made.pop(old).copy_(new)
