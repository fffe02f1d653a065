"""Update the tuned tensors group by group, each group by an optimizer of the runner."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from mezo_cli.config.schema import StepRecord
from mezo_cli.errors import UserError
from mezo_cli.library.settings import StepSettings
from mezo_cli.optim.mezo import Mezo
from mezo_cli.optim.update import BlockUpdate
from mezo_cli.perturb.params import Params


class Updates:
    """One optimizer of the runner per group. They read the same records and share the buffers of the moments.

    `groups` are the names of the tensors of each.
    """

    def __init__(self, params: Params, groups: Sequence[Collection[str]], settings: StepSettings) -> None:
        self._parts: list[tuple[Params, Mezo]] = []
        for names in groups:
            optimizer = settings.make_optimizer()
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
                own = [(step, grads, lr * group["lr_ratio"]) for step, grads, lr in records]
                optimizer.apply_updates(params, own)

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
