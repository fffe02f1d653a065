"""MeZO as a `torch.optim.Optimizer`, for a training loop of one's own (docs/how-to/library.md)."""

import logging
import math
import os
import reprlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from mezo_cli.config.explain import validate
from mezo_cli.errors import UserError, join
from mezo_cli.library.settings import METHOD, ParamsArgument, StepSettings, Updates, check_settings, to_groups
from mezo_cli.library.trajectory import open_writer
from mezo_cli.optim.mezo import MezoResult, spsa
from mezo_cli.perturb.forward import PerturbedForward
from mezo_cli.perturb.functional import swapped
from mezo_cli.perturb.noise import Direction, make_noise, to_float32
from mezo_cli.perturb.params import Params
from mezo_cli.runs.trajectory import Writer

Closure = Callable[[], Tensor | float]

log = logging.getLogger("mezo")

SAVED = ("seed", "eps", "samples", "noise")  # of the settings, in a state dict
RATIO_TOLERANCE = 1e-6  # of a group's lr to that of the group that the trajectory stores
NAMES_SHOWN = 8  # of tensors in one log line


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

    Weights in half precision are rounded once per step, stochastically (docs/concepts/methods.md), so that small
    updates are not lost.

    Args:
        model: any module. Its own `named_parameters()` give the names, by which z is drawn.
        params: what is tuned: None for every tensor with requires_grad; a function that is true for the names to
            tune; names or tensors of the model; or groups, dicts with `params`, `lr` and `weight_decay`.
        lr: learning rate; torch's schedulers change it per group.
        eps: perturbation scale, > 0.
        weight_decay: theta <- (1 - lr weight_decay) theta at each step, for all tensors of a group. A step whose
            projected gradients are all 0 leaves its decay to the next one that has others.
        momentum: decay of a momentum buffer, float32, of the size of the tuned tensors; 0 for none.
        betas: MeZO-Adam with these decays of its two moments, e.g. (0.9, 0.999); None for no Adam.
        samples: directions per step (n-SPSA).
        sample_schedule: "constant", or "linear": from 1 to `samples` over `total_steps`.
        total_steps: the length of a linear `sample_schedule`.
        noise: "gaussian" or "rademacher".
        seed: of z. Two trainings with one seed draw the same z.
        trajectory: a file that is to have the steps' scalars (16 bytes per step), for `mezo_cli.replay`.

    Attributes:
        forward: the model's patched forwards.
        steps: the number of steps taken.
        result: of the last step: its `loss`; `others` has both losses, `recorded` the projected gradients.
        unreachable: names of the tensors that were left out, known after the first step.
        uncovered: names of the tensors that are perturbed in place, known after the first step.
    """

    def __init__(
        self,
        model: nn.Module,
        params: ParamsArgument = None,
        *,
        lr: float = 1e-6,
        eps: float = 1e-3,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        betas: tuple[float, float] | None = None,
        samples: int = 1,
        sample_schedule: str = "constant",
        total_steps: int | None = None,
        noise: str = "gaussian",
        seed: int = 0,
        trajectory: str | os.PathLike[str] | None = None,
    ) -> None:
        groups = to_groups(model, params)
        settings = check_settings(
            lr=lr, eps=eps, weight_decay=weight_decay, momentum=momentum, betas=betas, samples=samples,
            sample_schedule=sample_schedule, total_steps=total_steps, noise=noise, seed=seed,
        )  # fmt: skip
        super().__init__(groups, {"lr": settings.lr, "weight_decay": settings.weight_decay})
        base_lr = _base_lr(self.param_groups)
        for group in self.param_groups:
            group["lr_ratio"] = group["lr"] / base_lr if base_lr else 1.0
        self.settings = settings
        self.steps = 0
        self.result: MezoResult | None = None
        self.unreachable: list[str] = []
        self.uncovered: list[str] = []
        self._model, self._path = model, None if trajectory is None else Path(trajectory)
        self._writer: Writer | None = None
        self._recorded: list[dict[str, Any]] = []  # the groups as the trajectory has them
        self._started = False
        of_groups = [group["names"] for group in groups]
        names = {name for of_group in of_groups for name in of_group}
        self.forward = PerturbedForward(model, Params(model, make_noise(noise), names=names), rounds=False)
        self._updates = Updates(self.forward.params, of_groups, settings)
        owners = {name: model.get_submodule(name.rpartition(".")[0]) for name in names}
        self._places = {name: (owner._parameters, name.rpartition(".")[2]) for name, owner in owners.items()}
        self._addresses = {name: p.data_ptr() for name, p in self.forward.params.tensors.items()}

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> float:  # type: ignore[override]
        """Take one step, with the model in eval mode, and return the mean of the losses.

        Args:
            closure: returns the loss of one fixed batch: a number, or a tensor with one element.

        Raises:
            FloatingPointError: when a loss is not finite. The weights are as they were, and no step was taken.
            UserError: when the closure returns no loss, a group's rate is not finite, or the weights are not where the
                optimizer has put them.
        """
        if closure is None:
            raise UserError(
                "step() needs a closure that returns the loss of one batch: optimizer.step(lambda: loss_of(model, "
                "batch)); in the Trainer of transformers use mezo_cli.MezoTrainer"
            )
        loss = self.estimate(closure)
        self.update()
        return loss

    @torch.no_grad()
    def estimate(self, closure: Closure) -> float:
        """Compute the losses and projected gradients of a step: its first half, which leaves the weights as they are.

        Args, errors and result are those of `step`.
        """
        for name, p in self.forward.params.tensors.items():  # an update of other memory would not reach the model
            owner, key = self._places[name]
            stays = p.data_ptr() == self._addresses[name] and p.dtype == self.forward.compute_dtype
            if owner.get(key) is not p or not stays:
                raise UserError(
                    f"{name} was moved since the optimizer was made (by model.to(), load_state_dict(assign=True) or "
                    "another MezoOptimizer): make the optimizer after it, and load this one's state_dict to continue"
                )
        for number, group in enumerate(self.param_groups):  # schedulers, load_state_dict and the user write in them
            rates = {name: float(v) if isinstance(v := group[name], Tensor) else v for name in ("lr", "weight_decay")}
            validate(StepSettings, {"name": "mezo", **rates}, f"param_groups[{number}].")
        with in_eval_mode(self._model):
            if not self._started:
                self._start(closure)
            n, seed = self._updates.samples(self.steps), self.settings.seed
            directions = [Direction(seed, self.steps, sample) for sample in range(n)]
            losses = partial(self.forward.forward_per_sign, lambda: to_tensor(closure()))
            results = spsa(self.forward, losses, directions, self.settings.eps)
        plus, minus, grads = zip(*results, strict=True)
        result = MezoResult.of(plus, minus, grads, to_float32(_base_lr(self.param_groups)))
        if not all(map(math.isfinite, result.recorded)):
            raise FloatingPointError(f"step {self.steps + 1}: the losses are {plus[0]} and {minus[0]}, not finite")
        self.result = result
        return result.loss

    @torch.no_grad()
    def update(self) -> None:
        """Update the weights by what `estimate` has computed: the second half of a step."""
        assert self.result is not None
        groups = self._groups()
        if self._path is not None:
            if self._writer is None:
                at_start = self._model, self.forward.params, groups, self.settings
                self._writer, self._recorded = open_writer(self._path, self.steps, *at_start), groups
            if groups != self._recorded:
                raise UserError(f"{self._path}: weight_decay and the ratios of the groups' lr must stay as they began")
            self._writer.append(self.steps, self.result.recorded, self.result.lr)
        self._updates.apply(groups, [(self.steps, self.result.recorded, self.result.lr)])
        self.steps += 1

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={getattr(self.settings, name)}" for name in (*SAVED, "momentum", "betas"))
        return f"MezoOptimizer({shown}, {self.steps} steps taken)"  # torch's has all names

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state dict with the step number, the settings and the moments; the model's weights are not."""
        settings = {"steps": self.steps} | {name: getattr(self.settings, name) for name in SAVED}
        return super().state_dict() | settings | self.settings.method_settings() | self._updates.state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after the step of a state dict, of this run; the model must have the weights of that step."""
        for name in ("steps", *SAVED, "deferred", "param_groups", "state"):
            if name not in state_dict:
                raise UserError(f"state_dict: it is of no MezoOptimizer: {name} is missing")
        if type(state_dict["steps"]) is not int or state_dict["steps"] < 0:
            raise UserError(f"state_dict: its steps are {state_dict['steps']!r}, not a whole number")
        for name in (*SAVED, *METHOD):
            value, other = getattr(self.settings, name), state_dict.get(name, StepSettings.model_fields[name].default)
            if (tuple(other) if isinstance(other, list) else other) != value:
                raise UserError(f"state_dict: its {name} is {other}, this optimizer's is {value}")
        names = [group["names"] for group in self.param_groups]
        if [group.get("names") for group in state_dict["param_groups"]] != names:
            raise UserError("state_dict: its groups are not of the same tensors, by name, as this optimizer's")
        updates = Updates(self.forward.params, names, self.settings)
        updates.load_state(state_dict, state_dict["steps"])
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        self._updates, self.steps = updates, state_dict["steps"]
        self.close()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group while the optimizer is made; refuse one later: the tuned tensors are in one storage by then."""
        if hasattr(self, "settings"):
            raise UserError(
                "add_param_group: MezoOptimizer keeps its groups; make another one with params=[...] of all"
            )
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        """Refuse a copy or a pickle: it would share no memory with a model, and have no patched forwards."""
        raise UserError("a MezoOptimizer is not copied or pickled: make one for the other model, and load a state_dict")

    def close(self) -> None:
        """Wait until the trajectory is on the disk, and close it. A later step opens it again."""
        if self._writer is not None:
            self._writer.sync()
            self._writer.close()
            self._writer = None

    def _start(self, closure: Closure) -> None:
        """Find which tensors the loss depends on, and which of them a module reads from another one."""
        loss = loss_with_graph(closure, self.forward.params.tensors.values())
        if loss.dtype.itemsize == 2:
            log.warning("MezoOptimizer: the loss is %s, too coarse for a difference: return it in float32", loss.dtype)
        if loss.grad_fn is not None:
            self.unreachable = self.forward.params.select_reachable(loss)
        del loss  # and its graph
        params, direction = self.forward.params, Direction(self.settings.seed, self.steps)
        reads = _PlainReads(params.tensors)
        # What forwards call of the noise runs outside the watch: it has to read theta, and may compile its kernels.
        methods = {name: _disable_current_modes()(getattr(params.noise, name)) for name in ("perturb", "perturb_rows")}
        unwatched = swapped("noise", {params: SimpleNamespace(has_factors=False, **methods)})
        with unwatched, self.forward.perturbed(direction, self.settings.eps, (1,)), reads:
            closure()
        self.uncovered = [name for name in params.tensors if name in reads.names_read]
        self.forward.reach.outside = self.uncovered
        self.forward.patches.reset()
        self._updates.keep(params.tensors)
        if self.unreachable:
            left = len(self.unreachable) - NAMES_SHOWN
            shown = join(self.unreachable[:NAMES_SHOWN]) + (f" and {left} more" if left > 0 else "")
            log.warning("MezoOptimizer: not in the graph of the loss, so not tuned: %s", shown)
        if self.uncovered:
            log.warning("MezoOptimizer: read outside their modules, so perturbed in place: %s", join(self.uncovered))
        self._started = True

    def _groups(self) -> list[dict[str, Any]]:
        """Return the groups as the trajectory has them: `names` of tuned tensors, `lr_ratio`, `weight_decay`."""
        tuned, base_lr, groups = self.forward.params.tensors, _base_lr(self.param_groups), []
        for group in self.param_groups:
            lr, ratio = float(group["lr"]), group["lr_ratio"]
            if abs(lr - base_lr * ratio) > RATIO_TOLERANCE * abs(lr):
                ratio = lr / base_lr  # which is only 0 if all are
            names = [name for name in group["names"] if name in tuned]
            groups.append({"names": names, "lr_ratio": ratio, "weight_decay": float(group["weight_decay"])})
        return groups


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Let a model be in eval mode inside, as MeZO needs it (paper, section 2), each module as before at exit."""
    with swapped("training", {module: module.training for module in model.modules()}):
        model.eval()
        yield


def _base_lr(groups: list[dict[str, Any]]) -> float:
    """Return the learning rate that the trajectory stores for a step: the first group's that is not 0."""
    return next((float(group["lr"]) for group in groups if group["lr"]), 0.0)


# --- the first step: what the loss depends on ---

# Patched forwards do not perturb weights that a model reads outside their own modules, such as an embedding that
# `F.linear` elsewhere uses as its weight, and the output projection of `nn.MultiheadAttention`: they are found, too.


def to_tensor(loss: Tensor | float) -> Tensor:
    """Return a closure's loss as a tensor of shape []."""
    if isinstance(loss, Tensor):
        if loss.numel() != 1:
            raise UserError(f"the closure returned a tensor of shape {list(loss.shape)}; it must return one loss")
        return loss.reshape(())
    try:
        if not isinstance(loss, str):
            return torch.tensor(float(loss), dtype=torch.float64)
    except (TypeError, ValueError, OverflowError):  # a list; a whole number above all floats
        pass
    what = f"{reprlib.repr(loss)}, a {type(loss).__name__}"
    raise UserError(f"the closure returned {what}; it must return one loss, a number or a tensor of one element")


def loss_with_graph(closure: Closure, tensors: Iterable[Tensor]) -> Tensor:
    """Return a closure's loss with its autograd graph, [], without the activations that a backward would need.

    So the memory is that of a forward without gradients. A closure that itself takes a gradient needs them: it is
    called again, and they are kept.
    """
    with torch.enable_grad(), ExitStack() as hooks:
        for p in tensors:
            if p.requires_grad:
                hooks.enter_context(p.register_post_accumulate_grad_hook(_refuse_gradient))
        try:
            with torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, _refuse_activation):
                return to_tensor(closure())
        except _ActivationNeededError:
            return to_tensor(closure())


def _refuse_gradient(p: Tensor) -> None:
    p.grad = None
    raise UserError("the closure calls backward(): MeZO needs no gradient; leave it out, and return the loss alone")


class _ActivationNeededError(Exception):
    """A backward needs an activation that was not kept."""


def _refuse_activation(packed: None) -> Tensor:
    raise _ActivationNeededError


class _PlainReads(TorchDispatchMode):
    """Record which tensors the operations inside read, by address: their views count as they do."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._used = sorted((p.data_ptr(), p.data_ptr() + p.nbytes, name) for name, p in tensors.items() if p.numel())
        self._starts = [start for start, _, _ in self._used]
        self.names_read: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not func.is_view:
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, Tensor) and value.layout is torch.strided and value.numel():
                    index = bisect_right(self._starts, value.data_ptr()) - 1
                    if index >= 0 and value.data_ptr() < self._used[index][1]:
                        self.names_read.add(self._used[index][2])
        return func(*args, **(kwargs or {}))
