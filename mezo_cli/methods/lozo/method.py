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
sum of r products in their order (noise.py), so a replay is bitwise identical.

LOZO-M (the paper's section 4) has momentum in the space of U:

    N <- beta N + (1 - beta) g U,   W <- W - lr (N V^T / r + wd W)           on a matrix W [m, n]
    N <- N V_old^T V_new / n        first, at a step with a new V

On other tensors m <- beta m + (1 - beta) g z, dense. For independent gaussian V the projection leaves about sqrt(r / n)
of the norm of N (0.06 for r 4 and n 1024): nearly a restart, at every `interval` steps. beta 0.9, from the paper's grid
0.5, 0.7, 0.9. The state is N, [m, r] per matrix, and m of the other tensors: 4 bytes per element, stored in the
checkpoint `last`. `beta: 0` is LOZO, bit for bit. The products with V are sums in a fixed order.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from mezo_cli.config.base import SettingError
from mezo_cli.config.schema import StepRecord
from mezo_cli.methods.lozo.settings import LozoConfig
from mezo_cli.optim.mezo import Mezo
from mezo_cli.optim.update import BlockUpdate
from mezo_cli.perturb.noise import Direction, to_float32

if TYPE_CHECKING:
    from torch import Tensor

    from mezo_cli.perturb.noise.spans import Span
    from mezo_cli.perturb.params import Params


class Sides(dict[str, "Tensor"]):
    """The momentum, stored as a `Moment` is: name of a tensor -> N of a matrix, m of another tensor."""

    def tensors(self) -> "dict[str, Tensor]":
        """Return them on the CPU."""
        return {name: tensor.cpu() for name, tensor in self.items()}

    def load(self, tensors: "dict[str, Tensor]") -> None:
        """Take over what `tensors` returned."""
        self.clear()
        self.update(tensors)


class LowRankSgd(BlockUpdate):
    """W <- (1 - lr wd) W - (lr / r) S V^T, S = (1 / n) sum g_i U_i; for other tensors S is the sum of g_i z_i."""

    def rebuild(self, params: "Params", records: list[StepRecord]) -> None:
        """Rebuild what a running quantile of |g| is taken of."""
        for (record,) in self.passes(records):
            self.estimator.gradients(record)

    def plan(self, params: "Params", record: StepRecord) -> "Callable[[Span], Tensor]":
        """Return what computes (lr / r) S V^T of a span."""
        return partial(self._expand, params, record, self.sides(params, record))

    def passes(self, records: list[StepRecord]) -> Iterator[list[StepRecord]]:
        """Yield one record at a time: V of one step is kept, and S of one is in memory."""
        for record in records:
            yield from super().passes([record])

    def sides(self, params: "Params", record: StepRecord) -> "dict[str, Tensor]":
        """Return S by the tensors' names: [m, r] of a matrix, else [numel]."""
        from mezo_cli.perturb.noise.spans import compute_device

        noise: Any = params.noise  # a `LowRankNoise`
        step, grads = record[0], self.estimator.gradients(record)
        drawn = [(Direction(self.estimator.seed, step, i), to_float32(g / len(grads))) for i, g in enumerate(grads)]
        sides: dict[str, Tensor] = {}
        for name, p in params.tensors.items():
            shape, device = tuple(p.shape), compute_device(p.device)
            draw: Any = noise.left if noise.is_matrix(shape) else noise.z
            terms = [draw(direction, name, shape, device) * g for direction, g in drawn]
            sides[name] = sum(terms[1:], start=terms[0])
        return sides

    def _expand(self, params: "Params", record: StepRecord, sides: "dict[str, Tensor]", span: "Span") -> "Tensor":
        from mezo_cli.methods.lozo.noise import Factors, write_product

        noise: Any = params.noise
        first = Direction(self.estimator.seed, record[0])
        moved, lr = self.step.view(span), record[2]
        for piece in span.pieces:
            out, own = moved[piece.part], sides[piece.name]
            if noise.is_matrix(piece.shape):
                right = noise.right(first, piece.name, piece.shape, own.device)
                write_product(Factors(own, right), piece.start, out)
                out.mul_(to_float32(lr / self.estimator.config.rank))
            else:
                out.copy_(own[piece.start : piece.start + piece.numel]).mul_(lr)
        return moved


class LowRankMomentum(LowRankSgd):
    """The same with N in place of S, and m of the tensors that are no matrices."""

    def __init__(self, estimator: Any) -> None:
        super().__init__(estimator)
        self.moments["m"] = self._momentum = Sides()

    def rebuild(self, params: "Params", records: list[StepRecord]) -> None:
        """Rebuild the momentum, for which every U is drawn again."""
        for (record,) in self.passes(records):
            self.sides(params, record)

    def sides(self, params: "Params", record: StepRecord) -> "dict[str, Tensor]":
        """Return the momentum, after the update of it."""
        step, new, config = record[0], super().sides(params, record), self.estimator.config
        noise: Any = params.noise
        if step and step % config.interval == 0:  # N <- N V_old^T V_new / n
            for name, p in params.tensors.items():
                if noise.is_matrix(p.shape):
                    moving = self._momentum[name]
                    at = (Direction(self.estimator.seed, step - 1), Direction(self.estimator.seed, step))
                    sides = (noise.right(direction, name, tuple(p.shape), moving.device) for direction in at)
                    self._momentum[name] = project(moving, *sides)
        beta, weight = to_float32(config.beta), to_float32(1 - config.beta)
        for name, estimate in new.items():
            old = self._momentum.get(name)
            decayed = 0.0 if old is None else old.to(estimate.device) * beta
            self._momentum[name] = estimate * weight + decayed
        return self._momentum


class Lozo(Mezo):
    """SPSA along z of low rank, which are those of `params.noise`, and SGD."""

    config: LozoConfig
    update_class = LowRankSgd

    def check_tensors(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Reject a rank above a dimension of every matrix."""
        largest = max((min(shape) for shape in shapes.values() if len(shape) == 2), default=0)
        if self.config.rank > largest:
            why = f"the largest trained matrix has {largest} rows or columns" if largest else "no matrix is trained"
            raise SettingError("optimizer.rank", f"optimizer.rank={self.config.rank}: {why}; give at most that many")


class LozoM(Lozo):
    """The same, and momentum."""

    update_class = LowRankMomentum


def project(moving: "Tensor", old: "Tensor", new: "Tensor") -> "Tensor":
    """Return N V_old^T V_new / n, float32 [m, r], the same bits on every device."""
    import torch

    old, new = old.to(moving.device), new.to(moving.device)
    products = old.double()[:, :, None] * new.double()[:, None, :]  # exact
    rows = 1 << (len(products) - 1).bit_length()
    products = torch.cat([products, products.new_zeros(rows - len(products), *products.shape[1:])])
    while len(products) > 1:  # pairwise: a library's sum differs from device to device
        products = products[: len(products) // 2] + products[len(products) // 2 :]
    weights = (products[0] / len(old)).float()  # [r, r]
    projected = moving[:, :1] * weights[0]
    for k in range(1, len(weights)):
        projected = projected + moving[:, k : k + 1] * weights[k]
    return projected
