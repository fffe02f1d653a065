"""Sessions of a run that are replayed from the base model."""

from mezo_cli.config.schema import Config
from mezo_cli.runs import Run
from mezo_cli.session import restore
from mezo_cli.session.opening import opened
from mezo_cli.session.session import Session


def replay_from_base(config: Config, run: Run, step: int) -> Session:
    """Return a session at a step, from base model and trajectory alone."""
    session = opened(config, run)
    assert list(restore.replayed(session, run, [step])) == [step]
    return session
