"""Time a step when the lowest layers hold no trained tensor: computed for each sign, once per batch, once per run.

    python scripts/bench_frozen.py                     RoBERTa-base's shape, 16 rows of 32 tokens
    python scripts/bench_frozen.py --shape large --rounds 1

Prints a Markdown table. `off` is model.cache_frozen=off. `per batch` computes the lowest layers once per batch
(model.cache_bytes=0). `kept` reads what the first step has computed, as few-shot training does. The three take turns;
ratios are medians over the rounds.
"""

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext

from mezo_cli.system import LIBRARY_DEFAULTS

os.environ |= LIBRARY_DEFAULTS | os.environ  # as the command line does, before torch is imported

import torch
import torch.nn.functional as F
from step_works import LABELS, SHAPES, model_of, rows_of
from torch import Tensor

from mezo_cli.config.schema import BiasConfig, LoraConfig, ModelConfig, PeftConfig, TokenizedExample
from mezo_cli.models import MASKED_LM, LoadedModel, adapters
from mezo_cli.objectives.collate import Batch, collate
from mezo_cli.objectives.mlm import MaskedLabelScorer
from mezo_cli.optim import make_config
from mezo_cli.optim.mezo import Mezo
from mezo_cli.perturb.forward import PerturbedForward
from mezo_cli.perturb.noise import make_noise
from mezo_cli.perturb.params import Params

MODES = ("off", "per batch", "kept")
DEVICE = torch.device("cpu")


def methods(shape: str) -> dict[str, PeftConfig]:
    """Return what is trained: the head; a LoRA of the top sixth of the layers; the biases of the top half."""
    layers = SHAPES[shape]["num_hidden_layers"]
    top, half = max(1, layers // 6), layers // 2
    return {
        "peft=head": PeftConfig(name="head"),
        f"peft=lora peft.layers={top}": LoraConfig(name="lora", r=8, alpha=16, targets="query_value", layers=top),
        f"peft=bias peft.layers={half}": BiasConfig(name="bias", layers=half),
    }


class Steps:
    """Steps of `mezo train` on rows, with a model of its own."""

    def __init__(self, shape: str, peft: PeftConfig, rows: list[TokenizedExample], mode: str) -> None:
        loaded = LoadedModel(model_of(shape), None, MASKED_LM, DEVICE, torch.float32)
        adapters.attach(loaded, peft, ModelConfig(name="bench", path="demo"), seed=0)
        self.forward = PerturbedForward(loaded.model, Params(loaded.model, make_noise("gaussian")))
        self.objective = MaskedLabelScorer(loaded.model, self.forward, LABELS)
        self.rows, self.count = rows, 0
        frozen = self.objective.frozen
        assert frozen is not None
        with nullcontext() if mode == "off" else frozen.find():
            self.forward.select_reachable(lambda: self.objective.logits(self.batch(rows[:1])))
        if mode == "kept":
            frozen.keep(rows, 64, self.batch)
        self.frozen_layers = frozen.count
        self.optimizer = Mezo(make_config("mezo", lr=1e-9), seed=0, steps=100)

    def batch(self, rows: Sequence[TokenizedExample]) -> Batch:
        """Collate rows."""
        return collate(rows, 1, DEVICE, False, self.objective.lay_out)

    @torch.no_grad()
    def step(self) -> float:
        """Take a step; return the seconds that it takes."""
        start = time.perf_counter()
        batch = self.batch(self.rows)

        def loss() -> Tensor:
            if self.objective.fits_paired_forward(batch):
                scores = self.objective.logits(batch)
            else:
                scores = self.forward.forward_per_sign(lambda: self.objective.logits(batch))
            return torch.stack([F.cross_entropy(of_sign, batch.labels) for of_sign in scores])

        self.optimizer.step(self.forward, loss, self.count)
        self.count += 1
        return time.perf_counter() - start


def main() -> None:
    """Run the script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="base")
    parser.add_argument("--batch", default="16x32")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    print(f"RoBERTa-{args.shape}'s shape, {args.batch}, {torch.get_num_threads()} threads, {args.rounds} rounds\n")
    print("| what is trained | frozen layers | off: seconds | per batch / off | kept / off |\n|---|---|---|---|---|")
    for name, peft in methods(args.shape).items():
        steps = {mode: Steps(args.shape, peft, rows_of(args.batch), mode) for mode in MODES}
        for one in steps.values():
            one.step()  # compiles, allocates, and computes what is kept
        taken = [{mode: one.step() for mode, one in steps.items()} for _ in range(args.rounds)]
        ratios = [statistics.median(t[mode] / t["off"] for t in taken) for mode in MODES[1:]]
        layers = f"{steps['kept'].frozen_layers} of {SHAPES[args.shape]['num_hidden_layers']}"
        seconds = statistics.median(t["off"] for t in taken)
        print(f"| `{name}` | {layers} | {seconds:.2f} | {ratios[0]:.2f} | {ratios[1]:.2f} |", flush=True)


if __name__ == "__main__":
    main()
