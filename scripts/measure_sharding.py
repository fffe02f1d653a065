"""Measure the memory and the time of a step whose weights are sharded over the ranks of one machine.

    python scripts/measure_sharding.py --shape opt-125m                  a table: one process, 2 ranks, fully_shard
    python scripts/measure_sharding.py --shape opt-1.3b --modes full     2 ranks alone, where memory is short

`one` is one process, `full` are ranks with distributed.shard=full. `fsdp2` are ranks whose model torch's `fully_shard`
has sharded layer by layer: two forwards without gradients of the same batch per step, the way of FSDP2 without a
perturbation, an update and a check. Weights are random, stored in bfloat16 in a folder under `--folder`, and float32 in
memory. The peak is VmHWM of a rank less what it takes with the libraries loaded and one step of the embedded model
taken; the first figure is that of loading and of the checks of a start, the second that of the steps. Times are the
median of the steps after the first, of ranks of one thread each. Linux only.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from measure_storage import SHAPES, Steps, config_of, make_folder
from process_memory import memory, reset_peak

from mezo_cli.config.compose import build_config
from mezo_cli.distributed.ranks import Ranks, sharing
from mezo_cli.system import trim_malloc

MODES = ("one", "full", "fsdp2")


def measure(step: Any, before: int, steps: int) -> dict[str, Any]:
    """Take steps, and return the peaks of start and steps in bytes, and the seconds of each step."""
    start_up = memory("VmHWM") - before
    trim_malloc()  # as after each step of a run
    reset_peak()
    seconds = [step() for _ in range(steps + 1)]
    return {"start": start_up, "peak": memory("VmHWM") - before, "seconds": seconds[1:]}


def of_mezo(folder: Path, args: argparse.Namespace, mode: str) -> dict[str, Any]:
    """Measure this project's step, in one process or as one of the ranks."""
    Steps(build_config(["model=demo", "data=demo"]), 2, 8).step()  # the libraries and the compiled noise
    before = memory("VmRSS")
    reset_peak()
    config = config_of(
        folder, args.shape, "float32", "float32", f"distributed.shard={'full' if mode == 'full' else 'none'}"
    )
    if mode == "one":
        work = Steps(config, args.rows, args.tokens, trains=True)
        return measure(work.step, before, args.steps)
    store, rank, size = next(iter(dist.rendezvous("env://")))
    ranks = Ranks(rank, size, store)
    ranks.start(config)
    with sharing(ranks):
        work = Steps(config, args.rows, args.tokens, trains=True)
        found = measure(work.step, before, args.steps)
    found["exchanged"] = ranks.exchanged["step"] / (args.steps + 1)
    ranks.close()
    return found


def of_fully_shard(args: argparse.Namespace) -> dict[str, Any]:
    """Measure two forwards per step of a model that `fully_shard` has sharded."""
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    before = memory("VmRSS")
    with torch.device("meta"):
        model: Any = transformers.AutoModelForCausalLM.from_config(SHAPES[args.shape][1]()).eval()
    layers = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))
    for layer in layers:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cpu")
    model.tie_weights()
    with torch.no_grad():
        for p in model.parameters():
            p.to_local().normal_(0, 0.02)
    ids = torch.randint(10, 5000, (args.rows, args.tokens), generator=torch.Generator().manual_seed(0))

    @torch.no_grad()
    def step() -> float:
        start = time.perf_counter()
        for _ in range(2):
            model(input_ids=ids, use_cache=False, logits_to_keep=1)
        return time.perf_counter() - start

    found = measure(step, before, args.steps)
    dist.destroy_process_group()
    return found


def run(args: argparse.Namespace, mode: str) -> list[dict[str, Any]]:
    """Return what each process of a mode measures."""
    own = [__file__, "--child", mode, "--shape", args.shape, "--folder", str(args.folder)]
    own += ["--rows", str(args.rows), "--tokens", str(args.tokens), "--steps", str(args.steps)]
    count = 1 if mode == "one" else args.ranks
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"] if count > 1 else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *launcher, *own], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return [json.loads(line) for line in lines]


def main() -> None:
    """Measure the modes in turn and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[name for name in SHAPES if name.startswith("opt")], default="opt-125m")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--steps", type=int, default=3, help="after a first one")
    parser.add_argument("--folder", type=Path, default=Path("outputs/shapes"), help="for the checkpoints")
    parser.add_argument("--child", choices=MODES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    folder = make_folder(args.folder, args.shape, "bfloat16")
    if args.child is not None:
        found = of_fully_shard(args) if args.child == "fsdp2" else of_mezo(folder, args, args.child)
        print(json.dumps(found), flush=True)
        return
    with torch.device("meta"):
        count = sum(
            p.numel() for p in transformers.AutoModelForCausalLM.from_config(SHAPES[args.shape][1]()).parameters()
        )
    print(f"{args.shape}: {count:,} weights, {4 * count / 1e9:.2f} GB in float32; {args.rows} x {args.tokens} tokens")
    print(
        f"{'':6}  {'ranks':>5}  {'start, GB':>9}  {'steps, GB':>9}  {'s per step':>10}  {'MB exchanged per step':>21}"
    )
    for mode in args.modes:
        of_ranks = run(args, mode)
        start, peak = (max(one[key] for one in of_ranks) / 1e9 for key in ("start", "peak"))
        seconds = max(statistics.median(one["seconds"]) for one in of_ranks)
        exchanged = f"{of_ranks[0]['exchanged'] / 1e6:21.0f}" if "exchanged" in of_ranks[0] else ""
        print(f"{mode:6}  {len(of_ranks):5}  {start:9.2f}  {peak:9.2f}  {seconds:10.2f}  {exchanged}", flush=True)


if __name__ == "__main__":
    main()
