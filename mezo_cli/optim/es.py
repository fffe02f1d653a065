"""Evolution strategies: a population of perturbed weights, each weighted by its reward, and no gradient.

N members see the same rows at theta + eps z_n; R_n is minus the loss of member n, a mean reward or any other loss.

    s = shape(R),   theta <- theta + lr (1 / N) sum_n c_n z_n,   c_n = s_n
    antithetic: N / 2 directions, each with both signs,          c_k = s_k+ - s_k-

`eps` is the literature's sigma and `lr` its alpha, which has the factor 1 / eps in it. `shaping`, with b the mean of R
(`baseline: mean`) or the reward of theta itself (`baseline: theta`, one forward more):

    zscore         (R - mean R) / (std + 1e-8)
    std            (R - b) / (std + 1e-8)
    centered_rank  rank(R) / (N - 1) - 1/2, equal rewards share their mean rank
    sign           sign(R - b)
    none           R - b

std (ddof 0) is that of the N rewards or, with `shaping_std: rows`, that of all members' rows. If all rewards are equal,
the c are 0: the step has no signal. It changes nothing, and its decay is deferred as that of mezo.py.

- The defaults are those of ES at Scale (Qiu et al. 2025, arXiv 2509.24372, Algorithm 2): N 30, zscore, one sign.
- `centered_rank` and both signs: OpenAI-ES (Salimans et al. 2017, arXiv 1703.03864, section 2).
- `shaping_std: rows`: the score of EGGROLL (Sarkar et al. 2025, arXiv 2511.16652), here with full-rank z, and 1e-8
  beside the std where its code has 1e-5 beside the variance.
- `optimizer=fzoo`: FZOO (arXiv 2506.09034, Algorithm 1): N 8, rademacher, std, baseline theta.
- `members: 2, antithetic: true, shaping: none, lr: LR / eps` is MeZO with LR, up to rounding.

`anchor` draws theta towards the weights theta0 that the run began with, after each update (Anchored Weight Decay,
arXiv 2605.30148); S is the soft threshold, S(x, t) = sign(x) max(|x| - t, 0):

    {l2: a}   theta <- theta0 + (1 - lr a) (theta - theta0)
    {l1: a}   theta <- theta0 + S(theta - theta0, lr a)

It is computed in float64 with the update and rounded once. After steps without a signal the next one applies the
product of their factors (l2), or the sum of their thresholds (l1). theta0 is kept in memory: 4 bytes per trainable
parameter. A resumed run reads it from the base model and the run's start.safetensors.

The trajectory stores the c. There is no other state.
"""

import logging
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from mezo_cli.config.optimizers import EsConfig
from mezo_cli.config.schema import StepRecord
from mezo_cli.distributed.ranks import split_sizes
from mezo_cli.errors import UserError
from mezo_cli.optim.base import LossFn, RowLossFn, StepResult
from mezo_cli.optim.mezo import ZerothOrder
from mezo_cli.optim.update import BlockUpdate, Moment, Terms
from mezo_cli.perturb.noise import Direction, to_float32

if TYPE_CHECKING:
    from torch import Tensor

    from mezo_cli.perturb.forward import PerturbedForward
    from mezo_cli.perturb.noise.spans import Span
    from mezo_cli.perturb.params import Params

log = logging.getLogger("mezo")

STD_FLOOR = 1e-8  # added to a standard deviation, as in the published code


class AnchoredSgd(BlockUpdate):
    """SGD, and after each update a decay towards the weights theta0 that the run began with."""

    def __init__(self, estimator: Any) -> None:
        super().__init__(estimator)
        ((self._kind, self._strength),) = estimator.config.anchor.items()  # l1 or l2, lambda
        self.start: Callable[[Span], Tensor] | None = None  # theta0 of a span
        self._owed: list[float] = []  # lr of the steps without a signal since the last one that had some
        self._due: list[float] = []  # lr of each step whose anchor is due with the last one: none if it has no signal

    def plan(self, params: "Params", record: StepRecord) -> "Callable[[Span], Tensor]":
        """Note whose anchor is due with this step, and return what computes -lr (1 / N) sum c z of a span."""
        _, coefficients, lr = record
        self._owed.append(lr)
        has_signal = lr != 0 and any(coefficients)
        self._due, self._owed = (self._owed, []) if has_signal else ([], self._owed)
        return partial(self.sum_of, params, self.estimator.estimate(record, lr))

    def anchor(self) -> "Callable[[Span, Tensor], None] | None":
        """Return what draws theta of a span towards theta0, if an anchor is due."""
        return partial(self._draw_to_start, self._due) if self._due else None

    def _draw_to_start(self, due: list[float], span: "Span", theta: "Tensor") -> None:
        from torch.nn.functional import softshrink

        if self.start is None:
            raise RuntimeError("an anchor needs `keep_start` before the first step")
        start = self.start(span).to(theta.device)
        theta.sub_(start)
        if self._kind == "l2":
            theta.mul_(math.prod(1.0 - lr * self._strength for lr in due))
        else:
            theta.copy_(softshrink(theta, self._strength * math.fsum(due)))
        theta.add_(start)


class Es(ZerothOrder):
    """The population step. The weights follow from (seed, step, c, lr) of every step and, with an anchor, theta0."""

    scalar = "coefficient"
    symbol = "c"
    config: EsConfig

    def __init__(self, config: EsConfig, seed: int, steps: int) -> None:
        super().__init__(config, seed, steps)
        if config.anchor is not None:
            self.update = AnchoredSgd(self)
        self._has_warned = False  # whether a step without a signal was logged

    def samples(self, step: int) -> int:
        """Return the number of directions."""
        return self.config.directions

    def step(self, forward: "PerturbedForward", loss_fn: LossFn, step: int) -> StepResult:
        """Take step number `step` (from 0). `loss_fn` returns the loss of one fixed batch through `forward`."""
        of_points = self._measure(forward, loss_fn, step)
        members = [moments for of_signs in of_points[: self.config.directions] for moments in of_signs]
        losses = [moments[0] for moments in members]
        loss_theta = of_points[-1][0][0] if self.config.baseline == "theta" else None
        measured = losses if loss_theta is None else [*losses, loss_theta]
        is_finite = all(map(math.isfinite, measured))  # else theta is left as it was, and the loop ends the run
        within = mean([moments[1] for moments in members]) if self.config.shaping_std == "rows" else 0.0
        spread = math.sqrt(within + variance(losses))  # of all rows, of which every member has as many
        shaped = self._shape(losses, loss_theta, spread) if is_finite else [0.0] * len(losses)
        if self.config.antithetic:
            shaped = [plus - minus for plus, minus in zip(shaped[::2], shaped[1::2], strict=True)]
        others = {"loss_std": math.sqrt(variance(losses)), "loss_min": min(losses), "loss_max": max(losses)}
        others |= {} if loss_theta is None else {"loss_theta": loss_theta}
        others["ties"] = (len(losses) - len(set(losses))) / (len(losses) - 1)  # share of those that repeat one before
        result = StepResult(mean(losses), [to_float32(c) for c in shaped], self.lr(step), others)
        if is_finite and all(map(math.isfinite, result.recorded)):
            if others["ties"] == 1 and not self._has_warned:
                self._has_warned = True
                what = f"step {step + 1}: all {len(losses)} members have the loss {result.loss:g}"
                why = "a step without a signal changes nothing; in metrics.jsonl ties is the share of equal members"
                log.warning("warning: %s: %s", what, why)
            self.apply_updates(forward.params, [(step, result.recorded, result.lr)])
        return result

    def _measure(self, forward: "PerturbedForward", loss_fn: LossFn, step: int) -> list[list[list[float]]]:
        """Return the losses of the directions and, where it is the baseline, of theta.

        The losses are read at once: this is where the host waits for the device, once per step. Ranks that share the
        directions compute those of their own, and exchange what is returned.

        Returns:
            [points][signs][loss], or with `shaping_std=rows` [points][signs][mean, variance] of the losses of the rows.
        """
        import torch

        config, ranks = self.config, forward.ranks
        signs = (1, -1) if config.antithetic else (1,)
        points: list[Direction | None] = [Direction(self.seed, step, k) for k in range(config.directions)]
        points += [None] * (config.baseline == "theta")

        by_rows = config.shaping_std == "rows"
        if by_rows and not isinstance(loss_fn, RowLossFn):
            why = "this loss has no losses of single rows; use optimizer.shaping_std=members"
            raise UserError(f"optimizer.shaping_std=rows: {why}")

        def losses_of_point() -> "Tensor":
            return loss_fn.rows() if isinstance(loss_fn, RowLossFn) and by_rows else loss_fn().reshape(-1, 1)

        losses = forward.losses_of(ranks.share_of(points), config.eps, losses_of_point, signs)
        of_rows = torch.stack([values.expand(len(signs), -1) for values in losses]).tolist()
        of_points = [[[mean(rows), variance(rows)][: 1 + by_rows] for rows in of_signs] for of_signs in of_rows]
        part, sizes = torch.tensor(of_points, dtype=torch.float64), split_sizes(len(points), ranks.size)
        return cast("list[list[list[float]]]", ranks.gather_parts(part, sizes, "step").tolist())

    def _shape(self, losses: list[float], loss_theta: float | None, spread: float) -> list[float]:
        rewards, shaping = [-loss for loss in losses], self.config.shaping
        if min(rewards) == max(rewards):
            return [0.0] * len(rewards)
        if shaping == "centered_rank":
            order, last = sorted(rewards), len(rewards) - 1
            return [(bisect_left(order, r) + bisect_right(order, r) - 1) / (2 * last) - 0.5 for r in rewards]
        base = mean(rewards) if loss_theta is None else -loss_theta
        differences = [reward - base for reward in rewards]
        if shaping == "none":
            return differences
        if shaping == "sign":
            return [float((d > 0) - (d < 0)) for d in differences]
        return [d / (spread + STD_FLOOR) for d in differences]

    def estimate(self, record: StepRecord, scale: float) -> Terms:
        """Return `scale` times -(1 / N) sum c z of a step: (direction, coefficient) of each of its terms."""
        coefficients, n = record[1], self.config.members
        return [(Direction(self.seed, record[0], k), -scale * c / n) for k, c in enumerate(coefficients)]

    def keep_start(self, params: "Params") -> None:
        """Copy the weights that the run began with, for an anchor."""
        import torch

        if isinstance(self.update, AnchoredSgd):
            copy, tensors = Moment(), params.tensors.items()
            copy.load({name: p.detach().to(torch.float32, copy=True).flatten() for name, p in tensors})
            self.update.start = copy.view


def mean(values: list[float]) -> float:
    """Return the mean, rounded once; nan if a value is not finite."""
    return math.fsum(values) / len(values) if all(map(math.isfinite, values)) else math.nan


def variance(values: list[float]) -> float:
    """Return the variance with ddof 0; nan if a value is not finite."""
    centre = mean(values)
    return mean([(value - centre) ** 2 for value in values])
