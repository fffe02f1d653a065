"""End a run: evaluate the best step, compare it with the untrained model, write predictions.jsonl and summary.json."""

import logging
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from mezo_cli import system
from mezo_cli.objectives.comparison import compare
from mezo_cli.objectives.evaluation import Evaluation
from mezo_cli.runs import trajectory
from mezo_cli.training.load import EncodedRows
from mezo_cli.training.session import Session
from mezo_cli.training.training_run import TrainingRun
from mezo_cli.training.verdict import verdict

log = logging.getLogger("mezo")


def finish(state: TrainingRun, session: Session, rows: EncodedRows, seconds: float, console: Console) -> None:
    """Evaluate the best step and write its evaluations, predictions.jsonl and summary.json, which `state` keeps.

    A rank other than 0 helps to evaluate. `session` is at the weights of the best step, `seconds` the training time.
    """
    splits = rows.splits()
    evaluations = {name: state.evaluate_best(session, name, split, console) for name, split in splits.items()}
    if not state.run.writes:
        return
    for split in ("train", "test"):
        if split in evaluations:
            state.log_evaluation(split, state.best_step, evaluations[split])
    if "test" in evaluations:
        pairs = zip(rows.texts or [], evaluations["test"].records, strict=True)
        describe = session.objective.describe_row
        state.run.write_predictions({**describe(row), **record} for row, record in pairs)
    state.summary = _summarise(state, session, rows, evaluations, seconds)
    state.run.write_summary(state.summary)


def _summarise(
    state: TrainingRun, session: Session, rows: EncodedRows, evaluations: Mapping[str, Evaluation], seconds: float
) -> dict[str, Any]:
    """Return the content of summary.json."""
    run, optimizer, best, ranks = state.run, session.optimizer, state.best_step, state.ranks
    passes, probe = optimizer.count_forwards(state.step), run.info().get("probe", {})
    passes["forwards"] += probe.get("forwards", 0)
    scores = _summarise_scores(state, session, rows, evaluations)
    metric = state.config.chosen_metric
    grads = trajectory.read(run.trajectory).drawn_grads(optimizer.shown) if optimizer.replayable else None
    summary = {
        "steps": state.step,
        **passes,
        "seconds": round(seconds, 3),
        "verdict": verdict(state.divergence.reason is not None, best, state.step),
        "best": {"step": best, metric: scores["dev"][metric]},
        **scores,
        optimizer.scalar: trajectory.scalar_stats(grads),
        "peak_memory_bytes": system.peak_memory(session.loaded.device),
    } | ({"probe": probe} if probe else {})
    if state.stop_reason is not None:
        summary["stopped"] = state.stop_reason
    if ranks is not None:
        shared = {"ranks": ranks.size, "split": ranks.split, "bytes_per_step": state.exchanged_bytes_per_step()}
        log.info("ranks  %d ranks shared the %s of a step, and exchanged %g bytes for it", *shared.values())
        summary["distributed"] = shared
    return summary


def _summarise_scores(
    state: TrainingRun, session: Session, rows: EncodedRows, evaluations: Mapping[str, Evaluation]
) -> dict[str, Any]:
    """Return `dev`, `train` and `test` of the best step, and what they are compared with."""
    config, objective, splits = state.config, session.objective, rows.splits()
    before: Mapping[str, Evaluation] = {}
    if config.test_at_start:
        before = {name: objective.assess(values, splits[name]) for name, values in state.untrained.items()}
        before = before if config.steps else evaluations
        if not before:
            log.warning("warning: the result is not compared with the untrained model: there is no untrained.json")
    compared = compare(objective, before, evaluations, splits, trained=config.steps > 0)
    intervals, test = compared.pop("intervals"), evaluations.get("test")
    # The scores that chose the best step: those of the same weights restored may differ in the last bits.
    dev = state.dev[state.best_step]
    return {
        "dev": {**{name: dev[name] for name in evaluations["dev"].scores()}, "intervals": intervals["dev"]},
        "train": {**evaluations["train"].scores(), "rows": len(rows.train)},
        "test": None if test is None else {**test.scores(), "intervals": intervals["test"]},
        **compared,
    }
