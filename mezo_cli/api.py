"""`finetune(...)`: a run in one call, by the same path as the command line."""

import json
import os
import sys
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from mezo_cli.errors import UserError


@dataclass(frozen=True)
class Finetuned:
    """A finished run: its `summary` (the content of summary.json) and its directory."""

    summary: dict[str, Any]
    run_dir: Path


def finetune(
    model: str = "roberta-large",
    task: str = "sst2",
    train_dataset: str | os.PathLike[str] | Iterable[Mapping[str, Any]] | None = None,
    eval_dataset: Iterable[Mapping[str, Any]] | None = None,
    *,
    steps: int | None = None,
    batch_size: int | None = None,
    lr: float | None = None,
    eps: float | None = None,
    seed: int | None = None,
    objective: str = "mlm",
    overrides: Sequence[str] = (),
    config_dir: str | os.PathLike[str] | None = None,
    output_dir: str | os.PathLike[str] | None = None,
) -> Finetuned:
    """Fine-tune a model and return the summary and the run directory.

    Args:
        model: a choice of `model=` (roberta-large, demo, ...), a hub id, or a local folder.
        task: a choice of `task=`.
        train_dataset: a path (file or folder, as `data.dir`), or rows (a `datasets.Dataset`, a list of dicts) with the
            task's columns and `label`; rows are stored in the run directory, so that the run can be repeated. None
            takes the task's data from the hub, or what `overrides` say.
        eval_dataset: rows to test on, together with `train_dataset` rows; dev is held out of those.
        steps, batch_size, lr, eps, seed: the config's values of these names; None leaves the defaults.
        objective: a choice of `objective=`.
        overrides: any further settings, as on the command line (`data.shots=16`).
        config_dir: a folder with the user's own YAMLs.
        output_dir: the run directory; a fresh one under `outputs/` when None.

    Raises:
        UserError: for settings or data that do not hold; its text is one line.
        RunFailed: when the run fails after training began.
    """
    from mezo_cli import config as configs
    from mezo_cli import launch, terminal
    from mezo_cli.overrides import quoted
    from mezo_cli.runs import Run

    folder = (Path(output_dir).expanduser() if output_dir is not None else _fresh_folder(task)).absolute()
    further = None if config_dir is None else str(config_dir)
    chosen = model in configs.choices(further)["model"]
    words = [f"task={task}", f"objective={objective}", f"model={model}" if chosen else f"model.path={quoted(model)}"]
    if train_dataset is None and eval_dataset is not None:
        raise UserError("eval_dataset needs train_dataset rows beside it")
    from_memory = train_dataset is not None and not isinstance(train_dataset, (str, os.PathLike))
    if train_dataset is not None:
        if eval_dataset is not None and not from_memory:
            raise UserError("eval_dataset goes with train_dataset rows; a folder holds its own dev and test files")
        where = folder / "data" if from_memory else Path(train_dataset).expanduser().absolute()  # type: ignore[arg-type]
        words += ["data=files", f"data.dir={quoted(where)}"]
    given = {"steps": steps, "batch_size": batch_size, "optimizer.lr": lr, "optimizer.eps": eps, "seed": seed}
    words += [f"{key}={value}" for key, value in given.items() if value is not None]
    config = configs.build([*words, *overrides], further)
    rows = {}
    if from_memory:
        rows = {"train": _lines("train_dataset", train_dataset)}  # type: ignore[arg-type]
        rows |= {} if eval_dataset is None else {"test": _lines("eval_dataset", eval_dataset)}
    run = Run.create(folder, configs.to_yaml(config), [sys.argv[0], "finetune", *words, *overrides])

    def store() -> None:
        for split, lines in rows.items():
            run.store_rows(split, lines)

    with terminal.telling(launch.console):
        return Finetuned(launch.start(config, run, before=store), folder)


def _fresh_folder(task: str) -> Path:
    now = datetime.now()
    return Path("outputs") / f"{now:%Y-%m-%d}" / f"{now:%H-%M-%S}-{task}-api-{uuid.uuid4().hex[:6]}"


def _lines(name: str, rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Turn rows into JSON lines; a ClassLabel column of a `datasets.Dataset` gives its names.

    Raises:
        UserError: for a row that is no mapping, or holds what JSON cannot.
    """
    features = getattr(rows, "features", None) or {}
    classes = {key: feature.names for key, feature in features.items() if hasattr(feature, "names")}
    lines = []
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise UserError(f"{name}, row {number}: a {type(row).__name__} where a mapping of columns is wanted")
        named = {k: _class(classes[k], v) if k in classes else v for k, v in row.items()}
        try:
            lines.append(json.dumps(named, ensure_ascii=False))
        except (TypeError, ValueError) as error:
            raise UserError(f"{name}, row {number}: {error}") from error
    return lines


def _class(names: Sequence[str], value: Any) -> Any:
    """Return a class's name; datasets write -1 for a row without a label."""
    return names[value] if isinstance(value, int) and 0 <= value < len(names) else value
