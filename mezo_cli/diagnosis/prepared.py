"""Load what `train` would begin with, and refuse what it would refuse, in the same words."""

import time
from dataclasses import dataclass

from mezo_cli import data
from mezo_cli.config.schema import Config, Splits, TokenizedExample
from mezo_cli.data.batch_sampler import BatchSampler
from mezo_cli.models.loading import DTYPES
from mezo_cli.optim.mezo import spsa
from mezo_cli.optim.settings import zeroth_order
from mezo_cli.perturb.noise import Direction
from mezo_cli.training.device_errors import explain_device_errors, smaller_batches
from mezo_cli.training.load import load_session
from mezo_cli.training.session import Session


@dataclass(frozen=True)
class Prepared:
    """A session and its rows, as they are before the first step.

    Attributes:
        session: only the parameters that reach the loss are trainable in it.
        train, dev, test: tokenized rows; test is None if there is none.
        unreachable: name -> number of scalars, of the parameters that do not reach the loss.
        seconds: that loading took.
    """

    session: Session
    train: list[TokenizedExample]
    dev: list[TokenizedExample]
    test: list[TokenizedExample] | None
    unreachable: dict[str, int]
    seconds: float

    @property
    def config(self) -> Config:
        """The config of the run."""
        return self.session.config


def prepare_run(config: Config) -> tuple[Prepared, Splits]:
    """Load data and model, encode all rows and compile the noise; return what the checks need, and the texts.

    Raises:
        UserError: for whatever `train` refuses before its first step.
    """
    start = time.perf_counter()
    splits = data.load_splits(config)
    session = load_session(config, trains=True)
    train, dev = (session.encoder.encode_all(rows) for rows in (splits.train, splits.dev))
    test = None if splits.test is None else session.encoder.encode_all(splits.test)
    with explain_device_errors("before the first step", smaller_batches(config)):
        sizes = {name: p.numel() for name, p in session.params.tensors.items()}
        first = [train[i] for i in BatchSampler(len(train), config.batch_size, config.seed).batch(0)]
        unreachable = {name: sizes[name] for name in session.exclude_unreachable(train[0], first)}
        if config.init == "linear_probe":
            session.objective.output_layer()
        if session.optimizer.replayable:
            _compile_noise(session, train[0])
    return Prepared(session, train, dev, test, unreachable, time.perf_counter() - start), splits


def _compile_noise(session: Session, row: TokenizedExample) -> None:
    """Draw z once for every kernel that a step runs; theta stays the same."""
    z, loss_fn = Direction(session.config.seed, 0), session.loss_of([row])
    for dtype in DTYPES.values():
        with session.forward.using_compute_dtype(dtype):
            spsa(session.forward, loss_fn, z, zeroth_order(session.config.optimizer).eps)
    session.params.update([(z, 0.0)], [1.0])
