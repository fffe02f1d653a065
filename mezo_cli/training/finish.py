"""End a run: evaluate the best step, compare it with the untrained model, write predictions.jsonl and summary.json."""

import logging
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from mezo_cli import system
from mezo_cli.objectives.scoring import Evaluation
from mezo_cli.runs import trajectory
from mezo_cli.training.load import EncodedRows
from mezo_cli.training.session import Session
from mezo_cli.training.training_run import TrainingRun
from mezo_cli.training.verdict import DIVERGED, NOT_COMPARED, NOT_IMPROVED, Compared, judge_difference

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
            state.log.evaluation(split, state.best.step, evaluations[split])
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
    run, optimizer, best, ranks = state.run, session.optimizer, state.best.step, state.ranks
    passes, probe = optimizer.count_forwards(state.step), run.info().get("probe", {})
    passes["forwards"] += probe.get("forwards", 0)
    scores = _summarise_scores(state, session, rows, evaluations)
    metric = state.config.chosen_metric
    rewarded = run.info().get("reward")
    grads = trajectory.read(run.trajectory).drawn_grads(optimizer.shown) if optimizer.replayable else None
    summary = {
        "steps": state.step,
        **passes,
        "seconds": round(seconds, 3),
        **_verdict(state, session, rows, scores),
        "best": {"step": best, metric: scores["dev"][metric]},
        **scores,
        optimizer.scalar: trajectory.scalar_stats(grads),
        "peak_memory_bytes": system.peak_memory(session.loaded.device),
    }
    summary |= ({"probe": probe} if probe else {}) | ({"reward": rewarded["name"]} if rewarded else {})
    if state.stop_reason is not None:
        summary["stopped"] = state.stop_reason
    if ranks.size > 1:
        shared = {"ranks": ranks.size, "split": ranks.split, "bytes_per_step": state.exchanged_bytes_per_step()}
        log.info("ranks  %d ranks shared the %s of a step, and exchanged %g bytes for it", *shared.values())
        summary["distributed"] = shared
    return summary


def _summarise_scores(
    state: TrainingRun, session: Session, rows: EncodedRows, evaluations: Mapping[str, Evaluation]
) -> dict[str, Any]:
    """Return `dev`, `train` and `test` of the best step, and what they are compared with."""
    config, objective, splits = state.config, session.objective, rows.splits()
    before = _untrained(state, session, rows) if config.steps else evaluations if config.test_at_start else {}
    compared = objective.compare(before, evaluations, splits, trained=config.steps > 0)
    intervals, test = compared.pop("intervals"), evaluations.get("test")
    # The scores that chose the best step: those of the same weights restored may differ in the last bits.
    dev = state.best.evaluations[state.best.step]
    return {
        "dev": {**{name: dev[name] for name in evaluations["dev"].scores()}, "intervals": intervals["dev"]},
        "train": {**evaluations["train"].scores(), "rows": len(rows.train)},
        "test": None if test is None else {**test.scores(), "intervals": intervals["test"]},
        **compared,
    }


def _untrained(state: TrainingRun, session: Session, rows: EncodedRows) -> dict[str, Evaluation]:
    """Return the evaluations before the first step; none where they were not asked for, or are lost."""
    splits = rows.splits()
    return {name: session.objective.assess(values, splits[name]) for name, values in state.untrained.items()}


def _verdict(
    state: TrainingRun, session: Session, rows: EncodedRows, scores: Mapping[str, Any]
) -> dict[str, str | None]:
    """Return `verdict`, and `verdict_reason`, the figures behind it. A run of no steps has none."""
    word, reason = None, None
    if not state.step:
        pass
    elif state.divergence.reason is not None:
        word, reason = DIVERGED, state.divergence.reason
    elif state.best.step == 0:
        word, reason = NOT_IMPROVED, "the result is that of step 0, the model before training"
    elif not state.config.test_at_start:
        word, reason = NOT_COMPARED, "test_at_start=false leaves out the untrained model"
    else:
        compared = _compared(state, session, rows, scores)
        if isinstance(compared, str):
            word, reason = NOT_COMPARED, compared
        else:
            repeatable = (state.run.info().get("reward") or {}).get("repeatable", True)
            word, reason = judge_difference(state.config, compared, repeatable)
    return {"verdict": word, "verdict_reason": reason}


def _compared(state: TrainingRun, session: Session, rows: EncodedRows, scores: Mapping[str, Any]) -> Compared | str:
    """Return what the verdict follows from: test at the picked step, else dev at the last evaluation; or what lacks."""
    metric, untrained = state.config.chosen_metric, _untrained(state, session, rows)
    if not untrained:
        return "the scores of the untrained model are lost: there is no untrained.json"
    if rows.test is not None:
        before, after = untrained["test"].scores(), scores["test"]
        difference = scores["difference"]["test"]
        return Compared("test", state.best.step, len(rows.test), before[metric], after[metric], difference)
    if state.last_dev is None or state.last_dev[0] != state.step:
        return "the rows of the last evaluation are lost: there is no last_dev.json"
    last = session.objective.assess(state.last_dev[1], rows.dev)
    difference = last.summary(untrained["dev"])
    before, after = untrained["dev"].scores(), last.scores()
    return Compared("dev", state.step, len(rows.dev), before[metric], after[metric], difference)
