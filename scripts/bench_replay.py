"""Time the update of a long replay against that of sixteen steps, per step: the caches of the noise must hold.

    python scripts/bench_replay.py --layers 2 --steps 2000

Prints a Markdown table. The tensors have the shapes of RoBERTa-large's layers, in full or with LoRA (small tensors).
`long` replays all steps, 64 at a time as `mezo replay` does; `short` replays steps 0 to 15 again and again, as
bench_step.py does. The two take turns. Times are those of the processor, so that other processes disturb them little.
"""

import argparse
import statistics
import time

import torch
from torch import nn

from mezo_cli.optim import make_config
from mezo_cli.optim.mezo import Mezo
from mezo_cli.perturb.noise import make_noise
from mezo_cli.perturb.params import Params
from mezo_cli.training.restore import PART

WIDTH, INNER, RANK = 1024, 4096, 8
SHORT = 16  # steps


def layer_shapes(lora: bool) -> list[tuple[int, ...]]:
    """Return the shapes of the trainable tensors of one layer."""
    if lora:
        return [(RANK, WIDTH), (WIDTH, RANK)] * 2
    linear = [(WIDTH, WIDTH)] * 4 + [(INNER, WIDTH), (WIDTH, INNER)]
    biases: list[tuple[int, ...]] = [(rows,) for rows, _ in linear]
    return [*linear, *biases, *[(WIDTH,)] * 4]  # the last are those of the layer norms


def make_params(layers: int, lora: bool, noise: str) -> Params:
    """Return the trainable tensors of that many layers."""
    tensors = [nn.Parameter(torch.zeros(shape)) for shape in layer_shapes(lora) * layers]
    return Params(nn.ParameterList(tensors), make_noise(noise))


def processor_seconds(optimizer: Mezo, params: Params, steps: range) -> float:
    """Return the processor's time per step of replaying `steps`."""
    records = [(step, [1.0 + 1e-3 * step] * optimizer.config.samples, 1e-9) for step in steps]
    start = time.process_time()
    optimizer.apply_updates(params, records)
    return (time.process_time() - start) / len(records)


@torch.no_grad()
def measure(layers: int, lora: bool, noise: str, samples: int, steps: int) -> tuple[float, float, float]:
    """Return seconds per step, medians over the parts of the replay: long, short, and of their ratio."""
    params = make_params(layers, lora, noise)
    optimizer = Mezo(make_config("mezo", noise=noise, samples=samples), seed=0, steps=steps)
    processor_seconds(optimizer, params, range(SHORT))  # compiles
    pairs = []
    for first in range(0, steps, PART):
        part = range(first, min(first + PART, steps))
        long = processor_seconds(optimizer, params, part)
        pairs.append((long, processor_seconds(optimizer, params, range(SHORT))))
    longs, shorts = zip(*pairs, strict=True)
    return (
        statistics.median(longs),
        statistics.median(shorts),
        statistics.median(long / short for long, short in pairs),
    )


def main() -> None:
    """Run the script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--tensors", choices=("all", "lora"), nargs="+", default=["all", "lora"])
    parser.add_argument("--noise", choices=("gaussian", "rademacher"), nargs="+", default=["gaussian", "rademacher"])
    parser.add_argument("--samples", type=int, nargs="+", default=[1, 100])
    args = parser.parse_args()
    print(f"{args.layers} layers, {args.steps} steps, {torch.get_num_threads()} threads, torch {torch.__version__}\n")
    print("| tensors | noise | samples | ms per step, long | short | long / short |\n|---|---|---|---|---|---|")
    for tensors in args.tensors:
        for noise in args.noise:
            for samples in args.samples:
                steps = max(SHORT, args.steps // samples)
                long, short, ratio = measure(args.layers, tensors == "lora", noise, samples, steps)
                times = f"{1e3 * long:.3g} | {1e3 * short:.3g} | {ratio:.2f}"
                print(f"| {tensors} | {noise} | {samples} | {times} |", flush=True)


if __name__ == "__main__":
    main()
