"""Propose the settings of a task for rows that have none: columns by type, labels by their values, words of one token.

No model is loaded: words that a model tells apart are proposed by `mezo data --words` (propose_words.py).
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mezo_cli.config.choices import find_choices
from mezo_cli.config.compose import build_config
from mezo_cli.config.overrides import parse
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
    named = {override.name: override.value for override in parse(overrides, find_choices(config_dir))}
    if "experiment" in named:
        return
    if missing := [key for key in NEEDED.get(named.get("objective", "mlm"), ()) if key not in named]:
        table, settings = _look(named, overrides)
        words = " ".join(shlex.quote(settings[key]) for key in settings if key not in named)
        row = {c: v for c, v in zip(table.columns, table.fields(0), strict=True) if v is not ABSENT}
        shown = shorten(json.dumps(row, ensure_ascii=False, default=str), 2 * SHOWN_CHARACTERS)
        raise UserError(f"{OWN} needs {join(missing)}; a row of {table.name} is {shown}; for example: {words}")


def propose_command(config: Config, overrides: Sequence[str], config_dir: str | None) -> str | None:
    """Return the command that trains on a file which no task was given for; None where the config's task reads it."""
    named = {override.name: override.value for override in parse(overrides, find_choices(config_dir))}
    if {"task", "experiment"} & named.keys() or "data.dir" not in named or not Path(named["data.dir"]).is_file():
        return None
    table, settings = _look(named, overrides)
    if all(table.find_column(column, config.task.rename) is not None for column in config.task.columns):
        return None
    return shlex.join(["mezo", "train", OWN, *settings.values(), *overrides])


def _look(named: Mapping[str, Any], overrides: Sequence[str]) -> tuple[Table, dict[str, str]]:
    """Return the first rows, and key -> `KEY=VALUE` of a proposal; `named` has the values of the overrides."""
    task = TaskConfig(name="own", labels=["-"])
    hub = {key: named[f"task.hub.{key}"] for key in type(task.hub).model_fields if f"task.hub.{key}" in named}
    data: DataConfig = DataConfig(name=named.get("data", "hub"))
    if data.name == "files":
        data = FilesConfig(name="files", dir=named.get("data.dir"))
    table = first_rows(task.replace(hub=task.hub.replace(**hub)), data, ROWS)
    columns = {name: [table.fields(i)[n] for i in range(len(table.rows))] for n, name in enumerate(table.columns)}
    values = {name: len({str(one) for one in of}) for name, of in columns.items()}
    few = [name for name, count in values.items() if 2 <= count <= min(MOST_LABELS, len(columns[name]) - 1)]
    fewest = "label" if "label" in columns else min(few, key=lambda name: values[name], default=None)
    label = named.get("task.label_column") or fewest
    texts = [name for name, of in columns.items() if name != label and all(isinstance(one, str) for one in of)]
    texts = [name for name in texts if any(" " in one for one in columns[name])] or texts
    labels = sorted({*label_texts(table, table.columns.index(label))}) if label in columns else []
    labels = named.get("task.labels") or labels[: MOST_LABELS + 1]
    prompt = " ".join(f"{{{name}}}" for name in named.get("task.columns") or texts)
    lists = {"task.columns": texts, "task.labels": labels}
    settings = {key: f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in lists.items()}
    if label not in (None, "label"):
        settings["task.label_column"] = f"task.label_column={json.dumps(label)}"
    objective = named.get("objective", "mlm")
    if objective in ("mlm", "lm"):
        key, end = ("task.template", ".") if objective == "mlm" else ("task.lm.template", "")
        settings[key] = f"{key}={json.dumps(f'{prompt} All in all, it was {{mask}}{end}', ensure_ascii=False)}"
        words = json.dumps(_words(labels, objective, overrides), ensure_ascii=False)
        settings["task.label_words"] = f"task.label_words={words}"
    return table, settings


def _words(labels: Sequence[str], objective: str, overrides: Sequence[str]) -> list[str]:
    """Return a word for each label: its name, if it is one token inside a text, or else Yes and No, or letters."""
    from mezo_cli.models import load_tokenizer
    from mezo_cli.objectives import OBJECTIVES

    chosen = [word for word in overrides if word.startswith(("model=", "model.path=", "model.revision="))]
    kind = OBJECTIVES.implementation(objective).model_kind
    tokenizer = load_tokenizer(build_config([*chosen, "data=demo"]).model, kind)
    names = [str(label).replace("_", " ") for label in labels]
    tokens = [tokenizer(f" {name}", add_special_tokens=False)["input_ids"] for name in names]
    if len({*names}) == len(names) and all(map(str.isalpha, names)) and all(len(ids) == 1 for ids in tokens):
        return names
    return ["No", "Yes"] if len(labels) == 2 else list(LETTERS[: len(labels)])
