"""Make run directories as training leaves them, with the project's own writers but without training."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from mezo_cli.config.compose import build_config
from mezo_cli.config.schema import Config, OptimizerConfig
from mezo_cli.config.stored import to_yaml
from mezo_cli.errors import RunFailed
from mezo_cli.runs import Run
from mezo_cli.runs.trajectory import Header, Writer

SEEDS = (13, 21, 42, 87, 100)


@cache
def default_config(task: str = "sst2", objective: str = "mlm") -> Config:
    """Return the default config with gaussian noise, the paper's."""
    return build_config([f"task={task}", f"objective={objective}", "optimizer.noise=gaussian"])


def make_config(settings: Mapping[str, Any]) -> Config:
    """Return the default config (RoBERTa-large, the paper's settings) with some settings changed, by dotted key."""
    given = {"data.seed": settings.get("seed", 42), **settings}
    config = default_config(given.pop("task", "sst2"), given.pop("objective", "mlm"))
    for key, value in given.items():
        config = _with(config, key.split("."), value)
    return config


def _with(node: Any, parts: Sequence[str], value: Any) -> Any:
    inner = value if len(parts) == 1 else _with(getattr(node, parts[0]), parts[1:], value)
    if isinstance(node, OptimizerConfig) and parts[0] != "name":
        return dataclasses.replace(node, settings={**node.settings, parts[0]: inner})
    return dataclasses.replace(node, **{parts[0]: inner})


def make_run(
    path: Path,
    settings: Mapping[str, Any] | None = None,
    *,
    dev: float = 0.5,
    test: float | None = 0.5,
    dev_loss: float = 0.6,
    ended: str = "finished",
    rows: str = "rows",
    start: str | None = None,
    grads: Sequence[float | Sequence[float]] = (),
    predicted: tuple[int, int] = (5, 5),
) -> Run:
    """Make a run directory and return it as a `Run`.

    Args:
        path: the run directory.
        settings: changes to the default config, by dotted key.
        dev, test, dev_loss: the scores of the best checkpoint, for a finished run; test None for no test split.
        ended: `finished`, `interrupted`, `running` (held by this process), or the error of a failed run.
        rows: the data fingerprint follows from it and the data seed.
        start: the start time in run.json.
        grads: the projected gradient of each step, or of each sample of each step.
        predicted: the number of rows predicted as each of the first two labels.
    """
    config = make_config(settings or {})
    run = Run.create(path, to_yaml(config), ["mezo", "train"])
    run.update(data_fingerprint=f"{rows}-{config.data.seed}-{config.data.dir}", **({"start": start} if start else {}))
    labels = dict(zip(config.task.labels, predicted, strict=False))
    run.log_metrics("eval", 0, split="dev", loss=0.7, accuracy=0.4, predicted=labels, seconds=0.5)
    optimizer = config.optimizer
    stored = {"sample_schedule": optimizer.sample_schedule, "steps": config.steps}
    header = Header("none", optimizer.name, optimizer.noise, config.seed, optimizer.samples, 0.0, [], stored)
    writer = Writer(run.open_trajectory(), header)
    for step, given in enumerate(grads):
        samples = [given] if isinstance(given, float) else list(given)
        grad = sum(samples) / len(samples)
        run.log_metrics("train", step + 1, loss=0.7 - 0.01 * step, projected_grad=grad, seconds=1.0 + step)
        writer.append(step, samples, 1e-6)
    writer.close()
    if ended == "running":
        run.update(status="running")
        return run
    try:
        with run.tracked():
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
            run.log_metrics("eval", steps, split=split, **seen, predicted=dict(labels), seconds=9.0)
    run.write_summary({"steps": steps, "forwards": 2 * steps, "backwards": 0, "seconds": 9.0, **scores})


def make_grid(root: Path, settings: Mapping[str, Any], lrs: Mapping[float, Mapping[int, tuple[float, float]]]) -> None:
    """Make a run for each lr and seed, with the scores of `lrs`: lr -> seed -> (dev, test)."""
    for lr, seeds in lrs.items():
        for seed, (dev, test) in seeds.items():
            point = {"optimizer.lr": lr, "seed": seed, **settings}
            make_run(root / f"{len(list(root.glob('*')))}", point, dev=dev, test=test)


def first_table_cells(out: str) -> dict[str, list[str]]:
    """Return row name -> words of its cells, of the first table that `--objectives` printed."""
    lines = out.split("\n\n")[0].splitlines()[1:]
    return {name: cells.split() for name, cells in (re.split(r"\s{2,}", line, maxsplit=1) for line in lines)}


def make_two_methods(root: Path) -> Path:
    """Make the runs of two methods on SST-2, one of them incomplete, and return their folder."""
    few_shot = {"data.shots": 16}
    make_grid(root / "mezo", few_shot, {1e-6: dict.fromkeys(SEEDS, (0.8, 0.9)), 1e-7: {13: (0.9, 0.95)}})
    other = {**few_shot, "optimizer.noise": "rademacher"}
    make_run(root / "other" / "a", {**other, "seed": 13}, dev=0.7, test=0.6)
    make_run(root / "other" / "b", {**other, "seed": 21}, ended="the disk | is\nfull")
    return root
