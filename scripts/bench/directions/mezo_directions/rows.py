"""MeZO with a direction of its own for each row of the batch, in the B of a `fixed_lora`: two forwards per step.

    row i sees B + eps U_i and B - eps U_i,   g_i = w_i (l_i+ - l_i-) / (2 eps),   B <- B - lr (1 / R) sum_i g_i U_i

l_i is the loss of row i, w_i its weight, R the number of rows, and U_i is drawn for (seed, step, i), i counted over the
whole batch. A row's loss depends on its own direction alone, so the noise of one row is not seen by another (compare
GRZO, arXiv 2606.02857, and EGGROLL, arXiv 2511.16652). The trajectory has the g_i.

The branch x A^T (B + eps U_i)^T of the row of each token is added in place to the output of the matrix, in float32.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
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
    _branches: "Branches | None" = None  # kept from step to step for its memory

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
        if self._branches is None or self._branches.forward is not forward:
            self._branches = Branches(forward, self.config.rows)
        branches = self._branches
        branches.draw([Direction(self.seed, step, row) for row in range(self.config.rows)])
        with added(branches):
            for branches.c in (eps, -eps):
                branches.next = branches.first
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
def added(branches: "Branches") -> Iterator[None]:
    """Let each row of the batches inside see B + c U_i, where i is its number in the whole batch."""
    forward, hooks, layers = branches.forward, [], []
    for module in forward.model.modules():
        if isinstance(module, PreTrainedModel):
            hooks.append(module.register_forward_pre_hook(branches.enter, with_kwargs=True))
    for name in forward.params.tensors:
        layer: Any = forward.model.get_submodule(name.removesuffix(BRANCH))
        layer.forward = partial(branches.compute, name, layer)  # in place of peft's own, which knows one B
        layers.append(layer)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for layer in layers:
            del layer.forward


class Branches:
    """The directions of the rows, and to which of them each token of the running forward belongs.

    Attributes:
        u: name -> U of each row of the whole batch, float32 [rows, outputs, r].
        c: what they are multiplied by.
        first, next: the number of the first row that is computed here, and of the first of the next forward.
    """

    def __init__(self, forward: PerturbedForward, rows: int) -> None:
        params, ranks, self.forward, self.c = forward.params, forward.ranks, forward, 0.0
        self._drawn = rows
        self.first = self.next = sum(split_sizes(rows, ranks.size)[: ranks.rank]) if ranks.split == "rows" else 0
        self.u: dict[str, Tensor] = {}
        self._layout: Any = None
        self._spans = [
            (span, torch.empty(rows, span.numel, device=span.theta.device)) for span in params.spans(params.tensors)
        ]
        self._sums = torch.empty(0)  # of a layer's output and branch
        for span, drawn in self._spans:
            for piece in span.pieces:
                part = drawn[:, piece.offset : piece.offset + piece.numel]
                self.u[piece.name] = part.view(rows, *piece.shape)

    def draw(self, directions: Sequence[Direction]) -> None:
        """Draw U of each row."""
        noise, self._layout = self.forward.params.noise, None
        noise.begin_pass()
        for span, drawn in self._spans:
            for row, direction in zip(drawn.zero_(), directions, strict=True):
                noise.update_(span, row, [(direction, 1.0)], [1.0])

    def enter(self, _: Any, args: Any, inputs: dict[str, Any]) -> None:
        """Take over the layout of a forward that begins."""
        layout = inputs.get("packed_layout")
        if layout is not None and layout is not self._layout:
            self._layout, self._rows = layout, slice(self.next, self.next + layout.shape[0])
            self._counts = torch.bincount(layout.rows, minlength=layout.shape[0]).tolist()
            self.next = self._rows.stop
            if self.next > self._drawn:
                raise UserError(f"optimizer.rows={self._drawn}: the batch has more rows; give batch_size")

    def compute(self, name: str, layer: Any, x: Tensor) -> Tensor:
        """Return W0 x + (B + c U) A x of each token, by its row. x: [1, tokens, inputs], or [rows, 1, inputs]."""
        if self._layout is None:
            raise UserError("optimizer=mezo_rows: the rows of this model's family are not packed")
        out = layer.base_layer(x)
        flat, tokens = out.view(-1, out.shape[-1]), x.flatten(0, 1)
        inner = (layer.lora_A["default"].weight.to(x.dtype) @ tokens.T).float().T  # in a third of the time of x A^T
        b = torch.add(layer.lora_B["default"].weight.float(), self.u[name][self._rows], alpha=self.c)
        total = self._in_float32(flat)
        if len(inner) == len(b):  # what the head reads
            total += torch.bmm(b, inner.unsqueeze(2))[..., 0]
        else:
            for one, part, of_row in zip(b, total.split(self._counts), inner.split(self._counts), strict=True):
                part.addmm_(of_row, one.T)
        if total is not flat:
            flat.copy_(total)
        return out

    def _in_float32(self, flat: Tensor) -> Tensor:
        """Return a tensor itself if it is float32, else a copy, whose memory is used for each layer in turn."""
        if flat.dtype == torch.float32:
            return flat
        if self._sums.numel() < flat.numel():
            self._sums = torch.empty(flat.numel(), device=flat.device)
        return self._sums[: flat.numel()].view_as(flat).copy_(flat)
