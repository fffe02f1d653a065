"""Parameter groups by the model's own names: which tensors are tuned, with which learning rate and weight decay."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from mezo_cli.errors import UserError, did_you_mean

# What `MezoOptimizer(model, params=...)` takes: a test of names; names or tensors; or groups of them with settings.
ParamsArgument = Callable[[str], bool] | Iterable[str | Tensor | Mapping[str, Any]] | None
GROUP_KEYS = ("params", "lr", "weight_decay")


def to_groups(model: nn.Module, params: ParamsArgument) -> list[dict[str, Any]]:
    """Return groups as torch.optim takes them, with the tensors' `names` beside `params`.

    Args:
        model: its `named_parameters()` give the names; a tied tensor has one.
        params: None for every tensor with requires_grad; a function that is true for the names to tune; names or
            tensors; or dicts with `params` (one of these) and the group's `lr` and `weight_decay`.
    """
    if not isinstance(model, nn.Module):
        what = "the model, an nn.Module, whose names z depends on"
        raise UserError(f"MezoOptimizer(model, ...) takes {what}; not a {type(model).__name__}")
    if params is None or callable(params):
        entries: list[Any] = [{"params": params}]
    else:
        entries = list(params)
        if not any(isinstance(entry, Mapping) for entry in entries):
            entries = [{"params": entries}]
    groups = [_group(model, entry) for entry in entries]
    names = [name for group in groups for name in group["names"]]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"params: {name} is given more than once")
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
    return {**entry, "params": list(chosen.values()), "names": list(chosen)}


def _select(model: nn.Module, what: Any) -> dict[str, nn.Parameter]:
    """Return name -> tensor of what one group's `params` names."""
    named = dict(model.named_parameters())
    if what is None or callable(what):
        return {name: p for name, p in named.items() if p.requires_grad and (what is None or what(name))}
    by_id = {id(p): name for name, p in named.items()}
    chosen = {}
    for one in [what] if isinstance(what, str | Tensor) else what:
        name = one if isinstance(one, str) else by_id.get(id(one))
        if name not in named:
            near = did_you_mean(str(one), named) if isinstance(one, str) else ""
            shown = f"a tensor of shape {list(one.shape)}" if isinstance(one, Tensor) else one
            if not isinstance(one, str | Tensor):
                raise UserError(f"params: give names or tensors, not a {type(one).__name__}")
            raise UserError(f"params: the model has no parameter {shown}{near}")
        if not named[name].requires_grad:
            raise UserError(f"params: {name} is frozen (requires_grad=False)")
        chosen[name] = named[name]
    return chosen
