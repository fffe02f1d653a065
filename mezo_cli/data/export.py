"""Write splits as files. Few-shot splits are the published code's files byte for byte."""

import logging
from collections.abc import Callable
from pathlib import Path

from mezo_cli.config.schema import DataConfig, TaskConfig
from mezo_cli.data.fewshot import limit, published_test
from mezo_cli.data.sources import open_other_tests
from mezo_cli.data.splits import select_rows
from mezo_cli.errors import UserError, join
from mezo_cli.runs.atomic import write_error, write_file, write_folder

log = logging.getLogger(__name__)


def export(
    task: TaskConfig, data: DataConfig, seed: int, out: Path, warn: Callable[[str], None] = log.warning
) -> list[Path]:
    """Write the train, dev and test rows into the folder `out` and return the files.

    The rows are those that `load` returns. Classes with too few rows are no error here: they are written, and `warn`
    is called with each note. A .tsv source keeps its lines and header, .csv is written with minimal quoting,
    everything else as JSONL. MNLI's files are dev_matched, test_matched, test_mismatched. No file is left
    half-written.
    """
    selected = select_rows(task, data, seed)
    for note in selected.notes:
        warn(note)
    dev_stem = task.files.dev
    test_stem = dev_stem.replace("dev", "test", 1)
    parts = {"train": selected.train, dev_stem: selected.dev, test_stem: selected.test}
    if selected.test is not None and "_" in test_stem:
        for name, rows in open_other_tests(task, selected.test).items():
            count = len(rows.labels)
            kept = list(range(count)) if data.shots is None else published_test(count)
            parts[f"{test_stem.partition('_')[0]}_{name}"] = rows.take(limit(kept, data.eval_limit))
    tables = {stem: rows.table for stem, rows in parts.items() if rows is not None}
    contents = {stem + table.suffix: table.export().encode() for stem, table in tables.items()}
    _check_output(out, contents)
    if out.is_dir() and any(out.iterdir()):
        try:
            for name, content in contents.items():
                write_file(out / name, content)
        except OSError as error:
            raise write_error(f"--export {out}", error) from error
    else:

        def write(folder: Path) -> None:
            for name, content in contents.items():
                (folder / name).write_bytes(content)

        write_folder(out, write, "--export")
    return [out / name for name in contents]


def _check_output(out: Path, contents: dict[str, bytes]) -> None:
    """Check that no file is overwritten with other content and that the folder holds no other splits."""
    if not out.exists():
        return
    if not out.is_dir():
        raise UserError(f"--export {out}: this is a file; a folder is needed")
    stems = {Path(name).stem for name in contents}
    existing = [p for p in sorted(out.iterdir()) if p.stem in stems or p.name in contents]
    other = [p.name for p in existing if not p.is_file() or contents.get(p.name) != p.read_bytes()]
    if other:
        raise UserError(f"--export {out}: {join(other)} already exists with other content; choose another folder")
