"""Time one MeZO step, the reference's step and plain forwards, interleaved in one process, on the same batch.

    python scripts/bench_step.py                       every shape and batch (half an hour on 2 cores)
    python scripts/bench_step.py --shapes large --batches 16x32 --rounds 3
    python scripts/bench_step.py --memory              peak memory too, each in a process of its own

`reference` is the published step, written from its description: torch.normal for each tensor from a reseeded global
generator, out of place, four passes over the weights, the original forward with the vocabulary head at the mask.
`floor` is two plain forwards: body and head at the mask, in inference mode. In bfloat16 it runs under autocast from
float32 weights, as MeZO stores them; `floor bf16 weights` runs from bfloat16 weights. With `lora` the model has
adapters in its queries and values. `replay` is one step of `mezo replay`, timed in calls of sixteen steps. Compare
ratios, not seconds.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

# As the command line sets them, before torch is imported: threads wait without spinning, large blocks in huge pages.
os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "THP_MEM_ALLOC_ENABLE": "1"} | os.environ

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import RobertaConfig, RobertaForMaskedLM

from mezo_cli import system
from mezo_cli.config.schema import ModelConfig, PeftConfig, TokenizedExample
from mezo_cli.models import MASKED_LM, LoadedModel, adapters
from mezo_cli.objectives.collate import Batch, collate
from mezo_cli.objectives.mlm import MaskedLabelScorer
from mezo_cli.optim import make_config
from mezo_cli.optim.mezo import Mezo
from mezo_cli.perturb.forward import PerturbedForward
from mezo_cli.perturb.noise import make_noise
from mezo_cli.perturb.params import Params

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128},
    "base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
    "large": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
}
LABELS = [6587, 372]  # " terrible", " great"
MASK_ID = 50264
REPLAYED_STEPS = 16
NOISES = ("gaussian", "rademacher")
COMPUTE = {"fp32": torch.float32, "bf16": torch.bfloat16}


def model_of(shape: str) -> Any:
    """Return a random RoBERTa of that shape, in eval mode."""
    torch.manual_seed(0)
    config = RobertaConfig(vocab_size=50265, max_position_embeddings=514, type_vocab_size=1, **SHAPES[shape])
    return RobertaForMaskedLM(config).eval()


def rows_of(spec: str) -> list[TokenizedExample]:
    """Return random rows: `16x32` is 16 rows of 32 tokens; `16xsst2` and `16xrte` have lengths like those tasks'."""
    count, kind = spec.split("x")
    rng = np.random.RandomState(0)
    if kind.isdecimal():
        lengths = np.full(int(count), int(kind))
    else:  # median and spread of SST-2's dev rows and of RTE's train rows with their templates, in tokens
        median, spread, most = {"sst2": (29, 0.40, 70), "rte": (70, 0.60, 256)}[kind]
        lengths = np.clip(rng.lognormal(np.log(median), spread, int(count)), 8, most).astype(int)
    rows = []
    for i, length in enumerate(lengths):
        ids = rng.randint(10, 50000, length)
        ids[-3] = MASK_ID
        rows.append(TokenizedExample(ids.tolist(), [0] * int(length), int(length) - 3, i % 2))
    return rows


class Reference:
    """The step of the paper's code, written from its description."""

    def __init__(self, model: Any, batch: Batch) -> None:
        self.model, self.batch, self.eps, self.lr, self.seed = model, batch, 1e-3, 0.0, 0

    def perturb(self, scale: float) -> None:
        """Add scale * eps * z to every tensor; z is drawn again."""
        torch.manual_seed(self.seed)
        for _, p in self.model.named_parameters():
            z = torch.normal(mean=0, std=1, size=p.data.size(), device=p.data.device, dtype=p.data.dtype)
            p.data = p.data + scale * z * self.eps

    def loss(self) -> float:
        """Run the body, then the head over the vocabulary at the mask."""
        hidden = self.model.roberta(
            input_ids=self.batch.input_ids, attention_mask=self.batch.attention_mask
        ).last_hidden_state
        at_mask = hidden[torch.arange(len(hidden), device=hidden.device), self.batch.positions]
        return float(F.cross_entropy(self.model.lm_head(at_mask)[:, LABELS], self.batch.labels))

    @torch.no_grad()
    def step(self) -> None:
        """Do one step."""
        self.seed += 1
        self.perturb(1)
        plus = self.loss()
        self.perturb(-2)
        minus = self.loss()
        g = (plus - minus) / (2 * self.eps)
        self.perturb(1)
        torch.manual_seed(self.seed)
        for _, p in self.model.named_parameters():
            z = torch.normal(mean=0, std=1, size=p.data.size(), device=p.data.device, dtype=p.data.dtype)
            p.data = p.data - self.lr * (g * z)


def with_lora(model: Any) -> Any:
    """Add the paper's LoRA (r 8, alpha 16, queries and values) to a model."""
    loaded = LoadedModel(model, None, MASKED_LM, model.device, torch.float32)
    settings = PeftConfig(name="lora", r=8, alpha=16, targets="query_value")
    adapters.attach(loaded, settings, ModelConfig(name="bench", path="demo"), seed=0)
    return loaded.model


class Ours:
    """This project's step, with its own model."""

    def __init__(self, model: Any, batch: Batch, noise: str, dtype: torch.dtype) -> None:
        self.count = 0
        self.forward = PerturbedForward(model, Params(model, make_noise(noise)))
        self.forward.compute_dtype = dtype
        self.objective = MaskedLabelScorer(model, self.forward, LABELS)
        self.batch, one_row = (
            collate(rows, 1, batch.device, False, self.objective.lay_out) for rows in (batch.rows, batch.rows[:1])
        )
        self.forward.select_reachable(lambda: self.objective.logits(one_row))
        self.optimizer = Mezo(make_config("mezo", lr=1e-9, noise=noise), seed=0, steps=1)

    def loss(self) -> Tensor:
        """Return the losses of both signs, [2]."""
        if self.objective.fits_paired_forward(self.batch):
            logits = self.objective.logits(self.batch)
        else:
            logits = self.forward.forward_per_sign(lambda: self.objective.logits(self.batch))
        return torch.stack([F.cross_entropy(scores, self.batch.labels) for scores in logits])

    @torch.no_grad()
    def step(self) -> None:
        """Do one step, as `mezo train` does."""
        self.optimizer.step(self.forward, self.loss, self.count)
        system.trim_malloc()
        self.count += 1

    @torch.no_grad()
    def replay(self, steps: int) -> None:
        """Do the updates of that many steps, as `mezo replay` does."""
        self.optimizer.apply_updates(self.forward.params, [(step, [1.0], 1e-9) for step in range(steps)])


@torch.inference_mode()
def plain_forwards(model: Any, batch: Batch, dtype: torch.dtype, forwards: int = 2) -> None:
    """Run plain forwards: the body, and the head at the mask for the label words."""
    kind = batch.input_ids.device.type
    for _ in range(forwards):
        with torch.autocast(kind, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            hidden = model.roberta(input_ids=batch.input_ids, attention_mask=batch.attention_mask).last_hidden_state
            at_mask = hidden[torch.arange(len(hidden), device=hidden.device), batch.positions]
            head = model.lm_head
            x = head.layer_norm(F.gelu(head.dense(at_mask)))
            F.linear(x, head.decoder.weight[LABELS], head.decoder.bias[LABELS])


def timed(work: Callable[[], None]) -> float:
    """Return the seconds that `work` takes."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def works_to_time(shape: str, batch: Batch, device: torch.device) -> dict[str, Callable[[], None]]:
    """Return name -> the work to time."""
    found: dict[str, Callable[[], None]] = {}
    plain, lora = model_of(shape).to(device), with_lora(model_of(shape).to(device))
    bf16 = model_of(shape).to(device, torch.bfloat16)
    found["reference"] = Reference(model_of(shape).to(device), batch).step
    for name, dtype in COMPUTE.items():
        found[f"floor {name}"] = partial(plain_forwards, plain, batch, dtype)
        found[f"floor {name} lora"] = partial(plain_forwards, lora, batch, dtype)
    found["floor bf16 weights"] = partial(plain_forwards, bf16, batch, torch.float32)
    for name, dtype in COMPUTE.items():
        for noise in NOISES:
            ours = Ours(model_of(shape).to(device), batch, noise, dtype)
            found[f"ours {name} {noise}"] = ours.step
            if name == "fp32":
                found[f"replay {noise}"] = partial(ours.replay, REPLAYED_STEPS)
        found[f"ours {name} gaussian lora"] = Ours(with_lora(model_of(shape).to(device)), batch, "gaussian", dtype).step
    return found


def floor_of(name: str) -> str:
    """Return the name of the plain forwards that a step is compared with."""
    words = name.split()
    return " ".join(["floor", words[1] if words[0] == "ours" else "fp32", *(["lora"] if words[-1] == "lora" else [])])


def steps_per_call(name: str) -> int:
    """Return how many steps one call of the work does."""
    return REPLAYED_STEPS if name.startswith("replay") else 1


def measure(shape: str, spec: str, rounds: int, device: torch.device) -> dict[str, Any]:
    """Time every work once per round, in turn; return medians, and medians of the rounds' ratios."""
    batch = collate(rows_of(spec), 1, device, False)
    works = works_to_time(shape, batch, device)
    for work in works.values():
        work()  # compiles, allocates
    taken = [{name: timed(work) / steps_per_call(name) for name, work in works.items()} for _ in range(rounds)]
    result: dict[str, Any] = {"shape": shape, "batch": spec, "tokens": int(batch.attention_mask.sum()), "rows": []}
    for name in works:
        result["rows"].append(
            {
                "name": name,
                "seconds": statistics.median(t[name] for t in taken),
                "reference_over_this": statistics.median(t["reference"] / t[name] for t in taken),
                "this_over_floor": statistics.median(t[name] / t[floor_of(name)] for t in taken),
            }
        )
    return result


def peak_of(shape: str, spec: str, what: str, device: torch.device) -> int:
    """Return the peak memory of `what` in bytes, less what the imported libraries take; loading is left out.

    A small step runs first, so that the compiler, its output and its libraries count as imported.
    """
    kind, name, *noise = what.removesuffix(" lora").split()
    dtype = COMPUTE[name]
    small = collate(rows_of("2x8"), 1, device, False)
    Ours(model_of("tiny").to(device), small, noise[0] if noise else "gaussian", dtype).step()
    before = resident()
    batch = collate(rows_of(spec), 1, device, False)
    model = model_of(shape).to(device)
    if what.endswith("lora"):
        model = with_lora(model)
    work = (
        partial(plain_forwards, model, batch, dtype, 1) if kind == "floor" else Ours(model, batch, noise[0], dtype).step
    )
    if device.type == "cuda":
        work()
        torch.cuda.reset_peak_memory_stats()
    else:
        work()  # compiling takes memory, once
        Path("/proc/self/clear_refs").write_text("5")  # resets the kernel's high-water mark
    for _ in range(3):
        work()
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else resident("VmHWM") - before


def resident(field: str = "VmRSS") -> int:
    """Return the process's resident memory (VmRSS) or its high-water mark (VmHWM) in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def memory(shape: str, spec: str, device: torch.device) -> dict[str, int]:
    """Measure each peak in a new process."""
    floors = [f"floor {name}{lora}" for name in COMPUTE for lora in ("", " lora")]
    ours = [f"ours {name} {noise}" for name in COMPUTE for noise in (*NOISES, "gaussian lora")]
    found = {}
    for name in floors + ours:
        command = [sys.executable, __file__, "--peak", name, "--shapes", shape, "--batches", spec]
        command += ["--device", str(device)]
        found[name] = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])
    return found


def show(result: dict[str, Any]) -> None:
    """Print one table."""
    print(f"\nRoBERTa-{result['shape']} shape, batch {result['batch']} ({result['tokens']} tokens)")
    print(f"{'':26}{'seconds':>9}{'reference / this':>18}{'this / floor':>14}{'peak GB':>9}{'/ floor':>9}")
    peaks = result.get("peaks", {})
    for row in result["rows"]:
        peak, memory = peaks.get(row["name"]), ""
        if peak is not None:
            floor = peaks[floor_of(row["name"])]
            memory = f"{peak / 1e9:9.2f}{peak / floor:9.2f}"
        print(
            f"{row['name']:26}{row['seconds']:9.3f}{row['reference_over_this']:18.2f}{row['this_over_floor']:14.2f}{memory}"
        )


def main() -> None:
    """Measure, print the tables and write them to --out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--shapes", nargs="+", default=["base", "large"], choices=SHAPES)
    parser.add_argument("--batches", nargs="+", default=["16x32", "64x32", "16xsst2", "16xrte"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--memory", action="store_true", help="measure peak memory too")
    parser.add_argument("--out", type=Path, default=Path("outputs/bench_step.json"))
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    args = parser.parse_args()
    device = torch.device(args.device)
    if args.peak:
        print(peak_of(args.shapes[0], args.batches[0], args.peak, device))
        return
    results = []
    print(f"torch {torch.__version__}, {device}, {torch.get_num_threads()} threads; checkpoint: 16 bytes per step")
    for shape in args.shapes:
        for spec in args.batches:
            results.append(measure(shape, spec, args.rounds, device))
            if args.memory:
                results[-1]["peaks"] = memory(shape, spec, device)
            show(results[-1])
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(results, indent=2) + "\n")
    print(f"\nwrote {args.out}")


if __name__ == "__main__":
    main()
