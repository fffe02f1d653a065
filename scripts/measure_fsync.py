"""Measure how much of a run's time its fsyncs take, and name the disk.

    python scripts/measure_fsync.py experiment=demo
    python scripts/measure_fsync.py --roberta-base data=demo steps=40 eval_every=20 batch_size=16 data.eval_limit=100

It trains once in this process with the given settings, into a run directory under `--out` (a temporary folder of the
working directory by default, removed at the end: where the folder lies decides which disk is measured).
`--roberta-base` trains random weights of roberta-base's shape (500 MB per checkpoint) with the tokenizer of the demo.
"""

import argparse
import importlib.resources
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from mezo_cli.cli import main as mezo


def time_fsyncs() -> list[float]:
    """Replace os.fsync by itself with a clock; return the list to which each call adds its seconds."""
    seconds: list[float] = []
    fsync = os.fsync

    def timed(fd: Any) -> None:
        began = time.perf_counter()
        try:
            fsync(fd)
        finally:
            seconds.append(time.perf_counter() - began)

    os.fsync = timed
    return seconds


def save_roberta_base(folder: Path) -> Path:
    """Save random weights of roberta-base's shape with the demo's tokenizer."""
    import torch
    from transformers import AutoTokenizer, RobertaConfig, RobertaForMaskedLM

    tokenizer = AutoTokenizer.from_pretrained(str(importlib.resources.files("mezo_cli") / "demo" / "model"))
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    config = RobertaConfig(vocab_size=50_265, max_position_embeddings=514, type_vocab_size=1, **special)
    torch.manual_seed(0)
    RobertaForMaskedLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def disk_of(folder: Path) -> str:
    """Return device, mount point and file system of a folder, as /proc/mounts has them."""
    mounts = [line.split()[:3] for line in Path("/proc/mounts").read_text().splitlines()]
    device, mount, kind = max((m for m in mounts if folder.resolve().is_relative_to(m[1])), key=lambda m: len(m[1]))
    return f"{device} at {mount} ({kind})"


def main() -> None:
    """Train once and print the fsyncs' share."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE", help="settings of the run, as for mezo train")
    parser.add_argument("--roberta-base", action="store_true", help="train random weights of that shape")
    parser.add_argument("--out", type=Path, default=Path(), help="where the run directory is made for the time")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="measure_fsync", dir=args.out) as name:
        folder = Path(name)
        words = [*args.words, f"hydra.run.dir={folder / 'run'}"]
        if args.roberta_base:
            words.append(f"model.path={save_roberta_base(folder / 'model')}")
        seconds = time_fsyncs()
        sys.argv = ["mezo", "train", *words]
        try:
            mezo()
        except SystemExit as end:
            if end.code:
                raise
        summary = json.loads((folder / "run" / "summary.json").read_text())
        total, whole = sum(seconds), summary["seconds"]
        print(f"{len(seconds)} fsyncs: {total:.2f} s of {whole:.1f} s of training and evaluation")
        print(f"({total / whole:.2%}), the slowest {max(seconds):.2f} s, on {disk_of(folder)}")


if __name__ == "__main__":
    main()
