"""Count the models that are in memory each time that a run makes one."""

import gc
import weakref
from typing import Any

import pytest

from mezo_cli.session import opening, session


def count_live(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets, whenever a run prepares a model, how much of the earlier ones is alive.

    Models and their trained tensors are counted: a tensor can outlive its model.
    """
    made: list[weakref.ref[Any]] = []
    alive: list[int] = []
    load = opening._load

    def counted(*args: Any, **options: Any) -> Any:
        alive.append(sum(one() is not None for one in made))
        made_now = load(*args, **options)
        made.extend(map(weakref.ref, (made_now.loaded.model, *made_now.params.tensors.values())))
        return made_now

    monkeypatch.setattr(session, "gc", gc)  # which is left out of the runs of most tests
    monkeypatch.setattr(opening, "_load", counted)
    return alive
