"""Compare theta in float32 with theta in two bytes, rounded stochastically and to nearest: accuracy, and what is kept.

    python scripts/measure_rounding.py --out outputs/rounding --seeds 13,21,42,87,100 experiment=demo-sst2 \
        data.dir=GLUE/SST-2 model.compute_dtype=bfloat16 steps=400 optimizer.lr=1e-4
    python scripts/measure_rounding.py --kept experiment=demo peft=none

One run per seed and storage, seed by seed; the losses are those before the first step and after the last, the best dev
accuracy and that of test are of the weights that the run keeps. `bfloat16-nearest` and `float16-nearest` round to the
nearest value instead, which `mezo` itself does not do. `kept` is the share of the updates that theta has really made:
the movement of theta from the first step to the last, projected on the sum of the same updates in float32. It is 1
where nothing is lost. A run that is in DIR already is not repeated. The table is printed again after every run.
`--kept` trains nothing: it applies 40 steps with made-up projected gradients at several learning rates, and prints what
is kept.
"""

import argparse
import dataclasses
import json
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from mezo_cli.commands.execute import execute
from mezo_cli.config.compose import build_config
from mezo_cli.config.schema import Config, StepRecord
from mezo_cli.config.stored import to_yaml
from mezo_cli.console import console_logging, make_console
from mezo_cli.perturb.noise import Direction
from mezo_cli.perturb.noise.spans import Span
from mezo_cli.perturb.params import Params
from mezo_cli.runs import Run, trajectory
from mezo_cli.training import restore
from mezo_cli.training.setup import prepare

NEAREST = "-nearest"
STORAGE = ("float32", "bfloat16", f"bfloat16{NEAREST}", "float16", f"float16{NEAREST}")
KEPT = "figures.json"
FORMS = {"dev loss before": ".3f", "after": ".3f", "kept": ".3f"}


def train(folder: Path, words: list[str], storage: str) -> None:
    """Train one run, and write beside it what is kept of its updates."""
    config = build_config([*words, f"model.dtype={storage.removesuffix(NEAREST)}", "checkpoint=trajectory"])
    with to_nearest() if storage.endswith(NEAREST) else nullcontext():
        console = make_console()
        with console_logging(console):
            execute(Run.create(folder, to_yaml(config), sys.argv), config, console)
        kept = share_kept(config, Run(folder))
    (folder / KEPT).write_text(json.dumps({"kept": kept}))


def figures(folder: Path) -> dict[str, float]:
    """Return the figures of a run that is done, in percent where they are accuracies."""
    dev, (test,) = (Run(folder).evaluations(split) for split in ("dev", "test"))
    return {
        "dev loss before": dev[0]["loss"],
        "after": dev[-1]["loss"],
        "dev before": 100 * dev[0]["accuracy"],
        "best dev": 100 * max(one["accuracy"] for one in dev),
        "test": 100 * test["accuracy"],
        "kept": json.loads((folder / KEPT).read_text())["kept"],
    }


@contextmanager
def to_nearest() -> Iterator[None]:
    """Let updates round to the nearest value."""
    with mock.patch("mezo_cli.perturb.params.round_", round_to_nearest), mock.patch.object(Params, "fuses", False):
        yield


def round_to_nearest(theta: Tensor, span: Span, dtype: torch.dtype, direction: Direction) -> None:
    """Round in place, in place of `mezo_cli.perturb.noise.rounding.round_`."""
    theta.copy_(theta.to(dtype))


def share_kept(config: Config, run: Run) -> float:
    """Return by how much theta has moved along the sum of its updates, as a share of that sum."""
    past = trajectory.read(run.trajectory)
    before = flat(restore.load_step(config, run, 0).params)
    moved = flat(restore.load_step(config, run, len(past)).params) - before
    exact = movement(config, "float32", past.records(0, len(past)), [name for name, _ in past.header.tensors])
    return float(moved @ exact / (exact @ exact))


def movement(config: Config, dtype: str, records: list[StepRecord], names: Sequence[str] = ()) -> Tensor:
    """Return by how much theta moves by the records; in float32 from theta = 0, so that nothing is rounded.

    Args:
        config: of the run.
        dtype: how theta is stored.
        records: the steps.
        names: the trainable tensors; all of them if empty.
    """
    model: Any = {"dtype": dtype}
    session = prepare(dataclasses.replace(config, model=dataclasses.replace(config.model, **model)))
    params, optimizer = session.params, session.optimizer
    params.tensors = {name: p for name, p in params.tensors.items() if not names or name in names}
    assert optimizer.replayable
    if dtype == "float32":
        for p in params.tensors.values():
            p.data.zero_()
    before = flat(params)
    optimizer.apply_updates(params, records)
    return flat(params) - before


def show_kept(words: list[str]) -> None:
    """Print the share of the updates that is kept, for each learning rate and storage."""
    config, draw = build_config(words), random.Random(0)
    grads = [draw.gauss(0.0, 10.0) for _ in range(40)]
    others = STORAGE[1:]
    print(f"| lr | mean movement | {' | '.join(others)} |\n|---|---|{'---|' * len(others)}")
    for lr in (1e-4, 1e-5, 1e-6, 1e-7):
        records = [(step, [g], lr) for step, g in enumerate(grads)]
        exact, cells = movement(config, "float32", records), []
        for storage in others:
            with to_nearest() if storage.endswith(NEAREST) else nullcontext():
                moved = movement(config, storage.removesuffix(NEAREST), records)
            cells.append(f"{float(moved @ exact / (exact @ exact)):.3f}")
        print(f"| {lr:.0e} | {float(exact.abs().mean()):.1e} | {' | '.join(cells)} |", flush=True)


def flat(params: Params) -> Tensor:
    """Return theta as one vector, float64."""
    return torch.cat([p.detach().flatten().double() for p in params.tensors.values()])


def show(done: dict[tuple[str, str], dict[str, float]]) -> None:
    """Print one row per storage: mean and standard deviation over the seeds."""
    names = list(next(iter(done.values())))
    print(f"\n| theta | seeds | {' | '.join(names)} |\n|---|---|{'---|' * len(names)}")
    for storage in STORAGE:
        rows = [found for (_, name), found in done.items() if name == storage]
        if rows:
            cells = [spread([row[name] for row in rows], FORMS.get(name, ".1f")) for name in names]
            print(f"| {storage} | {len(rows)} | {' | '.join(cells)} |")
    sys.stdout.flush()


def spread(values: list[float], form: str) -> str:
    """Return the mean and, for several values, their standard deviation."""
    deviation = f" ({statistics.stdev(values):{form}})" if len(values) > 1 else ""
    return f"{statistics.fmean(values):{form}}{deviation}"


def main() -> None:
    """Train what is not there yet, and print the table after each run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=Path("outputs/rounding"))
    parser.add_argument("--kept", action="store_true", help="train nothing")
    parser.add_argument("--seeds", default="13,21,42,87,100")
    parser.add_argument("--storage", default=",".join(STORAGE[:3]), help=f"some of {','.join(STORAGE)}")
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE")
    args = parser.parse_args()
    if args.kept:
        show_kept(args.words)
        return
    done: dict[tuple[str, str], dict[str, float]] = {}
    for seed in args.seeds.split(","):
        for storage in args.storage.split(","):
            folder = args.out / f"{storage}-{seed}"
            if not (folder / KEPT).is_file():
                train(folder, [*args.words, f"seed={seed}"], storage)
            done[seed, storage] = figures(folder)
            show(done)


if __name__ == "__main__":
    main()
