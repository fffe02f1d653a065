"""Flip one byte of one file of a run: every command must notice, or do exactly what it does without the flip."""

import random
import re
import shutil
from functools import partial
from pathlib import Path

from tests.campaign.cases import Job, Lab, bits, differing, only_times_differ
from tests.campaign.commands import run as run_commands
from tests.command_line import Result

COMMANDS = {
    "runs": ["runs", "."],
    "compare": ["compare", "."],
    "eval best": ["eval", "run", "--checkpoint", "best"],
    "eval last": ["eval", "run", "--checkpoint", "last"],
    "replay": ["replay", "run", "--step", "2", "--out", "out"],
    "show": ["show", "run"],
    "report": ["report", "run", "--out", "page.html"],
    "predict": ["predict", "run", "--text", "a fine film"],
    "export": ["export", "run", "--out", "exported"],
    "resume": ["resume", "run"],  # at the end, since it writes
}
WRITTEN = {"replay": "out", "export": "exported"}  # command -> the folder that it writes
TIMED = ("show", "report")  # they tell seconds, which no checksum covers
Told = dict[str, tuple[Result, dict[str, str]]]  # command -> how it ended, the files that it wrote


def jobs(lab: Lab, seed: int, count: int) -> list[Job]:
    """Return `count` flips, evenly over the cases, finished and interrupted runs, and the files of each."""
    rng = random.Random(f"flips {seed}")
    runs = [run for case in sorted(lab.bits) for run in (lab.finished(case), lab.interrupted(case))]
    expected: dict[Path, Told] = {}
    left: dict[Path, list[Path]] = {run: [] for run in runs}
    made: list[Job] = []
    for number in range(count):
        run = runs[number % len(runs)]
        if not left[run]:
            files = [path.relative_to(run) for path in sorted(run.rglob("*")) if path.is_file()]
            left[run] = rng.sample(files, len(files))
        name = left[run].pop()
        size = (run / name).stat().st_size
        if size == 0:
            continue
        # half of the flips hit the first kilobyte, where headers and settings are
        offset = rng.randrange(min(size, 1024)) if rng.random() < 0.5 else rng.randrange(size)
        xor = 1 << rng.randrange(8) if rng.random() < 0.75 else rng.randrange(1, 256)
        made.append(partial(_flip, lab, run, name, offset, xor, expected))
    return made


def _flip(
    lab: Lab, source: Path, name: Path, offset: int, xor: int, expected: dict[Path, Told], folder: Path
) -> tuple[str, str]:
    if source not in expected:
        shutil.copytree(source, folder / "plain" / "run")
        expected[source] = _use(folder / "plain")
    run = shutil.copytree(source, folder / "flipped" / "run")
    data = bytearray((run / name).read_bytes())
    before = data[offset]
    data[offset] ^= xor
    (run / name).write_bytes(data)
    told = _use(folder / "flipped")
    wrong = [
        f"`mezo {command}`: {problem}"
        for command in COMMANDS
        if (problem := _problem(name, told[command], expected[source][command]))
        and not (command in TIMED and only_times_differ(run / name, source / name))
    ]
    case = f"{source.relative_to(lab.folder)}/{name} byte {offset}: {before:#04x} -> {data[offset]:#04x}"
    return case, "; ".join(wrong)


def _use(folder: Path) -> Told:
    """Run every command on folder/run; return how each ended, its output without times and this folder's name."""
    results = run_commands(*COMMANDS.values(), cwd=folder)
    told: Told = {}
    for command, result in zip(COMMANDS, results, strict=False):
        out, err = (text.replace(str(folder), "").strip() for text in (result.out, result.err))
        files = {}
        out = re.sub(r"(?m)^time +.*$", "time", out)  # `seconds` is in no checksum: resumed lines differ in it
        if command in WRITTEN:
            files = bits(folder / WRITTEN[command])
        elif command == "resume":
            out = "" if result.code == 0 else out  # its lines tell speeds
            err = "" if result.code == 0 else err
            files = bits(folder / "run")
        told[command] = (Result(result.code, out, err), files)
    for command in COMMANDS:
        told.setdefault(command, (Result(-9, "", "the process died before this command"), {}))
    return told


def _problem(name: Path, told: tuple[Result, dict[str, str]], expected: tuple[Result, dict[str, str]]) -> str:
    """Return in which way a command failed on a flipped file, "" when it did not."""
    (result, files), (plain, plain_files) = told, expected
    said = result.out + "\n" + result.err
    if "Traceback" in said or "Logging error" in said:
        return f"traceback: {said.strip().splitlines()[-1][:160]}"
    if result.code < 0:
        return f"status {result.code}"
    if result.code == 2 and plain.code != 2:
        own = [line for line in result.err.splitlines() if line not in plain.err.splitlines()]
        lines = [line for line in own if not line.startswith("warning: ")]
        if len(lines) != 1 or not lines[0].startswith("error: "):
            return f"not one line: {result.err[-200:]!r}"
        return "" if name.name in "".join(own) else f"another file is blamed: {lines[0][:200]}"
    if result == plain:
        # a flipped file that nothing read is still there, for the command that does
        changed = differing({**files, str(name): ""}, {**plain_files, str(name): ""})
        return f"other files, silently: {changed}" if changed else ""
    if result.code in (0, 2) and name.name in said and ("damaged" in said or "cannot be read" in said):
        return ""
    if result.code == plain.code == 0:
        return f"another result, silently: {_first_difference(result.out, plain.out)}"
    return f"status {result.code} instead of {plain.code}: {result.err[:200]}"


def _first_difference(found: str, expected: str) -> str:
    pairs = zip(found.splitlines(), expected.splitlines(), strict=False)
    return next((f"{new!r} instead of {old!r}"[:300] for new, old in pairs if new != old), "lines are missing")
