"""Checkpoints of a run, `best` and `last`: whole or not at all, each file with its checksum in mezo.json."""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mezo_cli.errors import RunFailed, UserError
from mezo_cli.runs import sealed

NAMES = ("best", "last")
SEAL = "mezo.json"
MENDED = "; remove the checkpoint's folder, and its step is replayed from the trajectory"


def save(folder: Path, name: str, step: int, write: Callable[[Path], None]) -> None:
    """Let `write` fill a folder, and put it in the place of checkpoint `name`.

    Raises:
        RunFailed: when it cannot be written; the checkpoint that was there stays.
    """
    new, final, old = folder / f".{name}.new", folder / name, folder / f".{name}.old"
    try:
        folder.mkdir(exist_ok=True)
        shutil.rmtree(new, ignore_errors=True)
        write(new)
        sums = {path.name: _sum(path) for path in sorted(new.iterdir()) if path.is_file()}
        sealed.write_whole(new / SEAL, json.dumps(sealed.seal({"step": step, "sha256": sums}), indent=2) + "\n")
    except Exception as error:  # the disk, through several libraries
        shutil.rmtree(new, ignore_errors=True)
        raise RunFailed(f"step {step}: checkpoint {final} could not be written: {error}") from error
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        os.rename(final, old)
    os.rename(new, final)
    shutil.rmtree(old, ignore_errors=True)


def step_of(folder: Path, name: str) -> int | None:
    """Return the step of checkpoint `name`, None when there is none.

    Raises:
        UserError: when its mezo.json is missing or damaged.
    """
    return int(_stored(folder / name)["step"]) if (folder / name).is_dir() else None


def verify(checkpoint: Path) -> None:
    """Check a checkpoint's files against the checksums stored with it.

    Raises:
        UserError: for the first file that is missing or differs.
    """
    for name, stored in _stored(checkpoint)["sha256"].items():
        path = checkpoint / name
        if not path.is_file():
            raise UserError(f"{path} is missing from the checkpoint{MENDED}")
        if _sum(path) != stored:
            raise UserError(f"{path} is damaged: it does not match its checksum in {SEAL}{MENDED}")


def mend(folder: Path) -> None:
    """Finish the swap of `save` where a crash cut it between its two renames. Not while the run goes on."""
    for old in folder.glob(".*.old"):
        final = folder / old.name[1:-4]
        with contextlib.suppress(OSError):  # another reader was quicker, or the run may only be read
            shutil.rmtree(old, ignore_errors=True) if final.exists() else os.rename(old, final)


def run_of(checkpoint: Path) -> Path | None:
    """Return the run that a checkpoint folder lies in, None when it lies in none."""
    folder = checkpoint.resolve()
    run = folder.parent.parent
    return run if folder.parent.name == "checkpoints" and (run / "config.yaml").is_file() else None


def _stored(checkpoint: Path) -> dict[str, Any]:
    path = checkpoint / SEAL
    values = sealed.read_json(path)
    if sealed.check(values) is None:
        raise UserError(f"{path} is damaged: it does not match its own checksum{MENDED}")
    return values


def _sum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
