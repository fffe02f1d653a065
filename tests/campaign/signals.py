"""Send SIGINT, SIGTERM or SIGHUP to a training: one line, status 130, and the resumed run is bitwise identical."""

import json
import random
import signal
from pathlib import Path

from tests.campaign.cases import Job, Lab, Outcome, complaint, go_on
from tests.campaign.server import ForkServer
from tests.command_line import Result

KIND = "signals"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def jobs(lab: Lab, seed: int, count: int) -> list[Job]:
    """Return `count` signals: three of four before a file operation, the others at a random moment."""
    rng = random.Random(f"{KIND} {seed}")
    cases, made = sorted(lab.count), []
    for number in range(count):
        case, signum = cases[number % len(cases)], SIGNALS[(number + number // len(cases)) % len(SIGNALS)]
        if number % 4 == 3:
            made.append(_forked(lab, case, signum, {"after": [int(signum), rng.uniform(0.05, 1.0)]}))
        else:
            made.append(_forked(lab, case, signum, {"before": rng.randrange(1, lab.count[case] + 1)}))
    made.append(_ignored(lab, cases[0]))
    return made


def _judge(lab: Lab, case: str, run: Path, ended: Result, server: ForkServer) -> str:
    """Return what is wrong with a training that a signal ended, or that was done before it came."""
    wrong = complaint(ended, (0, 130))
    if not wrong and ended.code == 130:
        status = _status(run)
        # finished: the signal came when the status had been written
        wrong = "" if status in ("", "interrupted", "finished") else f"run.json says {status}"
    if not wrong:
        wrong, _ = go_on(lab, case, run, server)
    return wrong


def _status(run: Path) -> str:
    """Return the status in run.json, "" when there is none."""
    path = run / "run.json"
    return str(json.loads(path.read_text())["status"]) if path.exists() else ""


def _forked(lab: Lab, case: str, signum: signal.Signals, when: dict[str, object]) -> Job:
    def job(server: ForkServer, folder: Path) -> Outcome:
        run = folder / "run"
        if "before" in when:
            name = f"{case}: {signum.name} before file operation {when['before']}"
            watch = {"root": str(run), "signal_at": when["before"], "signum": int(signum)}
            (ended,) = server.run(lab.train(case, run), cwd=folder, watch=watch)
        else:
            (ended,) = server.run(lab.train(case, run), cwd=folder, **when)
            name = f"{case}: {signum.name} {when['after']}"
        wrong = _judge(lab, case, run, ended, server)
        return Outcome(KIND, name, not wrong, wrong or f"status {ended.code}, then bitwise identical")

    return job


def _ignored(lab: Lab, case: str) -> Job:
    """What nohup does: SIGHUP is ignored at the start, and must not end the run."""

    def job(server: ForkServer, folder: Path) -> Outcome:
        run = folder / "run"
        watch = {"root": str(run), "signal_at": lab.count[case] // 2, "signum": int(signal.SIGHUP)}
        (ended,) = server.run(lab.train(case, run), cwd=folder, watch=watch, ignore=[int(signal.SIGHUP)])
        wrong = complaint(ended)
        return Outcome(KIND, f"{case}: SIGHUP under nohup", not wrong, wrong or "went on")

    return job
