"""Time the commands that read runs, each in a process of its own: on many copies of a run, and on a long run.

python scripts/bench/bench_reports.py RUN --count 3000 --lines 200000
"""

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mezo_cli.runs import Run
from mezo_cli.runs.jsonl import NO_CRC, add_checksum


def main() -> None:
    """Print the least and the median of the CPU seconds, which other processes do not lengthen, and of the wall's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a finished run, which is copied with other seeds and learning rates")
    parser.add_argument("--count", type=int, default=3000, help="of copies")
    parser.add_argument("--lines", type=int, default=200_000, help="of the long run's metrics.jsonl")
    parser.add_argument("--repeats", type=int, default=3, help="of each measurement")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        many, long, page = Path(folder) / "runs", Path(folder) / "long", Path(folder) / "page.html"
        for number in range(args.count):
            copy(args.run, many / f"run{number}", number)
        lengthen(copy(args.run, long, 0), args.lines)
        print(
            f"{args.count:,} runs, a run of {args.lines:,} lines; load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores"
        )
        for words in (["runs", many], ["compare", many], ["report", many, "--out", page], ["show", long]):
            times = [time_process("-m", "mezo_cli", *map(str, words)) for _ in range(args.repeats)]
            walls, cpus = zip(*times, strict=True)
            texts = (f"{min(each):.2f} (median {statistics.median(each):.2f})" for each in (cpus, walls))
            print(f"mezo {words[0]:<8} {next(texts)} s of CPU, {next(texts)} s in all")


def copy(run: Path, to: Path, number: int) -> Path:
    """Copy a run with another seed and learning rate: five seeds at each of the learning rates."""
    shutil.copytree(run, to, ignore=shutil.ignore_patterns("checkpoints", "train.log"))
    text = (run / "config.yaml").read_text()
    info, stored = (
        Run(run).info(),
        [line.split()[1] for line in text.splitlines() if line.startswith(("  lr:", "seed:"))],
    )
    lr, seed = f"  lr: {1e-6 * (1 + number // 5):.6e}\n", number % 5
    text = text.replace(f"  lr: {stored[0]}\n", lr).replace(f"seed: {stored[1]}\n", f"seed: {seed}\n")
    (to / "config.yaml").write_text(text)
    info |= {"config_sha256": hashlib.sha256(text.encode()).hexdigest(), "data_fingerprint": f"rows of {seed}"}
    (to / "run.json").write_text(json.dumps(add_checksum(info)))
    return to


def lengthen(run: Path, count: int) -> None:
    """Put training lines between the evaluations of a run."""
    first, *rest = [line for line in Run(run).metrics() if line["kind"] == "eval"]
    (example,) = [line for line in Run(run).metrics() if line["kind"] == "train"][:1]
    lines, crc = [], NO_CRC
    for line in [first, *({**example, "step": step} for step in range(1, count + 1)), *rest]:
        sealed = add_checksum({key: value for key, value in line.items() if key != "crc"}, crc)
        lines.append(json.dumps(sealed))
        crc = sealed["crc"]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    Run(run).update(ends=Run(run).ends())


def time_process(*words: str) -> tuple[float, float]:
    """Run Python with these words; return its wall and CPU seconds."""
    began, before = time.perf_counter(), os.times()
    subprocess.run([sys.executable, *words], capture_output=True, check=True)
    wall, after = time.perf_counter() - began, os.times()
    return wall, after.children_user - before.children_user + after.children_system - before.children_system


if __name__ == "__main__":
    main()
