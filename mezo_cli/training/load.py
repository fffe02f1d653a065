"""Load what a config names: data, model, adapter, objective, optimizer; build the session; start its engine."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mezo_cli import models
from mezo_cli.adapters.adapter import attach
from mezo_cli.config.optimizers import FirstOrderConfig, zeroth_order
from mezo_cli.config.registry import ENGINE_OBJECTIVES
from mezo_cli.config.schema import Config, Example, Splits
from mezo_cli.data.batch_sampler import BatchSampler
from mezo_cli.distributed.ranks import ALONE, current
from mezo_cli.errors import UserError, first_line
from mezo_cli.models.quantized import row_factors
from mezo_cli.objectives import OBJECTIVES
from mezo_cli.objectives.plain_check import PlainCheck
from mezo_cli.optim import Optimizer, optimizer_class
from mezo_cli.optim.first_order import set_rate
from mezo_cli.perturb.forward import PerturbedForward
from mezo_cli.perturb.noise import noise_of
from mezo_cli.perturb.params import Params
from mezo_cli.runs import Run
from mezo_cli.system import is_device_error
from mezo_cli.tasks import ClassificationEncoder
from mezo_cli.training.device_errors import explain_device_errors, smaller_model
from mezo_cli.training.session import Session

if TYPE_CHECKING:  # a run without an engine imports nothing of it
    from mezo_cli.engine.engine import Engine

log = logging.getLogger("mezo")

CHECKED_ROWS = 2  # whose scores an engine computes at the start, to compare them


@dataclass(frozen=True)
class EncodedRows:
    """The rows of a run, tokenized.

    Attributes:
        train, dev: their rows.
        test: all of test, None if there is no test split; `texts` are the same as texts.
    """

    train: list[Any]
    dev: list[Any]
    test: list[Any] | None
    texts: list[Example] | None

    def splits(self) -> dict[str, list[Any]]:
        """Return name -> rows of the splits that there are."""
        return {"train": self.train, "dev": self.dev} | ({} if self.test is None else {"test": self.test})


def encode_rows(encoder: ClassificationEncoder, splits: Splits) -> EncodedRows:
    """Tokenize all rows."""
    test = None if splits.test is None else encoder.encode_all(splits.test)
    return EncodedRows(encoder.encode_all(splits.train), encoder.encode_all(splits.dev), test, splits.test)


def load_session(
    config: Config, checkpoint: Path | None = None, *, trains: bool = False, restores: bool = False
) -> Session:
    """Load the model, or a checkpoint of the run if given, and build the session.

    The precision of matrix products is set for the whole process.

    Args:
        config: of the run.
        checkpoint: the folder of one of its checkpoints.
        trains: a new run begins: the model's scores are then also checked with perturbed weights.
        restores: the caller loads the run's own head, so nothing is said about a new one.
    """
    full = config.peft.name == "none"
    source = config.model
    if checkpoint is not None and full:
        source = source.replace(path=str(checkpoint), revision=None)
    with explain_device_errors(f"loading model.path={source.path}", smaller_model(config)):
        objective_class = OBJECTIVES.implementation(config.objective.name)
        model_kind = objective_class.model_kind
        loaded = models.load(source, model_kind, config.task.labels, config.seed)
        if loaded.new_head and checkpoint is None and not restores:
            log.warning("a new classification head, drawn from the seed: %s", loaded.new_head)
        if config.init == "linear_probe" and not model_kind.has_classifier and full:
            models.untie(loaded.model)  # the probe writes rows of the decoder, not of the embeddings
        attach(loaded, config.peft, config.model, config.seed)
        if checkpoint is not None and not full:
            loaded.adapter.load(checkpoint)
        encoder = objective_class.encoder_class(config.task, loaded.tokenizer)
        if isinstance(config.optimizer, FirstOrderConfig) and config.optimizer.dropout is not None:
            set_rate(loaded.model, config.optimizer.dropout)
        optimizer = optimizer_class(config.optimizer)(config.optimizer, config.seed, config.steps)
        name = f"model.path={config.model.path}: {type(loaded.model).__name__}"
        try:
            return _build_session(config, loaded, encoder, optimizer, trains, name)
        except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:  # of a family's own code
            if is_device_error(error):
                raise
            family = f"is a model family that objective={config.objective.name} does not support"
            raise UserError(f"{name} {family}: {first_line(error)}") from error


@torch.no_grad()
def _build_session(
    config: Config, loaded: models.LoadedModel, encoder: Any, optimizer: Optimizer, trains: bool, model: str
) -> Session:
    """Patch the model's forwards, and check its outputs against the unpatched model's."""
    torch.set_float32_matmul_precision("highest")  # the run's own precision would blur the check
    params = Params(loaded.model, noise_of(zeroth_order(config.optimizer)))
    optimizer.check_tensors({name: tuple(p.shape) for name, p in params.tensors.items()})
    params.nonnegative = list(row_factors(loaded.model))
    objective_class = OBJECTIVES.implementation(config.objective.name)
    perturbed = trains and config.steps > 0 and not config.optimizer.needs_backward
    check = PlainCheck(objective_class, loaded, encoder, params, perturbed, model)
    forward = PerturbedForward(loaded.model, params)
    if config.model.paired_tokens is not None:
        forward.paired_tokens = config.model.paired_tokens
    objective = objective_class(config, loaded, forward, encoder)
    check.compare(objective)
    forward.set_compute_dtype(loaded.compute_dtype)
    torch.set_float32_matmul_precision(config.model.matmul_precision)
    objective.outputs(objective.collate(check.rows))  # a model may not support this dtype
    ranks = current()
    forward.ranks = ranks if ranks.split == "directions" else ALONE
    return Session(config, loaded, forward, objective, optimizer, encoder, ranks)


def prepare_first_step(
    session: Session, train: Sequence[Any], dev: Sequence[Any], sampler: BatchSampler
) -> tuple[list[str], int]:
    """Leave out what the loss does not depend on, and keep what frozen layers compute for the rows.

    Returns:
        The names of the parameters that are left out, and the bytes that are kept.
    """
    unreachable = session.exclude_unreachable(train[0], [train[i] for i in sampler.batch(0)])
    return unreachable, session.keep_states(train, dev) if session.config.steps else 0


@contextmanager
def running_engine(config: Config, run: Run, session: Session, *splits: Sequence[Any]) -> Iterator["Engine | None"]:
    """Yield the run's engine, which computes the session's forwards from then on; None without one.

    Args:
        config: of the run.
        run: its directory.
        session: at the weights that training begins from.
        splits: the rows of train, and all others that will be scored.
    """
    if config.engine.name == "none":
        del session  # which is replaced at the end of a run: memory may not hold two models
        yield None
        return
    from mezo_cli.engine.engine import Engine

    longest = ENGINE_OBJECTIVES.load(config.objective.name).longest
    engine = Engine(config, max(longest(session.objective, rows) for rows in splits if rows))
    try:
        attach_engine(engine, session, splits[0])
        run.update(engine=engine.record)
        del session  # as above
        yield engine
    finally:
        engine.close()


def attach_engine(engine: "Engine", session: Session, rows: Sequence[Any]) -> None:
    """Let a running engine compute a session's forwards, with the session's weights."""
    by_engine = ENGINE_OBJECTIVES.load(session.config.objective.name)
    session.objective = by_engine.attach(session.objective, engine, rows[:CHECKED_ROWS])
