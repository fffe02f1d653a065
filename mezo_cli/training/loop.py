"""Train one run: set up; for each step: batch, step, record, evaluate and save; finish."""

import dataclasses
import gc
import logging

import torch
from rich.console import Console

from mezo_cli import data, system
from mezo_cli.config.schema import Config, Example, Splits
from mezo_cli.console import progress_reporter
from mezo_cli.data.batch_sampler import BatchSampler, make_sampler
from mezo_cli.data.describe import shared_rows
from mezo_cli.data.fewshot import limit
from mezo_cli.distributed.ranks import current
from mezo_cli.errors import RunFailed, join
from mezo_cli.models.parameter_names import format_names
from mezo_cli.models.quantized import describe
from mezo_cli.runs import Run, recovery
from mezo_cli.training import agreement, precision, restore
from mezo_cli.training.device_errors import explain_device_errors, smaller_batches
from mezo_cli.training.finish import finish
from mezo_cli.training.forgetting import Forgetting, read_kept_rows
from mezo_cli.training.linear_probe import fit_output_layer
from mezo_cli.training.load import (
    EncodedRows,
    attach_engine,
    encode_rows,
    load_session,
    prepare_first_step,
    running_engine,
)
from mezo_cli.training.session import Session
from mezo_cli.training.training_run import TrainingRun

log = logging.getLogger("mezo")

TRAIN_ROWS = 1000  # rows of train, drawn uniformly, that the untrained model and the best step's are evaluated on


def train(config: Config, run: Run, console: Console) -> TrainingRun:
    """Train and evaluate, write the run directory, and return the run's end. An interrupted run is resumed.

    Args:
        config: of the run.
        run: the run directory, which this process has claimed.
        console: where progress is shown.

    Raises:
        UserError: before training, for whatever the user can correct.
        RunStopped: when the training has taken `max_seconds`, with `at_limit=stop`.
        RunFailed: when the loss is not finite, memory runs out, or the run directory cannot be written.
    """
    system.reset_peak_memory()
    ranks = current()
    splits = data.load_splits(config)
    agreement.check_rows(config, splits, ranks)
    recovery.check_data_unchanged(config, run, splits)
    resume_step = agreement.find_resume_step(config, run, ranks)  # None for a new run
    if resume_step is None:
        session = load_session(config, trains=True)
    else:
        session = restore.load_for_resume(config, run, resume_step)
    rows, kept = encode_rows(session.encoder, splits), read_kept_rows(config, session.loaded.tokenizer)
    _record_data(run, session, splits, rows, is_new=resume_step is None)
    _warn_of_shared_rows(session, splits, rows)
    del splits  # the texts of train and dev are not needed any more
    sampler = make_sampler(config, rows.train)
    with explain_device_errors("before the first step", smaller_batches(config)):
        _prepare_first_step(session, run, rows, sampler, is_new=resume_step is None)
    agreement.check_same_weights(session, ranks)
    if ranks.size > 1:
        log.info("ranks  %d ranks share the %s of each step", ranks.size, ranks.split)

    evaluated = dataclasses.replace(rows, train=limit(rows.train, TRAIN_ROWS))
    failures = explain_device_errors("", smaller_batches(config), RunFailed)
    started = running_engine(config, run, session, *rows.splits().values())
    state = TrainingRun(config, run, ranks, has_test=rows.test is not None)
    with failures, started as engine, state, torch.no_grad():
        if resume_step is None:
            state.start(session)
        else:
            state.resume(resume_step)
        with progress_reporter(console, config.steps, state.step) as progress:
            if session.objective.measures_forgetting:
                start = session if resume_step is None else restore.load_start(config, run)
                state.forgetting = Forgetting(config, start, list(session.params.tensors), kept)
                del start
            state.evaluate_and_save(session, rows.dev, progress)
            state.score_untrained(session, evaluated, console)
            stop_reason = state.find_stop_reason()
            while state.step < config.steps and stop_reason is None:
                numbers = sampler.batch(config.batch_number(state.step))
                batch, weights = [rows.train[i] for i in numbers], sampler.weights(numbers)
                result = session.step(batch, state.step, weights)
                figures = session.objective.step_scalars(session.optimizer.count_forwards)
                state.record(result, figures)
                if engine is not None:
                    engine.update(session.optimizer, state.step - 1, result)
                state.record_kernels(session.params.noise)
                if session.loaded.device.type == "cpu":
                    system.trim_malloc()
                progress.report_step(state.step, result.loss, figures.get("reward"), figures.get("tokens", 0.0))
                state.evaluate_and_save(session, rows.dev, progress)
                stop_reason = state.find_stop_reason()
            if stop_reason is not None:
                state.stop(session, stop_reason, rows.dev, progress)

        ranks.from_first("trained")  # the others read the files that rank 0 has written
        seconds = state.log.seconds()
        if engine is not None:
            engine.check_weights(session.params)
        if state.best.step != state.step:
            if engine is not None:
                engine.release()
            del session  # memory may not hold two models
            gc.collect()
            session = restore.load_step(config, run, state.best.step)
            if engine is not None:
                attach_engine(engine, session, rows.train)
        finish(state, session, evaluated, seconds, console)
    return state


def _record_data(run: Run, session: Session, splits: Splits, rows: EncodedRows, *, is_new: bool) -> None:
    log.info("data   %s: %s", session.config.data.name, splits.format_sizes())
    sizes = {"train": len(rows.train), "dev": len(rows.dev), "test": None if rows.test is None else len(rows.test)}
    run.update(
        data_fingerprint=splits.fingerprint,
        keep_sha256=recovery.keep_sha256(session.config),
        rows=sizes,
        prompt=session.encoder.decode(rows.train[0]),
        **session.objective.describe(),
        metric=session.config.chosen_metric,
    )
    if is_new:
        run.update(model_revision=session.loaded.revision, data_revision=splits.revision)


def _warn_of_shared_rows(session: Session, splits: Splits, rows: EncodedRows) -> None:
    """Say how many rows of dev and test are in train, if any are: the scores on them are too good."""
    named = {name: getattr(splits, name) for name, encoded in rows.splits().items() if encoded}
    if not session.config.task.labels:
        text = session.encoder.distinct_text
        named = {name: [Example((text(row),), -1) for row in encoded] for name, encoded in rows.splits().items()}
    shared = {other: count for (first, other), count in shared_rows(named).items() if first == "train" and count}
    if shared:
        parts = [f"{count:,} of {len(named[other]):,} rows of {other}" for other, count in shared.items()]
        log.warning("warning: data: %s are in train, too: their scores are too good", join(parts))


def _prepare_first_step(session: Session, run: Run, rows: EncodedRows, sampler: BatchSampler, *, is_new: bool) -> None:
    """Leave out what the loss does not depend on; in a new run also fit the linear probe and check the precision."""
    config = session.config
    unreachable, kept_bytes = prepare_first_step(session, rows.train, rows.dev, sampler)
    run.update(
        device=system.device_name(session.loaded.device),
        matmul_precision=torch.get_float32_matmul_precision(),
        task_version=config.task.version,
        trainable=session.trainable(),
    )
    _log_model(session, unreachable, kept_bytes)
    if is_new and config.init == "linear_probe":
        run.update(probe=fit_output_layer(session, rows.train))
    run.update(**session.objective.check_start([*rows.train, *rows.dev, *(rows.test or [])]))
    if is_new and config.steps and session.optimizer.replayable:
        numbers = sampler.batch(0)
        precision.check(session, session.loss_of([rows.train[i] for i in numbers], sampler.weights(numbers)))


def _log_model(session: Session, unreachable: list[str], kept_bytes: int) -> None:
    config, trainable = session.config, session.trainable()
    log.info(
        "model  %s on %s: training %s parameters (%.3g%%) in %d tensor%s",
        config.model.path,
        system.device_name(session.loaded.device),
        f"{trainable['count']:,}",
        100 * trainable["share"],
        len(trainable["names"]),
        "" if len(trainable["names"]) == 1 else "s",
    )
    if config.peft.name != "none":
        log.info("peft   %s: %s", config.peft.name, format_names(trainable["names"]))
    if config.model.tie_embeddings is not None and session.objective.model_kind.has_classifier:
        shown = str(config.model.tie_embeddings).lower()
        log.info("model  model.tie_embeddings=%s has no effect: objective=cls has no decoder", shown)
    if config.model.quantize != "none":
        log.info("model  base in %s; all but the layers' matrices in float32", describe(session.loaded.model))
    frozen = session.objective.frozen
    if frozen is not None and frozen.count:
        kept = f" and kept (up to {kept_bytes / 1e6:.3g} MB)" if kept_bytes else ""
        log.info("model  frozen lower %d layers: outputs computed once per batch%s", frozen.count, kept)
    slow = session.params.noise.describe_kernels()[1] if session.optimizer.replayable else ""
    if slow:  # known before the first step: by the environment, or from an earlier job of this process
        log.info("noise  %s", slow)
    if session.optimizer.replayable and session.params.noise.name == "torch":
        log.warning(
            "warning: optimizer.noise=torch is only for comparison with the published code: torch's CPU generator "
            "keeps the low 32 bits of its seed, so z is the same at every step"
        )
    if unreachable:
        log.info("not trained, because the loss does not depend on them: %s", ", ".join(unreachable))
