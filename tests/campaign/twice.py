"""Run one command in two processes at once: one does what it does alone, the other ends with one line."""

import random
from dataclasses import replace
from pathlib import Path

from tests.campaign.cases import Job, Lab, Outcome, bits, complaint, copy, differing, leftovers
from tests.campaign.server import ForkServer

KIND = "two at once"
WORDS = (
    ["replay", "run", "--step", "2", "--out", "out"],
    ["export", "run", "--out", "out"],
    ["export", "run", "--trajectory", "--out", "out"],
    ["data", "data=files", "data.dir=DATA", "--export", "out"],
    ["resume", "run"],
)


def jobs(lab: Lab, seed: int, count: int) -> list[Job]:
    """Return `count` cases."""
    rng, cases = random.Random(f"{KIND} {seed}"), sorted(lab.bits)
    return [_twice(lab, cases[number % len(cases)], rng.choice(WORDS)) for number in range(count)]


def _twice(lab: Lab, case: str, words: list[str]) -> Job:
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
