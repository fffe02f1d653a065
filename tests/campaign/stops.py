"""Kill a command, send it a signal, fill its disk, run it twice; then go on: the result is as of one undisturbed."""

import json
import random
import re
import shutil
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

from tests.campaign.cases import Job, Lab, bits, complaint, differing, go_on, leftovers
from tests.campaign.commands import run

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
EXPORTS = (
    ["replay", "run", "--step", "2", "--out", "out"],
    ["export", "run", "--out", "out"],
    ["export", "run", "--trajectory", "--out", "out"],
)
WRITING = (*EXPORTS, ["report", "run", "--out", "out.html"], ["prune", "run"])
AT_ONCE = (*EXPORTS, ["data", "data=files", "data.dir=DATA", "--export", "out"], ["resume", "run"])
FULL = re.compile(r"no space left|disk is full|disk full", re.IGNORECASE)


def kills(lab: Lab, seed: int, count: int) -> list[Job]:
    """Return `count` kills: two of three just before a file operation, the others at a random moment.

    Some of the former are kills of commands that write a folder or remove one; of the others a third kill the resumed
    run once more. Every fourth is SIGINT, SIGTERM or SIGHUP instead; the last is SIGHUP under nohup. The operations of
    each case are drawn without repetition as long as there are any.
    """
    rng = random.Random(f"kills {seed}")
    cases = sorted(lab.count)
    left: dict[str, list[int]] = {case: [] for case in cases}
    made: list[Job] = []
    for number in range(count):
        case = cases[number % len(cases)]
        if number % 4 == 1:
            signum = SIGNALS[number // 4 % len(SIGNALS)]
            made.append(partial(_signal, lab, case, signum, rng.randrange(1, lab.count[case] + 1)))
        elif number % 3 == 2:
            made.append(partial(_kill_after, lab, case, rng.uniform(0.0, 1.2)))
        elif number % 5 == 3:
            words, operation = rng.choice(WRITING), rng.randrange(1, 40)
            made.append(partial(_kill_writing, lab, case, words, operation, rng.random() < 0.5))
        else:
            left[case] = left[case] or rng.sample(range(1, lab.count[case] + 1), lab.count[case])
            again = rng.randrange(1, lab.count[case]) if rng.random() < 1 / 3 else 0
            made.append(partial(_kill_before, lab, case, left[case].pop(), rng.random() < 0.5, again))
    return [*made, partial(_signal, lab, cases[0], signal.SIGHUP, lab.count[cases[0]] // 2, is_ignored=True)]


def _kill_before(lab: Lab, case: str, operation: int, half: bool, again: int, folder: Path) -> tuple[str, str]:
    here, name = folder / "run", f"{case}: killed before file operation {operation}"
    watch = {"root": str(here), "kill_at": operation, "half": half}
    (ended,) = run(lab.train(case, here), cwd=folder, watch=watch)
    name += " (half a write done)" if half else ""
    if again:
        name += f", resumed, killed before operation {again}"
        run(["resume", str(here)], cwd=folder, watch={**watch, "kill_at": again})
    if ended.code not in (0, -signal.SIGKILL):  # 0: there were fewer operations than in the recorded run
        return name, f"ended before it was killed: {complaint(ended)}"
    return name, go_on(lab, case, here)[0]


def _kill_writing(lab: Lab, case: str, words: list[str], operation: int, half: bool, folder: Path) -> tuple[str, str]:
    """Kill a command that writes, and repeat it: what it makes is whole, the run as before, and nothing is left."""
    here, other = folder / "killed", folder / "plain"
    for place in (here, other):
        shutil.copytree(lab.finished(case), place / "run")
    (plain,) = run(words, cwd=other)
    (ended,) = run(words, cwd=here, watch={"root": str(here), "kill_at": operation, "half": half})
    whole = not differing(bits(here), bits(other))  # it was killed when all was done
    again = run(words, cwd=here)[0] if ended.code < 0 else ended
    wrong = "" if whole else complaint(again, (0, plain.code))
    name = f"{case}: `mezo {' '.join(words)}` killed before file operation {operation}"
    return name, wrong or differing(bits(here), bits(other)) or leftovers(here)


def _kill_after(lab: Lab, case: str, seconds: float, folder: Path) -> tuple[str, str]:
    run(lab.train(case, folder / "run"), cwd=folder, kill_after=seconds)
    return f"{case}: killed after {seconds:.3f} s", go_on(lab, case, folder / "run")[0]


def _signal(
    lab: Lab, case: str, signum: signal.Signals, operation: int, folder: Path, is_ignored: bool = False
) -> tuple[str, str]:
    """Send a signal before a file operation: one line, status 130; `is_ignored`: none, as under nohup."""
    here = folder / "run"
    watch = {"root": str(here), "signal_at": operation, "signum": int(signum)}
    (ended,) = run(lab.train(case, here), cwd=folder, watch=watch, ignore=[signum] if is_ignored else [])
    wrong, status = complaint(ended, (0,) if is_ignored else (0, 130)), _status(here)
    if status not in ("", "interrupted", "finished"):  # finished: it came when that had been written
        wrong = wrong or f"run.json says {status}"
    name = f"{case}: {signum.name} before file operation {operation}{', ignored' if is_ignored else ''}"
    return name, wrong or go_on(lab, case, here)[0]


def _status(folder: Path) -> str:
    """Return the status in run.json, "" where there is none."""
    path = folder / "run.json"
    return str(json.loads(path.read_text())["status"]) if path.exists() else ""


def full_disks(lab: Lab, seed: int, count: int) -> list[Job]:
    rng, cases = random.Random(f"full disks {seed}"), sorted(lab.log)
    return [partial(_full_disk, lab, cases[number % len(cases)], rng.random()) for number in range(count)]


def _full_disk(lab: Lab, case: str, share: float, folder: Path) -> tuple[str, str]:
    """Train on a disk with room for a share of the run: one line with path and cause; once there is room, resume."""
    here, files = folder / "run", [path for path in lab.finished(case).rglob("*") if path.is_file()]
    room = int(share * sum(path.stat().st_size for path in files))
    watch = {"root": str(here), "room": room}
    (ended,) = run(lab.train(case, here), cwd=folder, watch=watch)
    if ended.code == 0:  # it did fit
        wrong = complaint(ended) or differing(bits(here), lab.bits[case])
    else:
        wrong = complaint(ended, (1,))
        named = FULL.search(ended.err) and str(here) in ended.err
        wrong = wrong or ("" if named else f"path or cause is not named: {ended.err.strip()[-200:]}")
        wrong = wrong or ("run.json says finished" if _status(here) == "finished" else "")
    (again,) = run(["resume", str(here)], cwd=folder, watch=watch)
    wrong = wrong or complaint(again, (0, 1, 2))  # a directory that was never begun cannot be resumed: that is 2
    return f"{case}: a disk of {room:,} bytes", wrong or go_on(lab, case, here)[0]


def two_at_once(lab: Lab, seed: int, count: int) -> list[Job]:
    """Return `count` commands that two processes run: one does what it does alone, the other ends with one line."""
    rng, cases = random.Random(f"two at once {seed}"), sorted(lab.bits)
    return [partial(_twice, lab, cases[number % len(cases)], rng.choice(AT_ONCE)) for number in range(count)]


def _twice(lab: Lab, case: str, words: list[str], folder: Path) -> tuple[str, str]:
    words_here = [word.replace("DATA", str(lab.folder / "data")) for word in words]
    source = lab.interrupted(case) if words[0] == "resume" else lab.finished(case)
    for place in ("alone", "both"):
        shutil.copytree(source, folder / place / "run")
    (alone,) = run(words_here, cwd=folder / "alone")
    ended = run(words_here, cwd=folder / "both", copies=2)
    lines = [replace(one, err="".join(one.err.splitlines(keepends=True)[-1:])) for one in ended]  # the log before
    wrong = next((said for one in lines if (said := complaint(one, (0, 2)))), "")
    if min(one.code for one in ended) != alone.code:
        wrong = wrong or f"neither did it: {[one.err for one in ended]}"
    wrong = wrong or differing(bits(folder / "both"), bits(folder / "alone")) or leftovers(folder / "both")
    return f"{case}: two of `mezo {' '.join(words)}`", wrong
