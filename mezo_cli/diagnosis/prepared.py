"""Load what `train` would begin with, refuse what it would refuse, in the same words, and run the checks in order."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mezo_cli import data
from mezo_cli.config.schema import Config, Splits, TokenizedExample
from mezo_cli.data.batch_sampler import BatchSampler
from mezo_cli.diagnosis import cost, label_words, rewards, signal, storage
from mezo_cli.diagnosis import data as data_check
from mezo_cli.diagnosis.findings import Deadline, Section
from mezo_cli.diagnosis.jobs import Jobs
from mezo_cli.models.loading import DTYPES
from mezo_cli.objectives.classification import Classification
from mezo_cli.objectives.generation import Generation
from mezo_cli.optim.mezo import spsa
from mezo_cli.optim.settings import zeroth_order
from mezo_cli.perturb.noise import Direction
from mezo_cli.training.device_errors import explain_device_errors, smaller_batches
from mezo_cli.training.forgetting import read_kept_rows
from mezo_cli.training.linear_probe import find_output_layer
from mezo_cli.training.load import load_session
from mezo_cli.training.session import Session

WORDS, DATA, WEIGHTS, SIGNAL = 0.3, 0.25, 0.2, 0.6  # fractions of the time that is left when the check begins


@dataclass(frozen=True)
class Prepared:
    """A session and its rows, as they are before the first step.

    Attributes:
        session: only the parameters that reach the loss are trainable in it.
        splits: the rows as texts.
        rows: split -> its rows, tokenized.
        unreachable: name -> number of scalars, of the parameters that do not reach the loss.
        seconds: that loading took.
    """

    session: Session
    splits: Splits
    rows: dict[str, list[Any]]
    unreachable: dict[str, int]
    seconds: float


def prepare_run(config: Config) -> Prepared:
    """Load data and model, encode all rows and compile the noise."""
    start = time.perf_counter()
    splits = data.load_splits(config)
    session = load_session(config, trains=True)
    texts = {"train": splits.train, "dev": splits.dev} | ({} if splits.test is None else {"test": splits.test})
    rows = {name: session.encoder.encode_all(some) for name, some in texts.items()}
    read_kept_rows(config, session.loaded.tokenizer)
    train = rows["train"]
    with explain_device_errors("before the first step", smaller_batches(config)):
        sizes = {name: p.numel() for name, p in session.params.tensors.items()}
        first = [train[i] for i in BatchSampler(len(train), config.batch_size, config.seed).batch(0)]
        unreachable = {name: sizes[name] for name in session.exclude_unreachable(train[0], first)}
        if config.init == "linear_probe":
            find_output_layer(session)
        session.objective.check_start(train)
        if session.optimizer.replayable:
            _compile_noise(session, train[0])
    return Prepared(session, splits, rows, unreachable, time.perf_counter() - start)


def _compile_noise(session: Session, row: TokenizedExample) -> None:
    """Draw z once for every kernel that a step runs; theta stays the same."""
    z, loss_fn = Direction(session.config.seed, 0), session.loss_of([row])
    for dtype in DTYPES.values():
        with session.forward.using_compute_dtype(dtype):
            spsa(session.forward, loss_fn, z, zeroth_order(session.config.optimizer).eps)
    session.params.update([(z, 0.0)], [1.0])


def diagnose(prepared: Prepared, jobs: Jobs, deadline: Deadline) -> Iterator[Section]:
    """Yield the section of each check as it is done, within the time limit."""
    session, rows = prepared.session, prepared.rows
    advice = smaller_batches(session.config)
    if isinstance(session.objective, Classification):
        with explain_device_errors("scoring dev rows", advice):
            yield label_words.check(session, rows["dev"], rows["train"], deadline.part(WORDS))
    yield data_check.check(session.encoder, prepared.splits, rows, deadline.part(DATA))
    if session.config.engine.name == "none":
        with explain_device_errors("products of one batch", advice):
            yield storage.check(session, rows["train"], deadline.part(WEIGHTS))
    with explain_device_errors("losses of a batch", advice):
        # A reward is constant almost everywhere: it has no derivative that g could be compared with, and no best lr.
        by_rewards = isinstance(session.objective, Generation) and not session.config.objective.is_differentiable
        yield (rewards if by_rewards else signal).check(session, rows["train"], deadline.part(SIGNAL))
    with explain_device_errors("one step", advice):
        yield cost.check(session, rows, prepared.unreachable, prepared.seconds, jobs, deadline)
