"""Time commands that should start quickly: wall and CPU seconds of a process of its own, from start to end.

    python scripts/bench_runs.py tests/fixtures/runs/mezo --count 1000    `mezo runs` on many copies of a run
    python scripts/bench_runs.py outputs/run --predict --repeats 7        `mezo predict` of two texts by a run

`--predict` times the import of torch and of the run's model class in turn, in CPU seconds (user and system), and prints
the median of each and of their ratios.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def main() -> None:
    """Print the median and the least of the times of listing copies of a run, or of a prediction and of imports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run directory, which is copied")
    parser.add_argument("--count", type=int, default=1000, help="of copies")
    parser.add_argument("--repeats", type=int, default=5, help="of the measurement")
    parser.add_argument("--predict", action="store_true", help="time `mezo predict` beside the imports that it needs")
    args = parser.parse_args()
    if args.predict:
        time_prediction(args.run, args.repeats)
        return
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


def time_prediction(run: Path, repeats: int) -> None:
    """Print CPU seconds of predicting two texts, and of importing torch and the model class, in turn."""
    name = find_model_class(run)
    module = f"transformers.models.{name[0]}.modeling_{name[0]}"
    both = (
        ["-m", "mezo_cli", "predict", str(run), "--text", "good", "--text", "bad"],
        ["-c", f"import torch; from {module} import {name[1]}"],
    )
    times = [[time_process(*words)[1] for words in both] for _ in range(repeats)]
    ratio = statistics.median(predicting / importing for predicting, importing in times)
    medians = [statistics.median(column) for column in zip(*times, strict=True)]
    print(f"CPU seconds, medians of {repeats}: predict {medians[0]:.2f}, imports {medians[1]:.2f}, ratio {ratio:.2f}")


def find_model_class(run: Path) -> tuple[str, str]:
    """Return model_type and class of the model of a run's checkpoint; the embedded model's if it holds an adapter."""
    demo = Path(__file__).resolve().parents[1] / "mezo_cli" / "demo" / "model"
    stored = run / "checkpoints" / "best" / "config.json"
    config = json.loads((stored if stored.is_file() else demo / "config.json").read_text(encoding="utf-8"))
    return config["model_type"], config["architectures"][0]


def time_process(*words: str) -> tuple[float, float, str]:
    """Run Python with these words; return its wall and CPU seconds and its output."""
    began, before = time.perf_counter(), os.times()
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True)
    wall, after = time.perf_counter() - began, os.times()
    cpu = after.children_user - before.children_user + after.children_system - before.children_system
    return wall, cpu, done.stdout


if __name__ == "__main__":
    main()
