"""Interrupt a run, as Ctrl-C does, at a call of one of its functions."""

from typing import Any

import pytest


def interrupt_at(patch: pytest.MonkeyPatch, owner: Any, name: str, call: int, after: bool = False) -> None:
    """Raise KeyboardInterrupt at the given call of a function, before or after its work."""
    plain, calls = getattr(owner, name), [0]

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == call and not after:
            raise KeyboardInterrupt
        made = plain(*args, **kwargs)
        if calls[0] == call:
            raise KeyboardInterrupt
        return made

    patch.setattr(owner, name, interrupted)
