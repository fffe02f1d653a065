#!/usr/bin/env python3
"""Measure by backpropagation how noisy batches are, and the cosine of each method's estimate with the true gradient.

    python scripts/measure/measure_directions.py --noise 64 experiment=bench/sst2 data.dir=GLUE/SST-2
    python scripts/measure/measure_directions.py --at RUN --steps 0,500,1000 --calls 180 RUN ...

`--noise B`: for each kind of `data.batches`, batches of B rows at the start: the squared gradient G of the mean of all
batches (less its own noise), and the noise N of one row: a batch of B rows has the expected squared gradient G + N / B.
The same for the losses of batches: their standard deviation times the square root of B. Rows are `--rows` of train.

`--at`: at the weights of some steps of a run, the gradient of the mean loss over `--rows` rows of train; then for each
RUN (a run with the method and settings that are asked about) its optimizer takes steps from these weights, each from
the same ones, until `--calls` calls are used: the cosine of one step's update with the negative gradient (mean over the
steps), and that of their sum. It tells better directions from better step sizes.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mezo_cli.config.compose import build_config
from mezo_cli.config.schema import Config
from mezo_cli.data import load_splits
from mezo_cli.data.batch_sampler import make_sampler
from mezo_cli.report.frame import read_run
from mezo_cli.report.settings import method_name
from mezo_cli.training.prepare import load_session
from mezo_cli.training.restore import load_step
from mezo_cli.training.session import Session

KINDS = ("shuffled", "balanced", "replacement")


def gradient(session: Session, rows: Sequence[Any], weights: Sequence[float] | None = None) -> tuple[Tensor, float]:
    """Return the gradient of the loss of a batch, flat, and the loss."""
    tensors = list(session.params.tensors.values())
    with torch.enable_grad():
        loss = session.loss_of(rows, weights)()
        parts = torch.autograd.grad(loss, tensors)
    return torch.cat([part.detach().flatten().double() for part in parts]), loss.item()


def noise(session: Session, rows: Sequence[Any], size: int, kind: Any) -> tuple[float, float, float]:
    """Return G, N and the standard deviation of a batch's loss times the square root of its rows."""
    data = session.config.data.replace(batches=kind)
    sampler = make_sampler(session.config.replace(data=data, batch_size=size), rows)
    total, squares, losses = torch.zeros(1, dtype=torch.float64), [], []
    count = len(rows) // size
    for step in range(count):
        numbers = sampler.batch(step)
        grad, loss = gradient(session, [rows[i] for i in numbers], sampler.weights(numbers))
        total = total + grad / count
        squares.append(float(grad.square().sum()))
        losses.append(loss)
    mean_square = float(total.square().sum())
    of_batch = (sum(squares) / count - mean_square) * count / (count - 1)
    return mean_square - of_batch / count, of_batch * size, float(torch.tensor(losses).std()) * size**0.5


def true_gradient(session: Session, rows: Sequence[Any], size: int) -> Tensor:
    """Return the gradient of the mean loss over rows, in batches of at most `size`."""
    total = torch.zeros(1, dtype=torch.float64)
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        total = total + gradient(session, part)[0] * len(part) / len(rows)
    return total


def cosines(base: Session, config: Config, rows: Sequence[Any], target: Tensor, budget: int) -> tuple[float, ...]:
    """Return the mean cosine of one step, that of the sum of all steps, and the number of steps."""
    own = load_session(in_float32(config))
    own.loaded.model.load_state_dict(base.loaded.model.state_dict())
    own.exclude_unreachable(rows[0])
    optimizer: Any = own.optimizer
    optimizer.keep_start(lambda: own.params)
    sampler, single, total, step = make_sampler(config, rows), [], torch.zeros_like(target), 0
    start = {name: tensor.detach().clone() for name, tensor in own.params.tensors.items()}
    while sum(optimizer.count_forwards(step + 1).values()) <= budget:
        numbers = sampler.batch(step)
        with torch.no_grad():
            own.step([rows[i] for i in numbers], step, sampler.weights(numbers))
            parts = [(start[name] - tensor).flatten().double() for name, tensor in own.params.tensors.items()]
            for name, tensor in own.params.tensors.items():
                tensor.copy_(start[name])
        update = torch.cat(parts)
        total += update
        single.append(float(torch.nn.functional.cosine_similarity(update, target, dim=0)))
        step += 1
    return sum(single) / step, float(torch.nn.functional.cosine_similarity(total, target, dim=0)), step


def in_float32(config: Config) -> Config:
    """Return the config with forwards in float32, none of which are kept between steps."""
    model = config.model.replace(compute_dtype="float32", cache_frozen="off")
    return config.replace(model=model)


def show_noise(overrides: Sequence[str], size: int, count: int) -> None:
    """Print the noise of the batches of each kind."""
    config = build_config([*overrides, "model.compute_dtype=float32"])
    session, train = load_session(config), load_splits(config).train
    rows = session.encoder.encode_all([train[i] for i in torch.randperm(len(train)).tolist()[:count]])
    session.exclude_unreachable(rows[0])
    print("| data.batches | G | N | std of the loss x sqrt(B) |\n|---|---|---|---|")
    for kind in KINDS:
        print("| {} | {:.3g} | {:.3g} | {:.3g} |".format(kind, *noise(session, rows, size, kind)), flush=True)


def show_cosines(at: Path, steps: Sequence[int], paths: Sequence[Path], budget: int, count: int) -> None:
    """Print the cosines of each method at each step."""
    base = read_run(at)
    config = in_float32(base.config)
    print("| step | method | steps | cos of one step | cos of their sum |\n|---|---|---|---|---|")
    for step in steps:
        session = load_step(config, base.run, step)
        train = load_splits(config).train
        rows = session.encoder.encode_all([train[i] for i in torch.randperm(len(train)).tolist()[:count]])
        target = true_gradient(session, rows, config.batch_size)
        for path in paths:
            own = read_run(path).config
            one, whole, taken = cosines(session, own, rows, target, budget)
            print(f"| {step} | {method_name(own)} {path} | {taken} | {one:.5f} | {whole:.5f} |", flush=True)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--noise", type=int, default=0, help="rows per batch: measure the noise of batches")
    parser.add_argument("--at", type=Path, help="the run whose weights are taken")
    parser.add_argument("--steps", default="0", help="steps of that run, separated by commas")
    parser.add_argument("--calls", type=int, default=180, help="calls per method")
    parser.add_argument("--rows", type=int, default=1024, help="rows of train")
    parser.add_argument("words", nargs="*", help="overrides, or runs")
    args = parser.parse_intermixed_args()
    torch.manual_seed(0)
    if args.noise:
        show_noise(args.words, args.noise, args.rows)
    if args.at:
        steps = [int(step) for step in args.steps.split(",")]
        show_cosines(args.at, steps, [Path(word) for word in args.words], args.calls, args.rows)


if __name__ == "__main__":
    main()
