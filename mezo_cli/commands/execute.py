"""What train, resume, sweeps and the API share: check a new run, and train in its directory, which ranks may share."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from mezo_cli.config.explain import readers
from mezo_cli.config.optimizers import PerturbationConfig
from mezo_cli.config.schema import Config
from mezo_cli.config.stored import check_server_given, from_yaml, own_code_used, to_yaml
from mezo_cli.console import format_duration, log
from mezo_cli.distributed.ranks import Ranks
from mezo_cli.errors import UserError, join
from mezo_cli.process.environment import IN_SWEEP
from mezo_cli.process.signals import import_torch
from mezo_cli.report.document import conclusion, next_command, results
from mezo_cli.report.entries import Entry
from mezo_cli.report.terminal import result_lines
from mezo_cli.rewards.spec import NO_REWARD, reward_spec
from mezo_cli.runs import ReadOnlyRun, Run

# --- before there is a directory ---


def check_new_run(config: Config) -> None:
    """Check that the objective has what it needs, and if it continues prompts that the model does, and has room."""
    if config.engine.name != "none":
        check_server_given(config)
    if not config.objective.needs_labels:
        check_reward(config)
        encoder = load_encoder(config)
        if config.data.keep is not None:
            from mezo_cli.data.texts import read_kept_rows

            read_kept_rows(config, Path(config.data.keep), encoder.tokenizer)


def check_reward(config: Config) -> None:
    """Open the reward, which checks its file and its parameters; the data are read where these name columns."""
    if (reward := reward_spec(config)) is not None:
        from mezo_cli.rewards.scoring import Reward  # numpy, which composing a config does not need

        with Reward(reward) as opened:
            if opened.needed:
                from mezo_cli.data.sources import open_source

                opened.check_columns(open_source(config.data_task, config.data).columns)
    elif config.objective.loss == "reward":
        raise UserError(f"objective.loss=reward: {NO_REWARD}")


def load_encoder(config: Config) -> Any:
    """Return the encoder of a run's rows, with room for completions, without the model's weights."""
    import_torch()
    from mezo_cli import models
    from mezo_cli.objectives import OBJECTIVES

    objective = OBJECTIVES.implementation(config.objective.name)
    encoder = objective.encoder_class(config.task, models.load_tokenizer(config.model, objective.model_kind))
    if room := config.objective.completion_tokens(config):
        encoder.leave_room(room)
    return encoder


# --- in a directory that this process has claimed ---


def execute(run: Run, config: Config, console: Console, prepare: Callable[[], None] | None = None) -> dict[str, Any]:
    """Train in a run directory that this process has claimed, log the results and return the summary.

    `prepare` is called first; if it raises, the run is recorded as failed.
    """
    with run.tracked():
        if prepare is not None:
            prepare()
        run.update(**own_code_used(config))  # `mezo resume` asks for the code
        import_torch()
        from mezo_cli.training import auto, loop, precision  # they import torch

        before = 0.0
        if config.model.compute_dtype is None:
            config = precision.with_compute_dtype(config, run)
        if config.picks_micro_batch:
            config = auto.with_chosen_micro_batch(config, run)
        if config.optimizer.picks_rate:
            config, before = auto.with_chosen_rate(config, run)
        summary = loop.train(config, run, console, before)
        if run.writes:
            _log_results(run, summary, config)
    return summary


def _log_results(run: Run, summary: dict[str, Any], config: Config) -> None:
    entry = Entry(run, config, run.info(), "finished", summary["steps"], summary)
    for line in result_lines(results(entry)):
        log.info("%s", line)
    spent, memory = format_duration(summary["seconds"]), summary["peak_memory_bytes"] / 1e9
    log.info("%d steps, %d forwards in %s; peak memory %.2f GB", summary["steps"], summary["forwards"], spent, memory)
    log.info("evaluate again: %s", run.command("eval"))
    if "reward" in summary:
        log.info("reward  %s", summary["reward"])
    for name in ("projected_grad", "coefficient"):
        if (summary.get(name) or {}).get("zero_fraction") == 1:
            why = "no step has changed a weight, because the losses of its members were equal"
            log.info("every %s was exactly 0: %s", name, why)
    if told := conclusion(summary, config):
        log.info("verdict  %s", told)
    if IN_SWEEP not in os.environ and (command := next_command(entry)):  # a sweep ends with its comparison
        log.info("next     %s", command)


# --- among ranks ---


def broadcast_run(ranks: Ranks, claimed: tuple[Run, Config] | None) -> tuple[Run, Config] | None:
    """Return the run and its config on every rank: rank 0 has claimed the directory, the others follow it.

    `claimed` is None when there is nothing to do, and on the other ranks.
    """
    if ranks.is_first:
        ranks.from_first("" if claimed is None else json.dumps([str(claimed[0].path), to_yaml(claimed[1])]))
        return claimed
    if not (received := ranks.from_first()):
        return None
    path, text = json.loads(received)
    return ReadOnlyRun(Path(path)), from_yaml(text)


def check_shareable(config: Config, size: int) -> None:
    """Check that a run has a step that so many ranks can share."""
    chosen = config.optimizer
    if not isinstance(chosen, PerturbationConfig):
        how = f"run it by one process, or choose one of {join(readers('optimizer', 'eps'))}"
        why = f"{size} ranks were started, but ranks share forward passes alone"
        raise UserError(f"optimizer={chosen.name}: {why}; {how}")
    if config.model.stream:
        raise UserError(f"model.stream=true: {size} ranks were started, and each would read the layers; use false")
    split, points, loss = config.distributed.split, chosen.points, config.objective.loss
    few = f"a step has {points} direction{'' if points == 1 else 's'}, fewer than {size} ranks"
    if split == "directions" and points < size:
        raise UserError(f"distributed.split=directions: {few}; start fewer, or use distributed.split=rows")
    by_rows = split == "rows" or points < size
    if by_rows and loss == "reward":
        how = "start fewer, or raise optimizer.samples or optimizer.members"
        raise UserError(f"objective.loss={loss}: {few}, which share the members of a step, not its rows; {how}")
    if by_rows and config.batch_size < size:
        raise UserError(f"batch_size={config.batch_size} is less than {size} ranks, which share its rows; start fewer")
