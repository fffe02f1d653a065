"""Open a session: load a model, patch its forwards and check them; and prepare the rows that a command works with.

`opened` is the only caller of a loader. A process has one session at a time: leave it before the next is opened.
`train`, `resume`, `eval`, `predict` and `doctor` begin with `prepare`, so that all see the same rows, weights and loss.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from mezo_cli import data, models
from mezo_cli.adapters.adapter import attach
from mezo_cli.config.optimizers import FirstOrderConfig, zeroth_order
from mezo_cli.config.schema import Config, Splits
from mezo_cli.console import log
from mezo_cli.data.sampling import BatchSampler, make_sampler
from mezo_cli.data.texts import read_kept_rows
from mezo_cli.distributed.ranks import ALONE, current
from mezo_cli.errors import RunFailed, UserError, first_line
from mezo_cli.models.quantized import row_factors
from mezo_cli.models.streaming import streamed_layers
from mezo_cli.objectives import OBJECTIVES
from mezo_cli.objectives.plain_check import PlainCheck
from mezo_cli.optim import OPTIMIZERS, Optimizer
from mezo_cli.optim.first_order import set_rate
from mezo_cli.perturb.forward import PerturbedForward
from mezo_cli.perturb.params import Params
from mezo_cli.process.memory import explain_device_errors, is_device_error
from mezo_cli.runs import Run
from mezo_cli.session import restore
from mezo_cli.session.session import Session, smaller_batches, smaller_model
from mezo_cli.tasks.generate import PromptRow


def opened(config: Config, run: Run | None = None, at: str | int | None = None, *, trains: bool = False) -> Session:
    """Load a model and return the session that owns it: `with opened(config, run, "best") as session:`.

    Args:
        config: of the run.
        run: None for a new one.
        at: of a run: `best`, `last` or a step number; None for its start, which the base model gives.
        trains: a new run begins: the model's scores are then also checked with perturbed weights.
    """
    if run is None:
        return _load(config, trains=trains)
    name = None if at is None else restore.find_checkpoint(run, at)
    if name is not None:
        session = _load(config, restore.verified(run, name))
        session.at = run.checkpoint_step(name) or 0
        return session
    step = restore.find_step(config, run, at) if isinstance(at, str) else at
    past = None if step is None else restore.read_trajectory(config, run, step)  # which has to reach it
    session = _load(config, is_new=False)
    try:
        models.load_initial_state(session.loaded.model, run.initial_state_file)
        models.check_fingerprint(session.loaded.model, run.info()["weights_fingerprint"], run.path)
        if step is not None:
            restore.go_to(session, run, step, past)
    except BaseException:
        session.close()
        raise
    return session


def _load(config: Config, checkpoint: Path | None = None, *, trains: bool = False, is_new: bool = True) -> Session:
    """Load the model, or a checkpoint of the run if given, and build the session.

    The precision of matrix products is set for the whole process. `is_new`: nothing is loaded over a new head.
    """
    full = config.peft.name == "none"
    source = models.resolved(config.model)
    config = config.replace(model=source)
    if checkpoint is not None and full:
        source = source.replace(path=str(checkpoint), revision=None)
    with explain_device_errors(f"loading model.path={source.path}", smaller_model(config)):
        objective_class = OBJECTIVES.implementation(config.objective.name)
        model_kind = objective_class.model_kind
        spellings = [] if config.task.reordered() else config.task.lists().values()
        loaded = models.load(source, model_kind, config.task.labels, config.seed, *spellings)
        if loaded.new_head and checkpoint is None and is_new:
            log.warning("a new classification head, drawn from the seed: %s", loaded.new_head)
        if config.init == "linear_probe" and not model_kind.has_classifier and full:
            models.untie(loaded.model)  # the probe writes rows of the decoder, not of the embeddings
        attach(loaded, config.peft, config.model, config.seed)
        if checkpoint is not None and not full:
            loaded.adapter.load(checkpoint)
        encoder = objective_class.encoder_class(config.task, loaded.tokenizer)
        if isinstance(config.optimizer, FirstOrderConfig) and config.optimizer.dropout is not None:
            set_rate(loaded.model, config.optimizer.dropout)
        if config.model.checkpoint_activations:
            loaded.model.activation_checkpointing_enable({"use_reentrant": False})
        optimizer = OPTIMIZERS.implementation(config.optimizer.name)(config.optimizer, config.seed, config.steps)
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
    torch.set_float32_matmul_precision("highest")  # the run's own precision would blur the check
    params = Params(loaded.model, zeroth_order(config.optimizer).make_noise())
    optimizer.check_tensors({name: tuple(p.shape) for name, p in params.tensors.items()})
    params.nonnegative = list(row_factors(loaded.model))
    objective_class = OBJECTIVES.implementation(config.objective.name)
    streamed = streamed_layers(loaded.model)  # a pass over its files takes long, and it is of a family that is known
    perturbed = trains and config.steps > 0 and not config.optimizer.needs_backward and streamed is None
    check = PlainCheck(objective_class, loaded, encoder, params, perturbed, model)
    forward = PerturbedForward(loaded.model, params)
    if config.model.paired_tokens is not None:
        forward.paired_tokens = config.model.paired_tokens
    objective = objective_class(config, loaded, forward, encoder)
    check.compare(objective)
    torch.set_float32_matmul_precision(config.model.matmul_precision)
    if streamed is not None:
        if objective.frozen is None:
            raise UserError(f"{model} is a model family whose layers are not read as they run; use model.stream=false")
        forward.is_streamed = streamed.has
    forward.set_compute_dtype(loaded.compute_dtype)
    if streamed is None:
        objective.outputs(objective.collate(check.rows))  # a model may not support this dtype
    ranks = current.get()
    forward.ranks = ranks if ranks.split == "directions" else ALONE
    return Session(config, loaded, forward, objective, optimizer, encoder, ranks)


# --- the rows of a command, with its session ---


@dataclass
class Prepared(AbstractContextManager["Prepared"]):
    """A session and its rows, before the first step or forward of a command. `with` closes the session.

    Attributes:
        session: at the weights that the command begins with. Where it trains, only the parameters that reach the loss
            are trainable in it.
        splits: the rows as texts; all are empty where none were asked for.
        rows: split -> its rows, tokenized: of the splits that there are and that were asked for.
        kept: the rows of `data.keep`, where the command trains.
        unreachable: name -> number of scalars of the parameters that do not reach the loss, where it trains.
        states_bytes: the memory that will keep what frozen layers compute for the rows.
    """

    session: Session
    splits: Splits
    rows: dict[str, list[Any]]
    kept: list[PromptRow] = field(default_factory=list)
    unreachable: dict[str, int] = field(default_factory=dict)
    states_bytes: int = 0

    def __exit__(self, *of_error: object) -> None:
        self.session.close()

    @cached_property
    def sampler(self) -> BatchSampler:
        """Chooses the batches of the training rows."""
        return make_sampler(self.session.config, self.rows["train"])


def prepare(
    config: Config,
    load: Callable[[], Session] | None = None,
    check: Callable[[Splits], None] | None = None,
    *,
    splits: Sequence[str] = ("train", "dev", "test"),
    trains: bool = False,
    tells: bool = True,
) -> Prepared:
    """Load rows and model, tokenize the rows, and compare both among the ranks.

    Args:
        config: of the run.
        load: opens the session; None: that of a new run.
        check: checks the rows before the model is loaded.
        splits: those that are needed; none: no data are loaded.
        trains: steps will be taken. The weights are then compared among the ranks where nothing changes them any more.
        tells: whether the notes on the rows are logged.
    """
    ranks = current.get()
    if ranks.size > 1 and not ranks.split:
        ranks.start(config)
    found = data.load_splits(config, tells) if splits else Splits([], [], None)
    if ranks.size > 1:
        ranks.check_same("set of rows", f"rows of sha256 {found.fingerprint[:16]}")
    if trains and ranks.split == "rows" and (count := min(config.batch_size, len(found.train))) < ranks.size:
        raise UserError(f"distributed.split=rows: a step has {count} rows, fewer than {ranks.size} ranks")
    if check is not None:
        check(found)
    session = opened(config, trains=trains) if load is None else load()
    try:
        texts, config = {name: getattr(found, name) for name in splits}, session.config
        encoded = {name: session.encoder.encode_all(of) for name, of in texts.items() if of is not None}
        prepared = Prepared(session, found, encoded)
        if not trains:
            check_same_weights(session)
            return prepared
        if config.data.keep is not None:
            prepared.kept = read_kept_rows(config, Path(config.data.keep), session.loaded.tokenizer)
        sizes = {name: p.numel() for name, p in session.params.tensors.items()}
        with explain_device_errors("before the first step", smaller_batches(config)):
            prepared.unreachable = {name: sizes[name] for name in session.exclude_unreachable(encoded["train"][0])}
            prepared.states_bytes = session.keep_states(encoded["train"], encoded["dev"]) if config.steps else 0
        return prepared
    except BaseException:
        session.close()
        raise


def check_same_weights(session: Session, step: int = 0) -> None:
    """Check that all ranks have the same weights at a step; 0: before the first one."""
    if session.ranks.size == 1:  # the fingerprint reads all weights
        return
    path, fingerprint = session.config.model.path, models.fingerprint(session.loaded.model)
    text, what = f"model.path={path} with weights of sha256 {fingerprint[:16]}", f"model at step {step}"
    session.ranks.check_same(what if step else "model", text, RunFailed if step else UserError)
