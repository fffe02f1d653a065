"""Kill a training, then go on: the result must be that of a training that was never killed."""

import random
import signal
from pathlib import Path

from tests.campaign.cases import Job, Lab, Outcome, complaint, go_on
from tests.campaign.server import ForkServer

KIND = "kills"


def jobs(lab: Lab, seed: int, count: int) -> list[Job]:
    """Return `count` kills: two of three just before a file operation, the others at a random moment.

    A third of the former kill the resumed run once more. The operations of each case are drawn without repetition as
    long as there are any.
    """
    rng = random.Random(f"{KIND} {seed}")
    cases = sorted(lab.count)
    left: dict[str, list[int]] = {case: [] for case in cases}
    made = []
    for number in range(count):
        case = cases[number % len(cases)]
        if number % 3 == 2:
            made.append(_at_random(lab, case, rng.uniform(0.0, 1.2)))
            continue
        if not left[case]:
            left[case] = rng.sample(range(1, lab.count[case] + 1), lab.count[case])
        again = rng.randrange(1, lab.count[case]) if rng.random() < 1 / 3 else 0
        made.append(_before(lab, case, left[case].pop(), rng.random() < 0.5, again))
    return made


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
        return Outcome(KIND, name, not wrong, wrong or "same bits")

    return job


def _at_random(lab: Lab, case: str, seconds: float) -> Job:
    def job(server: ForkServer, folder: Path) -> Outcome:
        run = folder / "run"
        server.run(lab.train(case, run), cwd=folder, after=[int(signal.SIGKILL), seconds])
        wrong, _ = go_on(lab, case, run, server)
        return Outcome(KIND, f"{case}: killed after {seconds:.3f} s", not wrong, wrong or "same bits")

    return job
