"""Kill a training, or send it a signal that it handles, then go on: the result is that of one that never ended."""

import json
import random
import signal
from pathlib import Path

from tests.campaign.cases import Job, Lab, Outcome, bits, complaint, copy, differing, go_on, leftovers
from tests.campaign.server import ForkServer

KIND = "kills"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
WRITING = (
    ["replay", "run", "--step", "2", "--out", "out"],
    ["export", "run", "--out", "out"],
    ["export", "run", "--trajectory", "--out", "out"],
    ["report", "run", "--out", "out.html"],
    ["prune", "run"],
)


def jobs(lab: Lab, seed: int, count: int) -> list[Job]:
    """Return `count` kills: two of three just before a file operation, the others at a random moment.

    Some of the former are kills of commands that write a folder or remove one; of the others a third kill the resumed
    run once more. Every fourth is SIGINT, SIGTERM or SIGHUP instead; the last is SIGHUP under nohup. The operations of
    each case are drawn without repetition as long as there are any.
    """
    rng = random.Random(f"{KIND} {seed}")
    cases = sorted(lab.count)
    left: dict[str, list[int]] = {case: [] for case in cases}
    made = []
    for number in range(count):
        case = cases[number % len(cases)]
        if number % 4 == 1:
            signum = SIGNALS[number // 4 % len(SIGNALS)]
            made.append(_signal(lab, case, signum, rng.randrange(1, lab.count[case] + 1)))
            continue
        if number % 3 == 2:
            made.append(_at_random(lab, case, rng.uniform(0.0, 1.2)))
            continue
        if number % 5 == 3:
            made.append(_writing(lab, case, rng.choice(WRITING), rng.randrange(1, 40), rng.random() < 0.5))
            continue
        if not left[case]:
            left[case] = rng.sample(range(1, lab.count[case] + 1), lab.count[case])
        again = rng.randrange(1, lab.count[case]) if rng.random() < 1 / 3 else 0
        made.append(_before(lab, case, left[case].pop(), rng.random() < 0.5, again))
    return [*made, _signal(lab, cases[0], signal.SIGHUP, lab.count[cases[0]] // 2, is_ignored=True)]


def _before(lab: Lab, case: str, operation: int, half: bool, again: int) -> Job:
    def job(server: ForkServer, folder: Path) -> Outcome:
        run = folder / "run"
        watch = {"root": str(run), "kill_at": operation, "half": half}
        (ended,) = server.run(lab.train(case, run), cwd=folder, watch=watch)
        name = f"{case}: killed before file operation {operation}{' (half a write done)' if half else ''}"
        if again:
            name += f", resumed, killed before operation {again}"
            server.run(["resume", str(run)], cwd=folder, watch={"root": str(run), "kill_at": again, "half": half})
        wrong, _ = go_on(lab, case, run, server)
        if ended.code not in (0, -signal.SIGKILL):  # 0: there were fewer operations than in the recorded run
            wrong = f"ended before it was killed: {complaint(ended)}"
        return Outcome(KIND, name, not wrong, wrong or "bitwise identical")

    return job


def _writing(lab: Lab, case: str, words: list[str], operation: int, half: bool) -> Job:
    """Kill a command that writes, and repeat it: what it makes is whole, the run as before, and nothing is left."""

    def job(server: ForkServer, folder: Path) -> Outcome:
        (folder / "plain").mkdir()
        (folder / "killed").mkdir()
        for place in ("plain", "killed"):
            copy(lab.finished(case), folder / place / "run")
        (plain,) = server.run(words, cwd=folder / "plain")
        here = folder / "killed"
        watch = {"root": str(here), "kill_at": operation, "half": half}
        (ended,) = server.run(words, cwd=here, watch=watch)
        whole = not differing(bits(here), bits(folder / "plain"))  # it was killed when all was done
        again = server.run(words, cwd=here)[0] if ended.code < 0 else ended
        wrong = "" if whole else complaint(again, (0, plain.code))
        wrong = wrong or differing(bits(here), bits(folder / "plain")) or leftovers(here)
        name = f"{case}: `mezo {' '.join(words)}` killed before file operation {operation}"
        return Outcome(KIND, name, not wrong, wrong or "whole, nothing left")

    return job


def _at_random(lab: Lab, case: str, seconds: float) -> Job:
    def job(server: ForkServer, folder: Path) -> Outcome:
        run = folder / "run"
        server.run(lab.train(case, run), cwd=folder, after=[int(signal.SIGKILL), seconds])
        wrong, _ = go_on(lab, case, run, server)
        return Outcome(KIND, f"{case}: killed after {seconds:.3f} s", not wrong, wrong or "bitwise identical")

    return job


def _signal(lab: Lab, case: str, signum: signal.Signals, operation: int, is_ignored: bool = False) -> Job:
    """Send a signal before a file operation: one line, status 130; `is_ignored`: none, as under nohup."""

    def job(server: ForkServer, folder: Path) -> Outcome:
        run = folder / "run"
        watch = {"root": str(run), "signal_at": operation, "signum": int(signum)}
        ignored = [int(signum)] if is_ignored else []
        (ended,) = server.run(lab.train(case, run), cwd=folder, watch=watch, ignore=ignored)
        wrong = complaint(ended, (0,) if is_ignored else (0, 130))
        path = run / "run.json"
        status = json.loads(path.read_text())["status"] if path.exists() else "interrupted"
        if not wrong and status not in ("interrupted", "finished"):  # finished: it came when that had been written
            wrong = f"run.json says {status}"
        if not wrong:
            wrong, _ = go_on(lab, case, run, server)
        name = f"{case}: {signum.name} before file operation {operation}{', ignored' if is_ignored else ''}"
        return Outcome(KIND, name, not wrong, wrong or f"status {ended.code}, then bitwise identical")

    return job
