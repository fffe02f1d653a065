"""The updates that take an estimate G = sum c z of an optimizer: SGD, momentum, Adam, and their moments in memory.

The state of an update follows from the records of all steps, so that training, a resumed run and a replay compute the
same bits. Weight decay is applied as in mezo.py, whatever the update: it acts on theta alone, never on a moment.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from mezo_cli.config.schema import StepRecord
from mezo_cli.perturb.noise import Direction, to_float32

if TYPE_CHECKING:
    from torch import Tensor

    from mezo_cli.perturb.noise.spans import Segment, Span
    from mezo_cli.perturb.params import Params

Terms = list[tuple[Direction, float]]


class Moment:
    """A buffer like theta, float32, zero at first; memory is taken when a span of it is first asked for."""

    def __init__(self) -> None:
        self._flat: dict[Segment, Tensor] = {}
        self._views: dict[Span, Tensor] = {}
        self._loaded: dict[str, Tensor] = {}  # from a file, until their segment is asked for

    def view(self, span: "Span") -> "Tensor":
        """Return the part for a span of theta, [span.numel], to be written in place."""
        import torch

        if span not in self._views:
            segment = span.segment
            if segment not in self._flat:
                flat = torch.zeros(segment.flat.shape, dtype=torch.float32, device=segment.flat.device)
                self._flat[segment] = flat
                for piece in segment.whole.pieces:
                    if piece.name in self._loaded:
                        loaded = self._loaded.pop(piece.name)[piece.start : piece.start + piece.numel]
                        flat[piece.part] = loaded.to(flat.device)
            self._views[span] = self._flat[segment][span.place]
        return self._views[span]

    def load(self, tensors: "dict[str, Tensor]") -> None:
        """Take over what `tensors` returned."""
        self._flat, self._views, self._loaded = {}, {}, tensors

    def tensors(self) -> "dict[str, Tensor]":
        """Return parameter name -> its part, flat, on the CPU: of the tensors that have been asked for."""
        names = {piece.name for span in self._views for piece in span.pieces}
        views = {
            piece.name: flat[piece.part].cpu()
            for segment, flat in self._flat.items()
            for piece in segment.whole.pieces
            if piece.name in names
        }
        return {name: part.cpu() for name, part in self._loaded.items()} | views


class Scratch:
    """Uninitialized memory for a span at a time, the same at every step."""

    _buffer: "Tensor | None" = None

    def view(self, span: "Span") -> "Tensor":
        """Return float32 [span.numel]; the one before is no longer valid."""
        import torch

        if self._buffer is None or len(self._buffer) < span.numel or self._buffer.device != span.theta.device:
            self._buffer = torch.empty(span.numel, dtype=torch.float32, device=span.theta.device)
        return self._buffer[: span.numel]


class Sgd:
    """theta <- (1 - lr wd) theta - lr G, in one pass of the noise's kernels. There is no state.

    Args:
        estimator: the optimizer that estimates G.
    """

    def __init__(self, estimator: Any) -> None:
        self.estimator = estimator

    def own_decay(self, record: StepRecord) -> float:
        """Return the weight decay of a step, 1 - lr wd."""
        return 1.0 - record[2] * float(self.estimator.config.weight_decay)

    def rebuild(self, params: "Params", records: list[StepRecord]) -> None:
        """Rebuild the state from all steps so far; theta stays."""
        for record in records:
            self.estimator.estimate(record, 1.0)  # a running quantile of |g| is taken of what it sees

    def apply(self, params: "Params", records: list[StepRecord]) -> None:
        """Update the state, and theta, by each record in order."""
        terms, decays = [], []
        for record in records:
            of_step = self.estimator.estimate(record, -record[2])
            terms += of_step
            decays += [self.own_decay(record), *[1.0] * (len(of_step) - 1)]
        params.update(terms, decays)

    def state_tensors(self) -> "dict[str, Tensor]":
        """Return the state, to be stored; empty where it is quickly rebuilt."""
        return {}

    def load_tensors(self, tensors: "dict[str, Tensor]", step: int) -> None:
        """Take over what `state_tensors` returned after `step` steps; ValueError if they are of something else."""
        if tensors:
            raise ValueError(f"optimizer={self.estimator.config.name} stores no state")


class BlockUpdate(Sgd):
    """theta <- (1 - lr wd) theta - s, block by block of theta, with the step s of each block from `plan`.

    `rebuild` and `apply` need every step of a run once, in order.

    Attributes:
        moments: name -> a `Moment`, which the steps of the blocks update, or what is stored like one.
        scalars: names of attributes, numbers, that are stored beside the buffers.
        draws: how many z a step draws: with many, few steps are applied to a block while it is in cache.
    """

    scalars: ClassVar[tuple[str, ...]] = ("next_step",)

    def __init__(self, estimator: Any) -> None:
        super().__init__(estimator)
        self.moments: dict[str, Any] = {}
        self.next_step, self.draws = 0, int(estimator.config.directions)
        self.step = Scratch()

    @abstractmethod
    def plan(self, params: "Params", record: StepRecord) -> "Callable[[Span], Tensor]":
        """Update the scalars, and return what updates the buffers of a span and computes its s, float32 [numel]."""

    def anchor(self) -> "Callable[[Span, Tensor], None] | None":
        """Return what the step that was planned last does to theta of a span, float64, after it; None: nothing."""
        return None

    def rebuild(self, params: "Params", records: list[StepRecord]) -> None:
        """Rebuild the state from all steps so far; theta stays."""
        for of_pass in self.passes(records):
            planned = [self.plan(params, record) for record in of_pass]
            for span in params.blocks(params.noise.block) if self.moments else ():
                for step_of in planned:
                    step_of(span)

    def apply(self, params: "Params", records: list[StepRecord]) -> None:
        """Update the state, and theta, by each record in order."""
        for of_pass in self.passes(records):
            decays = [params.decay.take(self.own_decay(r), moves=r[2] != 0 and any(r[1])) for r in of_pass]
            planned = [(record[0], self.plan(params, record), self.anchor()) for record in of_pass]
            for span in params.blocks(params.noise.block):
                theta = params.load(span)
                for (step, step_of, anchor), decay in zip(planned, decays, strict=True):
                    params.decay_and_subtract(theta, step_of(span), decay, anchor and partial(anchor, span))
                    params.round_(span, theta, Direction(self.estimator.seed, step))
                params.store(span, theta)

    def passes(self, records: list[StepRecord]) -> Iterator[list[StepRecord]]:
        """Yield the records of the steps that are applied to a block of theta before the next block."""
        from mezo_cli.perturb.params import TERMS_PER_PASS

        steps = max(1, TERMS_PER_PASS // self.draws)
        for first in range(0, len(records), steps):
            of_pass = records[first : first + steps]
            for step, _, _ in of_pass:
                if step != self.next_step:
                    raise RuntimeError(f"it needs every step in order: got step {step}, expected {self.next_step}")
                self.next_step += 1
            yield of_pass

    def sum_of(self, params: "Params", terms: Terms, span: "Span") -> "Tensor":
        """Return the sum of c z of a span, term by term."""
        step = self.step.view(span).zero_()
        params.noise.update_(span, step, terms, [1.0] * len(terms))
        return step

    def state_tensors(self) -> "dict[str, Tensor]":
        """Return the buffers, named `m:PARAMETER`, and `scalars`; without buffers there are none."""
        import torch

        tensors = {f"{key}:{name}": value for key, m in self.moments.items() for name, value in m.tensors().items()}
        if tensors:
            if self.estimator.clip.past:
                tensors["clip"] = torch.tensor(list(self.estimator.clip.past), dtype=torch.float64)
            tensors["scalars"] = torch.tensor([getattr(self, name) for name in self.scalars], dtype=torch.float64)
        return tensors

    def load_tensors(self, tensors: "dict[str, Tensor]", step: int) -> None:
        """Take over what `state_tensors` returned after `step` steps; ValueError if they are of something else."""
        values = tensors["scalars"].tolist() if "scalars" in tensors else []
        if len(values) != len(self.scalars) or values[0] != step:
            raise ValueError(f"it does not hold the state of {self.estimator.config.name} at step {step}")
        for name, value in zip(self.scalars, values, strict=True):
            setattr(self, name, type(getattr(self, name))(value))
        self.estimator.clip.restore(tensors["clip"].tolist() if "clip" in tensors else [])
        for key, moment in self.moments.items():
            start = f"{key}:"
            moment.load({name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)})


class Momentum(BlockUpdate):
    """Heavy ball on MeZO's estimate (paper, arXiv 2305.17333, section 2.2 and its appendix).

        m_t = momentum m_(t-1) + G_t,   theta <- (1 - lr wd) theta - lr m_t

    This is torch.optim.SGD with g z as the gradient, except for the weight decay: it acts on theta, not on m, so that m
    follows from the scalars of the trajectory alone. A step whose g are all 0 defers it, although m moves theta.

    m is a buffer of theta's size; z is drawn once per step and sample, as MeZO does. The checkpoint `last` stores m.
    Where it is not at hand, m is rebuilt from all steps before: one draw of z each and no forward.
    """

    beta_name: ClassVar[str] = "momentum"  # the setting that the decay of m is

    def __init__(self, estimator: Any) -> None:
        super().__init__(estimator)
        self.beta = to_float32(getattr(estimator.config, self.beta_name))
        self.moments["m"] = Moment()

    def plan(self, params: "Params", record: StepRecord) -> "Callable[[Span], Tensor]":
        """Return what computes lr m of a span."""
        return partial(self.move, params, self.estimator.estimate(record, 1.0), record[2])

    def move(self, params: "Params", terms: Terms, rate: float, span: "Span") -> "Tensor":
        """Apply m <- beta m + terms to a span, and return rate m."""
        import torch

        m = self.moments["m"].view(span)
        params.noise.update_(span, m, terms, [self.beta, *[1.0] * (len(terms) - 1)])
        return torch.mul(m, rate, out=self.step.view(span))


class Adam(Momentum):
    """Adam (Kingma and Ba 2015, arXiv 1412.6980) on MeZO's estimate (paper, arXiv 2305.17333, section 2.2).

        m_t = b1 m_(t-1) + (1 - b1) G_t,   v_t = b2 v_(t-1) + (1 - b2) G_t^2,
        theta <- (1 - lr wd) theta - lr (m_t / (1 - b1^t)) / (sqrt(v_t / (1 - b2^t)) + adam_eps)

    This is torch.optim.AdamW with g z as the gradient (as in the published code, which fills `.grad`).

    - `noise: rademacher` with one sample: z^2 = 1, so all elements of v are the same number, sum (1 - b2) b2^(t-s)
      g_s^2. It is kept as one number, exact over all steps. What remains is momentum with a rate per step.
    - other noise, or more samples: v differs per element, so m and v are two buffers of theta's size.
    """

    beta_name = "beta1"
    scalars = ("next_step", "scalar_v", "power1", "power2")

    def __init__(self, estimator: Any) -> None:
        super().__init__(estimator)
        self.scalar_v = 0.0  # the second moment, where it is one number
        self.power1 = self.power2 = 1.0  # b1^t and b2^t, by products: a library's power may differ in the last place
        self._estimate = Scratch()
        config = estimator.config
        if config.noise != "rademacher" or config.samples > 1:  # else z^2 = 1, and all elements of v are equal
            self.moments["v"] = Moment()

    def plan(self, params: "Params", record: StepRecord) -> "Callable[[Span], Tensor]":
        """Return what computes a step of Adam of a span."""
        b2 = self.estimator.config.beta2
        self.power1, self.power2 = self.power1 * self.beta, self.power2 * b2
        rate = record[2] / (1 - self.power1)
        if "v" in self.moments:
            return partial(
                self._move_buffers, params, self.estimator.estimate(record, 1.0), rate, 1 / (1 - self.power2)
            )
        g = self.estimator.gradients(record)[0]
        self.scalar_v = b2 * self.scalar_v + (1 - b2) * g * g
        rate /= math.sqrt(self.scalar_v / (1 - self.power2)) + self.estimator.config.adam_eps
        return partial(self.move, params, self.estimator.estimate(record, 1 - self.beta), rate)

    def _move_buffers(self, params: "Params", terms: Terms, rate: float, correction: float, span: "Span") -> "Tensor":
        import torch

        b1, b2 = self.beta, self.estimator.config.beta2
        m, v = self.moments["m"].view(span), self.moments["v"].view(span)
        estimate, step = self._estimate.view(span).zero_(), self.step.view(span)
        params.noise.update_(span, estimate, terms, [1.0] * len(terms))
        m.mul_(b1).add_(torch.mul(estimate, 1 - b1, out=step))
        v.mul_(b2).add_(estimate.mul_(estimate).mul_(1 - b2))
        torch.mul(v, correction, out=step).sqrt_().add_(self.estimator.config.adam_eps)
        return torch.div(m, step, out=step).mul_(rate)
