"""Run the same short trainings with two source trees and compare every file that must not differ, bit for bit.

    git worktree add /tmp/old af9a540
    python scripts/compare_trees.py /tmp/old . --out /tmp/compared

For each case it trains in a process of its own with each tree. Compared: trajectory.bin, every .safetensors file, and
the fields of metrics.jsonl, summary.json and predictions.jsonl except times and memory.
Exit status 1 when anything differs.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

DEMO = ["model=demo", "data=demo", "seed=13", "eval_every=5", "log_every=1", "data.eval_limit=40"]
CASES = {
    "demo": ["experiment=demo", "peft=none", "batch_size=64", "steps=20", "eval_every=10"],
    "cls": [*DEMO, "objective=cls", "steps=10", "batch_size=16", "optimizer.lr=1e-3"],
    "lora": [*DEMO, "peft=lora", "steps=10", "batch_size=64", "optimizer.lr=1e-3"],
    "prefix": [*DEMO, "peft=prefix", "steps=6", "batch_size=16", "optimizer.lr=1e-2", "optimizer.eps=1e-1"],
    "head_bf16": [*DEMO, "peft=head", "steps=6", "batch_size=16", "model.compute_dtype=bfloat16"],
    "accuracy": [*DEMO, "objective.loss=accuracy", "steps=8", "batch_size=32", "optimizer.lr=1e-3"],
    "rademacher": [*DEMO, "steps=8", "batch_size=16", "optimizer.noise=rademacher", "optimizer.weight_decay=0.1"],
    "torch_noise": [*DEMO, "steps=4", "batch_size=16", "optimizer.noise=torch"],
    "nspsa": [*DEMO, "steps=6", "batch_size=16", "optimizer.samples=3", "optimizer.sample_schedule=linear"],
    "momentum": [*DEMO, "optimizer=mezo_momentum", "steps=8", "batch_size=16", "optimizer.lr=1e-4"],
    "adam": [*DEMO, "optimizer=mezo_adam", "steps=8", "batch_size=16", "optimizer.lr=1e-4"],
    "adamw": [*DEMO, "optimizer=adamw", "steps=6", "batch_size=16", "optimizer.lr=1e-4"],
    "sgd": [*DEMO, "optimizer=sgd", "steps=6", "batch_size=16", "optimizer.lr=1e-3"],
    "linear_probe": [*DEMO, "optimizer=linear_probe"],
    "probe_then_mezo": [*DEMO, "init=linear_probe", "steps=6", "batch_size=16", "probe_c=1.0"],
    "long_rows": [*DEMO, "steps=4", "batch_size=120", "optimizer.lr=1e-4"],
}
TIMES = {"seconds", "peak_memory_bytes", "crc"}


def mezo(tree: Path, words: list[str], folder: Path) -> None:
    """Run one command with the code of `tree`; a failure ends this script."""
    env = {**os.environ, "PYTHONPATH": str(tree), "MEZO_EAGER": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "mezo_cli", *words]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{tree}: {' '.join(words)}: exit status {done.returncode}\n{done.stderr}")


def facts(path: Path) -> Any:
    """Return what of a JSON or JSON lines file must agree."""
    lines = [json.loads(line) for line in path.read_bytes().splitlines()] if path.suffix == ".jsonl" else None
    values = json.loads(path.read_text()) if lines is None else lines
    rows = values if isinstance(values, list) else [values]
    return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]


def differences(old: Path, new: Path) -> list[str]:
    """Name the files of a run that differ."""
    found = []
    names = [p.relative_to(old) for p in sorted(old.rglob("*")) if p.suffix in (".bin", ".safetensors")]
    found += [str(n) for n in names if not (new / n).exists() or (old / n).read_bytes() != (new / n).read_bytes()]
    for name in ("metrics.jsonl", "summary.json", "predictions.jsonl"):
        if (old / name).exists() and facts(old / name) != facts(new / name):
            found.append(name)
    return found


def make(tree: Path, out: Path, chosen: list[str]) -> None:
    """Train the chosen cases with one tree; what is there already is kept."""
    out.mkdir(parents=True, exist_ok=True)
    for name, words in CASES.items():
        if name not in chosen or (out / name).exists():
            continue
        mezo(tree, ["train", *words, f"hydra.run.dir={name}"], out)
        print(f"{tree}: {name}", flush=True)


def main() -> None:
    """Compare two trees."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="what OUT/old holds already is used again")
    known = [*CASES]
    parser.add_argument("--cases", nargs="+", choices=known, default=known, help="only these")
    args = parser.parse_args()
    make(args.old.resolve(), args.out / "old", args.cases)
    shutil.rmtree(args.out / "new", ignore_errors=True)
    make(args.new.resolve(), args.out / "new", args.cases)
    bad = 0
    for old in sorted(p for p in (args.out / "old").iterdir() if p.name in args.cases):
        found = differences(old, args.out / "new" / old.name)
        bad += bool(found)
        print(f"{old.name:24} {'differs: ' + ', '.join(found) if found else 'the same'}")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
