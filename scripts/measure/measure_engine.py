#!/usr/bin/env python3
"""Measure what vLLM's prefix cache saves on prompts that begin alike, against transformers and vLLM without the cache.

    mezo engine install
    python scripts/fetch_smollm2.py --out smollm2
    python scripts/measure/measure_engine.py --model smollm2
    python scripts/measure/measure_engine.py                  # random weights of SmolLM2-135M's shape

One forward of some rows, as a step takes one per sign: random tokens, of which the first are the same in all rows. The
three ways take turns, with all cores each; the medians and their ratio to transformers are printed. Before each
forward the engine's weights count as changed, as they are in training, so nothing is left of the forward before.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from mezo_cli.engine.environment import find_python
from mezo_cli.engine.process import EngineFailed, EngineProcess
from mezo_cli.errors import UserError

SHAPE: dict[str, Any] = {  # of SmolLM2-135M
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
    "max_position_embeddings": 2048,
}
TOKENS = [100, 200]  # that are scored


def random_model(folder: Path) -> Path:
    """Save a random Llama of SmolLM2-135M's shape."""
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).save_pretrained(folder)
    return folder


def start(python: Path, model: Path, length: int, prefix_cache: bool) -> EngineProcess:
    """Start vLLM for a run of all parameters, of which none are trained: only its forwards are measured."""
    engine = EngineProcess(python)
    engine.call(
        "start",
        folder=str(model.resolve()),
        tensor_parallel=1,
        dtype="float32",
        memory=1_000_000_000,
        max_length=length,
        raw_logits=True,
        prefix_cache=prefix_cache,
        stops=False,
        adapters=1,
        rank=None,
        tensors=[],
        noise="gaussian",
    )
    return engine


def ask(engine: EngineProcess, prompts: list[list[int]]) -> torch.Tensor:
    """Return the scores of a forward with weights that count as changed: [rows, tokens]."""
    engine.call("update", terms=[], decays=[], decay_in_float64=True)
    return torch.tensor(engine.call("score", prompts=prompts, tokens=[TOKENS] * len(prompts), weights=[{}])[0])


@torch.no_grad()
def forward(model: Any, prompts: list[list[int]]) -> torch.Tensor:
    """Return the same by transformers."""
    scores: torch.Tensor = model(torch.tensor(prompts), logits_to_keep=1).logits[:, -1, TOKENS]
    return scores


def measure(model_folder: Path, python: Path, rows: int, common: int, own: int, repeats: int) -> None:
    """Time the three ways in turn, and print a line for each."""
    model = transformers.AutoModelForCausalLM.from_pretrained(model_folder, dtype="float32").eval()
    draw = random.Random(0)
    words = range(max(TOKENS) + 1, model.config.vocab_size)
    beginning = draw.choices(words, k=common)
    prompts = [[*beginning, *draw.choices(words, k=own)] for _ in range(rows)]
    with (
        start(python, model_folder, common + own, True) as cached,
        start(python, model_folder, common + own, False) as plain,
    ):
        ways = {
            "transformers": lambda: forward(model, prompts),
            "vLLM without the cache": lambda: ask(plain, prompts),
            "vLLM": lambda: ask(cached, prompts),
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        scores = {name: way() for name, way in ways.items()}  # not timed: the first forward of each
        before = cached.call("counts")
        for _ in range(repeats):
            for name, way in ways.items():
                began = time.perf_counter()
                way()
                seconds[name].append(time.perf_counter() - began)
        after = cached.call("counts")
    share = (after["cached"] - before["cached"]) / (after["prompt"] - before["prompt"])
    print(f"{rows} rows of {common} common tokens and {own} of their own, {torch.get_num_threads()} threads")
    reference = statistics.median(seconds["transformers"])
    for name, found in seconds.items():
        error = float((scores[name] - scores["transformers"]).abs().max())
        median = statistics.median(found)
        print(f"{name:24}{median:8.3f} s  {median / reference:5.2f}  scores differ by {error:.1e}")
    print(f"{100 * share:.0f}% of the tokens were read from the cache")


def main() -> None:
    """Measure, or print one line and exit with status 2."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a folder of a decoder; random weights without it")
    parser.add_argument("--python", help="the python of the engine's environment; that of `mezo engine install`")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--common", type=int, default=300, help="tokens that all rows begin with")
    parser.add_argument("--own", type=int, default=20, help="tokens of each row behind them")
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory(prefix="mezo-measure-") as folder:
            model = given.model or random_model(Path(folder))
            measure(model, find_python(given.python), given.rows, given.common, given.own, given.repeats)
    except (UserError, EngineFailed, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
