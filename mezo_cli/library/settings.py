"""The settings of a `MezoOptimizer` and its parameter groups, and the optimizers of the runner: one per group."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, cast

from torch import Tensor, nn

from mezo_cli.config.base import NotNegativeNumber, PositiveNumber, SettingError
from mezo_cli.config.explain import validate
from mezo_cli.config.optimizers import MomentDecay, Samples, SampleSchedule, SlowMomentDecay
from mezo_cli.config.schema import OptimizerConfig, Positive, Seed, StepRecord
from mezo_cli.errors import UserError, did_you_mean
from mezo_cli.optim import OPTIMIZERS, make_config
from mezo_cli.optim.mezo import Mezo
from mezo_cli.optim.update import BlockUpdate
from mezo_cli.perturb.params import Params

METHOD = ("momentum", "betas", "sample_schedule", "total_steps")  # what MeZO itself has no need of
# What `MezoOptimizer(model, params=...)` takes: a test of names; names or tensors; or groups of them with settings.
ParamsArgument = Callable[[str], bool] | Iterable[str | Tensor | Mapping[str, Any]] | None
GROUP_KEYS = ("params", "lr", "weight_decay")


class StepSettings(OptimizerConfig):
    """What `MezoOptimizer` is given beside the model and the groups; its docstring says what each is."""

    eps: PositiveNumber = 1e-3
    weight_decay: NotNegativeNumber = 0.0
    momentum: MomentDecay = 0.0
    betas: tuple[MomentDecay, SlowMomentDecay] | None = None
    samples: Samples = 1
    sample_schedule: SampleSchedule = "constant"
    total_steps: Positive | None = None
    noise: Literal["gaussian", "rademacher"] = "gaussian"
    seed: Seed = 0

    @property
    def method(self) -> str:
        """The runner's name of the optimizer."""
        return "mezo_adam" if self.betas else "mezo_momentum" if self.momentum else "mezo"

    def method_settings(self) -> dict[str, Any]:
        """Return what a state dict and a trajectory say of the method, as JSON has it; empty for MeZO itself."""
        if self.method == "mezo" and self.sample_schedule == "constant":
            return {}
        return {name: getattr(self, name) for name in METHOD} | {"betas": self.betas and list(self.betas)}


def check_settings(**values: Any) -> StepSettings:
    """Return the settings with Python's own numbers: NumPy's cannot be written as JSON."""
    try:
        settings = validate(StepSettings, {"name": "mezo", **values})
    except SettingError as error:
        if error.key != "betas":
            raise
        text = f"betas={values['betas']}: allowed are two numbers, from 0 to 0.9999 and from 0 to 0.999999"
        raise SettingError("betas", text) from error
    if settings.betas and settings.momentum:
        text = f"momentum={settings.momentum}: with betas the momentum is the first of them; leave momentum out"
        raise SettingError("momentum", text)
    if (settings.sample_schedule == "linear") != (settings.total_steps is not None):
        text = "total_steps is the length of sample_schedule='linear': give both or neither"
        raise SettingError("total_steps", text)
    return settings


def to_groups(model: nn.Module, params: ParamsArgument) -> list[dict[str, Any]]:
    """Return groups as torch.optim takes them, with the tensors' `names` beside `params`.

    Args:
        model: its `named_parameters()` give the names; a tied tensor has one.
        params: None for every tensor with requires_grad; a function that is true for the names to tune; names or
            tensors; or dicts with `params` (one of these) and the group's `lr` and `weight_decay`.
    """
    if not isinstance(model, nn.Module):
        raise UserError(
            "MezoOptimizer(model, ...) takes the model, an nn.Module, whose names z depends on; not a "
            f"{type(model).__name__}"
        )
    one = params is None or callable(params) or isinstance(params, str | Tensor) or not isinstance(params, Iterable)
    entries: list[Any] = [params] if one or isinstance(params, Mapping) else list(cast("Iterable[Any]", params))
    if not any(isinstance(entry, Mapping) for entry in entries):
        entries = [{"params": params if one else entries}]
    groups = [_group(model, entry) for entry in entries]
    for name, count in Counter(name for group in groups for name in group["names"]).items():
        if count > 1:
            raise UserError(f"params: {name} is in {count} groups")
    return groups


def _group(model: nn.Module, entry: Any) -> dict[str, Any]:
    if not isinstance(entry, Mapping) or "params" not in entry:
        raise UserError("params: a group is a dict with the key 'params'; single tensors or names stand without groups")
    for key in entry:
        if key not in GROUP_KEYS:
            raise UserError(f"params: a group has no setting {key!r}{did_you_mean(str(key), GROUP_KEYS)}")
    chosen = _select(model, entry["params"])
    if not chosen:
        raise UserError("params: no trainable tensor is chosen")
    rates: dict[str, Any] = {name: entry[name] for name in ("lr", "weight_decay") if name in entry}
    settings = validate(StepSettings, {"name": "mezo", **rates}).model_dump()
    rates = {name: settings[name] for name in rates}  # Python's own numbers
    return {**rates, "params": list(chosen.values()), "names": list(chosen)}


def _select(model: nn.Module, what: Any) -> dict[str, nn.Parameter]:
    """Return name -> tensor of what one group's `params` names."""
    named = dict(model.named_parameters())
    if what is None or callable(what):
        return {name: p for name, p in named.items() if p.requires_grad and (what is None or what(name))}
    by_id = {id(p): name for name, p in named.items()}
    chosen = {}
    for one in [what] if isinstance(what, str | Tensor) or not isinstance(what, Iterable) else what:
        name = one if isinstance(one, str) else by_id.get(id(one))
        if name not in named:
            if isinstance(one, str):
                raise UserError(f"params: the model has no parameter {one}{did_you_mean(one, named)}")
            raise UserError(f"params: give names or tensors of the model, not another {type(one).__name__}")
        if not named[name].requires_grad:
            raise UserError(f"params: {name} is frozen (requires_grad=False)")
        chosen[name] = named[name]
    return chosen


class Updates:
    """One optimizer of the runner per group. They read the same records and share the buffers of the moments.

    `groups` are the names of the tensors of each.
    """

    def __init__(self, params: Params, groups: Sequence[Collection[str]], settings: StepSettings) -> None:
        self._parts: list[tuple[Params, Mezo]] = []
        values = {name: getattr(settings, name) for name in ("eps", "samples", "sample_schedule", "noise")}
        if settings.betas:
            values |= {"beta1": settings.betas[0], "beta2": settings.betas[1]}
        elif settings.momentum:
            values["momentum"] = settings.momentum
        config = make_config(settings.method, **values)  # learning rate and weight decay are the groups'
        optimizer_class = cast("type[Mezo]", OPTIMIZERS.implementation(config.name))
        for names in groups:
            optimizer = optimizer_class(config, settings.seed, settings.total_steps or 1)
            if self._parts and isinstance(optimizer.update, BlockUpdate):
                first = self._parts[0][1].update
                assert isinstance(first, BlockUpdate)
                optimizer.update.moments = first.moments
            self._parts.append((params.subset(names), optimizer))

    def samples(self, step: int) -> int:
        """Return the number of directions of step `step` (from 0)."""
        return self._parts[0][1].samples(step)

    def keep(self, names: Collection[str]) -> None:
        """Update only these tensors from now on."""
        for params, _ in self._parts:
            params.tensors = {name: p for name, p in params.tensors.items() if name in names}

    def apply(self, groups: Sequence[Mapping[str, Any]], records: Sequence[StepRecord]) -> None:
        """Update theta by each record in order, group by group.

        Args:
            groups: each with `weight_decay`, and `lr_ratio`, its learning rate's ratio to the record's.
            records: (step, the projected gradients, the learning rate of the first group where it is not 0).
        """
        for group, (params, optimizer) in zip(groups, self._parts, strict=True):
            if params.tensors:
                optimizer.config = optimizer.config.replace(weight_decay=group["weight_decay"])
                of_group = [(step, grads, lr * group["lr_ratio"]) for step, grads, lr in records]
                optimizer.apply_updates(params, of_group)

    def state(self) -> dict[str, Any]:
        """Return the weight decay that each group has deferred, and the moments where there are some."""
        deferred = {"deferred": [params.decay.deferred for params, _ in self._parts]}
        moments = next((optimizer.update.state_tensors() for params, optimizer in self._parts if params.tensors), {})
        return deferred | ({"moments": moments} if moments else {})

    def load_state(self, state: Mapping[str, Any], step: int) -> None:
        """Take over what `state` returned after `step` steps."""
        for (params, optimizer), deferred in zip(self._parts, state["deferred"], strict=True):
            params.decay.deferred = deferred
            try:
                optimizer.update.load_tensors(dict(state.get("moments", {})), step)
            except ValueError as error:
                raise UserError(f"state_dict: {error}") from error
