"""Run the large campaign: kills, power cuts, full disks, flips, two at once, mistakes; print one table.

    python scripts/campaign.py                          # about 25 minutes on 2 cores
    python scripts/campaign.py --only flips --seed 3 --counts flips=100

What is damaged are runs of a tiny model with random weights, made anew. Exit status 1 when anything failed;
what did is listed at once and below the table, with the command or the damage. Ctrl-C ends it with the table of the
cases so far. docs/concepts/reliability.md says what is promised.
"""

import argparse
import itertools
import os
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the tests are no installed package
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from tests.campaign import flips, mistakes, power_cut, stops
from tests.campaign.cases import CASES, Job, build

KINDS = {  # -> (what makes its jobs, their number: of mistakes 0 for all)
    "kills": (stops.kills, 260),
    "power cuts": (power_cut.jobs, 120),
    "full disks": (stops.full_disks, 60),
    "flips": (flips.jobs, 2000),
    "two at once": (stops.two_at_once, 40),
    "mistakes": (mistakes.jobs, 0),
}
EXAMPLES = 60  # of each kind that failed are printed in full
Outcomes = dict[str, list[tuple[str, str]]]  # kind -> what was done, and what is wrong


def run_all(jobs: list[tuple[str, Job]], workers: int, folder: Path) -> Outcomes:
    """Run the jobs, so many at a time; after a Ctrl-C return the outcomes of those that are done."""
    began, ended, outcomes = time.monotonic(), itertools.count(1), Outcomes({kind: [] for kind, _ in jobs})

    def one(number: int) -> None:
        (kind, job), own = jobs[number], folder / str(number)
        own.mkdir(parents=True)
        try:
            case, wrong = job(own)
        finally:
            shutil.rmtree(own, ignore_errors=True)
        if wrong:  # at once: the rest takes long
            print(f"{kind}: {case}\n    {wrong}", file=sys.stderr, flush=True)
        outcomes[kind].append((case, wrong))
        count = next(ended)
        if count % 50 == 0:
            print(f"{count} of {len(jobs)} cases, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)

    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(one, number) for number in range(len(jobs))]
        try:
            for future in futures:
                future.result()
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            print(f"interrupted, of {len(jobs)} cases", file=sys.stderr, flush=True)
    return outcomes


def report(outcomes: Outcomes) -> str:
    """Return the table, in Markdown, and below it what failed."""
    lines, below = ["| kind | cases | passed | failed |", "|---|---|---|---|"], []
    for kind, of_kind in outcomes.items():
        fell = [f"{kind}: {case}\n    {wrong}" for case, wrong in of_kind if wrong]
        lines.append(f"| {kind} | {len(of_kind):,} | {len(of_kind) - len(fell):,} | {len(fell):,} |")
        below += fell[:EXAMPLES]
        if len(fell) > EXAMPLES:
            below.append(f"{kind}: and {len(fell) - EXAMPLES} more")
    return "\n".join([*lines, "", *below])


def main() -> None:
    """Run the campaign."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=list(KINDS), default=list(KINDS), metavar="KIND")
    parser.add_argument("--counts", nargs="+", default=[], metavar="KIND=NUMBER", help="other numbers of cases")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES), help="kinds of runs")
    parser.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1))
    args = parser.parse_args()
    counts = {kind: KINDS[kind][1] for kind in args.only}
    for text in args.counts:
        kind, _, number = text.partition("=")
        if kind not in counts or not number.isdecimal():
            parser.error(f"--counts {text}: KIND=NUMBER, with KIND one of {', '.join(counts)}")
        counts[kind] = int(number)
    if args.only == ["mistakes"]:
        args.cases = ["mezo", "adamw"]
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="campaign") as name:
        lab = build(Path(name) / "lab", tuple(args.cases))
        jobs = [(kind, job) for kind, count in counts.items() for job in KINDS[kind][0](lab, args.seed, count)]
        outcomes = run_all(jobs, args.workers, Path(name) / "jobs")
    print(report(outcomes))
    print(f"\nseed {args.seed}, {time.monotonic() - began:.0f} s")
    failed = any(wrong for of_kind in outcomes.values() for _, wrong in of_kind)
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
