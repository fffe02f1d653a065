"""Let Hydra compose the files of the same choices once per process: a composition takes 0.1 s, and most tests need one.

As in a sweep (config/sweep_plan.py), plain values are then set in a copy. Processes of their own, and the tests that
are about composing (`composing_all`), let Hydra compose everything; tests/config/test_compositions.py compares the two.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

from omegaconf import OmegaConf, open_dict, read_write

from mezo_cli.config import compose, sweep_plan
from mezo_cli.config.choices import config_dirs, find_choices
from mezo_cli.config.validation import defaults

whole = compose.compose_node
DIRECTORIES = ("hydra.run.dir", "hydra.sweep.dir")


def composing_once() -> Callable[..., Any]:
    """Return what can stand in the place of `compose.compose_node`."""
    made: dict[Any, Any] = {}

    def compose_node(overrides: Sequence[str], config_dir: str | None) -> Any:
        if config_dir is not None or any("hydra:" in text or "hydra.job" in text for text in overrides):
            return whole(overrides, config_dir)
        choices = find_choices()
        parsed = compose.parse(overrides, choices)
        own = [override for override in parsed if not override.name.startswith("hydra")]
        settable = sweep_plan._plain_values(own, choices)
        plain = [override for override in parsed if override.text in settable or override.name in DIRECTORIES]
        files = [override.text for override in parsed if override not in plain]
        key = (*files, *config_dirs(), repr(defaults()))
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
