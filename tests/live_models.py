"""Count the models that are in memory each time that a run makes one."""

import gc
import weakref
from typing import Any

import pytest

from mezo_cli.process import memory
from mezo_cli.training import loop, prepare, restore


def count_live(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets, whenever a run prepares a model, how much of the earlier ones is alive.

    Models and their trained tensors are counted: a tensor can outlive its model.
    """
    made: list[weakref.ref[Any]] = []
    alive: list[int] = []
    load_session = prepare.load_session

    def counted(*args: Any, **options: Any) -> Any:
        alive.append(sum(one() is not None for one in made))
        session = load_session(*args, **options)
        made.extend(map(weakref.ref, (session.loaded.model, *session.params.tensors.values())))
        return session

    for module in (memory, loop):
        monkeypatch.setattr(module, "gc", gc)  # which is left out of the runs of most tests
    monkeypatch.setattr(prepare, "load_session", counted)
    monkeypatch.setattr(restore, "load_session", counted)
    return alive
