"""LOZO (Chen et al. 2024, arXiv 2410.07698, Algorithm 1): MeZO along directions of low rank.

    z = U V^T on a matrix W [m, n],   U [m, r] drawn at every step, V [n, r] every `interval` steps
    g = (L(theta + eps z) - L(theta - eps z)) / (2 eps),   W <- W - lr (g U V^T / r + wd W)

The elements of U and V are those of `noise`. E[U V^T <U V^T, G>] = r G, so 1 / r makes the estimate that of MeZO. On
other tensors, and on matrices with a dimension below r, z is dense, as MeZO's. With n samples, which have the same V,
g U is the mean over them. Defaults: r 4, interval 50, eps 1e-3, the paper's grid for RoBERTa-large (its table 4: lr
1e-6 for lr / r here, r 4 and 8, interval 50 and 100).

The published code has 1 / r in lr, and at a step with a new V its update draws from another place of the generator than
the probe did: that step moves along a direction that was not probed.

A step costs two forwards. There is no state: V follows from (seed, step // interval). The update of an element is a
sum of r products in their order (perturb/noise/low_rank.py), so a replay is bitwise identical.
"""

from typing import TYPE_CHECKING, Any, cast

from mezo_cli.config.base import SettingError
from mezo_cli.config.optimizers import LozoConfig
from mezo_cli.config.schema import StepRecord
from mezo_cli.optim.base import to_float32
from mezo_cli.optim.mezo import Mezo
from mezo_cli.optim.moments import Scratch
from mezo_cli.perturb.noise import Direction

if TYPE_CHECKING:
    from torch import Tensor

    from mezo_cli.perturb.noise.low_rank import LowRankNoise
    from mezo_cli.perturb.params import Params


class Lozo(Mezo):
    """MeZO with low-rank z. The weights follow from (seed, step, g, lr) of every step."""

    config: LozoConfig

    def __init__(self, config: LozoConfig, seed: int, steps: int) -> None:
        super().__init__(config, seed, steps)
        self._step = Scratch()

    def check_tensors(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Reject a rank above a dimension of every matrix."""
        largest = max((min(shape) for shape in shapes.values() if len(shape) == 2), default=0)
        if self.config.rank > largest:
            why = f"the largest trained matrix has {largest} rows or columns" if largest else "no matrix is trained"
            raise SettingError("optimizer.rank", f"optimizer.rank={self.config.rank}: {why}; give at most that many")

    def apply_updates(self, params: "Params", records: list[StepRecord]) -> None:
        """Update theta by each record in order."""
        for record in records:
            self._update(params, record, self.direction(params, record))

    def direction(self, params: "Params", record: StepRecord) -> "dict[str, Tensor]":
        """Return what moves each tensor: (1 / n) sum g_i U_i of a matrix, [m, r], else (1 / n) sum g_i z_i, [numel]."""
        step, grads = record[0], self.gradients(record)
        drawn = [(Direction(self.seed, step, i), to_float32(g / len(grads))) for i, g in enumerate(grads)]
        sums: dict[str, Tensor] = {}
        for name, p in params.tensors.items():
            terms = [_part(params, direction, name, tuple(p.shape)) * g for direction, g in drawn]
            sums[name] = sum(terms[1:], start=terms[0])
        return sums

    def _update(self, params: "Params", record: StepRecord, moving: "dict[str, Tensor]") -> None:
        """Apply W <- decay W - (lr / r) S V^T, or theta <- decay theta - lr s, with S and s from `moving`."""
        from mezo_cli.perturb.noise.by_tensor import part_of
        from mezo_cli.perturb.noise.low_rank import Factors, write_product

        step, scalars, lr = record
        noise, first = low_rank_noise(params), Direction(self.seed, step)
        decay = params.decay.take(1.0 - lr * self.config.weight_decay, lr != 0 and any(scalars))
        of_matrix = to_float32(lr / self.config.rank)
        for span in params.blocks():
            theta, moved = params.load(span), self._step.view(span)
            for piece in span.pieces:
                out, own = moved[part_of(piece)], moving[piece.name]
                if noise.is_matrix(piece.shape):
                    right = noise.right(first, piece.name, piece.shape, own.device)
                    write_product(Factors(own, right), piece.start, out)
                    out.mul_(of_matrix)
                else:
                    out.copy_(own[piece.start : piece.start + piece.numel]).mul_(lr)
            params.decay_and_subtract(theta, moved, decay)
            params.round_(span, theta, first)
            params.store(span, theta)


def low_rank_noise(params: "Params") -> "LowRankNoise":
    """Return the noise that a run of LOZO draws from."""
    return cast("LowRankNoise", params.noise)


def _part(params: "Params", direction: Direction, name: str, shape: tuple[int, ...]) -> "Tensor":
    """Return U of a matrix, or z of another tensor."""
    from mezo_cli.perturb.noise.spans import compute_device

    noise, device = low_rank_noise(params), compute_device(params.tensors[name].device)
    draw: Any = noise.left if noise.is_matrix(shape) else noise.z
    drawn: Tensor = draw(direction, name, shape, device)
    return drawn
