"""The checkpoints `best` and `last`: written whole or not at all, with the checksums of their files in mezo.json."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from mezo_cli.errors import RunFailed, UserError
from mezo_cli.runs.atomic import file_sha256, new_folder, remove, sync, write_error
from mezo_cli.runs.jsonl import read_object, write_object

NAMES = ("best", "last")
OLD = ".{}.old"  # of the name of a checkpoint that a new one replaces
CHECKSUMS = "mezo.json"  # {"step": ..., "sha256": {file name: checksum}}
HINT = "; remove the checkpoint's folder, and its step is replayed from the trajectory"


def save(folder: Path, name: str, step: int, write: Callable[[Path], None]) -> None:
    """Save checkpoint `name`: `write` writes its files into a new folder, which then replaces the old checkpoint.

    The old one is removed when the new one is on the disk, name and all. It stays if that raises RunFailed.
    """
    final, old = folder / name, folder / OLD.format(name)

    def write_with_checksums(new: Path) -> None:
        write(new)
        sums = {path.name: file_sha256(path) for path in sorted(new.iterdir()) if path.is_file()}
        write_object(new / CHECKSUMS, {"step": step, "sha256": sums})

    try:
        if not folder.exists():
            folder.mkdir()
            sync(folder.parent)
        with new_folder(final, write_with_checksums) as new:
            remove(old)
            if final.exists():
                os.rename(final, old)
            os.rename(new, final)
        sync(folder)
    except Exception as error:  # a full disk raises different errors in each library
        repair(folder)
        raise RunFailed(f"step {step}: checkpoint {write_error(final, error)}") from error
    with contextlib.suppress(OSError):
        remove(old)


def verify(checkpoint: Path) -> None:
    """Compare a checkpoint's files with their checksums."""
    for name, stored in read_object(checkpoint / CHECKSUMS, HINT)["sha256"].items():
        path = checkpoint / name
        if not path.is_file():
            raise UserError(f"{path} is missing from the checkpoint{HINT}")
        if file_sha256(path) != stored:
            raise UserError(f"{path} is damaged: it does not match its checksum in {CHECKSUMS}{HINT}")


def repair(folder: Path) -> None:
    """Undo or finish the swap of `save` if a crash interrupted it. Must not be called while the run is running."""
    for name in NAMES if not folder.is_symlink() else ():
        final, old = folder / name, folder / OLD.format(name)
        with contextlib.suppress(OSError):  # another process did it first, or the run is read-only
            if old.is_dir() and not old.is_symlink():
                remove(old) if final.exists() else os.rename(old, final)


def find_run(checkpoint: Path) -> Path | None:
    """Return the run directory that a checkpoint folder is in; None if it is in none."""
    folder = checkpoint.resolve()
    run = folder.parent.parent
    return run if folder.parent.name == "checkpoints" and (run / "config.yaml").is_file() else None
