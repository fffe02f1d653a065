"""Let the disk fill during a command: one line that names path and cause, then a resume that is bitwise identical."""

import json
import random
import re
from pathlib import Path
from typing import Any

from tests.campaign.cases import Job, Lab, Outcome, bits, complaint, differing, go_on
from tests.campaign.server import ForkServer

KIND = "full disks"
CAUSE = re.compile(r"no space left|disk is full|disk full", re.IGNORECASE)


def jobs(lab: Lab, seed: int, count: int) -> list[Job]:
    """Return `count` trainings on full disks."""
    rng, cases = random.Random(f"{KIND} {seed}"), sorted(lab.log)
    return [_training(lab, cases[number % len(cases)], rng.random()) for number in range(count)]


def _training(lab: Lab, case: str, share: float) -> Job:
    def job(server: ForkServer, folder: Path) -> Outcome:
        run = folder / "run"
        room = int(share * _size(lab.finished(case)))
        watch: dict[str, Any] = {"root": str(run), "room": room}
        (ended,) = server.run(lab.train(case, run), cwd=folder, watch=watch)
        name = f"{case}: a disk of {room:,} bytes"
        if ended.code == 0:  # it did fit
            wrong = complaint(ended) or differing(bits(run), lab.bits[case])
        else:
            wrong = complaint(ended, (1,)) or _unnamed(ended.err, run) or _wrong_status(run)
        if not wrong:
            again = server.run(["resume", str(run)], cwd=folder, watch=watch)[0]
            # a directory that was never begun cannot be resumed: that is 2
            wrong = complaint(again, (0, 1, 2))
            wrong = f"resume on the full disk: {wrong}" if wrong else ""
        if not wrong:
            wrong, _ = go_on(lab, case, run, server)
            wrong = f"once there is room again: {wrong}" if wrong else ""
        return Outcome(KIND, name, not wrong, wrong or "one line, then bitwise identical")

    return job


def _unnamed(err: str, run: Path) -> str:
    if not CAUSE.search(err):
        return f"the cause is not named: {err.strip()[-200:]}"
    return "" if str(run) in err else f"no path is named: {err.strip()[-200:]}"


def _wrong_status(run: Path) -> str:
    path = run / "run.json"
    if not path.exists():
        return ""
    try:
        status = json.loads(path.read_text())["status"]
    except ValueError:
        return "run.json is torn"
    return "" if status != "finished" else "run.json says finished"


def _size(run: Path) -> int:
    return sum(path.stat().st_size for path in run.rglob("*") if path.is_file())
