"""A replayable optimizer's state as a file of the checkpoint `last`, which spares a resumed run to rebuild it."""

from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING

from mezo_cli.errors import UserError
from mezo_cli.optim.base import ReplayableOptimizer

if TYPE_CHECKING:
    from torch import Tensor


class StoredState(ReplayableOptimizer):
    """An optimizer whose state is tensors by name."""

    @abstractmethod
    def state_tensors(self) -> "dict[str, Tensor]":
        """Return the state; empty where it is quickly rebuilt."""

    @abstractmethod
    def load_tensors(self, tensors: "dict[str, Tensor]", step: int) -> None:
        """Take over what `state_tensors` returned after `step` steps.

        Raises:
            ValueError: when it is of another optimizer or another step.
        """

    def save_state(self, path: Path) -> None:
        """Write `state_tensors` as safetensors; no file where there are none."""
        import safetensors.torch

        tensors = self.state_tensors()
        if tensors:
            safetensors.torch.save_file(tensors, path)

    def load_state(self, path: Path, step: int) -> None:
        """Read what `save_state` wrote after `step` steps."""
        from mezo_cli.models.stored_tensors import read_tensors

        tensors, _ = read_tensors(path)
        try:
            self.load_tensors(tensors, step)
        except ValueError as error:
            raise UserError(f"{path} is damaged: {error}") from error
