"""Train one run: prepare; for each step: batch, step, record, evaluate and save; finish."""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from mezo_cli.config.schema import Config, Example, Splits
from mezo_cli.console import log, progress_reporter
from mezo_cli.data.sampling import BatchSampler, limit
from mezo_cli.data.splits import shared_rows
from mezo_cli.distributed.ranks import current
from mezo_cli.errors import RunFailed, UserError, join
from mezo_cli.models import fingerprint
from mezo_cli.models.quantized import describe
from mezo_cli.models.stored_tensors import format_names
from mezo_cli.process.memory import explain_device_errors, reset_peak_memory, trim_malloc
from mezo_cli.process.versions import describe_arithmetic, device_name
from mezo_cli.runs import Run, recovery
from mezo_cli.runs.atomic import file_sha256
from mezo_cli.session import restore
from mezo_cli.session.opening import Prepared, check_same_weights, opened, prepare
from mezo_cli.session.session import Session, smaller_batches
from mezo_cli.training import precision
from mezo_cli.training.divergence import Divergence, check_finite
from mezo_cli.training.evaluations import Evaluations
from mezo_cli.training.finish import finish, stop_early
from mezo_cli.training.forgetting import Forgetting
from mezo_cli.training.linear_probe import fit_output_layer
from mezo_cli.training.run_log import RunLog

if TYPE_CHECKING:
    from mezo_cli.engine.engine import Engine

COSTLY = 0.25  # of the time: evaluations on dev that take more are told
TRAIN_ROWS = 1000  # rows of train, drawn uniformly, that the untrained model and the best step's are evaluated on


def train(config: Config, run: Run, console: Console, before: float = 0.0) -> dict[str, Any]:
    """Train and evaluate, and write the run directory. An interrupted run is resumed.

    Args:
        config: of the run.
        run: the run directory, which this process has claimed.
        console: where progress is shown.
        before: the seconds of `max_seconds` that this process has taken already.

    Returns:
        The content of summary.json; empty on a rank other than 0.

    Raises:
        UserError: before training, for whatever the user can correct.
        RunStopped: when the training has taken `max_seconds`, with `at_limit=stop`.
        RunFailed: when the loss is not finite, memory runs out, or the run directory cannot be written.
    """
    reset_peak_memory()
    ranks = current.get()  # of which the first alone looks
    found = ranks.from_first(str(recovery.find_resume_step(config, run)) if ranks.is_first else "")
    resumed = None if found == "None" else int(found)  # None for a new run
    load = None if resumed is None else partial(opened, config, run)  # at the start, as a new run's
    check = None if resumed is None else partial(_check_data_unchanged, config, run)
    prepared = prepare(config, load, check, trains=True)
    failures = explain_device_errors("", smaller_batches(config), RunFailed)
    with prepared.session as session, failures, torch.no_grad():
        forgetting = _begin(prepared, run, resumed)
        run_log, train, texts = RunLog(config, run, ranks, before), prepared.rows["train"], prepared.splits.test
        scores = Evaluations(run_log, prepared.rows | {"train": limit(train, TRAIN_ROWS)}, console, forgetting)
        sampler = prepared.sampler
        running: AbstractContextManager[Engine | None] = nullcontext()
        if config.engine.name != "none":
            from mezo_cli.engine.engine import running_engine  # which only a run that has one needs

            running = running_engine(config, run, session, prepared.rows)
        del prepared  # the texts of train and dev are not needed any more
        with running as engine, run_log:
            divergence, seconds = _take_steps(session, engine, scores, sampler, train, resumed)
            if scores.best == run_log.step:
                return finish(session, scores, divergence, texts, seconds)
            if engine is not None:
                engine.release()
            session.close()
            with opened(config, run, scores.best) as picked:
                if engine is not None:
                    engine.serve(picked, train)
                return finish(picked, scores, divergence, texts, seconds)


def _take_steps(
    session: Session,
    engine: "Engine | None",
    scores: Evaluations,
    sampler: BatchSampler,
    train: Sequence[Any],
    resumed: int | None,
) -> tuple[Divergence, float]:
    """Take the steps that are left, evaluate and save; return whether the loss has diverged, and the seconds."""
    run_log, divergence = scores.run_log, Divergence()
    config, run = run_log.config, run_log.run
    if resumed is None:
        run_log.begin(session)
    else:
        _resume(resumed, scores, divergence, replayable=session.optimizer.replayable)
    with progress_reporter(scores.console, config.steps, run_log.step) as progress:
        scores.on_dev(session, progress)
        scores.before_training(session)
        stop_reason = find_stop_reason(scores, divergence)
        while run_log.step < config.steps and stop_reason is None:
            step = run_log.step
            numbers = sampler.batch(config.batch_number(step))
            result = session.step([train[i] for i in numbers], step, sampler.weights(numbers))
            figures = session.objective.step_scalars(session.optimizer.count_forwards)
            check_finite(config, run, step + 1, result)
            run_log.record(session, result, figures)
            if engine is not None:
                engine.update(session.optimizer, step, result)
            if session.loaded.device.type == "cpu":
                trim_malloc()
            progress.report_step(step + 1, result.loss, figures.get("reward"), figures.get("tokens", 0.0))
            if config.logs_at(step + 1):
                divergence.add(result.loss)
            scores.on_dev(session, progress)
            divergence.warn(config, run, step + 1)
            stop_reason = find_stop_reason(scores, divergence)
        if stop_reason is not None:
            stop_early(stop_reason, session, scores, progress)
    run_log.ranks.from_first("trained")  # the others read the files that rank 0 has written
    seconds = run_log.seconds()
    share = scores.dev_seconds / max(time.perf_counter() - (run_log.started or 0.0), 1e-9)  # of this process
    if share > COSTLY:
        told = "dev    evaluations took %.0f%% of the time: raise eval_every, or set data.eval_limit"
        log.info(told, 100 * share)
    if engine is not None:
        engine.check_weights(session.params)
    if run.writes:
        run.update(weights={"last": {"step": run_log.step, "sha256": fingerprint(session.loaded.model)}})
    return divergence, seconds


def find_stop_reason(scores: Evaluations, divergence: Divergence) -> str | None:
    """Return what ends the run before its last step: `divergence`, `patience`, `max_seconds`, or None.

    Every process takes one step at least, however low max_seconds is.
    """
    run_log, config = scores.run_log, scores.run_log.config
    if run_log.step >= config.steps:
        return None
    if config.stop_on_divergence is not False and divergence.reason is not None:
        return "divergence"
    if config.patience is not None and sum(step > scores.best for step in scores.dev) >= config.patience:
        return "patience"  # so many evaluations have not been better than the best
    if config.max_seconds is None or run_log.started is None:
        return None
    is_over = time.perf_counter() - run_log.started >= config.max_seconds
    return "max_seconds" if run_log.ranks.first_says(is_over) else None


def _resume(step: int, scores: Evaluations, divergence: Divergence, *, replayable: bool) -> None:
    run_log = scores.run_log
    if step and run_log.run.writes:
        scores.load()
    lines = run_log.resume(step, replayable=replayable)
    scores.dev |= restore.dev_evaluations(run_log.config, run_log.run, lines, stop=step)
    if scores.dev:
        scores.best = run_log.config.best_step(scores.dev)
    for line in lines:
        if line["kind"] == "train":
            divergence.add(line["loss"])
            divergence.was_told |= divergence.reason is not None
    log.info("resumed at step %d of %d", step, run_log.config.steps)


# --- before the first step ---


def _begin(prepared: Prepared, run: Run, resumed: int | None) -> Forgetting | None:
    """Record what is trained on what, keep what later evaluations compare with the start, and go to a resumed step.

    In a new run also fit the linear probe and check the precision.
    """
    session, splits, sampler, rows = prepared.session, prepared.splits, prepared.sampler, prepared.rows
    config, is_new = session.config, resumed is None
    # What the forwards are computed with, from which step on: another machine may go on with a run.
    arithmetic = list(run.info().get("arithmetic") or []) if resumed else []
    here = describe_arithmetic(session.loaded.device, config.model.computes_in)
    if not arithmetic or {**arithmetic[-1], **here} != arithmetic[-1]:
        arithmetic.append({"from_step": resumed or 0, **here})
    run.update(
        data_fingerprint=splits.fingerprint,
        keep_sha256=_keep_sha256(config) if config.data.keep else None,
        rows={name: len(rows[name]) if name in rows else None for name in ("train", "dev", "test")},
        prompt=session.encoder.decode(rows["train"][0]) if config.data.store_texts else None,
        **session.objective.describe(),
        metric=config.chosen_metric,
        device=device_name(session.loaded.device),
        arithmetic=arithmetic,
        matmul_precision=torch.get_float32_matmul_precision(),
        task_version=config.task.version,
        trainable=session.trainable(),
    )
    if is_new:
        run.update(model_revision=session.loaded.revision, data_revision=splits.revision)
    _log_rows_and_model(prepared)
    with explain_device_errors("before the first step", smaller_batches(config)):
        if is_new and config.init == "linear_probe":
            run.update(probe=fit_output_layer(session, rows["train"]))
        run.update(**session.objective.check_start([row for of_split in rows.values() for row in of_split]))
        is_rounded = session.forward.compute_dtype != torch.float32
        is_cheap = config.objective.loss != "reward"  # to complete the rows would take as long as several steps
        if is_new and is_rounded and is_cheap and config.steps and session.optimizer.replayable:
            numbers = sampler.batch(0)
            precision.check(session, session.loss_of([rows["train"][i] for i in numbers], sampler.weights(numbers)))
        forgetting = Forgetting(config, session, prepared.kept) if session.objective.measures_forgetting else None
        if resumed:
            restore.go_to(session, run, resumed)
    check_same_weights(session)
    if session.ranks.size > 1:
        log.info("ranks  %d ranks share the %s of each step", session.ranks.size, session.ranks.split)
    return forgetting


def _check_data_unchanged(config: Config, run: Run, splits: Splits) -> None:
    """Refuse to resume a run with other rows than it began with, or another file as `data.keep`."""
    before, keep, why = run.info(), config.data.keep, "changed since this run began, so it cannot be resumed"
    if before.get("data_fingerprint") not in (None, splits.fingerprint):
        raise UserError(f"{run.path}: the data have {why}")
    if before.get("keep_sha256") not in (None, _keep_sha256(config) if keep else None):
        raise UserError(f"{run.path}: data.keep={keep} has {why}")


def _keep_sha256(config: Config) -> str:
    try:
        return file_sha256(Path(str(config.data.keep)))
    except OSError as error:
        raise UserError(f"data.keep={config.data.keep}: {error.strerror}") from error


def _log_rows_and_model(prepared: Prepared) -> None:
    session, config, trainable = prepared.session, prepared.session.config, prepared.session.trainable()
    splits, encoder = prepared.splits, session.encoder
    test = "no test split" if splits.test is None else f"{len(splits.test)} test"
    log.info("data   %s: %d train, %d dev, %s", config.data.name, len(splits.train), len(splits.dev), test)
    named = {name: getattr(splits, name) for name, rows in prepared.rows.items() if rows}
    if not config.task.labels:
        named = {name: [Example((encoder.distinct_text(row),), -1) for row in prepared.rows[name]] for name in named}
    shared = {other: count for (first, other), count in shared_rows(named).items() if first == "train" and count}
    if shared:
        parts = [f"{count:,} of {len(named[other]):,} rows of {other}" for other, count in shared.items()]
        log.warning("warning: data: %s are in train, too: their scores are too good", join(parts))
    where = f"{config.model.path} on {device_name(session.loaded.device)}"
    where += "" if config.model.computes_in == "float32" else f", forwards in {config.model.computes_in}"
    tensors = f"{len(trainable['names'])} tensor{'' if len(trainable['names']) == 1 else 's'}"
    figures = f"{trainable['count']:,}", 100 * trainable["share"], tensors
    log.info("model  %s: training %s parameters (%.3g%%) in %s", where, *figures)
    if config.peft.name != "none":
        log.info("peft   %s: %s", config.peft.name, format_names(trainable["names"]))
    if config.model.tie_embeddings is not None and session.objective.model_kind.has_classifier:
        shown = str(config.model.tie_embeddings).lower()
        log.info("model  model.tie_embeddings=%s has no effect: objective=cls has no decoder", shown)
    if config.model.quantize != "none":
        log.info("model  base in %s; all but the layers' matrices in float32", describe(session.loaded.model))
    frozen = session.objective.frozen
    if frozen is not None and frozen.count:
        kept = f" and kept (up to {prepared.states_bytes / 1e6:.3g} MB)" if prepared.states_bytes else ""
        log.info("model  frozen lower %d layers: outputs computed once per batch%s", frozen.count, kept)
    slow = session.params.noise.describe_kernels()[1] if session.optimizer.replayable else ""
    if slow:  # known before the first step: by the environment, or from an earlier job of this process
        log.info("noise  %s", slow)
    if session.optimizer.replayable and session.params.noise.name == "torch":
        why = "torch's CPU generator keeps the low 32 bits of its seed, so z is the same at every step"
        log.warning("warning: optimizer.noise=torch is only for comparison with the published code: %s", why)
    if prepared.unreachable:
        log.info("not trained, because the loss does not depend on them: %s", ", ".join(prepared.unreachable))
