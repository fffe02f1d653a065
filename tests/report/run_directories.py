"""Make runs as training leaves them, without training: as directories by the project's own writers, or in memory."""

import contextlib
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from mezo_cli.config.compose import build_config
from mezo_cli.config.explain import validate
from mezo_cli.config.optimizers import zeroth_order
from mezo_cli.config.registry import CHOICES
from mezo_cli.config.schema import Config, data_dir, to_dict
from mezo_cli.config.stored import to_yaml
from mezo_cli.config.validation import choose
from mezo_cli.errors import RunFailed
from mezo_cli.report.entries import Entry
from mezo_cli.report.groups import Group, group_runs
from mezo_cli.runs import Run
from mezo_cli.runs.trajectory import Header, Writer

SEEDS = (13, 21, 42, 87, 100)
NUMBERS = itertools.count()  # of the names of runs without a directory


@cache
def default_config(task: str = "sst2", objective: str = "mlm") -> Config:
    """Return the default config with gaussian noise, the paper's."""
    return build_config([f"task={task}", f"objective={objective}", "optimizer.noise=gaussian"])


def make_config(settings: Mapping[str, Any]) -> Config:
    """Return the default config (RoBERTa-large, the paper's settings) with some settings changed, by dotted key."""
    given = {"data.seed": settings.get("seed", 42), **settings}
    values = to_dict(default_config(given.pop("task", "sst2"), given.pop("objective", "mlm")))
    for key, value in given.items():
        *groups, name = key.split(".")
        node = values
        for group in groups:
            node = node[group]
        node[name] = value
    groups = {name: choose(name, values[name]) for name in CHOICES}
    return validate(Config, {**values, **groups})  # without the rules: a test may combine what a run may not


def make_entry(
    settings: Mapping[str, Any] | None = None,
    *,
    dev: float = 0.5,
    test: float | None = 0.5,
    dev_loss: float = 0.6,
    ended: str = "finished",
    rows: str = "rows",
    start: str = "2026-01-01",
    steps_done: int = 0,
) -> Entry:
    """Return a run as `read_entry` gives it, without a directory. See `make_run`."""
    config = make_config(settings or {})
    scores = {"dev": dev, "test": test} if ended == "finished" else {}
    losses = {"dev": dev_loss, "test": 0.6}
    return Entry(
        run=Run(Path(f"{ended}-{next(NUMBERS)}")),
        config=config,
        status=ended if ended in ("finished", "interrupted", "running") else "failed",
        info={"error": ended, "start": start, "data_fingerprint": f"{rows}-{config.data.seed}-{data_dir(config.data)}"},
        steps_done=steps_done,
        summary={
            split: {"accuracy": value, config.chosen_metric: value, "loss": losses[split]}
            for split, value in scores.items()
            if value is not None
        },
    )


def make_grid(settings: Mapping[str, Any], lrs: Mapping[float, Mapping[int, tuple[float, float]]]) -> list[Entry]:
    """Return a run for each lr and seed, with the scores of `lrs`: lr -> seed -> (dev, test)."""
    points = [(lr, seed, scores) for lr, seeds in lrs.items() for seed, scores in seeds.items()]
    return [
        make_entry({"optimizer.lr": lr, "seed": seed, **settings}, dev=dev, test=test)
        for lr, seed, (dev, test) in points
    ]


def only_group(*entries: Entry) -> Group:
    (group,) = group_runs(entries)
    return group


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
    between: Mapping[int, float] | None = None,
) -> Run:
    """Make a run directory and return it as a `Run`.

    Args:
        dev, test, dev_loss: the scores of the best checkpoint, for a finished run; test None for no test split.
        ended: `finished`, `interrupted`, `running` (held by this process), or the error of a failed run.
        rows: the data fingerprint follows from it and the data seed.
        start: the start time in run.json.
        grads: the projected gradient of each step that the trajectory has, or of each sample of each step. A finished
            run has taken these steps alone, whatever its config says: 100,000 records would be slow to read.
        between: step -> dev score of further evaluations, after that of step 0, whose score is 0.4.
    """
    config = make_config(settings or {})
    run = Run.create(path, to_yaml(config), ["mezo", "train"])
    run.update(
        data_fingerprint=f"{rows}-{config.data.seed}-{data_dir(config.data)}", **({"start": start} if start else {})
    )
    labels = dict.fromkeys(config.task.labels[:2], 5)
    run.log_metrics("eval", 0, split="dev", loss=0.7, accuracy=0.4, predicted=labels, seconds=0.5)
    for step, score in (between or {}).items():
        run.log_metrics("eval", step, split="dev", loss=0.65, accuracy=score, predicted=labels, seconds=0.6)
    writer = _open_trajectory(run, config)
    for step, of_step in enumerate(grads):
        samples = [of_step] if isinstance(of_step, float) else list(of_step)
        grad = sum(samples) / len(samples)
        run.log_metrics("train", step + 1, loss=0.7 - 0.01 * step, projected_grad=grad, seconds=1.0 + step)
        writer.append(step, samples, 1e-6)
    writer.close()

    def finish() -> None:
        scores = {
            name: None if value is None else {"accuracy": value, "loss": loss, config.chosen_metric: value}
            for name, value, loss in (("dev", dev, dev_loss), ("train", 0.9, 0.3), ("test", test, 0.6))
        }
        for split, seen in scores.items():
            if seen is not None:
                run.log_metrics("eval", config.steps, split=split, **seen, predicted=labels, seconds=9.0)
        passes = {"forwards": 2 * config.steps, "backwards": 0, "seconds": 9.0}
        best = {"step": min(run.evaluations("dev"), key=config.rank)["step"]}
        run.write_summary({"steps": len(grads), **passes, "best": best, **scores})

    return _end(run, ended, finish)


def _open_trajectory(run: Run, config: Config) -> Writer:
    optimizer = zeroth_order(config.optimizer)
    stored = {"sample_schedule": optimizer.sample_schedule, "steps": config.steps}
    header = Header("none", optimizer.name, optimizer.noise, config.seed, optimizer.samples, 0.0, [], stored)
    return Writer(run.open_trajectory(), header)


def _end(run: Run, ended: str, finish: Callable[[], None]) -> Run:
    """End a run as `ended` says (see `make_run`); `finish` writes what a finished run has."""
    if ended == "running":
        run.update(status="running")
        return run
    with contextlib.suppress(KeyboardInterrupt, RunFailed), run.tracked():
        if ended == "interrupted":
            raise KeyboardInterrupt
        if ended != "finished":
            raise RunFailed(ended)
        finish()
    return run


def make_two_methods(root: Path) -> Path:
    """Make the runs of two methods on SST-2, one of them incomplete, and return their folder."""
    few = {"data.shots": 16, "model.tie_embeddings": False}  # as in the paper
    for seed in SEEDS:
        make_run(root / "mezo" / f"a{seed}", {**few, "seed": seed}, dev=0.8, test=0.9)
    make_run(root / "mezo" / "b", {**few, "seed": 13, "optimizer.lr": 1e-7}, dev=0.9, test=0.95)
    other = {**few, "optimizer.noise": "rademacher"}
    make_run(root / "other" / "a", {**other, "seed": 13}, dev=0.7, test=0.6)
    make_run(root / "other" / "b", {**other, "seed": 21}, ended="the disk | is\nfull")
    return root


def make_curves(
    path: Path,
    settings: Mapping[str, Any] | None = None,
    *,
    gain: float = 0.3,
    text: str = "a film of no great length",
    ended: str = "finished",
    test_rows: int = 40,
) -> Run:
    """Make the directory of a run that learns: curves of loss and dev, gradients (some of them 0), predictions.

    Args:
        gain: by how much dev is better at the end than before the first step.
        text: in every test row, and in the prompt; every fourth row is predicted wrong.
        ended: `finished`, or `running` (held by this process).
    """
    config = make_config({"steps": 40, "eval_every": 10, "log_every": 1, **(settings or {})})
    argv = ["mezo", "train", "steps=40", f"data.dir={'a/long/path' * 9}"]
    labels, steps, metric = config.task.labels, config.steps, config.chosen_metric
    run = Run.create(path, to_yaml(config), argv)
    run.update(
        data_fingerprint=f"rows-{config.data.seed}",
        rows={"train": 32, "dev": 32, "test": test_rows},
        prompt=f"<s>{text}. It was<mask>.</s>",
        scored_by="label words at the mask",
        label_words=config.task.label_words,
        trainable={"count": 1000, "share": 1.0, "names": ["weight"]},
    )
    writer = _open_trajectory(run, config)
    generator = random.Random(config.seed)
    for step in range(steps + 1):
        if step:
            grad = 0.0 if step % 5 == 0 else generator.gauss(0, 1)
            writer.append(step - 1, [grad], 1e-6)
            run.log_metrics("train", step, loss=1 - step / 80, projected_grad=grad, seconds=round(step * 0.25, 3))
        if config.evaluates_at(step):
            score = 0.5 + gain * step / steps
            dev = {"loss": 1 - score, "accuracy": score, metric: score}
            predicted = {label: 32 // len(labels) for label in labels}
            run.log_metrics("eval", step, split="dev", **dev, predicted=predicted, seconds=step * 0.25)
    writer.close()

    def finish() -> None:
        rows = [_predict(row, text, labels) for row in range(test_rows)]
        predicted = {label: sum(row["predicted"] == label for row in rows) for label in labels}
        test = {"loss": 0.5, "accuracy": 0.75, metric: 0.75}
        run.log_metrics("eval", steps, split="test", **test, predicted=predicted, seconds=11.0)
        run.write_predictions(rows)
        passes = {"forwards": 2 * steps, "backwards": 0, "seconds": 10.0, "peak_memory_bytes": 10**9}
        best = {"step": steps, "accuracy": dev["accuracy"]}
        run.write_summary({"steps": steps, **passes, "best": best, "dev": dev, "train": test, "test": test})

    return _end(run, ended, finish)


def _predict(row: int, text: str, labels: Sequence[str]) -> dict[str, Any]:
    """Return the prediction for a row: the surer, the higher the row's number."""
    label = labels[row % len(labels)]
    predicted = label if row % 4 else labels[(row + 1) % len(labels)]
    high = 0.5 + row / 200
    rest = (1 - high) / (len(labels) - 1)
    probabilities = {name: high if name == predicted else rest for name in labels}
    columns = {"sentence": f"{text}, row {row}"}
    return {"columns": columns, "label": label, "predicted": predicted, "probabilities": probabilities}
