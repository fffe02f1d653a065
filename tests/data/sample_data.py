"""Tasks of conf/ and writers of small data files for the data tests."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mezo_cli.config.schema import Example, FilesConfig
from tests.lm_bff import load_task
from tests.tiny import write_jsonl

SST2, RTE, MNLI, SST5, COLA, MRPC = map(load_task, ("sst2", "rte", "mnli", "sst5", "cola", "mrpc"))
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


def write_numbered(folder: Path, **counts: int) -> Path:
    """Write `SPLIT.jsonl` files whose rows are "SPLIT 0", "SPLIT 1", ... of alternating classes; return the folder."""
    for split, count in counts.items():
        write_jsonl(folder / f"{split}.jsonl", [{"sentence": f"{split} {i}", "label": i % 2} for i in range(count)])
    return folder


def words(examples: list[Example] | None) -> set[str]:
    """Return the first words of rows."""
    return {example.texts[0].split()[0] for example in examples or []}
