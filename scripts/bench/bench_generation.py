"""Time completions of a member's weights against `model.generate` of transformers, in turns, on the same batch.

    python scripts/bench/bench_generation.py                        a tiny Llama and one of SmolLM2-135M's shape
    python scripts/bench/bench_generation.py --shapes tiny --prompts 16 64 --temperature 1 --rounds 9
    python scripts/bench/bench_generation.py --shapes smollm2 --rows 8 --members 1 4 16

Weights are random and no token ends a completion. `ours` is `Decoder.complete` inside `materialized`, from the prompts
to the last token and its text; making the member's weights is timed apart, and so is a replay step. With `--members` it
is instead members of a LoRA (rank 8, queries and values) one after the other against all of them in one batch, making
their weights included. Compare ratios, not seconds.
"""

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from mezo_cli.process.environment import LIBRARY_DEFAULTS
from mezo_cli.process.memory import peak_memory, reset_peak_memory

os.environ |= LIBRARY_DEFAULTS | os.environ  # as the command line does, before torch is imported

import peft
import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from mezo_cli.objectives.decoding import Decoder, Sampling
from mezo_cli.perturb.forward import PerturbedForward
from mezo_cli.perturb.members import Population
from mezo_cli.perturb.noise import Direction, make_noise
from mezo_cli.perturb.params import Params
from mezo_cli.perturb.plan import Perturbation

SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "num_attention_heads")
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": dict(zip(SIZES, (96, 192, 2, 500, 3), strict=True)),
    "smollm2": dict(zip(SIZES, (576, 1536, 30, 49152, 9), strict=True)),
}
Work = Callable[[], object]
# On one CPU thread its own time is taken, which other processes disturb less.
CLOCK = time.process_time if torch.get_num_threads() == 1 else time.perf_counter


def new_model(shape: str) -> Any:
    """Return a random Llama without an end token."""
    torch.manual_seed(0)
    more: dict[str, Any] = {"eos_token_id": None, "num_key_value_heads": 3, "tie_word_embeddings": True}
    model = LlamaForCausalLM(LlamaConfig(**SHAPES[shape], **more)).eval()
    model.generation_config.pad_token_id = 0
    return model


def patched(model: Any, shape: str) -> tuple[PerturbedForward, Population, Decoder]:
    """Return a model's forwards, its members, and what completes prompts with it."""
    forward = PerturbedForward(model, Params(model, make_noise("gaussian")))
    forward.select_reachable(lambda: model(torch.zeros(1, 2, dtype=torch.long)).logits)
    words = models.WordLevel({f" w{i}": i for i in range(SHAPES[shape]["vocab_size"])}, unk_token=" w0")
    return forward, Population(forward), Decoder(model, PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words)))


def make_prompts(args: argparse.Namespace) -> list[list[int]]:
    """Return random prompts of random lengths."""
    numbers = random.Random(0)
    least, most = args.prompts
    return [numbers.choices(range(500), k=numbers.randint(least, most)) for _ in range(args.rows)]


def make_works(args: argparse.Namespace, shape: str) -> dict[str, Work]:
    """Return what is timed: completions by transformers and ours, a member's weights, a replay step."""
    stock, model = new_model(shape), new_model(shape)
    forward, population, decoder = patched(model, shape)
    prompts, most = make_prompts(args), args.prompts[1]
    sampling = Sampling(args.new, args.temperature, (), False)
    options: dict[str, Any] = {"max_new_tokens": args.new, "do_sample": args.temperature > 0}
    options["input_ids"] = torch.tensor([[0] * (most - len(prompt)) + prompt for prompt in prompts])
    options["attention_mask"] = torch.tensor([[0] * (most - len(p)) + [1] * len(p) for p in prompts])
    if args.temperature:
        options |= {"temperature": args.temperature, "top_k": 0}

    def member(work: Work) -> float:
        with forward.perturbed(Direction(1, 0), 1e-3, (1,)), population.materialized():
            return timed(work)

    return {
        "generate": lambda: stock.generate(**options),
        "ours": lambda: member(lambda: decoder.complete(prompts, [(row, 0) for row in range(args.rows)], sampling)),
        "member": lambda: bool(member(bool)),
        "replay": lambda: forward.params.update([(Direction(1, 0), 1e-9)], [1.0]),
    }


def make_member_works(args: argparse.Namespace, shape: str, count: int) -> dict[str, Work]:
    """Return what is timed: the completions of the members of a LoRA one after the other, and in one batch."""
    model = new_model(shape).requires_grad_(False)
    settings = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"])
    forward, population, decoder = patched(peft.inject_adapter_in_model(settings, model), shape)
    prompts, keys = make_prompts(args), [(row, 0) for row in range(args.rows)]
    sampling = Sampling(args.new, args.temperature, (), False)
    members = [Perturbation(Direction(1, 0, i), 1e-3, (1,)) for i in range(count)]

    def one() -> None:
        for member in members:
            with forward.perturbed(*member), population.materialized():
                decoder.complete(prompts, keys, sampling)

    def together() -> None:
        with population.materialized(members) as rows:
            decoder.complete(prompts, keys, sampling, rows)

    return {"one": one, "together": together if count > 1 else one}


def timed(work: Work) -> float:
    """Return the seconds that `work` takes, or those that it says itself."""
    start = CLOCK()
    seconds = work()
    return seconds if isinstance(seconds, float) else CLOCK() - start


def first_call(work: Work) -> float:
    """Return how many MB more than before are resident at the peak of a work's first call."""
    reset_peak_memory()
    before = peak_memory(torch.device("cpu"))
    work()
    return (peak_memory(torch.device("cpu")) - before) / 1e6


def main() -> None:
    """Measure and print a table per shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--prompts", type=int, nargs=2, default=[32, 32], help="the shortest's tokens, the longest's")
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--members", type=int, nargs="+", default=[], help="of a LoRA: how many, together or not")
    args = parser.parse_args()
    for shape in args.shapes:
        print(f"Llama, {shape}: {args.rows} prompts of {args.prompts} tokens, {args.new} new, {args.rounds} rounds")
        for count in args.members:
            print(f" {count} members")
            measure(make_member_works(args, shape, count), args.rounds, [("one", "together")])
        if not args.members:
            measure(make_works(args, shape), args.rounds, [("generate", "ours"), ("member", "replay")])


def measure(works: dict[str, Work], count: int, ratios: list[tuple[str, str]]) -> None:
    """Time works in turns; print their medians and ratios."""
    peaks = {name: first_call(work) for name, work in works.items()}
    rounds = [{name: timed(work) for name, work in works.items()} for _ in range(count)]
    for name, peak in peaks.items():
        seconds = statistics.median(taken[name] for taken in rounds)
        print(f"  {name:8} {seconds:.4f} s, at the first call {peak:,.0f} MB more memory")
    for over, under in ratios:
        values = sorted(taken[over] / taken[under] for taken in rounds)
        print(f"  {over} / {under}: {statistics.median(values):.2f} ({values[0]:.2f} to {values[-1]:.2f})")


if __name__ == "__main__":
    main()
