"""Time `mezo runs` on many copies of a run: wall and CPU seconds of a process of its own, from start to end.

python scripts/bench/bench_runs.py tests/fixtures/runs/mezo --count 1000
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def main() -> None:
    """Print the median and the least of the times of listing copies of a run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run directory, which is copied")
    parser.add_argument("--count", type=int, default=1000, help="of copies")
    parser.add_argument("--repeats", type=int, default=5, help="of the measurement")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.count):
            shutil.copytree(args.run, Path(folder) / f"run{number}", ignore=shutil.ignore_patterns("checkpoints"))
        walls, cpus = zip(*(time_listing(folder, args.count) for _ in range(args.repeats)), strict=True)
    print(
        f"mezo runs, {args.count:,} runs, {args.repeats} times, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    )
    for name, values in (("wall", walls), ("CPU", cpus)):
        print(f"{name:<5} median {statistics.median(values):.2f} s, least {min(values):.2f} s")


def time_listing(folder: str, count: int) -> tuple[float, float]:
    """List the runs in a process of its own; return its wall and CPU seconds."""
    wall, cpu, out = time_process("-m", "mezo_cli", "runs", folder)
    if sum(line.startswith("run") for line in out.splitlines()) != count + 1:  # with the table's head
        raise SystemExit(f"{count} runs were not listed:\n{out[-300:]}")
    return wall, cpu


def time_process(*words: str) -> tuple[float, float, str]:
    """Run Python with these words; return its wall and CPU seconds and its output."""
    began, before = time.perf_counter(), os.times()
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True)
    wall, after = time.perf_counter() - began, os.times()
    cpu = after.children_user - before.children_user + after.children_system - before.children_system
    return wall, cpu, done.stdout


if __name__ == "__main__":
    main()
