"""Time a decoder's losses of a step with its last layer computed for all positions, and for the read ones alone.

    python scripts/bench_last_layer.py                            OPT-125M's and GPT-2's shapes, 12 layers, 16 x 32
    python scripts/bench_last_layer.py --layers 24 --rounds 3

Prints a Markdown table. The weights are random, both ways share them, and they take turns within a round. The update is
left out: it is the same. Ratios are medians over the rounds.
"""

import argparse
import os
import statistics
import time
from dataclasses import replace
from typing import Any, cast

from mezo_cli.system import LIBRARY_DEFAULTS

os.environ |= LIBRARY_DEFAULTS | os.environ  # as the command line does, before torch is imported

import torch
import torch.nn.functional as F
from step_works import rows_of
from transformers import GPT2Config, GPT2LMHeadModel, OPTConfig, OPTForCausalLM

from mezo_cli.objectives import packed_decoder
from mezo_cli.objectives.collate import collate
from mezo_cli.objectives.lm import CausalLabelScorer
from mezo_cli.perturb.forward import PerturbedForward
from mezo_cli.perturb.noise import Direction, make_noise
from mezo_cli.perturb.params import Params

DEVICE = torch.device("cpu")
LABELS = [[6587], [372]]
WORDS = 50272  # of the vocabulary


def model_of(name: str, layers: int, width: int) -> Any:
    """Return a random decoder: `opt` makes queries by a product of their own, `gpt2` together with keys and values."""
    torch.manual_seed(0)
    if name == "gpt2":
        return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_layer=layers, n_embd=width, n_head=width // 64))
    config = OPTConfig(
        vocab_size=WORDS,
        num_hidden_layers=layers,
        hidden_size=width,
        word_embed_proj_dim=width,
        ffn_dim=4 * width,
        num_attention_heads=width // 64,
    )
    return OPTForCausalLM(config)


class Losses:
    """The two losses of a step of `mezo train`, by one model."""

    def __init__(self, model: Any, spec: str) -> None:
        self.forward = PerturbedForward(model.eval(), Params(model, make_noise("gaussian")))
        self.objective = CausalLabelScorer(model, self.forward, LABELS)
        self.rows, self.step = rows_of(spec), 0

    @torch.no_grad()
    def seconds(self) -> float:
        """Return the processor time that they take: other work on the machine changes it little."""
        batch = collate(self.rows, 1, DEVICE, False, self.objective.lay_out)  # new, so that its inputs are made again
        self.step += 1
        start = time.process_time()
        with self.forward.perturbed(Direction(0, self.step), 1e-3):
            if self.objective.fits_paired_forward(batch):
                scores = self.objective.logits(batch)
            else:
                scores = self.forward.forward_per_sign(lambda: self.objective.logits(batch))
            for of_sign in scores:
                float(F.cross_entropy(of_sign, batch.labels))
        return time.process_time() - start


def main() -> None:
    """Time both ways for each model in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--batch", default="16x32", help="rows x tokens (default: %(default)s)")
    parser.add_argument("--models", default="opt,gpt2", help="opt, gpt2 or both (default: %(default)s)")
    args = parser.parse_args()
    print(f"{args.layers} layers of width {args.width}, {args.batch}, {torch.get_num_threads()} threads\n")
    print("| model | all positions: seconds | read positions / all |\n|---|---|---|", flush=True)
    reading, module = packed_decoder.packed_inputs, cast(Any, packed_decoder)

    def reading_all(*inputs: Any) -> dict[str, Any]:
        made = reading(*inputs)
        return {**made, "packed_layout": replace(made["packed_layout"], read=None)}

    for name in args.models.split(","):
        losses, times = Losses(model_of(name, args.layers, args.width), args.batch), []
        for _ in range(args.rounds + 1):  # the first warms up
            module.packed_inputs = reading_all
            everything = losses.seconds()
            module.packed_inputs = reading
            times.append((everything, losses.seconds()))
        ratios = sorted(read / everything for everything, read in times[1:])
        middle, seconds = statistics.median(ratios), statistics.median(everything for everything, _ in times[1:])
        print(f"| {name} | {seconds:.2f} | {middle:.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f}) |", flush=True)


if __name__ == "__main__":
    main()
