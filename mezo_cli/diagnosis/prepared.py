"""Load what `train` would begin with, refuse what it would refuse, in the same words, and run the checks in order."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mezo_cli import data
from mezo_cli.config.optimizers import zeroth_order
from mezo_cli.config.schema import Config, Splits, TokenizedExample
from mezo_cli.data.batch_sampler import BatchSampler, make_sampler
from mezo_cli.diagnosis import cost, label_words, rewards, signal
from mezo_cli.diagnosis import data as data_check
from mezo_cli.diagnosis.findings import Deadline, Section
from mezo_cli.models.loading import DTYPES
from mezo_cli.objectives.classification import Classification
from mezo_cli.objectives.generation import Generation
from mezo_cli.optim.mezo import spsa
from mezo_cli.perturb.noise import Direction
from mezo_cli.training.device_errors import explain_device_errors, smaller_batches
from mezo_cli.training.forgetting import read_kept_rows
from mezo_cli.training.linear_probe import find_output_layer
from mezo_cli.training.load import EncodedRows, encode_rows, load_session, prepare_first_step
from mezo_cli.training.session import Session

WORDS, SIGNAL = 0.3, 0.6  # fractions of the time that is left when the check begins


@dataclass(frozen=True)
class Prepared:
    """A session and its rows, as they are before the first step.

    Attributes:
        session: only the parameters that reach the loss are trainable in it.
        splits: the rows as texts.
        rows: the rows, tokenized.
        sampler: of the training rows.
        unreachable: name -> number of scalars, of the parameters that do not reach the loss.
        seconds: that loading took.
    """

    session: Session
    splits: Splits
    rows: EncodedRows
    sampler: BatchSampler
    unreachable: dict[str, int]
    seconds: float


def prepare_run(config: Config) -> Prepared:
    """Load data and model, encode all rows and compile the noise."""
    start = time.perf_counter()
    splits = data.load_splits(config)
    session = load_session(config, trains=True)
    rows = encode_rows(session.encoder, splits)
    read_kept_rows(config, session.loaded.tokenizer)
    sampler = make_sampler(config, rows.train)
    with explain_device_errors("before the first step", smaller_batches(config)):
        sizes = {name: p.numel() for name, p in session.params.tensors.items()}
        unreachable = {name: sizes[name] for name in prepare_first_step(session, rows.train, rows.dev, sampler)[0]}
        if config.init == "linear_probe":
            find_output_layer(session)
        session.objective.check_start(rows.train)
        if session.optimizer.replayable:
            _compile_noise(session, rows.train[0])
    return Prepared(session, splits, rows, sampler, unreachable, time.perf_counter() - start)


def _compile_noise(session: Session, row: TokenizedExample) -> None:
    """Draw z once for every kernel that a step runs; theta stays the same."""
    z, loss_fn = Direction(session.config.seed, 0), session.loss_of([row])
    for dtype in DTYPES.values():
        with session.forward.using_compute_dtype(dtype):
            spsa(session.forward, loss_fn, z, zeroth_order(session.config.optimizer).eps)
    session.params.update([(z, 0.0)], [1.0])


def diagnose(prepared: Prepared, jobs: Sequence[Config], deadline: Deadline) -> Iterator[Section]:
    """Yield the section of each check as it is done, within the time limit; `jobs` will be run, the first is this."""
    session, rows, sampler = prepared.session, prepared.rows, prepared.sampler
    advice = smaller_batches(session.config)
    if isinstance(session.objective, Classification):
        with explain_device_errors("scoring dev rows", advice):
            yield label_words.check(session, rows.dev, rows.train, deadline.part(WORDS))
    yield data_check.check(session.encoder, prepared.splits, rows.splits())
    with explain_device_errors("losses of a batch", advice):
        # A reward is constant almost everywhere: it has no derivative that g could be compared with, and no best lr.
        by_rewards = isinstance(session.objective, Generation) and not session.config.objective.is_differentiable
        if by_rewards:
            yield rewards.check(session, rows.train, deadline.part(SIGNAL))
        else:
            yield signal.check(session, rows.train, sampler, deadline.part(SIGNAL))
    with explain_device_errors("one step", advice):
        yield cost.check(session, rows, sampler, prepared.unreachable, prepared.seconds, jobs, deadline)
