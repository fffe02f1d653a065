"""What the moments of `mezo_momentum` and `mezo_adam` cost: the error of a bounded window, and the time of an update.

    python scripts/measure_moments.py error     how far a window's steps are from those of the whole moment
    python scripts/measure_moments.py cost      how long an update takes, as a ratio to MeZO's
    python scripts/measure_moments.py cost --rounds 50 model=demo data=files data.dir=GLUE/SST-2 batch_size=16

`error` takes `--steps` real steps of each method (experiment=demo batch_size=64, unless settings are given) and holds
what those projected gradients move by a window against what they move by the whole moment, starting from 0 so that no
rounding of theta comes in; on one layer's tensors, as elements of z are alike. Told are the mean over single steps, the
last and four before it, and all steps together. `cost` takes real steps of all methods in turn, each on a model of its
own, and tells medians.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mezo_cli import config as configs
from mezo_cli.loop import load_data
from mezo_cli.optim.mezo import Mezo, Record
from mezo_cli.order import Order
from mezo_cli.session import Session, prepare

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


class Stepping:
    """A session that takes real steps of train, one after the other, and times its updates."""

    def __init__(self, words: Sequence[str], given: Sequence[str]) -> None:
        config = configs.build([*given, *words])
        self.session: Session = prepare(config)
        self.rows = self.session.inputs.encode_all(load_data(config).train)
        self.order = Order(len(self.rows), config.batch_size, config.seed)
        batch = self.session.batch(self.rows[:2])
        self.session.params.keep_live(lambda: self.session.objective.logits(batch))
        self.count, self.update_seconds = 0, 0.0
        optimizer: Any = self.session.optimizer
        self._apply, optimizer.apply = optimizer.apply, self._timed

    def step(self) -> Record:
        """Take one step; return its record."""
        result = self.session.step([self.rows[i] for i in self.order.batch(self.count)], self.count)
        self.count += 1
        return self.count - 1, result.projected_grads, result.lr

    def _timed(self, *args: Any) -> None:
        start = time.perf_counter()
        self._apply(*args)
        self.update_seconds = time.perf_counter() - start


@torch.no_grad()
def displaced(words: Sequence[str], given: Sequence[str], records: Sequence[Record], last: int) -> list[Tensor]:
    """Return how far records move one layer: all of them, and the last `last` ones, each flat; theta starts at 0."""
    session = prepare(configs.build([*given, *words]))
    params, optimizer = session.params, session.optimizer
    assert isinstance(optimizer, Mezo)
    params.tensors = {name: p for name, p in params.tensors.items() if ".layer.0." in name}
    moved = []
    for part in (records[:-last], records[-last:]):
        for p in params.tensors.values():
            p.data.zero_()
        optimizer.apply(params, list(part))
        moved.append(torch.cat([p.data.flatten() for p in params.tensors.values()]).double())
    return [moved[0] + moved[1], moved[1]]


def error(args: argparse.Namespace) -> None:
    """Print how far a window's steps are from the whole moment's."""
    heads = [f"{name}: {what}" for name in MOMENTS for what in ("one step", f"{args.steps} steps")]
    errors: dict[int, list[float]] = {window: [] for window in WINDOWS}
    for words in MOMENTS.values():
        given = args.overrides or ["experiment=demo", "batch_size=64"]
        stepping = Stepping(words, [*given, f"steps={args.steps}"])
        records = [stepping.step() for _ in range(args.steps)]
        singles: dict[int, list[float]] = {window: [] for window in WINDOWS}
        for at in range(args.steps - 4 * args.apart, args.steps + 1, args.apart):
            exact = displaced(words, given, records[:at], 1)
            for window in WINDOWS:
                ours = displaced([*words, f"optimizer.window={window}"], given, records[:at], 1)
                whole, one = (float((a - b).norm() / b.norm()) for a, b in zip(ours, exact, strict=True))
                singles[window].append(one)
                if at == args.steps:
                    errors[window] += [statistics.fmean(singles[window]), whole]
    print(f"| window | {' | '.join(heads)} |\n|---|{'---|' * len(heads)}")
    for window, row in errors.items():
        print(f"| {window} | {' | '.join(f'{100 * value:.2g}%' for value in row)} |")


def cost(args: argparse.Namespace) -> None:
    """Print what an update and a whole step of each method cost beside MeZO's of the same noise."""
    given = [*(args.overrides or ["model=demo", "data=demo", "batch_size=16"]), "optimizer.lr=1e-7"]
    all_of_them = {name: Stepping([*words, "steps=1000"], given) for name, words in METHODS.items()}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in METHODS}
    for number in range(args.rounds + 10):  # by which the windows are full
        for name, stepping in all_of_them.items():
            start = time.perf_counter()
            stepping.step()
            whole = time.perf_counter() - start
            if number >= 10:
                times[name].append((stepping.update_seconds, whole))
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
    parser.add_argument("--apart", type=int, default=20, help="of `error`: steps between the five that are looked at")
    parser.add_argument("--rounds", type=int, default=20, help="of `cost`")
    parser.add_argument("overrides", nargs="*", help="settings as for `mezo train`")
    args = parser.parse_intermixed_args()
    {"error": error, "cost": cost}[args.what](args)


if __name__ == "__main__":
    main()
