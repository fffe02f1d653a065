"""Measure peak memory and time of a step of a model in half precision, or of a quantised base, against float32.

    python scripts/measure/measure_storage.py --shape roberta-large
    python scripts/measure/measure_storage.py --shape opt-1.3b --storage bfloat16 --compute bfloat16
    python scripts/measure/measure_storage.py --shape opt-1.3b --storage float32,int8,nf4 --compute float32 \
        --peft lora --rounds 0 --steps 1

The weights are random, in a folder that is made under `--folder` and used again. The peak is VmHWM less what the
imported libraries take, as in bench_step.py, each in a process of its own; times are of one process, in turn. For a CPU
without AVX-512 set ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2. Linux only.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import transformers
from scipy.stats import bootstrap

from mezo_cli import models
from mezo_cli.config.compose import build_config
from mezo_cli.config.schema import Config, TokenizedExample
from mezo_cli.models.quantized import count_parameters
from mezo_cli.process.memory import trim_malloc
from mezo_cli.training.prepare import load_session
from mezo_cli.training.session import Session

DEMO = Path(models.__file__).parents[1] / "demo"
SHAPES: dict[str, tuple[str, Any]] = {  # objective, config of transformers
    "roberta-base": ("mlm", lambda: roberta(768, 12)),
    "roberta-large": ("mlm", lambda: roberta(1024, 24)),
    "opt-125m": ("lm", lambda: opt(768, 12, 12)),
    "opt-1.3b": ("lm", lambda: opt(2048, 24, 32)),
}


def roberta(width: int, layers: int) -> Any:
    """Return the config of a RoBERTa."""
    return transformers.RobertaConfig(
        vocab_size=50265,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        intermediate_size=4 * width,
        max_position_embeddings=514,
        type_vocab_size=1,
        architectures=["RobertaForMaskedLM"],
    )


def opt(width: int, layers: int, heads: int) -> Any:
    """Return the config of an OPT."""
    return transformers.OPTConfig(
        hidden_size=width,
        word_embed_proj_dim=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        ffn_dim=4 * width,
        architectures=["OPTForCausalLM"],
    )


def make_folder(home: Path, shape: str, dtype: str) -> Path:
    """Write a checkpoint with random weights in that dtype, and the demo's tokenizer, if it is not there yet."""
    folder = home / f"{shape}-{dtype}"
    if (folder / "tokenizer.json").exists():
        return folder
    objective, make = SHAPES[shape]
    settings = make()
    kind = transformers.AutoModelForMaskedLM if objective == "mlm" else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        empty = kind.from_config(settings)
    tensors, seen = {}, set()
    for name, p in empty.named_parameters():
        if id(p) not in seen and "lm_head.decoder" not in name:
            seen.add(id(p))
            spread = 1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0
            tensors[name] = torch.empty(p.shape).normal_(spread, 0.02).to(getattr(torch, dtype))
    folder.mkdir(parents=True, exist_ok=True)
    settings.save_pretrained(folder)
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    for file in (DEMO / "model").glob("*token*"):
        shutil.copyfile(file, folder / file.name)
    return folder


def stored_as(storage: str, peft: str) -> list[str]:
    """Return the settings of how weights are stored: a dtype, or int8 or nf4 of a quantised base."""
    quantized = [f"model.quantize={storage}"] if storage in ("int8", "nf4") else [f"model.dtype={storage}"]
    return [*quantized, f"peft={peft}"]


def config_of(folder: Path, shape: str, storage: str, compute: str, peft: str) -> Config:
    """Return the config of a run."""
    words = [
        *stored_as(storage, peft),
        f"model.path={folder}",
        f"model.name={shape}",
        "model.device=cpu",
        f"objective={SHAPES[shape][0]}",
    ]
    words += [f"model.compute_dtype={compute}", "data=demo", "steps=100", "optimizer.lr=1e-6"]
    return build_config(words)


def memory(field: str) -> int:
    """Return a field of /proc/self/status in bytes: VmRSS (resident) or VmHWM (its peak)."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


class Steps:
    """A session that takes steps on one batch.

    Args:
        config: of the run.
        rows, tokens: the size of the batch.
        trains: check the model's scores as the start of a run does.
    """

    def __init__(self, config: Config, rows: int, tokens: int, trains: bool = False) -> None:
        self.session: Session = load_session(config, trains=trains)
        generator = torch.Generator().manual_seed(0)
        vocabulary = min(len(self.session.encoder.tokenizer), 5000)
        texts = torch.randint(10, vocabulary, (rows, tokens), generator=generator).tolist()
        mask, masked = self.session.encoder.tokenizer.mask_token_id, config.objective.name == "mlm"
        self.rows = [
            TokenizedExample([*text[:-1], mask] if masked else text, [0] * tokens, tokens - 1, i % 2)
            for i, text in enumerate(texts)
        ]
        self.session.exclude_unreachable(self.rows[0])
        self.done = 0

    @torch.no_grad()
    def step(self) -> float:
        """Take a step; return its seconds."""
        start = time.perf_counter()
        self.session.step(self.rows, self.done)
        self.done += 1
        trim_malloc()
        return time.perf_counter() - start


def step_peak(config: Config, stored: list[str], rows: int, tokens: int, steps: int) -> dict[str, Any]:
    """Return the peak of a process that takes steps, less what the libraries take, in bytes; and all of VmHWM."""
    demo = build_config(["model=demo", "data=demo", *stored])
    Steps(demo, 2, 8).step()  # the compiler and its libraries count as imported
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again at what is resident now
    work = Steps(config, rows, tokens)
    start_up, seconds = memory("VmHWM"), [work.step()]
    Path("/proc/self/clear_refs").write_text("5")
    seconds += [work.step() for _ in range(steps)]
    count = count_parameters(work.session.loaded.model)
    return {
        "parameters": count,
        "peak": memory("VmHWM") - before,
        "start_up": start_up - before,
        "process": memory("VmHWM"),
        "seconds": seconds,
    }


def compare_seconds(names: Sequence[str], times: Sequence[Sequence[float]]) -> str:
    """Return the median seconds of two works that took turns, [rounds, 2], and of the second's ratio to the first.

    The ratio has the 95% percentile interval of its median over bootstrap samples of the rounds.
    """
    ratios = [second / first for first, second in times]
    low, high = bootstrap([ratios], np.median, random_state=0, method="percentile").confidence_interval
    first, second = (statistics.median(column) for column in zip(*times, strict=True))
    what = (
        f"{torch.get_num_threads()} thread(s), {len(times)} rounds: {names[0]} {first:.2f} s, {names[1]} {second:.2f} s"
    )
    return f"{what}, ratio {statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})"


def in_process(words: list[str]) -> dict[str, Any]:
    """Run this script with `words` and return the JSON of its last line."""
    done = subprocess.run([sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def measure_step(args: argparse.Namespace) -> None:
    """Print peak and time of a step for each storage and compute dtype."""
    pairs = [(storage, compute) for storage in args.storage.split(",") for compute in args.compute.split(",")]
    folder = make_folder(args.folder, args.shape, args.file)
    size = ["--rows", str(args.rows), "--tokens", str(args.tokens), "--folder", str(args.folder), "--file", args.file]
    size += ["--steps", str(args.steps), "--peft", args.peft]
    peaks = {
        (storage, compute): in_process(
            ["--one", "--shape", args.shape, "--storage", storage, "--compute", compute, *size]
        )
        for storage, compute in ([] if args.times_only else pairs)
    }
    times: dict[tuple[str, str], list[float]] = {pair: [] for pair in pairs}
    if args.rounds:
        work = {pair: Steps(config_of(folder, args.shape, *pair, args.peft), args.rows, args.tokens) for pair in pairs}
        for number in range(args.rounds + 1):
            for pair, steps in work.items():
                seconds = steps.step()
                times[pair] += [seconds] if number else []  # the first step makes buffers
    print(f"\n{args.shape}, {args.rows} x {args.tokens} tokens, {torch.get_num_threads()} thread(s)")
    print("| stored as | computed in | peak GB | peak / float32 | start-up GB | higher of both | s per step | ratio |")
    print("|---|---|---|---|---|---|---|---|")
    base = pairs[0]
    for pair in pairs:
        mine = times[pair] or peaks[pair]["seconds"][1:]
        ratio = statistics.median(a / b for a, b in zip(mine, times[base] or peaks[base]["seconds"][1:], strict=True))
        cells = "| | |"
        if peaks:
            peak, start_up = peaks[pair]["peak"], peaks[pair]["start_up"]
            higher = max(peak, start_up) / max(peaks[base]["peak"], peaks[base]["start_up"])
            cells = f"{peak / 1e9:.2f} | {peak / peaks[base]['peak']:.2f} | {start_up / 1e9:.2f} | {higher:.2f}"
        print(f"| {' | '.join(pair)} | {cells} | {statistics.median(mine):.2f} | {ratio:.2f} |", flush=True)


def main() -> None:
    """Measure, or with --one measure one case and print it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--shape", default="roberta-large", choices=SHAPES)
    parser.add_argument("--storage", default="float32,bfloat16,float16", help="also int8 and nf4, with --peft")
    parser.add_argument("--peft", default="none")
    parser.add_argument("--compute", default="float32,bfloat16")
    parser.add_argument("--file", default="float32", help="dtype of the checkpoint's file")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--steps", type=int, default=3, help="over which the peak is taken, after a first one")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument(
        "--rounds", type=int, default=3, help="0: times are those of the processes that measure the peak"
    )
    parser.add_argument("--times-only", action="store_true", help="leave the peaks out")
    parser.add_argument("--folder", type=Path, default=Path("outputs/storage"))
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.one:
        measure_step(args)
        return
    folder = make_folder(args.folder, args.shape, args.file)
    config = config_of(folder, args.shape, args.storage, args.compute, args.peft)
    print(json.dumps(step_peak(config, stored_as(args.storage, args.peft), args.rows, args.tokens, args.steps)))


if __name__ == "__main__":
    main()
