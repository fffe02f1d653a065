"""Run the large campaign: kills, power cuts, full disks, flips, two at once, mistakes; print one table.

    python scripts/campaign.py                          # about 25 minutes on 2 cores
    python scripts/campaign.py --only flips --seed 3 --counts flips=100

What is damaged are runs of a tiny model with random weights, made anew. Exit status 1 when anything failed;
what did is listed at once and below the table, with the command or the damage. Ctrl-C ends it with the table of the
cases so far. docs/concepts/reliability.md says what is promised.
"""

import argparse
import os
import queue
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the tests are no installed package
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from tests.campaign import flips, full_disk, kills, mistakes, power_cut, twice
from tests.campaign.cases import CASES, Job, Lab, Outcome, build
from tests.campaign.server import ForkServer

COUNTS = {
    "kills": 260,
    "power cuts": 120,
    "full disks": 60,
    "flips": 2000,
    "two at once": 40,
    "mistakes": 0,
}
EXAMPLES = 60  # of each kind that failed are printed in full


def make_jobs(lab: Lab, seed: int, counts: dict[str, int]) -> list[Job]:
    """Return the jobs of every kind in `counts`: of mistakes so many of each group, 0 for all of them."""
    makers = {module.KIND: module for module in (kills, power_cut, full_disk, flips, twice, mistakes)}
    jobs: list[Job] = []
    for kind, count in counts.items():
        jobs += mistakes.jobs(lab, seed, count or None) if kind == "mistakes" else makers[kind].jobs(lab, seed, count)
    return jobs


def run_all(jobs: list[Job], servers: "queue.Queue[ForkServer]", workers: int, folder: Path) -> list[Outcome]:
    """Run the jobs, one at a time on each server; after a Ctrl-C return the outcomes of those that are done."""
    began, outcomes = time.monotonic(), list[Outcome]()

    def one(number: int) -> None:
        server, own = servers.get(), folder / str(number)
        own.mkdir(parents=True)
        try:
            outcome = jobs[number](server, own)
            if not outcome.passed:  # at once: the rest takes long
                print(f"{outcome.kind}: {outcome.case}\n    {outcome.what}", file=sys.stderr, flush=True)
            outcomes.append(outcome)
        finally:
            servers.put(server)
            shutil.rmtree(own, ignore_errors=True)
        if len(outcomes) % 50 == 0:
            seconds = time.monotonic() - began
            print(f"{len(outcomes)} of {len(jobs)} cases, {seconds:.0f} s", file=sys.stderr, flush=True)

    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(one, number) for number in range(len(jobs))]
        try:
            for future in futures:
                future.result()
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            print(f"interrupted after {len(outcomes)} of {len(jobs)} cases", file=sys.stderr, flush=True)
    return outcomes


def report(outcomes: list[Outcome]) -> str:
    """Return the table, in Markdown, and below it what failed."""
    lines = ["| kind | cases | passed | failed |", "|---|---|---|---|"]
    below = []
    for kind in dict.fromkeys(outcome.kind for outcome in outcomes):
        of_kind = [outcome for outcome in outcomes if outcome.kind == kind]
        fell = [outcome for outcome in of_kind if not outcome.passed]
        lines.append(f"| {kind} | {len(of_kind):,} | {len(of_kind) - len(fell):,} | {len(fell):,} |")
        below += [f"{kind}: {outcome.case}\n    {outcome.what}" for outcome in fell[:EXAMPLES]]
        if len(fell) > EXAMPLES:
            below.append(f"{kind}: and {len(fell) - EXAMPLES} more")
    return "\n".join([*lines, "", *below])


def main() -> None:
    """Run the campaign."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=list(COUNTS), default=list(COUNTS), metavar="KIND")
    parser.add_argument("--counts", nargs="+", default=[], metavar="KIND=NUMBER", help="other numbers of cases")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES), help="kinds of runs")
    parser.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1))
    args = parser.parse_args()
    counts = {kind: COUNTS[kind] for kind in args.only}
    for text in args.counts:
        kind, _, number = text.partition("=")
        if kind not in counts or not number.isdecimal():
            parser.error(f"--counts {text}: KIND=NUMBER, with KIND one of {', '.join(counts)}")
        counts[kind] = int(number)
    if args.only == ["mistakes"]:
        args.cases = ["mezo", "adamw"]
    began = time.monotonic()
    servers: queue.Queue[ForkServer] = queue.Queue()
    with tempfile.TemporaryDirectory(prefix="campaign") as name:
        all_servers = [ForkServer() for _ in range(args.workers)]
        for server in all_servers:
            servers.put(server)
        lab = build(all_servers[0], Path(name) / "lab", tuple(args.cases))
        outcomes = run_all(make_jobs(lab, args.seed, counts), servers, args.workers, Path(name) / "jobs")
        for server in all_servers:
            server.close()
    print(report(outcomes))
    print(f"\nseed {args.seed}, {time.monotonic() - began:.0f} s")
    sys.exit(0 if all(outcome.passed for outcome in outcomes) else 1)


if __name__ == "__main__":
    main()
