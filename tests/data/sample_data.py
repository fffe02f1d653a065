"""Tasks and writers of small data files for the data tests. The tasks do not depend on conf/."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mezo_cli.config.schema import FilesConfig, FileSource, HubSource, TaskConfig

SST2 = TaskConfig(
    name="sst2",
    template="{sentence} It was {mask}.",
    labels=["negative", "positive"],
    label_words=["terrible", "great"],
    columns=["sentence"],
    hub=HubSource(path="nyu-mll/glue", name="sst2", labels=["negative", "positive"]),
    files=FileSource(folder="SST-2", labels=["0", "1"]),
)
RTE = TaskConfig(
    name="rte",
    labels=["entailment", "not_entailment"],
    columns=["premise", "hypothesis"],
    rename={"sentence1": "premise", "sentence2": "hypothesis"},
    hub=HubSource(path="nyu-mll/glue", name="rte", labels=["entailment", "not_entailment"]),
    files=FileSource(folder="RTE"),
)
MNLI = TaskConfig(
    name="mnli",
    labels=["contradiction", "entailment", "neutral"],
    columns=["premise", "hypothesis"],
    rename={"sentence1": "premise", "sentence2": "hypothesis", "gold_label": "label"},
    hub=HubSource(path="nyu-mll/glue", name="mnli", test="validation_matched"),
    files=FileSource(folder="MNLI", dev="dev_matched", test="test_matched"),
)
SST5 = TaskConfig(
    name="sst5",
    labels=["very negative", "negative", "neutral", "positive", "very positive"],
    columns=["text"],
    rename={"label_text": "label"},
    hub=HubSource(path="SetFit/sst5"),
    files=FileSource(folder="sst-5", columns=["label", "text"], labels=["0", "1", "2", "3", "4"]),
)
COLA = TaskConfig(
    name="cola",
    labels=["unacceptable", "acceptable"],
    columns=["sentence"],
    files=FileSource(columns=["source", "label", "star", "sentence"], labels=["0", "1"]),
)
MRPC = TaskConfig(
    name="mrpc",
    labels=["not_equivalent", "equivalent"],
    columns=["sentence1", "sentence2"],
    rename={"#1 String": "sentence1", "#2 String": "sentence2", "Quality": "label"},
    files=FileSource(labels=["0", "1"]),
)

HEADER = "sentence\tlabel"  # of SST-2's files


def files_config(folder: Path, **settings: Any) -> FilesConfig:
    """Return the config of `data=files data.dir=FOLDER` with further settings."""
    return FilesConfig(name="files", dir=str(folder), **settings)


def write_tsv(path: Path, header: str | None, rows: Sequence[Sequence[str]], end: str = "\n") -> Path:
    """Write a file in GLUE's format and return its path."""
    lines = ([header] if header else []) + ["\t".join(row) for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes("".join(line + end for line in lines).encode())
    return path


def sst2_rows(count: int, word: str = "row") -> list[list[str]]:
    """Return rows with alternating classes. Each sentence ends in a space, as in GLUE."""
    return [[f"{word} {i} ", str(i % 2)] for i in range(count)]


def write_jsonl(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Write one JSON object per line and return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
