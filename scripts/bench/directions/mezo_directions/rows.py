"""MeZO with a direction of its own for each row of the batch, in the B of a `fixed_lora`: two forwards per step.

    row i sees B + eps U_i and B - eps U_i,   g_i = w_i (l_i+ - l_i-) / (2 eps),   B <- B - lr (1 / R) sum_i g_i U_i

l_i is the loss of row i, w_i its weight, R the number of rows, and U_i is drawn for (seed, step, i), i counted over the
whole batch. A row's loss depends on its own direction alone, so the noise of one row is not seen by another (compare
GRZO, arXiv 2606.02857, and EGGROLL, arXiv 2511.16652). The trajectory has the g_i.

The branch x A^T (B + eps U_i)^T is x A^T B^T of the layer and, added here in float32, eps x A^T U_i^T of the row of each
token.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor
from transformers import PreTrainedModel

from mezo_cli.config.base import Number, Positive
from mezo_cli.config.optimizers import PerturbationConfig
from mezo_cli.config.schema import StepRecord
from mezo_cli.distributed.ranks import split_sizes
from mezo_cli.errors import UserError
from mezo_cli.optim.base import LossFn, RowLossFn
from mezo_cli.optim.mezo import MezoResult, ZerothOrder
from mezo_cli.optim.update import Terms
from mezo_cli.perturb.forward import PerturbedForward
from mezo_cli.perturb.noise import Direction

BRANCH = ".lora_B.default.weight"


class MezoRowsConfig(PerturbationConfig):
    """Settings of the optimizer."""

    implementation: ClassVar[str] = "mezo_directions.rows:MezoRows"
    title: ClassVar[str] = "MeZO by rows"
    has_engine: ClassVar[bool] = False
    lr: Number = Field(1e-4, ge=0.0, le=3e38, description="learning rate")
    rows: Positive = Field(16, le=10_000, description="the rows of a batch: batch_size")

    @property
    def directions(self) -> int:
        """One per row."""
        return self.rows

    def count_forwards(self, steps: int, total: int) -> dict[str, int]:
        """Return two forwards per step."""
        return {"forwards": 2 * steps, "backwards": 0}


class MezoRows(ZerothOrder):
    """The estimate (1 / R) sum_i g_i U_i, and SGD."""

    config: MezoRowsConfig

    def samples(self, step: int) -> int:
        """Return the number of rows."""
        return self.config.rows

    def check_tensors(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Reject tensors that are no branch of a LoRA."""
        other = next((name for name in shapes if not name.endswith(BRANCH)), None)
        if other is not None:
            raise UserError(f"optimizer=mezo_rows: {other} is no B of a LoRA; use peft=fixed_lora")

    def step(self, forward: PerturbedForward, loss_fn: LossFn, step: int) -> MezoResult:
        """Take step number `step` (from 0)."""
        if not isinstance(loss_fn, RowLossFn):
            raise UserError("optimizer=mezo_rows: this loss has no losses of single rows")
        eps, losses = self.config.eps, []
        for c in (eps, -eps):
            with added(forward, self.seed, step, c, self.config.rows):
                losses.append(loss_fn.rows())
        if losses[0].shape[1] != self.config.rows:
            raise UserError(f"optimizer.rows={self.config.rows}: the batch has {losses[0].shape[1]} rows")
        plus, minus = torch.cat(losses).double().tolist()
        grads = [(a - b) / (2 * eps) for a, b in zip(plus, minus, strict=True)]
        result = MezoResult.of(plus, minus, grads, self.lr(step))
        if all(map(math.isfinite, result.recorded)):
            self.apply_updates(forward.params, [(step, result.recorded, result.lr)])
        return result

    def estimate(self, record: StepRecord, scale: float) -> Terms:
        """Return `scale` times (1 / R) sum_i g_i U_i: (direction, coefficient) of each term."""
        step, grads, _ = record
        return [(Direction(self.seed, step, i), scale * g / len(grads)) for i, g in enumerate(grads)]


@contextmanager
def added(forward: PerturbedForward, seed: int, step: int, c: float, count: int) -> Iterator[None]:
    """Let each row of the batches inside see B + c U_i, where i is its number in the whole batch of `count` rows."""
    ranks = forward.ranks
    now = _Rows(sum(split_sizes(count, ranks.size)[: ranks.rank]) if ranks.split == "rows" else 0)
    hooks = []
    for module in forward.model.modules():
        if isinstance(module, PreTrainedModel):
            hooks.append(module.register_forward_pre_hook(now.enter, with_kwargs=True))
    for name, p in forward.params.tensors.items():
        layer = forward.model.get_submodule(name.removesuffix(".weight"))

        def add(_: Any, args: tuple[Tensor], out: Tensor, name: str = name, p: Tensor = p) -> Tensor:
            total = out.float()
            for row, tokens in now.tokens(args[0]):
                u = forward.params.noise.z(Direction(seed, step, row), name, tuple(p.shape), p.device).view(p.shape)
                total[:, tokens].add_(args[0][:, tokens].float() @ u.T, alpha=c)
            return total.to(out.dtype)

        hooks.append(layer.register_forward_hook(add))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _Rows:
    """Which row of the whole batch each token of the running forward belongs to."""

    def __init__(self, first: int) -> None:
        self._next, self._first, self._layout = first, first, None

    def enter(self, _: Any, args: Any, inputs: dict[str, Any]) -> None:
        """Take over the layout of a forward that begins."""
        layout = inputs.get("packed_layout")
        if layout is not None and layout is not self._layout:
            self._layout, self._first, self._next = layout, self._next, self._next + layout.shape[0]
            self._ends = torch.bincount(layout.rows, minlength=layout.shape[0]).cumsum(0).tolist()

    def tokens(self, x: Tensor) -> Iterator[tuple[int, slice]]:
        """Yield (row, where its tokens are in x): all of them, or in an encoder's last layer the one that is read."""
        if self._layout is None:
            raise UserError("optimizer=mezo_rows: the rows of this model's family are not packed")
        rows, starts = len(self._ends), [0, *self._ends]
        is_read = x.shape[1] == rows
        for row in range(rows):
            yield self._first + row, slice(row, row + 1) if is_read else slice(starts[row], starts[row + 1])
