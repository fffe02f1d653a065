"""Train in a claimed run directory and log the results: what `train`, `resume`, a sweep's jobs and the API share."""

import json
import logging
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from mezo_cli.config.explain import readers
from mezo_cli.config.optimizers import PerturbationConfig
from mezo_cli.config.own_code import own_code_used
from mezo_cli.config.schema import Config
from mezo_cli.config.stored import from_yaml, to_yaml
from mezo_cli.console import format_duration, format_score, print_line, relative_path
from mezo_cli.distributed.ranks import Ranks
from mezo_cli.errors import UserError, join
from mezo_cli.report import untrained
from mezo_cli.runs import ReadOnlyRun, Run
from mezo_cli.runs.scores import MARK, picked_start
from mezo_cli.system import import_torch

log = logging.getLogger("mezo")


def execute(
    run: Run,
    config: Config,
    console: Console,
    prepare: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Train in a run directory that this process has claimed, log the results and return the summary.

    Args:
        run: the run directory.
        config: its config.
        console: where progress is shown.
        prepare: called first; if it raises, the run is recorded as failed.
    """
    with run.tracked():
        prepare()
        run.update(**own_code_used(config))  # `mezo resume` asks for the code
        import_torch()
        from mezo_cli.training import loop  # imports torch

        ended = loop.train(config, run, console)
        if run.writes:
            _log_results(run, ended.summary, ended.best.evaluations[0], config)
    return ended.summary


# --- one run for all ranks of a torchrun ---


def broadcast_run(ranks: Ranks, claim: Callable[[], tuple[Run, Config] | None]) -> tuple[Run, Config] | None:
    """Return the run and its config on every rank: rank 0 creates or claims the directory, the others follow it.

    Args:
        ranks: those that share the run.
        claim: creates or claims the run directory, on rank 0 alone; returns None when there is nothing to do.
    """
    if ranks.is_first:
        claimed = claim()
        ranks.from_first("" if claimed is None else json.dumps([str(claimed[0].path), to_yaml(claimed[1])]))
        return claimed
    received = ranks.from_first()
    if not received:
        return None
    path, text = json.loads(received)
    return ReadOnlyRun(Path(path)), from_yaml(text)


def check_shareable(config: Config, size: int) -> None:
    """Check that a run has a step that so many ranks can share."""
    chosen = config.optimizer
    if not isinstance(chosen, PerturbationConfig):
        raise UserError(
            f"optimizer={chosen.name}: {size} ranks were started, but ranks share forward passes alone; "
            f"run it by one process, or choose one of {join(readers('optimizer', 'eps'))}"
        )
    split = config.distributed.split
    directions = "1 direction" if chosen.directions == 1 else f"{chosen.directions} directions"
    if split == "directions" and chosen.directions < size:
        raise UserError(
            f"distributed.split=directions: a step has {directions}, fewer than {size} ranks; "
            "start fewer, or use distributed.split=rows"
        )
    by_rows = split == "rows" or chosen.directions < size
    if by_rows and not config.objective.shares_rows:
        raise UserError(
            f"objective.loss={config.objective.loss}: a step has {directions}, fewer than {size} ranks, which share "
            "the members of a step, not its rows; start fewer, or raise optimizer.samples or optimizer.members"
        )
    if by_rows and config.batch_size < size:
        raise UserError(f"batch_size={config.batch_size} is less than {size} ranks, which share its rows; start fewer")


# --- what is logged ---


def announce(path: Path, quiet: bool) -> None:
    """Announce the directory of a run: in the log, or, if `quiet`, as the one line on standard output."""
    if quiet:
        print_line(relative_path(path))
        sys.stdout.flush()
    else:
        log.info("run    %s", relative_path(path))


def _log_results(run: Run, summary: dict[str, Any], first: Mapping[str, Any], config: Config) -> None:
    """Log the scores before training and at the best checkpoint, which the task's metric has chosen, and baselines."""
    metric, best, test = config.chosen_metric, summary["best"]["step"], summary["test"]
    rows = [("dev before training", first, 0), ("dev best", summary["dev"], best)]
    rows += [("test before training", summary.get("test_before"), 0)]
    rows += [(name, scores, 0) for name, scores in untrained.baselines(summary).items()]
    rows += [("test at best", test, best)]
    others = [name for name in dict.fromkeys((config.shown_metric, "accuracy", "loss")) if name in first]
    width = max(len(name) for name, scores, _ in rows if scores is not None)
    if first["loss"] == -first[metric]:  # a reward and its mirror image
        others.remove("loss")
    widths = {score: 6 if score == "loss" else 8 for score in dict.fromkeys((metric, *others))}
    heads = "  ".join(f"{score:>{columns}}" for score, columns in widths.items())
    log.info("%-*s  %s  at step  95%% interval", width, "", heads)
    mark = f"  {MARK}" if picked_start(summary) else ""
    for name, scores, step in rows:
        if scores is not None:
            values = {score: format_score(score, scores[score]) if score in scores else "" for score in widths}
            cells = "  ".join(f"{value:>{widths[score]}}" for score, value in values.items())
            line = f"{name:{width}}  {cells}  {step:7d}  {untrained.interval(scores, metric, _plain)}"
            log.info("%s", line.rstrip() + (mark if name in ("dev best", "test at best") else ""))
    for said in textwrap.wrap(untrained.sentence(summary, config), 100):
        log.info("%s", said)
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
    if summary["verdict"] is not None:
        log.info("verdict  %s: %s", summary["verdict"], summary["verdict_reason"])


def _plain(metric: str, value: float) -> str:
    return format_score(metric, value).rstrip("%")
