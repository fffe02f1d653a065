"""End a run: evaluate the best step, compare it with the untrained model, write predictions.jsonl and summary.json.

The verdict says whether the picked step is better than the untrained model, by the interval of their difference. It
follows from the files of a run, so a resumed run has that of a run that was never stopped.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from mezo_cli.config.base import without_folder
from mezo_cli.config.optimizers import PerturbationConfig
from mezo_cli.config.rates import advise
from mezo_cli.config.schema import Config, Example
from mezo_cli.console import ProgressReporter, log
from mezo_cli.errors import RunStopped
from mezo_cli.models import fingerprint
from mezo_cli.models.quantized import count_parameters
from mezo_cli.objectives.scoring import Evaluation
from mezo_cli.process.memory import peak_memory
from mezo_cli.runs import BEFORE_TRAINING, trajectory
from mezo_cli.runs.contents import format_difference, format_score, without_texts
from mezo_cli.session.session import Session
from mezo_cli.training.divergence import DIVERGED, Divergence
from mezo_cli.training.evaluations import Evaluations

IMPROVED, WITHIN_NOISE, WORSE = "improved", "within_noise", "worse"
NOT_IMPROVED, NOT_COMPARED = "not_improved", "not_compared"
LEAST_ROWS = 10  # of a comparison


def stop_early(reason: str, session: Session, scores: Evaluations, progress: ProgressReporter) -> None:
    """End the training before its last step: evaluate on dev if it finishes now, save the weights, record the reason.

    Raises:
        RunStopped: for max_seconds with at_limit=stop; the run is not finished.
    """
    run_log, config, step = scores.run_log, session.config, scores.run_log.step
    finishes = reason != "max_seconds" or config.at_limit == "finish"
    if finishes:
        scores.on_dev(session, progress, is_last=True)
    run_log.checkpoint(session, "last")
    run_log.run.update(stopped={"by": reason, "step": step})
    how = {"divergence": "because it diverged", "patience": f"by patience={config.patience}"}
    text = f"stopped {how.get(reason, f'after {reason}={config.max_seconds or 0:g}')} at step {step} of {config.steps}"
    if not finishes:
        raise RunStopped(text)
    log.info("%s: the best dev score is that of step %d", text, scores.best)


def finish(
    session: Session, scores: Evaluations, divergence: Divergence, texts: Sequence[Example] | None, seconds: float
) -> dict[str, Any]:
    """Evaluate the best step, write its evaluations, predictions.jsonl and summary.json, and return the summary.

    A rank other than 0 helps to evaluate; its summary is empty.

    Args:
        session: at the weights of the best step.
        scores: the evaluations before.
        divergence: whether the run has diverged.
        texts: the rows of test.
        seconds: the training time.
    """
    run_log, config, optimizer, ranks = scores.run_log, session.config, session.optimizer, session.ranks
    run, best, metric = run_log.run, scores.best, config.chosen_metric
    evaluations = {split: scores.at_best(session, split) for split in scores.rows}
    if not run.writes:
        return {}
    for split in ("train", "test"):
        if split in evaluations:
            run_log.evaluation(split, best, evaluations[split])
    if "test" in evaluations:
        pairs = zip(texts or [], evaluations["test"].records, strict=True)
        rows = ({**session.objective.describe_row(row), **record} for row, record in pairs)
        run.write_predictions(rows if config.data.store_texts else map(without_texts, rows))
    info, forwards = run.info(), optimizer.count_forwards(run_log.step)
    probe, reward, stopped = info.get("probe"), info.get("reward"), info.get("stopped")
    forwards["forwards"] += sum(info[before]["forwards"] for before in BEFORE_TRAINING if info.get(before))
    untrained = {name: session.objective.assess(values, scores.rows[name]) for name, values in scores.untrained.items()}
    results = _results(session, scores, untrained, evaluations)
    word, reason = None, None
    if run_log.step:
        word, reason = _verdict(session, scores, divergence, untrained, evaluations, results)
        if word in (NOT_IMPROVED, WITHIN_NOISE):
            reason += _standstill(session, scores, untrained)
    grads = trajectory.read(run.trajectory).drawn_grads(optimizer.samples) if optimizer.replayable else None
    summary = {
        "steps": run_log.step,
        **forwards,
        "seconds": round(seconds, 3),
        "verdict": word,
        "verdict_reason": reason,
        "best": {"step": best, metric: results["dev"][metric]},
        **results,
        optimizer.scalar: trajectory.scalar_stats(grads),
        "peak_memory_bytes": peak_memory(session.loaded.device),
    }
    summary |= ({"probe": probe} if probe else {}) | ({"reward": without_folder(reward["name"])} if reward else {})
    summary |= {"stopped": stopped["by"]} if stopped else {}
    if ranks.size > 1:
        shared = {"ranks": ranks.size, "split": ranks.split, "bytes_per_step": run_log.exchanged_bytes_per_step()}
        log.info("ranks  %d ranks shared the %s of a step, and exchanged %g bytes for it", *shared.values())
        summary["distributed"] = shared
    last = info["weights"]["last"]
    picked = last if best == last["step"] else {"step": best, "sha256": fingerprint(session.loaded.model)}
    run.update(weights={"best": picked, "last": last})
    run_log.summary(summary)
    return summary


def _results(
    session: Session, scores: Evaluations, untrained: Mapping[str, Evaluation], evaluations: Mapping[str, Evaluation]
) -> dict[str, Any]:
    config, test = session.config, evaluations.get("test")
    before = untrained if config.steps else evaluations if config.test_at_start else {}
    compared = session.objective.compare(before, evaluations, scores.rows, trained=config.steps > 0)
    intervals = compared.pop("intervals")
    # The scores that chose the best step: those of the same weights restored may differ in the last bits.
    dev = scores.dev[scores.best]
    return {
        "dev": {**{name: dev[name] for name in evaluations["dev"].scores()}, "intervals": intervals["dev"]},
        "train": {**evaluations["train"].scores(), "rows": len(scores.rows["train"])},
        "test": None if test is None else {**test.scores(), "intervals": intervals["test"]},
        **compared,
    }


def _verdict(
    session: Session,
    scores: Evaluations,
    divergence: Divergence,
    untrained: Mapping[str, Evaluation],
    evaluations: Mapping[str, Evaluation],
    results: Mapping[str, Any],
) -> tuple[str, str]:
    """Return the verdict and the figures behind it: of test at the picked step, else of dev at the last evaluation."""
    config, step = session.config, scores.best
    if divergence.reason is not None:
        return DIVERGED, divergence.reason
    if step == 0:
        return NOT_IMPROVED, "the result is that of step 0, the model before training"
    if not config.test_at_start:
        return NOT_COMPARED, "test_at_start=false leaves out the untrained model"
    if not untrained:
        return NOT_COMPARED, "the scores of the untrained model are lost: there is no untrained.json"
    if "test" in evaluations:
        split, after, difference = "test", evaluations["test"], results["difference"]["test"]
    elif scores.last_dev is None or scores.last_dev[0] != scores.run_log.step:
        return NOT_COMPARED, "the rows of the last evaluation are lost: there is no last_dev.json"
    else:
        step, split, after = scores.last_dev[0], "dev", session.objective.assess(scores.last_dev[1], scores.rows["dev"])
        difference = after.summary(untrained["dev"])
    before, now = (evaluation.scores()[config.chosen_metric] for evaluation in (untrained[split], after))
    is_repeatable = (scores.run_log.run.info().get("reward") or {}).get("repeatable", True)
    return judge_difference(config, split, step, len(scores.rows[split]), (before, now), difference, is_repeatable)


def judge_difference(
    config: Config,
    split: str,
    step: int,
    rows: int,
    values: tuple[float, float],
    difference: Mapping[str, Any],
    repeatable: bool = True,
) -> tuple[str, str]:
    """Return the verdict on weights that nothing about the rows compared has picked, and the figures behind it.

    Args:
        config: of the run.
        split: of the rows: test, at the picked step; or dev, at the last evaluation.
        step: of the weights, later than 0.
        rows: their number.
        values: the metric of the untrained model, and of these weights.
        difference: of the two by metric, with `intervals` (`Evaluation.summary`).
        repeatable: whether the reward gave the same numbers when it was called again.
    """
    metric = config.chosen_metric
    if rows < LEAST_ROWS:
        return NOT_COMPARED, f"{split} has {rows} rows, and a comparison needs {LEAST_ROWS}"
    interval = difference["intervals"].get(metric)
    if interval is None:
        return NOT_COMPARED, f"the objective gives no interval of {metric}"
    improved = all(config.better(metric, end, 0.0) for end in interval)
    worse = all(config.better(metric, 0.0, end) for end in interval)
    before, after = (format_score(metric, value, "%") for value in values)
    change = format_difference(metric, difference)
    text = f"{split} {metric} {before} before training, {after} at step {step}: {change}"
    if improved and not repeatable:
        return WITHIN_NOISE, f"{text}, but the reward gave other numbers when it was called again"
    if improved or worse:
        return IMPROVED if improved else WORSE, text
    return WITHIN_NOISE, f"{text}, which has 0 in it"


def _standstill(session: Session, scores: Evaluations, untrained: Mapping[str, Evaluation]) -> str:
    """Return that the loss on dev has stayed within its interval of before, and which lr runs like this one begin with.

    Empty where it has not, or where the rows of before are not known.
    """
    optimizer, usual = session.config.optimizer, ""
    if "dev" not in untrained or not isinstance(optimizer, PerturbationConfig):
        return ""
    interval = untrained["dev"].summary()["intervals"].get("loss")
    losses = [line["loss"] for line in scores.dev.values()]
    if interval is None or not interval[0] <= min(losses) <= max(losses) <= interval[1]:
        return ""
    if optimizer.name == "mezo":
        usual = advise(count_parameters(session.loaded.model), session.config.peft.name, above=optimizer.lr)
    moved = " to ".join(format_score("loss", losses[at]) for at in (0, -1))
    text = f"; the loss on dev has moved by less than its noise, {moved}"
    return f"{text}: optimizer.lr={optimizer.lr:g} may be too small{usual}"
