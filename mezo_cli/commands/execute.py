"""What `train`, `resume`, sweeps and the API share: check a run, claim it with the ranks, train, log the result."""

import json
import logging
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rich.console import Console

from mezo_cli.config.explain import readers
from mezo_cli.config.optimizers import PerturbationConfig
from mezo_cli.config.own_code import check_server_given, own_code_used
from mezo_cli.config.rewards import NO_REWARD, reward_spec
from mezo_cli.config.schema import Config
from mezo_cli.config.stored import from_yaml, to_yaml
from mezo_cli.console import format_duration
from mezo_cli.distributed.ranks import Ranks
from mezo_cli.errors import UserError, join
from mezo_cli.report.document import gain_sentence, results
from mezo_cli.report.frame import Entry
from mezo_cli.report.terminal import LOG_WIDTH, result_lines
from mezo_cli.runs import ReadOnlyRun, Run
from mezo_cli.system import import_torch

log = logging.getLogger("mezo")


# --- before its directory is made ---


def check_new_run(config: Config) -> None:
    """Check that the objective has what it needs, and if it continues prompts that the model does, and has room."""
    check_server_given(config)
    check_reward(config)
    if not config.objective.needs_labels:
        encoder = load_encoder(config)
        if config.data.keep is not None:
            from mezo_cli.training.forgetting import read_kept_rows

            read_kept_rows(config, Path(config.data.keep), encoder.tokenizer)


def check_reward(config: Config) -> None:
    """Open the reward, which checks its file and its arguments."""
    reward = reward_spec(config)
    if reward is not None:
        from mezo_cli.rewards.scoring import Reward  # numpy, which composing a config does not need

        with Reward(reward):
            pass
    elif config.objective.loss == "reward":
        raise UserError(f"objective.loss=reward: {NO_REWARD}")


def check_new_runs(configs: Iterable[Config]) -> None:
    """Check the jobs of a sweep: each objective and engine once, with the first job that has it."""
    by_need = {
        repr((config.objective, config.model, config.task, config.data.keep, config.engine)): config
        for config in configs
    }
    for config in by_need.values():
        check_new_run(config)


def load_encoder(config: Config) -> Any:
    """Return the encoder of a run's rows, with room for completions, without the model's weights."""
    import_torch()
    from mezo_cli import models
    from mezo_cli.objectives import OBJECTIVES

    objective = OBJECTIVES.implementation(config.objective.name)
    encoder = objective.encoder_class(config.task, models.load_tokenizer(config.model, objective.model_kind))
    room = config.objective.completion_tokens(config)
    if room:
        encoder.leave_room(room)
    return encoder


# --- the ranks of a torchrun ---


def broadcast_run(ranks: Ranks, claimed: tuple[Run, Config] | None) -> tuple[Run, Config] | None:
    """Return the run and its config on every rank: rank 0 has claimed the directory, the others follow it.

    Args:
        ranks: those that share the run.
        claimed: what rank 0 has created or claimed; None when there is nothing to do, and on the other ranks.
    """
    if ranks.is_first:
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
    if config.model.stream:
        raise UserError(f"model.stream=true: {size} ranks were started, and each would read the layers; use false")
    split = config.distributed.split
    directions = "1 direction" if chosen.directions == 1 else f"{chosen.directions} directions"
    if split == "directions" and chosen.directions < size:
        raise UserError(
            f"distributed.split=directions: a step has {directions}, fewer than {size} ranks; "
            "start fewer, or use distributed.split=rows"
        )
    by_rows = split == "rows" or chosen.directions < size
    if by_rows and config.objective.loss == "reward":
        raise UserError(
            f"objective.loss={config.objective.loss}: a step has {directions}, fewer than {size} ranks, which share "
            "the members of a step, not its rows; start fewer, or raise optimizer.samples or optimizer.members"
        )
    if by_rows and config.batch_size < size:
        raise UserError(f"batch_size={config.batch_size} is less than {size} ranks, which share its rows; start fewer")


# --- train ---


def execute(
    run: Run,
    config: Config,
    console: Console,
    prepare: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """Train in a run directory that this process has claimed, log the results and return the summary.

    Args:
        run: the run directory.
        config: its config.
        console: where progress is shown.
        prepare: called first; if it raises, the run is recorded as failed.
    """
    with run.tracked():
        if prepare is not None:
            prepare()
        run.update(**own_code_used(config))  # `mezo resume` asks for the code
        import_torch()
        from mezo_cli.training import loop, rate  # they import torch

        if config.optimizer.picks_rate:
            config = rate.with_chosen_rate(config, run)
        summary = loop.train(config, run, console)
        if run.writes:
            _log_results(run, summary, config)
    return summary


def _log_results(run: Run, summary: dict[str, Any], config: Config) -> None:
    entry = Entry(run, config, run.info(), "finished", summary["steps"], summary, {})
    for line in result_lines(results(entry)) + textwrap.wrap(gain_sentence(summary, config), LOG_WIDTH):
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
    if summary["verdict"] is not None:
        log.info("verdict  %s: %s", summary["verdict"], summary["verdict_reason"])
