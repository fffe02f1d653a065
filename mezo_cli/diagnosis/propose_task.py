"""Propose the settings of a task for rows that have none: columns by type, labels by their values, words of one token.

No model is loaded: words that a model tells apart are proposed by `mezo data --words` (propose_words.py).
"""

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mezo_cli.config.choices import find_choices
from mezo_cli.config.compose import build_config
from mezo_cli.config.overrides import Override, parse
from mezo_cli.config.schema import Config, DataConfig, FilesConfig, TaskConfig
from mezo_cli.data.sources import first_rows
from mezo_cli.data.table import ABSENT, Table, label_texts
from mezo_cli.errors import SHOWN_CHARACTERS, UserError, join, shorten

OWN = "task=own"
ROWS = 1000  # of train that are looked at
MOST_LABELS = 20  # a column with more values is no label
LETTERS = "ABCDEFGHIJKLMNOPQRST"
NEEDED = {  # what an objective needs of a task
    "mlm": ("task.columns", "task.labels", "task.template", "task.label_words"),
    "lm": ("task.columns", "task.labels", "task.lm.template", "task.label_words"),
    "cls": ("task.columns", "task.labels"),
}


def check_own_task(overrides: Sequence[str], config_dir: str | None) -> None:
    """Ask for what `task=own` lacks, in one line with a row of the data and a proposal."""
    given = {override.name: override for override in parse(overrides, find_choices(config_dir))}
    if "experiment" in given:
        return
    objective = given["objective"].value if "objective" in given else "mlm"
    missing = [key for key in NEEDED.get(objective, ()) if key not in given]
    if missing:
        table, settings = _look(given, overrides)
        words = " ".join(shlex.quote(settings[key]) for key in settings if key not in given)
        row = {c: v for c, v in zip(table.columns, table.fields(0), strict=True) if v is not ABSENT}
        shown = shorten(json.dumps(row, ensure_ascii=False, default=str), 2 * SHOWN_CHARACTERS)
        raise UserError(f"{OWN} needs {join(missing)}; a row of {table.name} is {shown}; for example: {words}")


def propose_command(config: Config, overrides: Sequence[str], config_dir: str | None) -> str | None:
    """Return the command that trains on a file which no task was given for; None where the config's task reads it."""
    given = {override.name: override for override in parse(overrides, find_choices(config_dir))}
    if {"task", "experiment"} & given.keys() or "data.dir" not in given or not Path(given["data.dir"].value).is_file():
        return None
    table, settings = _look(given, overrides)
    if all(table.find_column(column, config.task.rename) is not None for column in config.task.columns):
        return None
    return shlex.join(["mezo", "train", OWN, *settings.values(), *overrides])


def _look(given: Mapping[str, Override], overrides: Sequence[str]) -> tuple[Table, dict[str, str]]:
    """Return the first rows, and key -> `KEY=VALUE` of a proposal."""
    plain = {name: override.value for name, override in given.items()}
    task = TaskConfig(name="own", labels=["-"])
    hub = {key: plain[f"task.hub.{key}"] for key in type(task.hub).model_fields if f"task.hub.{key}" in plain}
    data: DataConfig = DataConfig(name=plain.get("data", "hub"))
    if data.name == "files":
        data = FilesConfig(name="files", dir=plain.get("data.dir"))
    table = first_rows(task.replace(hub=task.hub.replace(**hub)), data, ROWS)
    columns = {name: [table.fields(i)[n] for i in range(len(table.rows))] for n, name in enumerate(table.columns)}
    label = plain.get("task.label_column") or _label_column(columns)
    texts = [name for name, of in columns.items() if name != label and all(isinstance(one, str) for one in of)]
    texts = [name for name in texts if any(" " in one for one in columns[name])] or texts
    labels = sorted({*label_texts(table, table.columns.index(label))}) if label in columns else []
    labels = plain.get("task.labels") or labels[: MOST_LABELS + 1]
    prompt = " ".join(f"{{{name}}}" for name in plain.get("task.columns") or texts)
    lists = {"task.columns": texts, "task.labels": labels}
    settings = {key: f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in lists.items()}
    if label not in (None, "label"):
        settings["task.label_column"] = f"task.label_column={json.dumps(label)}"
    objective = plain.get("objective", "mlm")
    if objective in ("mlm", "lm"):
        key, end = ("task.template", ".") if objective == "mlm" else ("task.lm.template", "")
        settings[key] = f"{key}={json.dumps(f'{prompt} All in all, it was {{mask}}{end}', ensure_ascii=False)}"
        words = json.dumps(_words(labels, _counter(overrides, given)), ensure_ascii=False)
        settings["task.label_words"] = f"task.label_words={words}"
    return table, settings


def _label_column(columns: Mapping[str, Sequence[Any]]) -> str | None:
    """Return `label`, or else the column with the fewest values, of those with 2 to `MOST_LABELS`."""
    if "label" in columns:
        return "label"
    values = {name: len({str(one) for one in of}) for name, of in columns.items()}
    few = [name for name, count in values.items() if 2 <= count <= min(MOST_LABELS, len(columns[name]) - 1)]
    return min(few, key=lambda name: values[name], default=None)


def _words(labels: Sequence[str], tokens: Callable[[str], int]) -> list[str]:
    """Return a word of one token for each label: its name, or else Yes and No, or letters."""
    names = [str(label).replace("_", " ") for label in labels]
    if len({*names}) == len(names) and all(name.isalpha() and tokens(name) == 1 for name in names):
        return names
    return ["No", "Yes"] if len(labels) == 2 else list(LETTERS[: len(labels)])


def _counter(overrides: Sequence[str], given: Mapping[str, Override]) -> Callable[[str], int]:
    """Return what counts the tokens of a word inside a text, by the model's tokenizer."""
    from mezo_cli.models import load_tokenizer
    from mezo_cli.objectives import OBJECTIVES

    objective = given["objective"].value if "objective" in given else "mlm"
    chosen = [word for word in overrides if word.startswith(("model=", "model.path=", "model.revision="))]
    config = build_config([*chosen, "data=demo"])
    tokenizer = load_tokenizer(config.model, OBJECTIVES.implementation(objective).model_kind)
    return lambda word: len(tokenizer(f" {word}", add_special_tokens=False)["input_ids"])
