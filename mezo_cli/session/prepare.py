"""Prepare what a command works with: its rows and its session; where it trains, also what a step needs.

`train`, `resume`, `eval`, `predict` and `doctor` begin here, so that all of them see the same rows, weights and loss.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from mezo_cli import data, models
from mezo_cli.config.schema import Config, Splits
from mezo_cli.data.batch_sampler import BatchSampler, make_sampler
from mezo_cli.data.files import read_table
from mezo_cli.data.table import task_rows
from mezo_cli.distributed.ranks import current
from mezo_cli.errors import RunFailed, UserError
from mezo_cli.process.device_errors import explain_device_errors
from mezo_cli.session.opening import opened
from mezo_cli.session.session import Session, smaller_batches
from mezo_cli.tasks.generate import GenerateEncoder, PromptRow

SPLITS = ("train", "dev", "test")
MOST_BYTES = 4e9  # of the log-probabilities that the start gives the answers of `data.keep`


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
    splits: Sequence[str] = SPLITS,
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
    ranks = current()
    if not ranks.split:
        ranks.start(config)
    found = data.load_splits(config, tells) if splits else Splits([], [], None)
    ranks.check_same("set of rows", f"rows of sha256 {found.fingerprint[:16]}")
    if trains:
        rows = min(config.batch_size, len(found.train))
        if ranks.split == "rows" and rows < ranks.size:
            raise UserError(f"distributed.split=rows: a step has {rows} rows, fewer than {ranks.size} ranks")
    if check is not None:
        check(found)
    session = opened(config, trains=trains) if load is None else load()
    try:
        return _with_rows(session, found, splits, trains)
    except BaseException:
        session.close()
        raise


def _with_rows(session: Session, found: Splits, splits: Sequence[str], trains: bool) -> Prepared:
    config = session.config
    texts = {name: getattr(found, name) for name in splits}
    encode = session.encoder.encode_all
    prepared = Prepared(session, found, {name: encode(of) for name, of in texts.items() if of is not None})
    if not trains:
        check_same_weights(session)
        return prepared
    if config.data.keep is not None:
        prepared.kept = read_kept_rows(config, Path(config.data.keep), session.loaded.tokenizer)
    sizes = {name: p.numel() for name, p in session.params.tensors.items()}
    train = prepared.rows["train"]
    with explain_device_errors("before the first step", smaller_batches(config)):
        prepared.unreachable = {name: sizes[name] for name in session.exclude_unreachable(train[0])}
        prepared.states_bytes = session.keep_states(train, prepared.rows["dev"]) if config.steps else 0
    return prepared


def read_kept_rows(config: Config, file: Path, tokenizer: Any) -> list[PromptRow]:
    """Return the rows of `data.keep`, encoded as the task's prompts are."""
    settings = config.task.generate.replace(prompt="{prompt}", answer="{answer}", gold=None)
    task = config.task.replace(labels=[], columns=[], rename={}, generate=settings)
    try:
        examples = task_rows(read_table([file], task), task).examples()
        rows = GenerateEncoder(task, tokenizer).encode_all(examples)
    except UserError as error:
        raise UserError(f"data.keep: {error}") from error
    tokens, words = sum(len(row.answer_ids) for row in rows), len(tokenizer)
    if 4 * tokens * words > MOST_BYTES:
        why = f"{tokens:,} tokens of answers times {words:,} words take {4 * tokens * words / 1e9:.3g} GB"
        raise UserError(f"data.keep={file}: {why}, and {MOST_BYTES / 1e9:g} GB are the limit; give fewer rows")
    return rows


def check_same_weights(session: Session, step: int = 0) -> None:
    """Check that all ranks have the same weights at a step; 0: before the first one."""
    if session.ranks.size == 1:  # the fingerprint reads all weights
        return
    path, fingerprint = session.config.model.path, models.fingerprint(session.loaded.model)
    text, what = f"model.path={path} with weights of sha256 {fingerprint[:16]}", f"model at step {step}"
    session.ranks.check_same(what if step else "model", text, RunFailed if step else UserError)
