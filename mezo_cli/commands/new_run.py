"""Check what a new run needs besides valid settings, before its directory is made."""

from pathlib import Path
from typing import Any

from mezo_cli.config.schema import Config
from mezo_cli.config.stored import check_server_given
from mezo_cli.errors import UserError
from mezo_cli.process.signals import import_torch
from mezo_cli.rewards.spec import NO_REWARD, reward_spec


def check_new_run(config: Config) -> None:
    """Check that the objective has what it needs, and if it continues prompts that the model does, and has room."""
    check_server_given(config)
    check_reward(config)
    if not config.objective.needs_labels:
        encoder = load_encoder(config)
        if config.data.keep is not None:
            from mezo_cli.session.prepare import read_kept_rows

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
