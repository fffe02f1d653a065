"""Let Hydra compose the files of the same choices once per process: a composition takes 0.1 s, and most tests need one.

As in a sweep (sweep/plan.py), plain values are then set in a copy. Processes of their own, and the tests that
are about composing (`composing_all`), let Hydra compose everything; tests/config/test_compose.py compares the two.
"""

import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf, open_dict, read_write

from mezo_cli.config import compose
from mezo_cli.config.choices import Choices, config_dirs, find_choices
from mezo_cli.config.overrides import Override
from mezo_cli.sweep import plan as sweep_plan

whole, parse_all = compose.compose_node, compose.parse
DIRECTORIES = ("hydra.run.dir", "hydra.sweep.dir")


@functools.cache
def built_in_choices(folders: tuple[Path, ...]) -> Choices:
    """Return the choices in the built-in folder and those of plug-ins."""
    return find_choices()


def parsing_once() -> Callable[..., list[Override]]:
    """Return what can stand in the place of `compose.parse`: a composition here asks for the same words once more."""
    last: list[Any] = [None, None]

    def parse(overrides: Sequence[str], choices: Choices) -> list[Override]:
        key = (list(overrides), choices)
        if last[0] != key:
            last[1] = parse_all(overrides, choices)
            last[0] = key
        return list(last[1])

    return parse


def composing_once() -> Callable[..., Any]:
    """Return what can stand in the place of `compose.compose_node`."""
    made: dict[Any, Any] = {}

    def compose_node(overrides: Sequence[str], config_dir: str | None) -> Any:
        if config_dir is not None or any("hydra:" in text or "hydra.job" in text for text in overrides):
            return whole(overrides, config_dir)
        choices = built_in_choices(tuple(config_dirs()))
        parsed = compose.parse(overrides, choices)
        own = [override for override in parsed if not override.name.startswith("hydra")]
        settable = sweep_plan.plain_values(own, choices)
        plain = [override for override in parsed if override.text in settable or override.name in DIRECTORIES]
        files = [override.text for override in parsed if override not in plain]
        key = (*files, *config_dirs())
        if key not in made:
            made[key] = whole(files, None)
        node = compose.with_values(made[key], [override for override in plain if override.name not in DIRECTORIES])
        with read_write(node), open_dict(node.hydra):
            node.hydra.runtime.cwd = os.getcwd()
            node.hydra.overrides.task = [override.text for override in own]
            for override in plain:
                if override.name in DIRECTORIES:
                    OmegaConf.update(node, override.name, override.value)
        return node

    return compose_node
