"""Count the operations that a step dispatches, against two plain forwards of the same packed batch.

    python scripts/count_operations.py 16x32 64x32
    python scripts/count_operations.py 64x32 --paired-tokens 1024    a forward per sign

It prints a Markdown table, or with --json a list. Nothing is computed: the tensors live on the fake device of the
tests, and a model of RoBERTa-large's shape takes no memory. `launches` are the operations that are not views: on a GPU
each starts a kernel.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import RobertaConfig, RobertaForMaskedLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the tests are no installed package

from step_works import LABELS, SHAPES, rows_of

from mezo_cli.objectives.collate import collate
from mezo_cli.objectives.mlm import MaskedLabelScorer
from mezo_cli.optim import make_config
from mezo_cli.optim.mezo import Mezo
from mezo_cli.perturb.forward import PerturbedForward
from mezo_cli.perturb.noise import make_noise
from mezo_cli.perturb.params import Params
from tests.fake_accelerator import DEVICE, fake_device, made_up, to_fake
from tests.host_waits import HostWaits


class Counts(NamedTuple):
    """Operations dispatched by some work: all of them, those that are not views, and calls of noise kernels."""

    operations: int
    launches: int
    kernels: int


def count(work: Callable[[], Any]) -> Counts:
    """Count what `work` dispatches; a noise kernel is one operation."""
    with HostWaits(made_up) as host:
        work()
    return Counts(host.operations, host.launches, host.names["mezo::noise"])


def model_of(shape: str, layers: int, dtype: torch.dtype = torch.float32) -> Any:
    """Return a RoBERTa on the fake device."""
    size = SHAPES[shape] | {"num_hidden_layers": layers}
    config = RobertaConfig(vocab_size=50265, max_position_embeddings=514, type_vocab_size=1, **size)
    model: Any = RobertaForMaskedLM(config)
    to_fake(model.to(dtype).eval())
    return model


def measure(shape: str, spec: str, layers: int, paired_tokens: int | None) -> dict[str, Counts]:
    """Return what is counted: two plain forwards, a step, its update alone, and the same of weights in two bytes.

    Args:
        shape: a key of `SHAPES`.
        spec: the batch, as `16x32`.
        layers: their number.
        paired_tokens: as `model.paired_tokens`; None: the device's.
    """
    model, small = model_of(shape, layers), model_of(shape, layers, torch.bfloat16)
    forward = PerturbedForward(model, Params(model, make_noise("gaussian")))
    if paired_tokens is not None:
        forward.paired_tokens = paired_tokens
    objective = MaskedLabelScorer(model, forward, LABELS)
    batch = collate(rows_of(spec), 1, DEVICE, False, objective.lay_out)
    optimizer, in_two_bytes = Mezo(make_config("mezo"), seed=0, steps=9), Params(small, make_noise("gaussian"))

    def loss() -> Tensor:
        if objective.fits_paired_forward(batch):
            scores = objective.logits(batch)
        else:
            scores = forward.forward_per_sign(lambda: objective.logits(batch))
        return torch.stack([F.cross_entropy(of_sign, batch.labels) for of_sign in scores])

    works = {
        "two plain forwards": lambda: [objective.logits(batch) for _ in range(2)],
        "a step": lambda: optimizer.step(forward, loss, 1),
        "its update": lambda: optimizer.apply_updates(forward.params, [(2, [1.0], 1e-6)]),
        "its update in two bytes": lambda: optimizer.apply_updates(in_two_bytes, [(2, [1.0], 1e-6)]),
    }
    count(partial(optimizer.step, forward, loss, 0))  # makes the keys of the tensors, once per run
    optimizer.apply_updates(in_two_bytes, [(1, [1.0], 1e-6)])
    return {name: count(work) for name, work in works.items()}


def main() -> None:
    """Run the script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("batches", nargs="*", default=["16x32", "64x32"])
    parser.add_argument("--shape", choices=SHAPES, default="large")
    parser.add_argument("--layers", type=int, nargs="+", help="instead of the shape's")
    parser.add_argument("--paired-tokens", type=int, help="as model.paired_tokens")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if not args.json:
        print("| batch | work | operations | launches | of these, noise kernels | launches / two plain forwards |")
        print("|---|---|---|---|---|---|")
    found = []
    for layers, spec in itertools.product(args.layers or [SHAPES[args.shape]["num_hidden_layers"]], args.batches):
        with fake_device(), torch.no_grad():
            counted = measure(args.shape, spec, layers, args.paired_tokens)
        found.append({"layers": layers, "batch": spec, "works": {k: c._asdict() for k, c in counted.items()}})
        for name, counts in counted.items():
            ratio = counts.launches / counted["two plain forwards"].launches
            if not args.json:
                print(f"| {spec} | {name} | {' | '.join(map(str, counts))} | {ratio:.2f} |", flush=True)
    if args.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
