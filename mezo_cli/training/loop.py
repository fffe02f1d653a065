"""Train one run: set up; for each step: batch, step, record, evaluate and save; finish."""

import gc
import logging
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console

from mezo_cli import data, system
from mezo_cli.config.schema import Config, Splits, TokenizedExample
from mezo_cli.console import progress_reporter
from mezo_cli.data.batch_sampler import BatchSampler
from mezo_cli.data.fewshot import limit
from mezo_cli.distributed.ranks import current
from mezo_cli.errors import RunFailed, UserError
from mezo_cli.models.parameter_names import format_names
from mezo_cli.runs import Run
from mezo_cli.training import agreement, precision, restore
from mezo_cli.training.device_errors import explain_device_errors, smaller_batches
from mezo_cli.training.linear_probe import fit_output_layer
from mezo_cli.training.setup import Session, prepare
from mezo_cli.training.training_run import EvaluatedRows, TrainingRun
from mezo_cli.training.with_engine import attach, running_engine

log = logging.getLogger("mezo")

TRAIN_ROWS = 1000  # rows of train, drawn uniformly, that the untrained model and the best step's are evaluated on


def train(config: Config, run: Run, console: Console, prunes: Callable[[], bool] | None = None) -> dict[str, Any]:
    """Train and evaluate, write the run directory, and return the summary. An interrupted run is resumed.

    Args:
        config: of the run.
        run: the run directory, which this process has claimed.
        console: where progress is shown.
        prunes: called after each evaluation on dev after step 0, once its line is written; if it is true the run ends.

    Raises:
        UserError: before training, for whatever the user can correct.
        RunStopped: when the training has taken `max_seconds`, with `at_limit=stop`.
        RunFailed: when the loss is not finite, memory runs out, or the run directory cannot be written.
    """
    system.reset_peak_memory()
    ranks = current()  # None if no other process shares the run
    splits = data.load_splits(config)
    if ranks is not None:
        agreement.check_rows(config, splits, ranks)
    _check_data_unchanged(run, splits)
    resume_step = agreement.find_resume_step(config, run, ranks)  # None for a new run
    session = prepare(config, trains=True) if resume_step is None else restore.load_for_resume(config, run, resume_step)
    train_rows, dev_rows = (session.encoder.encode_all(rows) for rows in (splits.train, splits.dev))
    test_rows = None if splits.test is None else session.encoder.encode_all(splits.test)
    log.info("data   %s: %s", config.data.name, splits.format_sizes())
    sizes = {"train": len(train_rows), "dev": len(dev_rows), "test": None if test_rows is None else len(test_rows)}
    encoder = session.encoder
    run.update(
        data_fingerprint=splits.fingerprint,
        rows=sizes,
        prompt=encoder.decode(train_rows[0]),
        scored_by=encoder.scored_by,
        label_words=encoder.label_words,
    )
    if resume_step is None:
        run.update(model_revision=session.loaded.revision, data_revision=splits.revision)
    rows = EvaluatedRows(limit(train_rows, TRAIN_ROWS), dev_rows, test_rows, splits.test)
    del splits  # the texts of train and dev are not needed any more
    sampler = BatchSampler(len(train_rows), config.batch_size, config.seed)
    with explain_device_errors("before the first step", smaller_batches(config)):
        _prepare_first_step(session, run, train_rows, dev_rows, sampler, is_new=resume_step is None)
    if ranks is not None:
        agreement.check_same_weights(session, ranks)
        log.info("ranks  %d ranks share the %s of each step", ranks.size, ranks.split)

    failures = explain_device_errors("", smaller_batches(config), RunFailed)
    started = running_engine(config, session, train_rows, dev_rows, test_rows or [])
    with failures, started as engine, TrainingRun(config, run, ranks, prunes) as state, torch.no_grad():
        if resume_step is None:
            state.start(session)
        else:
            state.resume(resume_step)
        with progress_reporter(console, config.steps, state.step) as progress:
            state.evaluate_and_save(session, dev_rows, progress)
            state.score_untrained(session, rows, console)
            stop_reason = state.find_stop_reason()
            while state.step < config.steps and stop_reason is None:
                batch = [train_rows[i] for i in sampler.batch(state.step)]
                result = session.step(batch, state.step)
                state.record(result)
                if engine is not None:
                    engine.update(session.optimizer, state.step - 1, result)
                state.record_kernels(session.params.noise)
                if session.loaded.device.type == "cpu":
                    system.trim_malloc()
                progress.report_step(state.step, result.loss)
                state.evaluate_and_save(session, dev_rows, progress)
                stop_reason = state.find_stop_reason()
            if stop_reason is not None:
                state.stop(session, stop_reason, dev_rows, progress)

        if ranks is not None:
            ranks.from_first("trained")  # the others read the files that rank 0 has written
        seconds = state.seconds()
        if engine is not None:
            engine.check_weights(session.params)
        if state.best_step != state.step:
            if engine is not None:
                engine.release()
            del session  # memory may not hold two models
            gc.collect()
            session = restore.load_step(config, run, state.best_step)
            if engine is not None:
                attach(engine, session, train_rows)
        return state.finish(session, rows, seconds, console)


def _check_data_unchanged(run: Run, splits: Splits) -> None:
    """Refuse to resume a run with other rows than it began with."""
    before = run.info().get("data_fingerprint")
    if before not in (None, splits.fingerprint):
        raise UserError(f"{run.path}: the data have changed since this run began, so it cannot be resumed")


def _prepare_first_step(
    session: Session,
    run: Run,
    train_rows: list[TokenizedExample],
    dev_rows: list[TokenizedExample],
    sampler: BatchSampler,
    *,
    is_new: bool,
) -> None:
    """Leave out what the loss does not depend on; in a new run also fit the linear probe and check the precision."""
    config = session.config
    unreachable = session.exclude_unreachable(train_rows[0], [train_rows[i] for i in sampler.batch(0)])
    run.update(
        device=system.device_name(session.loaded.device),
        matmul_precision=torch.get_float32_matmul_precision(),
        task_version=config.task.version,
        trainable=session.trainable(),
    )
    _log_model(session, unreachable, session.keep_states(train_rows, dev_rows) if config.steps else 0)
    if is_new and config.init == "linear_probe":
        run.update(probe=fit_output_layer(session, train_rows))
    if is_new and config.steps and session.optimizer.replayable:
        precision.check(session, session.loss_of([train_rows[i] for i in sampler.batch(0)]))


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
    frozen = session.objective.frozen
    if frozen is not None and frozen.count:
        kept = f" and kept (up to {kept_bytes / 1e6:.3g} MB)" if kept_bytes else ""
        log.info("model  frozen lower %d layers: outputs computed once per batch%s", frozen.count, kept)
    slow = session.params.noise.describe_kernels()[1] if session.optimizer.replayable else ""
    if slow:  # known before the first step: by the environment, or from an earlier job of this process
        log.info("noise  %s", slow)
    if session.optimizer.replayable and session.params.noise.kind == "torch":
        log.warning(
            "warning: optimizer.noise=torch is only for a comparison with the reference: torch's CPU generator keeps "
            "the low 32 bits of its seed, so z is the same at every step"
        )
    if unreachable:
        log.info("not trained, because the loss does not depend on them: %s", ", ".join(unreachable))
