"""Finding a task's train, dev and test files in a folder, or taking one file for all."""

import re
from pathlib import Path

from mezo_cli.data import files
from mezo_cli.data.source import Source
from mezo_cli.data.table import Rows, bind, label_texts
from mezo_cli.errors import UserError, did_you_mean, listed
from mezo_cli.schema import DataConfig, TaskConfig


def open_source(task: TaskConfig, data: DataConfig) -> Source:
    """Open `data.dir`: a folder with train, dev (or validation) and test files, or one single file.

    With `data.shots` null a test file without labels (GLUE's own) is passed over with a note. With shots the official
    dev file of a .tsv task is the test set (reference), and its test file is not opened. A folder without a train
    file is searched for the task's own folder (`task.files.folder`), so that one `data.dir` serves several tasks.
    Raises `UserError` for whatever is missing, ambiguous or damaged.
    """
    if data.dir is None:
        raise UserError("data=files needs data.dir=PATH: a folder with train, dev and test files, or one file")
    root = Path(data.dir).expanduser()
    if root.is_file():
        if root.suffix not in files.SUFFIXES:
            raise UserError(f"{root}: files of this kind are not read; allowed: {listed(files.SUFFIXES)}")
        return Source(bind(files.read([root], task), task))
    if not root.exists():
        near = did_you_mean(root.name, [p.name for p in root.parent.iterdir()]) if root.parent.is_dir() else ""
        raise UserError(f"data.dir={data.dir}: no such file or folder{near}; it is looked up from {Path.cwd()}")
    return _open_folder(_task_folder(root, task), task, data)


def _task_folder(root: Path, task: TaskConfig) -> Path:
    own = root / task.files.folder if task.files.folder else None
    return own if own is not None and own.is_dir() and not _find(root, ["train"]) else root


def _open_folder(folder: Path, task: TaskConfig, data: DataConfig) -> Source:
    train_paths = _find(folder, ["train"])
    if not train_paths:
        there = listed(sorted(p.name for p in folder.iterdir())[:12]) or "nothing"
        wanted = listed(f"train{suffix}" for suffix in files.SUFFIXES)
        raise UserError(f"{folder}: no training file ({wanted}); there is: {there}")
    dev_paths = _find(folder, _dev_stems(task))
    test_paths = _find(folder, list(dict.fromkeys([task.files.test, "test"])))
    train = bind(files.read(train_paths, task), task)
    dev = bind(files.read(dev_paths, task), task) if dev_paths else None
    notes: list[str] = []
    if dev is not None and data.shots is not None and dev.table.suffix == ".tsv":
        if test_paths:
            notes.append(
                f"{test_paths[0].name} is not used: with data.shots the test set is the official {dev.table.name}"
            )
        return Source(train, dev, None, notes)
    test = _labelled(test_paths, task, notes) if test_paths else None
    return Source(train, dev, test, notes)


def siblings(task: TaskConfig, official: Rows) -> dict[str, Rows]:
    """Open the further test sets beside the official one: for `dev_matched.tsv` also `dev_mismatched.tsv`.

    Returns them by the part of the stem behind `dev_` or `test_`.
    """
    path = Path(official.table.path)
    prefix = path.stem.partition("_")[0] + "_"
    if not path.is_file() or not path.stem.startswith(prefix):
        return {}
    beside = [p for p in sorted(path.parent.glob(f"{prefix}*{path.suffix}")) if p != path]
    return {p.stem.removeprefix(prefix): bind(files.read([p], task), task) for p in beside}


def _dev_stems(task: TaskConfig) -> list[str]:
    stem = task.files.dev
    return list(dict.fromkeys([stem, stem.replace("dev", "validation"), "dev", "validation", "valid", "val"]))


def _labelled(paths: list[Path], task: TaskConfig, notes: list[str]) -> Rows | None:
    """Open a test file; one without labels is no test set, and said so."""
    table = files.read(paths, task)
    at = table.find(task.label_column, task.rename)
    if at is None:
        notes.append(f"{table.name} has no column '{task.label_column}': without labels it is no test set")
        return None
    if table.rows and set(label_texts(table, at)) == {"-1"}:
        notes.append(f"{table.name} has the label -1 in every row: without labels it is no test set")
        return None
    return bind(table, task)


def _find(folder: Path, stems: list[str]) -> list[Path]:
    """Find the one file with one of the stems, or all shards of one (`train-00000-of-00002.parquet`)."""
    found = [p for stem in stems for suffix in files.SUFFIXES if (p := folder / f"{stem}{suffix}").is_file()]
    if len(found) > 1:
        raise UserError(f"{folder}: {listed(p.name for p in found)}: only one of these can be meant; remove the others")
    return found or [p for stem in stems for p in _shards(folder, stem)]


def _shards(folder: Path, stem: str) -> list[Path]:
    pattern = re.compile(re.escape(stem) + r"-(\d+)-of-(\d+)\.parquet")
    found = sorted(p for p in folder.glob(f"{stem}-*-of-*.parquet") if pattern.fullmatch(p.name))
    if found:
        match = pattern.fullmatch(found[0].name)
        assert match is not None
        if len(found) != int(match[2]):
            raise UserError(f"{folder}: {len(found)} of the {int(match[2])} shards of {stem} are there")
    return found
