"""`finetune(...)`, `load(run)`: train, and use what was trained, by the same path as the command line."""

import os
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from json import JSONEncoder
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mezo_cli.errors import UserError
from mezo_cli.process.environment import keeping_matmul_precision

if TYPE_CHECKING:  # they import torch
    from mezo_cli.data.texts import Rows
    from mezo_cli.objectives.prediction import Predicted
    from mezo_cli.session.session import Session


@dataclass(frozen=True)
class Finetuned:
    """A finished run: its `summary` (the content of summary.json) and its directory."""

    summary: dict[str, Any]
    run_dir: Path


def finetune(
    model: str = "roberta-large",
    task: str = "sst2",
    train_dataset: "str | os.PathLike[str] | Rows | None" = None,
    eval_dataset: "Rows | None" = None,
    *,
    steps: int | None = None,
    batch_size: int | None = None,
    lr: float | None = None,
    eps: float | None = None,
    seed: int | None = None,
    objective: str = "mlm",
    reward: str | Mapping[str, Any] | Callable[..., Any] | None = None,
    overrides: Sequence[str] = (),
    config_dir: str | os.PathLike[str] | None = None,
    output_dir: str | os.PathLike[str] | None = None,
) -> Finetuned:
    """Fine-tune a model and return the summary and the run directory.

    The environment of torch's libraries (OMP_WAIT_POLICY, THP_MEM_ALLOC_ENABLE) is set as on the command line when
    this function is imported, before torch. torch's precision of matrix products is afterwards as it was.

    Args:
        model: a choice of `model=` (roberta-large, demo, ...), a hub id, or a local folder.
        task: a choice of `task=`.
        train_dataset: a path (file or folder, as `data.dir`), or rows with the task's columns and `label`: a list of
            dicts, a `datasets.Dataset`, a DataFrame, a dict of columns. Rows are stored in the run directory, so that
            the run can be repeated; columns that the task does not read are not. None takes the task's data from the
            hub, or what `overrides` say.
        eval_dataset: rows to test on, together with `train_dataset` rows; dev is held out of those.
        steps, batch_size, lr, eps, seed: the config's values of these names; None leaves the defaults.
        objective: a choice of `objective=`.
        reward: `objective.reward` of `objective="generate"`: a text or a mapping as on the command line, or a function
            (docs/how-to/rewards.md), which runs in this process, without a time limit, and is not stored.
        overrides: any further settings, as on the command line (`data.shots=16`).
        config_dir: a folder with the user's own YAMLs.
        output_dir: the run directory; a fresh one under `outputs/` when None.

    Raises:
        UserError: for settings or data that are not valid; its text is one line.
        RunStopped: when training has taken `max_seconds`, with `at_limit=stop`; `mezo resume` continues the run.
        RunFailed: when the run fails after training began.
    """
    from mezo_cli.commands.execute import check_new_run, execute
    from mezo_cli.config.base import own_function
    from mezo_cli.config.choices import find_choices
    from mezo_cli.config.compose import build_config
    from mezo_cli.config.overrides import quote
    from mezo_cli.config.stored import REWARD, to_yaml, with_own_code
    from mezo_cli.console import console_logging, make_console
    from mezo_cli.data.table import read_columns
    from mezo_cli.data.texts import FILES, in_memory, table_of
    from mezo_cli.runs import Run

    fresh = f"outputs/{datetime.now():%Y-%m-%d/%H-%M-%S}-{task}-api-{uuid.uuid4().hex[:6]}"
    folder = Path(fresh if output_dir is None else output_dir).expanduser().absolute()
    further = None if config_dir is None else str(config_dir)
    chosen = model in find_choices(further)["model"]
    words = [f"task={task}", f"objective={objective}", f"model={model}" if chosen else f"model.path={quote(model)}"]
    from_memory = train_dataset is not None and not isinstance(train_dataset, (str, os.PathLike))
    if eval_dataset is not None and not from_memory:
        raise UserError("eval_dataset needs train_dataset rows; a folder has its own dev and test files")
    if train_dataset is not None:
        where = folder / "data" if from_memory else Path(train_dataset).expanduser().absolute()  # type: ignore[arg-type]
        words += ["data=files", f"data.dir={quote(where)}"]
    settings = {"steps": steps, "batch_size": batch_size, "optimizer.lr": lr, "optimizer.eps": eps, "seed": seed}
    words += [f"{key}={value}" for key, value in settings.items() if value is not None]
    if isinstance(reward, str):
        words.append(f"objective.reward={reward if own_function(reward) is None else quote(reward)}")
    if isinstance(overrides, str):
        raise UserError(f"overrides={overrides!r}: a list of KEY=VALUE texts is expected, not one text")
    config = build_config([*words, *overrides], further)
    if reward is not None and not isinstance(reward, str):
        config = with_own_code(config, {REWARD: dict(reward) if isinstance(reward, Mapping) else reward})
    given = {"train": train_dataset, "test": eval_dataset} if from_memory else {}
    data_task = config.data_task
    tables = {
        split: table_of(FILES[split], of, data_task, read_columns(data_task))
        for split, of in given.items()
        if of is not None
    }
    if tables and not config.data.store_texts:
        raise UserError("data.store_texts=false: rows from memory are kept in the run directory: give files")
    Run.check_free(folder)
    if not from_memory:
        check_new_run(config)
    run = Run.create(folder, to_yaml(config), [sys.argv[0], "finetune", *words, *overrides])

    def store() -> None:
        for split, table in tables.items():
            run.save_rows(split, table.export(JSONEncoder().default if data_task.labels else str))  # default: TypeError
        if tables:  # which it may read
            check_new_run(config)

    console = make_console()
    with console_logging(console), keeping_matmul_precision():
        try:
            return Finetuned(execute(run, config, console, prepare=store), folder)
        except UserError as error:
            if not from_memory:
                raise
            raise UserError(in_memory(str(error), folder / "data")) from error


class LoadedRun(AbstractContextManager["LoadedRun"]):
    """A run's model at one checkpoint, to predict with.

    Attributes:
        labels: the labels, in order; empty for a task without.
        columns: the texts of a row, in order: those of the prompt for a task without labels.
    """

    def __init__(self, session: "Session") -> None:
        from mezo_cli.data.texts import prompt_columns

        self._session = session
        self.labels, self.columns = list(session.config.task.labels), prompt_columns(session.config.data_task)

    def __exit__(self, *of_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop the model, and free its memory. `with load(run) as loaded:` does it at the end."""
        self._session.close()

    def predict(self, rows: "Rows") -> "list[Predicted]":
        """Return a `Prediction` for each row: its `predicted` label and the `probabilities` of all labels.

        Of a run with `objective=generate` it is a `CompletedPrompt`: the `prompt` and its `completion`;
        with `objective=choice` a `ChosenCandidate`: the `prediction`, and the `scores` of all `candidates`.

        Rows go through the model in batches of the run's `eval_batch_size`. The rows of a split, in their
        order, get probabilities bitwise identical to those of its evaluation. A row that is longer than the model
        takes is cut, and its `cut` is true.

        Args:
            rows: texts; for a task of several columns mappings of them, or sequences in the order of `columns`. Or as
                `finetune` takes them: a `datasets.Dataset`, a DataFrame, a dict of columns; no label is needed.
        """
        from mezo_cli.data.texts import from_memory

        config = self._session.config
        examples = from_memory(rows, config.data_task)
        with keeping_matmul_precision(config.model.matmul_precision):
            return self._session.predict(examples)


def load(
    run: str | os.PathLike[str], checkpoint: str | int = "best", *, base: str | os.PathLike[str] | None = None
) -> LoadedRun:
    """Load the model of a run.

    Args:
        run: the run directory, or a checkpoint folder in it.
        checkpoint: `best`, `last` or a step, which is replayed.
        base: the folder of the base model, where it lies elsewhere than the run says.
    """
    from mezo_cli.commands.open_run import open_run
    from mezo_cli.console import console_logging, make_error_console

    wanted = None if checkpoint == "best" else str(checkpoint)
    # The log shows what is downloaded, and long replays.
    with console_logging(make_error_console()), keeping_matmul_precision():
        opened = open_run(Path(run).expanduser(), wanted, None if base is None else Path(base).expanduser())
        return LoadedRun(opened.load())
