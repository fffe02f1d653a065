"""Writing the chosen rows as files: for few-shot splits, the reference's files byte for byte."""

import logging
import os
from collections.abc import Callable
from pathlib import Path

from mezo_cli.data import folder
from mezo_cli.data.fewshot import limit, reference_test
from mezo_cli.data.splits import Part, plan
from mezo_cli.errors import UserError, listed
from mezo_cli.schema import DataConfig, TaskConfig

log = logging.getLogger(__name__)


def export(
    task: TaskConfig, data: DataConfig, seed: int, out: Path, warn: Callable[[str], None] = log.warning
) -> list[Path]:
    """Write train, dev and test rows into the folder `out` and return the files.

    Rows are those that `load` gives, but short and empty groups are no error here: they are written, and `warn` (the
    log's warning unless given) is called for each note. A .tsv source is written with its own lines and header, .csv
    anew with least quoting, everything else as JSONL. MNLI's names are dev_matched, test_matched, test_mismatched.
    Files appear whole or not at all.
    Raises `UserError` when `out` holds other content under these names, or other splits beside them.
    """
    planned = plan(task, data, seed)
    for note in planned.notes:
        warn(note)
    dev_stem = task.files.dev
    test_stem = dev_stem.replace("dev", "test", 1)
    parts = {"train": planned.train, dev_stem: planned.dev}
    if planned.test is not None:
        parts[test_stem] = planned.test
        if "_" in test_stem:
            for name, rows in folder.siblings(task, planned.test.rows).items():
                chosen = list(range(len(rows))) if data.shots is None else reference_test(len(rows))
                chosen = limit(chosen, data.eval_limit)
                parts[f"{test_stem.partition('_')[0]}_{name}"] = Part(rows, chosen)
    contents = {stem + part.rows.table.suffix: _content(part) for stem, part in parts.items()}
    return _write(Path(out), contents)


def _content(part: Part) -> bytes:
    return (part.rows.table.header + "".join(part.rows.lines(part.chosen))).encode()


def _write(out: Path, contents: dict[str, bytes]) -> list[Path]:
    _check_free(out, contents)
    paths = [out / name for name in contents]
    drafts = [out / f".{name}.{os.getpid()}.tmp" for name in contents]
    try:
        out.mkdir(parents=True, exist_ok=True)
        for draft, content in zip(drafts, contents.values(), strict=True):
            draft.write_bytes(content)
        for draft, path in zip(drafts, paths, strict=True):
            draft.replace(path)
    except OSError as error:
        raise UserError(f"--export {out}: cannot be written: {error.strerror}") from None
    finally:
        for draft in drafts:
            draft.unlink(missing_ok=True)
    return paths


def _check_free(out: Path, contents: dict[str, bytes]) -> None:
    """Refuse to overwrite other content, and to put a second set of splits beside one that is there."""
    if not out.exists():
        return
    if not out.is_dir():
        raise UserError(f"--export {out}: this is a file; a folder is needed")
    stems = {Path(name).stem for name in contents}
    there = [p for p in sorted(out.iterdir()) if p.stem in stems or p.name in contents]
    other = [p.name for p in there if not p.is_file() or contents.get(p.name) != p.read_bytes()]
    if other:
        raise UserError(f"--export {out}: {listed(other)} is there with other content; choose another folder")
