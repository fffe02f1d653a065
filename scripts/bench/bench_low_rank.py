"""Time a step of LOZO with the factors of z, against copies of the weights; and nine weight sets in one product.

    python scripts/bench/bench_low_rank.py                            RoBERTa-base's width with 3 layers, 3 batches
    python scripts/bench/bench_low_rank.py --layers 12 --batches 16x32 --rounds 9

A random RoBERTa takes steps of `mezo` (dense z), of `lozo` with copies of the perturbed weights, and of `lozo` with
factors, in turns. The population is a prototype of FZOO's forwards: the linear layers of one transformer layer with
nine perturbed weight sets, one set after another, or all written first and then one batched product per layer. Both
draw the same z. Printed are medians over the rounds of the ratios to the first of each kind. On one CPU thread it is
the thread's own time.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from step_works import SHAPES, Ours, model_of, rows_of

from mezo_cli.objectives.collate import collate
from mezo_cli.optim import make_config, optimizer_class
from mezo_cli.perturb.noise import Direction, make_noise
from mezo_cli.perturb.params import Params

CLOCK = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
MEMBERS = 9
EPS = 1e-3


def step_works(layers: int, rows: str) -> dict[str, Callable[[], None]]:
    """Return the steps to time, by name."""
    SHAPES["short"] = SHAPES["base"] | {"num_hidden_layers": layers}
    works: dict[str, Callable[[], None]] = {}
    for name, method, factors in (
        ("mezo", "mezo", False),
        ("lozo, copies", "lozo", False),
        ("lozo, factors", "lozo", True),
    ):
        config: Any = make_config(method, lr=1e-9)
        ours = Ours(model_of("short"), collate(rows_of(rows), 1, torch.device("cpu"), False), "gaussian", torch.float32)
        ours.forward.params.noise, ours.forward.uses_factors = config.make_noise(), factors
        ours.optimizer = optimizer_class(config)(config, 0, 1)  # type: ignore[assignment]
        works[name] = ours.step
    return works


def population_works(rows: str) -> dict[str, Callable[[], None]]:
    """Return the forwards of a population's linear layers to time, by name."""
    tokens, (width, inner) = int(rows.split("x")[0]) * int(rows.split("x")[1]), (768, 3072)
    shapes = [(width, width)] * 4 + [(inner, width), (width, inner)]  # out, in
    model = torch.nn.ModuleList(torch.nn.Linear(n, m, bias=False) for m, n in shapes)
    params = Params(model, make_noise("rademacher"))
    spans = [params.span_of(f"{i}.weight") for i in range(len(shapes))]
    inputs = {n: torch.randn(tokens, n) for n in (width, inner)}
    one = torch.empty(max(span.numel for span in spans))
    all_of_them = torch.empty(MEMBERS, len(one))

    @torch.no_grad()
    def in_turn() -> None:
        for member in range(MEMBERS):
            for span, (m, n) in zip(spans, shapes, strict=True):
                params.noise.perturb(Direction(0, 0, member), span, EPS, one[: span.numel])
                torch.mm(inputs[n], one[: m * n].view(m, n).t())

    @torch.no_grad()
    def batched() -> None:
        for span, (m, n) in zip(spans, shapes, strict=True):
            for member in range(MEMBERS):
                params.noise.perturb(Direction(0, 0, member), span, EPS, all_of_them[member, : span.numel])
            weights = all_of_them[:, : m * n].view(MEMBERS, m, n)
            torch.bmm(inputs[n].expand(MEMBERS, tokens, n), weights.transpose(1, 2))

    return {"nine sets in turn": in_turn, "nine sets in one product": batched}


def ratios(works: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Return the median over the rounds of each work's time by the first one's."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds + 1):
        for name, work in works.items():
            start = CLOCK()
            work()
            if number:  # the first round compiles and allocates
                seconds[name].append(CLOCK() - start)
    first = next(iter(seconds.values()))
    return {
        name: round(statistics.median(a / b for a, b in zip(values, first, strict=True)), 3)
        for name, values in seconds.items()
    }


def main() -> None:
    """Print the ratios, one JSON object per batch."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", nargs="+", default=["16x32", "4x32", "1x32"])
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    for rows in args.batches:
        of_steps = ratios(step_works(args.layers, rows), args.rounds)
        print(json.dumps({"batch": rows, **of_steps, **ratios(population_works(rows), args.rounds)}), flush=True)


if __name__ == "__main__":
    main()
