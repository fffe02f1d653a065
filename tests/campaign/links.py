"""Put links in the place of a run's files, and run commands twice at once: nothing outside changes, nothing is lost."""

import random
from dataclasses import replace
from pathlib import Path

from mezo_cli.runs.run import APPENDED, OTHERS, REPLACED
from tests.campaign.cases import Job, Lab, Outcome, bits, complaint, copy, differing, leftovers
from tests.campaign.server import ForkServer

KIND = "links"
TEMPORARY = [f".{name}.tmp" for name in (*REPLACED, *APPENDED)]
PLACES = [*OTHERS, *REPLACED, *APPENDED, *TEMPORARY, "checkpoints/.best.new", "checkpoints/.last.old"]
USES = (
    ["runs", "."],
    ["show", "run"],
    ["eval", "run"],
    ["resume", "run"],
    ["resume", "run", "steps=7"],
    ["prune", "run"],
)
TWICE = (
    ["replay", "run", "--step", "2", "--out", "out"],
    ["export", "run", "--out", "out"],
    ["export", "run", "--trajectory", "--out", "out"],
    ["data", "data=files", "data.dir=DATA", "--export", "out"],
    ["resume", "run"],
)


def jobs(lab: Lab, seed: int, count: int) -> list[Job]:
    """Return `count` cases: two of three have a link, in the others two processes run one command at once."""
    rng = random.Random(f"{KIND} {seed}")
    cases = sorted(lab.bits)
    made = []
    for number in range(count):
        case = cases[number % len(cases)]
        if number % 3 == 2:
            made.append(_twice(lab, case, rng.choice(TWICE)))
        else:
            source = lab.finished(case) if rng.random() < 0.3 else lab.interrupted(case)
            made.append(_link(lab, source, rng.choice(PLACES), rng.choice(("same", "other", "folder", "missing"))))
    return made


def _link(lab: Lab, source: Path, name: str, target: str) -> Job:
    """Put a link in the place of a file: to its own content, moved away, to other content, a folder, or nothing."""

    def job(server: ForkServer, folder: Path) -> Outcome:
        here, outside = folder / "here", folder / "outside"
        here.mkdir()
        (outside / "folder").mkdir(parents=True)
        (outside / "other").write_text("mine")
        path = copy(source, here / "run") / name
        path.parent.mkdir(exist_ok=True)
        kind = "other" if target == "same" and not path.exists() else target
        if path.exists():
            path.rename(outside / "same" if kind == "same" else here / "moved")
        path.symlink_to(outside / kind)
        before = _state(outside)
        wrong = ""
        for words, ended in zip(USES, server.run(*USES, cwd=here), strict=True):
            wrong = wrong or (f"`mezo {' '.join(words)}`: {said}" if (said := complaint(ended, (0, 2))) else "")
        wrong = wrong or ("a file outside the run was changed" if _state(outside) != before else "")
        case = f"{source.relative_to(lab.folder)}: {name} is a link to {kind}"
        return Outcome(KIND, case, not wrong, wrong or "nothing outside was touched")

    return job


def _state(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def _twice(lab: Lab, case: str, words: list[str]) -> Job:
    """Run one command in two processes at once: one does what it does alone, the other ends with one line."""

    def job(server: ForkServer, folder: Path) -> Outcome:
        words_here = [word.replace("DATA", str(lab.folder / "data")) for word in words]
        source = lab.interrupted(case) if words[0] == "resume" else lab.finished(case)
        for place in ("alone", "both"):
            copy(source, folder / place / "run")
        (alone,) = server.run(words_here, cwd=folder / "alone")
        ended = server.run(words_here, cwd=folder / "both", copies=2)
        lines = [replace(one, err="".join(one.err.splitlines(keepends=True)[-1:])) for one in ended]  # the log before
        wrong = next((said for one in lines if (said := complaint(one, (0, 2)))), "")
        if not wrong and min(one.code for one in ended) != alone.code:
            wrong = f"neither did it: {[one.err for one in ended]}"
        wrong = wrong or differing(bits(folder / "both"), bits(folder / "alone")) or leftovers(folder / "both")
        return Outcome(KIND, f"{case}: two of `mezo {' '.join(words)}`", not wrong, wrong or "one won")

    return job
