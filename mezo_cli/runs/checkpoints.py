"""The checkpoints `best` and `last`: written whole or not at all, with the checksums of their files in mezo.json."""

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mezo_cli.errors import RunFailed, UserError
from mezo_cli.runs.checksums import add_checksum, verify_checksum
from mezo_cli.runs.files import file_sha256, read_json, remove, sync, write_atomically, write_error, write_new_folder

NAMES = ("best", "last")
CHECKSUMS = "mezo.json"  # {"step": ..., "sha256": {file name: checksum}}
REPAIR_HINT = "; remove the checkpoint's folder, and its step is replayed from the trajectory"


def save(folder: Path, name: str, step: int, write: Callable[[Path], None]) -> None:
    """Save checkpoint `name`: `write` writes its files into a new folder, which then replaces the old checkpoint.

    The old one is removed when the new one is on the disk, name and all.

    Raises:
        RunFailed: when it cannot be written; the old checkpoint stays.
    """
    new, final, old = folder / f".{name}.new", folder / name, folder / f".{name}.old"

    def write_with_checksums(new: Path) -> None:
        write(new)
        sums = {path.name: file_sha256(path) for path in sorted(new.iterdir()) if path.is_file()}
        write_atomically(new / CHECKSUMS, json.dumps(add_checksum({"step": step, "sha256": sums}), indent=2) + "\n")

    try:
        if not folder.exists():
            folder.mkdir()
            sync(folder.parent)
        write_new_folder(new, write_with_checksums)
        remove(old)
        if final.exists():
            os.rename(final, old)
        os.rename(new, final)
        sync(folder)
    except Exception as error:  # a full disk raises different errors in each library
        shutil.rmtree(new, ignore_errors=True)
        repair_interrupted_swap(folder)
        raise RunFailed(f"step {step}: checkpoint {write_error(final, error)}") from error
    shutil.rmtree(old, ignore_errors=True)


def read_step(folder: Path, name: str) -> int | None:
    """Return the step of checkpoint `name`; None if there is none."""
    return int(_read_checksums(folder / name)["step"]) if (folder / name).is_dir() else None


def verify(checkpoint: Path) -> None:
    """Compare a checkpoint's files with their checksums."""
    for name, stored in _read_checksums(checkpoint)["sha256"].items():
        path = checkpoint / name
        if not path.is_file():
            raise UserError(f"{path} is missing from the checkpoint{REPAIR_HINT}")
        if file_sha256(path) != stored:
            raise UserError(f"{path} is damaged: it does not match its checksum in {CHECKSUMS}{REPAIR_HINT}")


def repair_interrupted_swap(folder: Path) -> None:
    """Undo or finish the swap of `save` if a crash interrupted it between its two renames.

    Must not be called while the run is running.
    """
    for name in NAMES if not folder.is_symlink() else ():
        old, final = folder / f".{name}.old", folder / name
        if not old.is_dir() or old.is_symlink():
            continue
        with contextlib.suppress(OSError):  # another process did it first, or the run is read-only
            shutil.rmtree(old, ignore_errors=True) if final.exists() else os.rename(old, final)


def set_aside(folder: Path) -> int:
    """Rename the folder of the checkpoints to remove it; return its bytes. `remove_leftovers` undoes or completes that.

    So a crash leaves no checkpoint without some of its files.
    """
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    os.rename(folder, _aside(folder))
    sync(folder.parent)
    return size


def is_set_aside(folder: Path) -> bool:
    """Whether a removal of the checkpoints was begun and not completed."""
    return _aside(folder).is_dir()


def remove_leftovers(folder: Path, is_pruned: bool) -> None:
    """Remove what processes that were killed left; `is_pruned`: run.json says that the checkpoints are removed."""
    if not is_pruned and is_set_aside(folder) and not folder.exists():
        os.rename(_aside(folder), folder)
    remove(_aside(folder))
    repair_interrupted_swap(folder)
    for name in NAMES:
        remove(folder / f".{name}.new")
        if (folder / name).exists():
            remove(folder / f".{name}.old")


def _aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.removed")


def find_run(checkpoint: Path) -> Path | None:
    """Return the run directory that a checkpoint folder is in; None if it is in none."""
    folder = checkpoint.resolve()
    run = folder.parent.parent
    return run if folder.parent.name == "checkpoints" and (run / "config.yaml").is_file() else None


def _read_checksums(checkpoint: Path) -> dict[str, Any]:
    path = checkpoint / CHECKSUMS
    values = read_json(path)
    if verify_checksum(values) is None:
        raise UserError(f"{path} is damaged: it does not match its own checksum{REPAIR_HINT}")
    return values
