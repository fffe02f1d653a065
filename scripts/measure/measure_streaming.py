#!/usr/bin/env python3
"""Measure layers that are read from disk as they run (model.stream): time against the resident model, and memory.

    python scripts/measure/measure_streaming.py ratio --shape roberta-large --compute float32,bfloat16
    python scripts/measure/measure_streaming.py large --folder /path/with/20GB [--compute float32]

`ratio` takes steps of both in turns, each with a checkpoint of its own. `large` makes a Llama of 7B parameters with
random weights in bfloat16, trains a LoRA of it for 3 steps of 16 x 32 tokens, and looks at the process from outside:
VmHWM, and how much of the checkpoint is in the system's cache (mincore). For docs/how-to/small-memory.md. Linux only.
"""

import argparse
import ctypes
import json
import mmap
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import safetensors.torch
import torch
import transformers
from measure_storage import DEMO, SHAPES, Steps, compare_seconds, config_of, make_folder

from mezo_cli.models.streaming import CHUNK, StreamedLayers, streamed_layers

POLL_SECONDS = 0.05
BYTES = 20_000_000_000  # that the large checkpoint needs, with room


def time_reading(streamed: StreamedLayers, number: int) -> float:
    """Return the seconds that a layer takes to be read from the disk, which is not in the system's memory then."""
    streamed._end(number)
    start = time.perf_counter()
    for _, file, offset, size in streamed._extents[number]:
        for begin in range(0, size, CHUNK):
            os.pread(file, min(CHUNK, size - begin), offset + begin)
    return time.perf_counter() - start


def ratio(args: argparse.Namespace) -> None:
    """Print the median of the ratios of a streamed step to a resident one, with its 95% interval."""
    for compute in (args.compute or "float32,bfloat16").split(","):
        works = []
        for name, stream in (("resident", False), ("streamed", True)):
            folder = make_folder(args.folder / name, args.shape, compute)  # each its own: cached pages are shared
            config = config_of(folder, args.shape, "float32", compute, "lora")
            model = config.model.replace(stream=stream)
            works.append(Steps(config.replace(model=model), args.rows, args.tokens))
        times = [[work.step() for work in works] for _ in range(args.rounds + 1)][1:]
        streamed = streamed_layers(works[1].session.loaded.model)
        assert streamed is not None
        rate = median(streamed.sizes[-1] / time_reading(streamed, len(streamed.sizes) - 1) for _ in range(5))
        print(
            f"{args.shape}, LoRA, {args.rows} x {args.tokens}, {compute}, "
            f"{compare_seconds(('resident', 'streamed'), times)}; {sum(streamed.sizes) / 1e9:.2f} GB per step, "
            f"disk {rate / 1e9:.2f} GB/s",
            flush=True,
        )


def make_large(folder: Path) -> Path:
    """Write a Llama of 32 layers of width 4,096 with random weights, bfloat16, a file per layer."""
    if (folder / "model.safetensors.index.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(folder).free < BYTES:
        sys.exit(f"{folder}: {BYTES / 1e9:.0f} GB are needed, {shutil.disk_usage(folder).free / 1e9:.0f} are free")
    config = transformers.LlamaConfig(
        hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, architectures=["LlamaForCausalLM"]
    )
    with torch.device("meta"):
        empty = transformers.AutoModelForCausalLM.from_config(config)
    files: dict[str, str] = {}
    for name in empty.state_dict():
        files[name] = f"{name.split('.')[2]}.safetensors" if ".layers." in name else "rest.safetensors"
    for file in sorted(set(files.values())):
        tensors = {}
        for name in (name for name in files if files[name] == file):
            shape, mean = empty.state_dict()[name].shape, 1.0 if "norm" in name else 0.0
            tensors[name] = torch.empty(shape).normal_(mean, 0.02).bfloat16()
        safetensors.torch.save_file(tensors, folder / file, {"format": "pt"})
    config.save_pretrained(folder)
    for part in (DEMO / "model").glob("*token*"):
        shutil.copyfile(part, folder / part.name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return folder


def cached_bytes(files: list[Path]) -> int:
    """Return how much of files is in the system's cache (mincore)."""
    total = 0
    for file in files:
        with (
            file.open("rb") as opened,
            mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED) as view,
        ):
            array = np.frombuffer(view, dtype=np.uint8)
            found = np.zeros(-(-len(array) // mmap.PAGESIZE), dtype=np.uint8)
            ctypes.CDLL(None).mincore(
                ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(len(array)), ctypes.c_void_p(found.ctypes.data)
            )
            total += int((found & 1).sum()) * mmap.PAGESIZE
            del array
    return total


def large(args: argparse.Namespace) -> None:
    """Train a LoRA of the large model, and print the peak of its process and of the cached part of its checkpoint."""
    compute = args.compute or "bfloat16"
    if compute == "bfloat16" and "bf16" not in Path("/proc/cpuinfo").read_text(encoding="utf-8"):
        sys.exit("this CPU has no products in bfloat16 (avx512_bf16, amx_bf16): give --compute float32")
    folder, run = make_large(args.folder / "llama-7b"), args.folder / f"run-{int(time.time())}"
    words = [f"model.path={folder}", "model.name=llama-7b", "objective=lm", "peft=lora", "model.stream=true"]
    words += [f"model.compute_dtype={compute}", f"model.quantize={args.quantize}", f"hydra.run.dir={run}"]
    words += ["task=sst2", "data=demo", "data.shots=8", "data.eval_limit=16", f"task.lm.max_length={args.tokens}"]
    words += [f"batch_size={args.rows}", "steps=3", "eval_every=3", "log_every=1", "test_at_start=false"]
    child = subprocess.Popen([sys.executable, "-m", "mezo_cli", "train", *words])
    files, loading, most, peak = sorted(folder.glob("*.safetensors")), 0, 0, 0
    while child.poll() is None:
        try:
            lines = Path(f"/proc/{child.pid}/status").read_text(encoding="utf-8").splitlines()
            peak = max([peak, *(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))])
        except OSError:
            continue
        cached = cached_bytes(files)
        if (run / "metrics.jsonl").exists():  # written after the first evaluation
            most = max(most, cached)
        else:
            loading = max(loading, cached)
        time.sleep(POLL_SECONDS)
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    seconds = [line["seconds"] for line in metrics if line["kind"] == "train"]
    size = sum(file.stat().st_size for file in files)
    print(
        f"\n7B, LoRA, {args.rows} x {args.tokens}, {compute}, quantize={args.quantize}: exit {child.returncode}; "
        f"checkpoint {size / 1e9:.1f} GB; VmHWM {peak / 1e9:.2f} GB; of the checkpoint at most "
        f"{loading / 1e9:.2f} GB cached before the first evaluation has ended, {most / 1e9:.2f} GB from then on; "
        f"seconds at the steps {seconds}"
    )


def main() -> None:
    """Run a stage."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    stages: dict[str, Any] = {one.__name__: one for one in (ratio, large)}
    parser.add_argument("stage", choices=stages)
    parser.add_argument("--shape", default="roberta-large", choices=SHAPES)
    parser.add_argument("--compute", help="ratio: both, float32,bfloat16; large: bfloat16")
    parser.add_argument("--quantize", default="none")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--folder", type=Path, default=Path("outputs/streaming"))
    args = parser.parse_args()
    stages[args.stage](args)


if __name__ == "__main__":
    main()
