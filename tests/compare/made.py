"""Run directories as training leaves them, written by the project's own writers, without any training."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from mezo_cli import config as configs
from mezo_cli.errors import RunFailed
from mezo_cli.runs import Run
from mezo_cli.runs.trajectory import Header, Writer
from mezo_cli.schema import Config

SEEDS = (13, 21, 42, 87, 100)


@cache
def composed(task: str = "sst2", objective: str = "mlm") -> Config:
    return configs.build([f"task={task}", f"objective={objective}", "optimizer.noise=gaussian"])


def config_of(settings: Mapping[str, Any]) -> Config:
    """The default config (RoBERTa-large, the paper's settings) with some settings changed, by dotted key."""
    given = {"data.seed": settings.get("seed", 42), **settings}
    config = composed(given.pop("task", "sst2"), given.pop("objective", "mlm"))
    for key, value in given.items():
        config = _with(config, key.split("."), value)
    return config


def _with(node: Any, parts: Sequence[str], value: Any) -> Any:
    inner = value if len(parts) == 1 else _with(getattr(node, parts[0]), parts[1:], value)
    return dataclasses.replace(node, **{parts[0]: inner})


def made(
    path: Path,
    settings: Mapping[str, Any] | None = None,
    *,
    dev: float = 0.5,
    test: float | None = 0.5,
    dev_loss: float = 0.6,
    ended: str = "finished",
    rows: str = "rows",
    start: str | None = None,
    grads: Sequence[float] = (),
    predicted: tuple[int, int] = (5, 5),
) -> Run:
    """A run that ended so: finished, interrupted, running (this process holds it), or failed with `ended` as its error.

    The data fingerprint follows from `rows` and the data seed.
    """
    config = config_of(settings or {})
    run = Run.create(path, configs.to_yaml(config), ["mezo", "train"])
    run.update(data_fingerprint=f"{rows}-{config.data.seed}-{config.data.dir}", **({"start": start} if start else {}))
    labels = dict(zip(config.task.labels, predicted, strict=False))
    run.metric("eval", 0, split="dev", loss=0.7, accuracy=0.4, predicted=labels, seconds=0.5)
    header = Header("none", config.optimizer.name, config.optimizer.noise, config.seed, 1, 0.0, [])
    writer = Writer(run.open_trajectory(), header)
    for step, grad in enumerate(grads):
        run.metric("train", step + 1, loss=0.7 - 0.01 * step, projected_grad=grad, seconds=1.0 + step)
        writer.append(step, [grad], 1e-6)
    writer.close()
    if ended == "running":
        return run
    try:
        with run.recording():
            if ended == "interrupted":
                raise KeyboardInterrupt
            if ended != "finished":
                raise RunFailed(ended)
            _finish(run, config, dev, dev_loss, test, labels)
    except (KeyboardInterrupt, RunFailed):
        pass
    return run


def _finish(
    run: Run, config: Config, dev: float, dev_loss: float, test: float | None, labels: Mapping[str, int]
) -> None:
    metric, steps = config.task.metric, config.steps
    scores = {
        name: None if value is None else {"accuracy": value, "loss": loss, metric: value}
        for name, value, loss in (("dev", dev, dev_loss), ("train", 0.9, 0.3), ("test", test, 0.6))
    }
    for split, seen in scores.items():
        if seen is not None:
            run.metric("eval", steps, split=split, **seen, predicted=dict(labels), seconds=9.0)
    run.summary({"steps": steps, "forwards": 2 * steps, "backwards": 0, "seconds": 9.0, **scores})


def grid(root: Path, settings: Mapping[str, Any], lrs: Mapping[float, Mapping[int, tuple[float, float]]]) -> None:
    """Runs for lr -> seed -> (dev, test)."""
    for lr, seeds in lrs.items():
        for seed, (dev, test) in seeds.items():
            point = {"optimizer.lr": lr, "seed": seed, **settings}
            made(root / f"{len(list(root.glob('*')))}", point, dev=dev, test=test)


def cells_of(out: str) -> dict[str, list[str]]:
    """The cells of the first table of `--objectives`, in words, by the names of its rows."""
    lines = out.split("\n\n")[0].splitlines()[1:]
    return {name: cells.split() for name, cells in (re.split(r"\s{2,}", line, maxsplit=1) for line in lines)}
