"""Train in a run directory and log the results: what `train`, `resume` and the API share."""

import logging
import os
from collections.abc import Callable
from typing import Any

from rich.console import Console

from mezo_cli.config.own_code import own_code_used
from mezo_cli.config.schema import Config
from mezo_cli.console import format_duration
from mezo_cli.process.environment import IN_SWEEP
from mezo_cli.process.signals import import_torch
from mezo_cli.report.document import conclusion, next_command, results
from mezo_cli.report.entries import Entry
from mezo_cli.report.terminal import result_lines
from mezo_cli.runs import Run

log = logging.getLogger("mezo")


def execute(
    run: Run,
    config: Config,
    console: Console,
    prepare: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """Train in a run directory that this process has claimed, log the results and return the summary.

    `prepare` is called first; if it raises, the run is recorded as failed.
    """
    with run.tracked():
        if prepare is not None:
            prepare()
        run.update(**own_code_used(config))  # `mezo resume` asks for the code
        import_torch()
        from mezo_cli.training import loop, micro_batch, precision, rate  # they import torch

        before = 0.0
        if config.model.compute_dtype is None:
            config = precision.with_compute_dtype(config, run)
        if config.picks_micro_batch:
            config = micro_batch.with_chosen_micro_batch(config, run)
        if config.optimizer.picks_rate:
            config, before = rate.with_chosen_rate(config, run)
        summary = loop.train(config, run, console, before)
        if run.writes:
            _log_results(run, summary, config)
    return summary


def _log_results(run: Run, summary: dict[str, Any], config: Config) -> None:
    entry = Entry(run, config, run.info(), "finished", summary["steps"], summary)
    for line in result_lines(results(entry)):
        log.info("%s", line)
    log.info(
        "%d steps, %d forwards in %s; peak memory %.2f GB",
        summary["steps"],
        summary["forwards"],
        format_duration(summary["seconds"]),
        summary["peak_memory_bytes"] / 1e9,
    )
    log.info("evaluate again: %s", run.command("eval"))
    if "reward" in summary:
        log.info("reward  %s", summary["reward"])
    for name in ("projected_grad", "coefficient"):
        if (summary.get(name) or {}).get("zero_fraction") == 1:
            log.info(
                "every %s was exactly 0: no step has changed a weight, because the losses of its members were equal",
                name,
            )
    if told := conclusion(summary, config):
        log.info("verdict  %s", told)
    if IN_SWEEP not in os.environ and (command := next_command(entry)):  # a sweep ends with its comparison
        log.info("next     %s", command)
