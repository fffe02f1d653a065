"""MeZO as a `torch.optim.Optimizer`, for a training loop of one's own (docs/how-to/library.md)."""

import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mezo_cli.config.schema import OptimizerConfig, Seed
from mezo_cli.config.validation import check
from mezo_cli.errors import UserError, join
from mezo_cli.library.groups import ParamsArgument, to_groups
from mezo_cli.library.trajectory import apply_records, make_header, open_writer
from mezo_cli.library.uncovered import find_uncovered
from mezo_cli.optim.base import to_float32
from mezo_cli.optim.mezo import MezoResult, spsa_per_direction
from mezo_cli.optim.settings import NotNegativeNumber, PositiveNumber, Samples
from mezo_cli.perturb.forward import PerturbedForward
from mezo_cli.perturb.noise import Direction, make_noise
from mezo_cli.perturb.params import Params
from mezo_cli.runs.trajectory import Writer

log = logging.getLogger("mezo")

Closure = Callable[[], Tensor | float]
SAVED = ("steps", "seed", "eps", "samples", "noise")
RATIO_TOLERANCE = 1e-6  # of a group's lr to that of the group that the trajectory stores
NAMES_SHOWN = 8  # of tensors in one log line


@dataclass(frozen=True)
class StepSettings(OptimizerConfig):
    """What `MezoOptimizer` is given."""

    eps: PositiveNumber = 1e-3
    weight_decay: NotNegativeNumber = 0.0
    samples: Samples = 1
    noise: Literal["gaussian", "rademacher"] = "gaussian"
    seed: Seed = 0


class MezoOptimizer(torch.optim.Optimizer):
    """Tune a model by the losses that a function returns; no gradient is needed (paper, Algorithm 1 and section 2.1).

        optimizer = MezoOptimizer(model, lr=1e-6, eps=1e-3)
        loss = optimizer.step(lambda: loss_of(model, batch))

    The closure must return the loss of one fixed batch: it is called twice per direction, with theta + eps z and with
    theta - eps z. Make it once the model is on its device: the tuned tensors move to one storage, and the forwards
    of its modules are replaced. Outside `step` the model computes what it did before.

    The first step calls the closure twice more: once with a graph, to leave out the tensors that the loss does not
    depend on (when the loss has a graph), and once with perturbed weights, to find those that a module reads from
    another one. The latter are perturbed in place for each sign, and their exact bits are put back. What only a later
    closure uses is not found.

    Args:
        model: any module. Its own `named_parameters()` give the names, by which z is drawn.
        params: what is tuned: None for every tensor with requires_grad; a function that is true for the names to
            tune; names or tensors of the model; or groups, dicts with `params`, `lr` and `weight_decay`.
        lr: learning rate; torch's schedulers change it per group.
        eps: perturbation scale, > 0.
        weight_decay: theta <- (1 - lr weight_decay) theta at each step, for all tensors of a group. A step whose
            projected gradients are all 0 leaves its decay to the next one that has others.
        samples: directions per step (n-SPSA).
        noise: "gaussian" or "rademacher".
        seed: of z. Two trainings with one seed draw the same z.
        trajectory: a file that is to have the steps' scalars (16 bytes per step), for `mezo_cli.replay`.

    Attributes:
        forward: the model's patched forwards, for a closure that computes both signs at once (`step(paired=True)`).
        steps: the number of steps taken.
        result: losses and projected gradients of the last step.
        unreachable: names of the tensors that were left out, known after the first step.
        uncovered: names of the tensors that are perturbed in place, known after the first step.

    Raises:
        UserError: for a value out of range; its text is one line.
    """

    def __init__(
        self,
        model: nn.Module,
        params: ParamsArgument = None,
        *,
        lr: float = 1e-6,
        eps: float = 1e-3,
        weight_decay: float = 0.0,
        samples: int = 1,
        noise: str = "gaussian",
        seed: int = 0,
        trajectory: str | os.PathLike[str] | None = None,
    ) -> None:
        groups = to_groups(model, params)
        values = _check_settings(
            groups, lr=lr, eps=eps, weight_decay=weight_decay, samples=samples, noise=noise, seed=seed
        )
        super().__init__(groups, {name: values[name] for name in ("lr", "weight_decay")})
        base_lr = _base_lr(self.param_groups)
        for group in self.param_groups:
            group["lr_ratio"] = group["lr"] / base_lr if base_lr else 1.0
        self.eps, self.samples, self.noise, self.seed = (values[name] for name in ("eps", "samples", "noise", "seed"))
        self.steps = 0
        self.result: MezoResult | None = None
        self.unreachable: list[str] = []
        self.uncovered: list[str] = []
        self._model, self._path = model, None if trajectory is None else Path(trajectory)
        self._writer: Writer | None = None
        self._recorded: list[dict[str, Any]] = []  # the groups as the trajectory has them
        self._deferred = [1.0] * len(groups)  # see `apply_records`
        self._started = False
        names = {name for group in groups for name in group["names"]}
        self.forward = PerturbedForward(model, Params(model, make_noise(noise), names=names), rounds_frozen=False)
        self._places = _places(model, names)
        self._addresses = {name: p.data_ptr() for name, p in self.forward.params.tensors.items()}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse a group after the optimizer was made: memory and names are laid out by then.

        Raises:
            UserError: always but when torch calls it to make the optimizer.
        """
        if hasattr(self, "forward"):
            raise UserError("add_param_group: the groups of a MezoOptimizer are given when it is made (params=...)")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Closure, paired: bool = False) -> float:  # type: ignore[override]  # torch's is optional
        """Take one step, with the model in eval mode, and return the mean of the losses.

        Args:
            closure: returns the loss of one fixed batch: a number, or a tensor with one element.
            paired: the closure computes both signs in one call by `forward.paired_forward`, and returns a tensor [2].

        Raises:
            FloatingPointError: when a loss is not finite. The weights are as they were, and no step was taken.
            UserError: when the closure returns no loss, or the weights are not where the optimizer has put them.
        """
        self._check_addresses()
        with in_eval_mode(self._model):
            if not self._started:
                self._start(closure)
            directions = [Direction(self.seed, self.steps, sample) for sample in range(self.samples)]
            results = spsa_per_direction(self.forward, partial(self._losses, closure, paired), directions, self.eps)
        plus, minus, grads = zip(*results, strict=True)
        n, rounded = self.samples, [to_float32(grad) for grad in grads]
        if not all(map(math.isfinite, rounded)):
            raise FloatingPointError(f"step {self.steps + 1}: the losses are {plus[0]} and {minus[0]}, not finite")
        base_lr = _base_lr(self.param_groups)
        self.result = MezoResult(sum(plus) / n, sum(minus) / n, rounded, to_float32(base_lr))
        groups = self._groups_at(base_lr)
        if self._path is not None:
            self._record(self.result, groups)
        apply_records(self.forward.params, groups, self.seed, [(self.steps, rounded, self.result.lr)], self._deferred)
        self.steps += 1
        return self.result.loss

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state dict with the step number and the settings. The weights are the model's to save."""
        decay = {"decay": "float64", "deferred": list(self._deferred)} if self.forward.params.decay.in_float64 else {}
        return super().state_dict() | {name: getattr(self, name) for name in SAVED} | decay

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after the step of a state dict; the model must have the weights of that step.

        Raises:
            UserError: when it is of another noise or of other tensors, or lacks a field.
        """
        for name in SAVED:
            if name not in state_dict:
                raise UserError(f"state_dict: it is of no MezoOptimizer: {name} is missing")
        if state_dict["noise"] != self.noise:
            raise UserError(f"state_dict: its noise is {state_dict['noise']}, this optimizer's is {self.noise}")
        saved, own = (
            [group["names"] for group in groups] for groups in (state_dict["param_groups"], self.param_groups)
        )
        if saved != own:
            raise UserError("state_dict: its groups are not of the same tensors, by name, as this optimizer's")
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        for name in SAVED:
            setattr(self, name, state_dict[name])
        # One of before weight decay was computed in float64 has neither: the training continues as it began.
        self.forward.params.decay.in_float64 = "decay" in state_dict
        self._deferred = list(state_dict.get("deferred", [1.0] * len(self.param_groups)))
        self.close()

    def close(self) -> None:
        """Wait until the trajectory is on the disk, and close it. A later step opens it again."""
        if self._writer is not None:
            self._writer.sync()
            self._writer.close()
            self._writer = None

    def _start(self, closure: Closure) -> None:
        """Find which tensors the loss depends on, and which of them a module reads from another one."""
        loss = loss_with_graph(closure)
        if loss.grad_fn is not None:
            self.unreachable = self.forward.params.select_reachable(loss)
        del loss  # and its graph
        self.uncovered = find_uncovered(self.forward, closure, Direction(self.seed, self.steps), self.eps)
        self.forward.perturb_whole(self.uncovered)
        if self.unreachable:
            log.warning("MezoOptimizer: not in the graph of the loss, so not tuned: %s", _in_short(self.unreachable))
        if self.uncovered:
            log.warning("MezoOptimizer: read outside their modules, so perturbed in place: %s", join(self.uncovered))
        self._started = True

    def _losses(self, closure: Closure, paired: bool) -> Tensor:
        """Return the losses with theta + eps z and with theta - eps z, [2]."""
        if not paired:
            return self.forward.forward_per_sign(lambda: to_tensor(closure()))
        losses = closure()
        if not isinstance(losses, Tensor) or losses.shape != (2,):
            raise UserError("step(paired=True): the closure must return both losses, a tensor of shape [2]")
        return losses

    def _check_addresses(self) -> None:
        """Refuse to continue where an update would not reach the model: its weights are in other memory now.

        Raises:
            UserError: naming the first such tensor.
        """
        for name, p in self.forward.params.tensors.items():
            owner, key = self._places[name]
            if owner.get(key) is not p or p.data_ptr() != self._addresses[name] or p.dtype != torch.float32:
                raise UserError(
                    f"{name} was moved since the optimizer was made (by model.to(), load_state_dict(assign=True) or "
                    "another MezoOptimizer): make the optimizer after it, and load this one's state_dict to continue"
                )

    def _groups_at(self, base_lr: float) -> list[dict[str, Any]]:
        """Return the groups as the trajectory has them: `names` of tuned tensors, `lr_ratio`, `weight_decay`."""
        tuned = self.forward.params.tensors
        groups = []
        for group in self.param_groups:
            lr, ratio = float(group["lr"]), group["lr_ratio"]
            if abs(lr - base_lr * ratio) > RATIO_TOLERANCE * abs(lr):
                ratio = lr / base_lr  # which is only 0 if all are
            names = [name for name in group["names"] if name in tuned]
            groups.append({"names": names, "lr_ratio": ratio, "weight_decay": float(group["weight_decay"])})
        return groups

    def _record(self, result: MezoResult, groups: list[dict[str, Any]]) -> None:
        """Append the step to the trajectory file."""
        assert self._path is not None
        if self._writer is None:
            header = make_header(self._model, self.forward.params, groups, self.seed, self.samples)
            self._writer, self._recorded = open_writer(self._path, header, self.steps), groups
        if groups != self._recorded:
            raise UserError(f"{self._path}: weight_decay and the ratios of the groups' lr must stay as they began")
        self._writer.append(self.steps, result.projected_grads, result.lr)


def to_tensor(loss: Tensor | float) -> Tensor:
    """Return a closure's loss as a tensor of shape [].

    Raises:
        UserError: for a tensor of several elements, or what is no number.
    """
    if isinstance(loss, Tensor):
        if loss.numel() != 1:
            raise UserError(f"the closure returned a tensor of shape {list(loss.shape)}; it must return one loss")
        return loss.reshape(())
    try:
        return torch.tensor(float(loss), dtype=torch.float64)
    except (TypeError, ValueError) as error:
        raise UserError(f"the closure returned {type(loss).__name__}; it must return a number or a tensor") from error


def loss_with_graph(closure: Closure) -> Tensor:
    """Return a closure's loss with its autograd graph, [], without the activations that a backward would need.

    So the memory is that of a forward without gradients. A closure that itself takes a gradient needs them: it is
    called again, and they are kept.
    """
    with torch.enable_grad():
        try:
            with torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, _refuse_activation):
                return to_tensor(closure())
        except _ActivationNeededError:
            return to_tensor(closure())


class _ActivationNeededError(Exception):
    """A backward needs an activation that was not kept."""


def _refuse_activation(packed: None) -> Tensor:
    raise _ActivationNeededError


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Let a model be in eval mode inside, as MeZO needs it (paper, section 2), each module as before at exit."""
    before = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in before.items():
            module.training = training


def _places(model: nn.Module, names: set[str]) -> dict[str, tuple[Mapping[str, nn.Parameter | None], str]]:
    """Return name -> (the parameters of its module by key, its key there)."""
    return {
        name: (model.get_submodule(owner)._parameters, key)
        for name, (owner, _, key) in ((name, name.rpartition(".")) for name in names)
    }


def _base_lr(groups: list[dict[str, Any]]) -> float:
    """Return the learning rate that the trajectory stores for a step: the first group's that is not 0."""
    return next((float(group["lr"]) for group in groups if group["lr"]), 0.0)


def _in_short(names: list[str]) -> str:
    """Return a few of the names, and how many more there are."""
    return join(names[:NAMES_SHOWN]) + (f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else "")


def _check_settings(groups: list[dict[str, Any]], **values: Any) -> dict[str, Any]:
    """Refuse values out of the ranges of optimizer=mezo, and tensors of several dtypes.

    Returns:
        The values as Python's own numbers, which the groups get too: NumPy's cannot be written as JSON.

    Raises:
        UserError: naming the setting, or the tensor.
    """
    for group in [{}, *groups]:
        own: dict[str, Any] = {name: group[name] for name in ("lr", "weight_decay") if name in group}
        settings = check(StepSettings, {"name": "mezo", **values, **own})
        group |= {name: getattr(settings, name) for name in own}
    checked = asdict(check(StepSettings, {"name": "mezo", **values}))
    tensors = {name: p for group in groups for name, p in zip(group["names"], group["params"], strict=True)}
    for name, p in tensors.items():
        if nn.parameter.is_lazy(p):
            raise UserError(f"params: {name} has no shape yet: run the model once before the optimizer is made")
        if p.dtype != torch.float32:
            raise UserError(f"params: {name} is {p.dtype}; MezoOptimizer tunes tensors of torch.float32")
    return checked
