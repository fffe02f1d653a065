"""MeZO, the paper's Algorithm 1 (Malladi et al. 2023, arXiv 2305.17333, section 2), and n-SPSA (its section 2.1).

    z ~ N(0, I),   g = (L(theta + eps z) - L(theta - eps z)) / (2 eps),   theta <- theta - lr (g z + wd theta)

n-SPSA averages g_i z_i over n directions drawn at the same theta (section 2.1). With `sample_schedule: linear` step t
of T draws n_t = 1 + floor(n t / T) directions, from 1 to n in equal parts (the published linear schedule is max(1,
floor(n t / T)), which ends at n - 1). lr is not scaled with n_t.

Weight decay is applied once per step, to every tensor: theta - (lr wd) theta + c z is computed in float64 and rounded
once. With theta in float32 and lr wd below 3e-8, theta - (lr wd) theta alone would round to theta; c z is what carries
it, in the mean over the steps. A step whose g are all 0 (an accuracy as loss, equal scores) has no c z, so it changes
nothing and defers its decay. The next step with a g that is not 0 applies the decay of all steps since the last one,

    theta <- theta - D theta + c z,   D = 1 - prod_i (1 - lr_i wd)

D is a function of the records alone (perturb/params.py). Another scalar of a step that is not 0, a
curvature, counts as a g: the decay then acts at once, though no c z carries it. What is deferred when a run ends is not
applied; if the run is resumed with more steps, their first g that is not 0 applies it.

`clip_g` bounds each |g| (`Clip`). A step costs 2 n_t forwards with perturbed weights, and one pass over theta that
draws z n_t times. Other updates than this SGD are in update.py, another estimate is in es.py, others in methods/.
"""

import math
from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self, cast

from mezo_cli.config.optimizers import PerturbationConfig, ZerothOrderConfig
from mezo_cli.config.schema import OptimizerConfig, StepRecord
from mezo_cli.distributed.ranks import split_sizes
from mezo_cli.errors import UserError
from mezo_cli.optim.base import LossFn, ReplayableOptimizer, StepResult, learning_rate
from mezo_cli.optim.update import Adam, Momentum, Sgd, Terms
from mezo_cli.perturb.noise import Direction, to_float32

if TYPE_CHECKING:  # torch is imported when a step is taken, not when settings are read
    from mezo_cli.perturb.forward import PerturbedForward
    from mezo_cli.perturb.params import Params


class MezoResult(StepResult):
    """The scalars of one step: `loss` is the mean of both losses, which are means over the samples."""

    @classmethod
    def of(cls, plus: Sequence[float], minus: Sequence[float], grads: Sequence[float], lr: float) -> Self:
        """Return the result of the losses and projected gradients of a step, one of each per sample."""
        n, recorded = len(plus), [to_float32(grad) for grad in grads]
        of_signs = {"loss_plus": sum(plus) / n, "loss_minus": sum(minus) / n}
        others = {**of_signs, "projected_grad": sum(recorded) / n}
        return cls(sum(of_signs.values()) / 2, recorded, lr, others)


def spsa(
    forward: "PerturbedForward", loss_fn: LossFn, directions: Sequence[Direction], eps: float
) -> list[tuple[float, float, float]]:
    """Return L(theta + eps z), L(theta - eps z) and g along the z of each direction (paper, Definition 1).

    `forward` draws z for each module's weights as the module runs; theta is not written. The losses of all directions
    are read at once: this is where the host waits for the device, once per step. Where ranks share the directions, each
    computes the losses of its own.
    """
    pairs = losses_at(forward, loss_fn, directions, eps)
    return [(plus, minus, (plus - minus) / (2 * eps)) for plus, minus in pairs]


def losses_at(
    forward: "PerturbedForward", loss_fn: LossFn, points: Sequence[Direction | None], eps: float
) -> list[list[float]]:
    """Return [L(theta + eps z), L(theta - eps z)] of each direction; for None twice L(theta)."""
    import torch

    ranks = forward.ranks
    losses = forward.losses_of(ranks.share_of(points), eps, loss_fn)
    pairs = torch.stack([loss.expand(2) for loss in losses]) if losses else torch.empty(0, 2, dtype=torch.float64)
    pairs = ranks.gather_parts(pairs.cpu().double(), split_sizes(len(points), ranks.size), "step")
    return cast("list[list[float]]", pairs.tolist())


class ZerothOrder(ReplayableOptimizer):
    """An estimate of the gradient, a sum of c z over the directions of a step, and an update that takes it.

    A subclass estimates: its `step` computes and records scalars, of which `estimate` makes the terms of the sum.
    """

    config: PerturbationConfig
    update_class: ClassVar[type[Sgd]] = Sgd

    def __init__(self, config: PerturbationConfig, seed: int, steps: int) -> None:
        self.config, self.seed, self.steps = config, seed, steps
        self.update = self.update_class(self)

    def lr(self, step: int) -> float:
        """Return the learning rate of step `step` (from 0)."""
        return learning_rate(self.config, step, self.steps)

    @abstractmethod
    def estimate(self, record: StepRecord, scale: float) -> Terms:
        """Return `scale` times a step's estimate of the gradient: (direction, coefficient) of each of its terms."""

    def rebuild_state(self, params: "Params", records: list[StepRecord]) -> None:
        """Rebuild the state of the update, and what a running quantile of |g| is taken of."""
        self.update.rebuild(params, records)

    def apply_updates(self, params: "Params", records: list[StepRecord]) -> None:
        """Update theta by each record in order."""
        self.update.apply(params, records)

    def save_state(self, path: Path) -> None:
        """Write the state of the update as safetensors; no file where it has none, or is quickly rebuilt."""
        import safetensors.torch

        tensors = self.update.state_tensors()
        if tensors:
            safetensors.torch.save_file(tensors, path)

    def load_state(self, path: Path, step: int) -> None:
        """Read what `save_state` wrote after `step` steps."""
        from mezo_cli.models.stored_tensors import read_tensors

        tensors, _ = read_tensors(path)
        try:
            self.update.load_tensors(tensors, step)
        except ValueError as error:
            raise UserError(f"{path} is damaged: {error}") from error


class Clip:
    """Clip the projected gradients of a run, step by step: by a number, or a running quantile of their sizes.

        g <- max(-b, min(b, g)),   b = NUMBER,   or for `q0.99` the 0.99 quantile of the last `clip_window` raw |g|

    The quantile is the ceil(q n)-th smallest of the n values that the steps before left, raw, at most `clip_window`;
    the first step is not clipped. So b is a function of the trajectory, which stores the raw g: a step, a resumed run
    and a replay compute the same.

    Args:
        bound: a number or a quantile, as `ClipBound` has it; None: never clip.
        window: the number of raw |g| of which the quantile is taken.

    Attributes:
        past: the raw |g| of which the next quantile is taken; empty without a quantile.
    """

    def __init__(self, bound: str | None, window: int) -> None:
        self._quantile = float(bound[1:]) if bound is not None and bound.startswith("q") else None
        self._limit = float(bound) if bound is not None and self._quantile is None else math.inf
        self.past = deque[float](maxlen=window)
        self._step: int | None = None  # the last one, whose |g| are in `past`

    def clip(self, step: int, grads: list[float]) -> list[float]:
        """Return a step's g, clipped. Steps must come in order; the last one may be repeated."""
        if self._quantile is not None and step != self._step:
            self._step = step
            if self.past:
                self._limit = sorted(self.past)[math.ceil(self._quantile * len(self.past)) - 1]
            self.past.extend(map(abs, grads))
        return [max(-self._limit, min(self._limit, g)) for g in grads]

    def restore(self, past: Iterable[float]) -> None:
        """Take over the `past` of a run that continues."""
        self.past.clear()
        self.past.extend(past)
        self._step = None


class Mezo(ZerothOrder):
    """SPSA, and SGD. The weights follow from (seed, step, g, lr) of every step."""

    config: ZerothOrderConfig

    def __init__(self, config: ZerothOrderConfig, seed: int, steps: int) -> None:
        super().__init__(config, seed, steps)
        self.clip = Clip(config.clip_g, config.clip_window)

    def samples(self, step: int) -> int:
        """Return n_t, the number of directions that step `step` draws."""
        return self.config.samples_at(step, self.steps)

    def step(self, forward: "PerturbedForward", loss_fn: LossFn, step: int) -> MezoResult:
        """Take step number `step` (from 0). `loss_fn` returns the loss of one fixed batch through `forward`."""
        directions = [Direction(self.seed, step, sample) for sample in range(self.samples(step))]
        plus, minus, grads = zip(*spsa(forward, loss_fn, directions, self.config.eps), strict=True)
        result = MezoResult.of(plus, minus, grads, self.lr(step))
        if all(map(math.isfinite, result.recorded)):  # else theta is left as it was, and the loop ends the run
            self.apply_updates(forward.params, [(step, result.recorded, result.lr)])
        return result

    def gradients(self, record: StepRecord) -> list[float]:
        """Return g of each of a step's n_t directions, clipped. Steps must come in order; the last may be repeated."""
        step, grads, _ = record
        return self.clip.clip(step, grads[: self.samples(step)])

    def estimate(self, record: StepRecord, scale: float) -> Terms:
        """Return `scale` times (1 / n) sum_i g_i z_i of a step: (direction, coefficient) of each of its n_t terms."""
        grads = self.gradients(record)
        return [(Direction(self.seed, record[0], i), scale * g / len(grads)) for i, g in enumerate(grads)]


class MezoMomentum(Mezo):
    """SPSA, and momentum."""

    update_class = Momentum


class MezoAdam(Mezo):
    """SPSA, and Adam."""

    update_class = Adam


class NullSigns(Mezo):
    """A control: MeZO with the sign of every g replaced by one that is drawn.

        theta <- theta - lr (s g z + wd theta),   s = -1 or 1, a function of (seed, step, sample)

    It takes steps of MeZO's sizes along MeZO's directions, in a sense that knows nothing of the loss: what it gains
    over zero-shot is what the choice of a checkpoint on dev gains alone. The trajectory holds g without s.
    """

    def gradients(self, record: StepRecord) -> list[float]:
        """Return s g of each of a step's directions, g clipped."""
        grads = super().gradients(record)
        return [random_sign(self.seed, record[0], sample) * g for sample, g in enumerate(grads)]


def random_sign(seed: int, step: int, sample: int) -> int:
    """Return -1 or 1, independent of z."""
    digest = blake2b(f"{seed}\0null_signs\0{step}\0{sample}".encode(), digest_size=1).digest()
    return 1 if digest[0] & 1 else -1


class LinearProbe(Mezo):
    """MeZO of zero steps, on a model that `init=linear_probe` has fitted: it runs no forward and updates nothing.

    Its name tells such runs apart in tables. conf/optimizer/linear_probe.yaml sets `init` and `steps`.
    """

    def __init__(self, config: OptimizerConfig, seed: int, steps: int) -> None:
        super().__init__(ZerothOrderConfig(name=config.name, lr=config.lr), seed, steps)
