"""Commands about a run that the program prints: they run as printed, from the folder that it was started in."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mezo_cli.config.own_code import SHUFFLED
from mezo_cli.console import relative_path

TAKES_REWARD = ("resume", "eval")  # a function of the user's own is not stored: these take it again


def run_command(verb: str, path: Path, info: Mapping[str, Any], *words: str) -> str:
    """Return `mezo VERB RUN WORDS`, with the reward that the run needs to be given again.

    Args:
        verb: the command: eval, resume, ...
        path: the run directory.
        info: its run.json.
        words: what follows, each as one word of the command line.
    """
    return shlex.join(["mezo", verb, relative_path(path), *words, *(own_reward(info) if verb in TAKES_REWARD else [])])


def own_reward(info: Mapping[str, Any]) -> list[str]:
    """Return the override that gives a run its own reward again; empty where it has none."""
    if not info.get("own_reward"):
        return []
    reward = info.get("reward") or {"in_process": True}  # not recorded before the first step
    if reward["in_process"]:  # a callable of Python, which no command line can name
        return ["objective.reward=FILE.py:FUNCTION"]
    name = str(reward["name"])
    place, _, function = name.removeprefix(SHUFFLED).rpartition(":")
    mark = SHUFFLED if name.startswith(SHUFFLED) else ""
    return [f"objective.reward={mark}{relative_path(Path(place)) if place.endswith('.py') else place}:{function}"]
