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
        eval_dataset: rows to test on, together with `train_dataset` rows.
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
    from mezo_cli import launch
    from mezo_cli.runs import Run

    folder = Path(output_dir) if output_dir is not None else _fresh_folder(task)
    words = [f"task={task}", f"objective={objective}", *_model(model, configs)]
    if train_dataset is None and eval_dataset is not None:
        raise UserError("eval_dataset needs train_dataset rows beside it")
    if isinstance(train_dataset, (str, os.PathLike)):
        if eval_dataset is not None:
            raise UserError("eval_dataset goes with train_dataset rows; a folder holds its own dev and test files")
        words += ["data=files", f"data.dir={_quoted(Path(train_dataset).expanduser().resolve())}"]
    elif train_dataset is not None:
        words += ["data=files", f"data.dir={_quoted(folder.resolve() / 'data')}"]
    given = {"steps": steps, "batch_size": batch_size, "optimizer.lr": lr, "optimizer.eps": eps, "seed": seed}
    words += [f"{key}={value}" for key, value in given.items() if value is not None]
    config = configs.build([*words, *overrides], None if config_dir is None else str(config_dir))
    run = Run.create(folder, configs.to_yaml(config), [sys.argv[0], "finetune", *words, *overrides])
    if train_dataset is not None and not isinstance(train_dataset, (str, os.PathLike)):
        run.store_rows("train", _lines(train_dataset))
        if eval_dataset is not None:
            run.store_rows("test", _lines(eval_dataset))
    launch.logging_on()
    return Finetuned(launch.start(config, run), folder)


def _model(name: str, configs: Any) -> list[str]:
    """Return the overrides for a model given by its choice, hub id or folder."""
    choices = [path.stem for path in (configs.conf_dir() / "model").glob("*.yaml")]
    return [f"model={name}"] if name in choices else [f"model.name={Path(name).name}", f"model.path={_quoted(name)}"]


def _quoted(value: Any) -> str:
    """Quote a value for Hydra's override grammar."""
    text = str(value).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{text}'"


def _fresh_folder(task: str) -> Path:
    now = datetime.now()
    return Path("outputs") / f"{now:%Y-%m-%d}" / f"{now:%H-%M-%S}-{task}-api-{uuid.uuid4().hex[:6]}"


def _lines(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Turn rows into JSON lines; a ClassLabel column of a `datasets.Dataset` gives its names."""
    features = getattr(rows, "features", None) or {}
    names = {key: feature.names for key, feature in features.items() if hasattr(feature, "names")}

    def named(row: Mapping[str, Any]) -> dict[str, Any]:
        return {k: names[k][v] if k in names and isinstance(v, int) and v >= 0 else v for k, v in row.items()}

    return [json.dumps(named(row), ensure_ascii=False) for row in rows]
