"""Measure the moments of `mezo_momentum` and `mezo_adam`: the error of a bounded window, and the time of an update.

    python scripts/measure_moments.py error     difference between steps with a window and with the exact moment
    python scripts/measure_moments.py cost      time of an update, as a ratio to MeZO's
    python scripts/measure_moments.py cost --rounds 50 model=demo data=files data.dir=GLUE/SST-2 batch_size=16

`error` takes `--steps` steps of each method (experiment=demo peft=none batch_size=64, unless settings are given). It
applies the recorded projected gradients twice, with a window and with the exact moment, and compares how far theta has
moved. It does so from theta = 0, to leave out the rounding of theta, and for one layer's tensors, as all elements of z
have the same distribution. Printed are the mean over five single steps (the last one and four before it) and the error
of all steps together. `cost` takes steps of all methods in turn, each with its own model, and prints medians.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mezo_cli.config.compose import build_config
from mezo_cli.config.schema import StepRecord
from mezo_cli.data import load_splits
from mezo_cli.data.batch_sampler import BatchSampler
from mezo_cli.optim.mezo import Mezo
from mezo_cli.training.setup import Session, prepare

WINDOWS = (4, 8, 16, 32, 64)
RADEMACHER = "optimizer.noise=rademacher"
MOMENTS = {  # what `error` compares; lr such that the demo learns
    "mezo_momentum": ["optimizer=mezo_momentum", "optimizer.lr=3e-5", RADEMACHER],
    "mezo_adam": ["optimizer=mezo_adam", "optimizer.lr=3e-4", RADEMACHER],
}
METHODS = {  # what `cost` compares
    "mezo, gaussian": ["optimizer=mezo"],
    "mezo_momentum, gaussian, buffer": ["optimizer=mezo_momentum"],
    "mezo_momentum, gaussian, window 8": ["optimizer=mezo_momentum", "optimizer.window=8"],
    "mezo_adam, gaussian, two buffers": ["optimizer=mezo_adam"],
    "mezo, rademacher": ["optimizer=mezo", RADEMACHER],
    "mezo_momentum, rademacher, buffer": ["optimizer=mezo_momentum", RADEMACHER],
    "mezo_momentum, rademacher, window 8": ["optimizer=mezo_momentum", RADEMACHER, "optimizer.window=8"],
    "mezo_adam, rademacher, buffer": ["optimizer=mezo_adam", RADEMACHER],
    "mezo_adam, rademacher, window 8": ["optimizer=mezo_adam", RADEMACHER, "optimizer.window=8"],
}


class TimedSession:
    """A session that takes training steps in order and times the updates."""

    def __init__(self, words: Sequence[str], given: Sequence[str]) -> None:
        config = build_config([*given, *words])
        self.session: Session = prepare(config)
        self.rows = self.session.encoder.encode_all(load_splits(config).train)
        self.sampler = BatchSampler(len(self.rows), config.batch_size, config.seed)
        batch = self.session.batch(self.rows[:2])
        self.session.forward.select_reachable(lambda: self.session.objective.logits(batch))
        self.count, self.update_seconds = 0, 0.0
        optimizer: Any = self.session.optimizer
        self._apply, optimizer.apply_updates = optimizer.apply_updates, self._timed

    def step(self) -> StepRecord:
        """Take the next step; return its record."""
        result = self.session.step([self.rows[i] for i in self.sampler.batch(self.count)], self.count)
        self.count += 1
        return self.count - 1, result.projected_grads, result.lr

    def _timed(self, *args: Any) -> None:
        start = time.perf_counter()
        self._apply(*args)
        self.update_seconds = time.perf_counter() - start


@torch.no_grad()
def movement(words: Sequence[str], given: Sequence[str], records: Sequence[StepRecord], last: int) -> list[Tensor]:
    """Return by how much the records move one layer from theta = 0, flat: all of them, and the last `last` ones."""
    session = prepare(build_config([*given, *words]))
    params, optimizer = session.params, session.optimizer
    assert isinstance(optimizer, Mezo)
    params.tensors = {name: p for name, p in params.tensors.items() if ".layer.0." in name}
    moved = []
    for part in (records[:-last], records[-last:]):
        for p in params.tensors.values():
            p.data.zero_()
        optimizer.apply_updates(params, list(part))
        moved.append(torch.cat([p.data.flatten() for p in params.tensors.values()]).double())
    return [moved[0] + moved[1], moved[1]]


def error(args: argparse.Namespace) -> None:
    """Print the relative error of steps with a window."""
    heads = [f"{name}: {what}" for name in MOMENTS for what in ("one step", f"{args.steps} steps")]
    errors: dict[int, list[float]] = {window: [] for window in WINDOWS}
    for words in MOMENTS.values():
        given = args.overrides or ["experiment=demo", "peft=none", "batch_size=64"]
        session = TimedSession(words, [*given, f"steps={args.steps}"])
        records = [session.step() for _ in range(args.steps)]
        singles: dict[int, list[float]] = {window: [] for window in WINDOWS}
        for step in range(args.steps - 4 * args.apart, args.steps + 1, args.apart):
            exact = movement(words, given, records[:step], 1)
            for window in WINDOWS:
                ours = movement([*words, f"optimizer.window={window}"], given, records[:step], 1)
                whole, one = (float((a - b).norm() / b.norm()) for a, b in zip(ours, exact, strict=True))
                singles[window].append(one)
                if step == args.steps:
                    errors[window] += [statistics.fmean(singles[window]), whole]
    print(f"| window | {' | '.join(heads)} |\n|---|{'---|' * len(heads)}")
    for window, row in errors.items():
        print(f"| {window} | {' | '.join(f'{100 * value:.2g}%' for value in row)} |")


def cost(args: argparse.Namespace) -> None:
    """Print the time of an update and of a step of each method, and their ratios to MeZO's with the same noise."""
    given = [*(args.overrides or ["model=demo", "data=demo", "batch_size=16"]), "optimizer.lr=1e-7"]
    sessions = {name: TimedSession([*words, "steps=1000"], given) for name, words in METHODS.items()}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in METHODS}
    for number in range(args.rounds + 10):  # the windows are full after ten
        for name, session in sessions.items():
            start = time.perf_counter()
            session.step()
            whole = time.perf_counter() - start
            if number >= 10:
                times[name].append((session.update_seconds, whole))
    medians = {name: [statistics.median(column) for column in zip(*seen, strict=True)] for name, seen in times.items()}
    print("| method | update, ms | / mezo's | step / mezo's |\n|---|---|---|---|")
    for name, (update, step) in medians.items():
        plain = medians[f"mezo, {name.split(', ')[1]}"]
        print(f"| {name} | {1000 * update:.1f} | {update / plain[0]:.2f} | {step / plain[1]:.2f} |")


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["error", "cost"])
    parser.add_argument("--steps", type=int, default=200, help="of `error`")
    parser.add_argument("--apart", type=int, default=20, help="of `error`: steps between the five single steps")
    parser.add_argument("--rounds", type=int, default=20, help="of `cost`")
    parser.add_argument("overrides", nargs="*", help="settings as for `mezo train`")
    args = parser.parse_intermixed_args()
    {"error": error, "cost": cost}[args.what](args)


if __name__ == "__main__":
    main()
