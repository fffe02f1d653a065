"""Interrupt a run, as Ctrl-C does, at a call of one of its functions; replay one from its base model."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mezo_cli.config.registry import OPTIMIZERS
from mezo_cli.config.schema import Config
from mezo_cli.runs import Run
from mezo_cli.session import restore
from mezo_cli.session.opening import opened
from mezo_cli.session.session import Session
from tests.command_line import mezo


@contextmanager
def interrupted_at(owner: Any, name: str, call: int, after: bool = False) -> Iterator[None]:
    """Inside, raise KeyboardInterrupt at the given call of a function, before or after its work."""
    plain, calls = getattr(owner, name), [0]

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == call and not after:
            raise KeyboardInterrupt
        made = plain(*args, **kwargs)
        if calls[0] == call:
            raise KeyboardInterrupt
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        yield


def last_weights(folder: Path) -> bytes:
    """Return the file of the weights or the adapter in a folder, or in the last checkpoint of a run."""
    last = folder / "checkpoints" / "last"
    return next((last if last.exists() else folder).glob("*model.safetensors")).read_bytes()


def interrupt_and_resume(words: list[str], home: Path, optimizer: str = "mezo", step: int = 4) -> tuple[Path, Path]:
    """Run a command whole, and interrupted at its step number `step` and resumed: the weights are the same bits.

    Return the folders of both runs.
    """
    run, whole = home / "run", home / "whole"
    assert mezo("train", *words, f"hydra.run.dir={whole}").code == 0
    with interrupted_at(OPTIMIZERS.implementation(optimizer), "step", step):
        assert mezo("train", *words, f"hydra.run.dir={run}").code == 130
    assert mezo("resume", run).code == 0
    assert last_weights(run) == last_weights(whole)
    return run, whole


def replay_from_base(config: Config, run: Run, step: int) -> Session:
    """Return a session at a step, from base model and trajectory alone."""
    session = opened(config, run)
    assert list(restore.replayed(session, run, [step])) == [step]
    return session
