"""`--from RUN|FILE`: the settings of a run or of a config.yaml as overrides, before those of the command line.

They are data: what only a user may name is given again.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mezo_cli.config import compose
from mezo_cli.config.choices import find_choices
from mezo_cli.config.overrides import parse, quote
from mezo_cli.config.schema import Config, to_dict
from mezo_cli.config.stored import REWARD, USED, from_yaml, own_keys, read_settings, reward_of, without_own_code
from mezo_cli.errors import UserError
from mezo_cli.report.settings import flatten
from mezo_cli.runs import Run, checkpoints

NO_TEXTS = ("null", "true", "false", "nan", "inf")  # words that the override grammar reads as something else
ANY_TASK = "own"  # the task that a run's own fills in, where no file has its name


def with_settings_of(source: Path, overrides: Sequence[str], config_dir: str | None) -> list[str]:
    """Return the overrides of the command line, after those that the settings of `source` come to.

    A key that is given wins, and so does a choice, with all keys of its group.
    """
    choices = find_choices(config_dir)
    parsed = parse(overrides, choices)
    named = {override.name for override in parsed}
    if "experiment" in named:
        raise UserError(f"--from {source}: leave experiment=... out, whose settings its own would replace")
    config = _read(source, named)
    chosen = {group: getattr(getattr(config, group, None), "name", "") for group in choices}
    chosen = {group: name for group, name in chosen.items() if name in choices[group] and name != ANY_TASK}
    stored = flatten(to_dict(config))
    left_out = {key for pair in compose.INSTEAD.items() for key, other in (pair, pair[::-1]) if other in named}
    left_out |= {key for key, other in compose.INSTEAD.items() if stored[other]} | named
    if config.data.seed == config.seed:
        left_out.add("data.seed")  # it followed the seed, and does again
    kept = {key: value for key, value in stored.items() if key not in left_out and key.partition(".")[0] not in named}
    words = [f"{group}={name}" for group, name in chosen.items() if group not in named]
    if "task" not in named and "task" not in chosen:  # of somebody's config folder
        words.append(f"task={ANY_TASK}")
        words += [f"{key}={_spelled(kept.pop(key))}" for key in [*kept] if key.startswith("task.")]
    read = [override for override in parsed if override.name in choices or override.name.startswith("task.")]
    picked = [override.jobs[0] if override.sweeps else override.text for override in read]
    with compose.hydra_session():
        node = compose.compose_node([*words, *picked], config_dir)
        compose.begin(node, [])
        before = flatten(to_dict(compose.config_of(node)))
    words += [f"{key}={_spelled(value)}" for key, value in kept.items() if before.get(key, ...) != value]
    return [*words, *overrides]


def _read(source: Path, named: set[str]) -> Config:
    if source.is_file():
        text, info = source.read_text(encoding="utf-8"), {}
    else:
        run = Run.open(checkpoints.find_run(source) or source)
        text, info = (run.path / "config.yaml").read_text(encoding="utf-8"), run.info()
    try:
        settings, config = read_settings(text), from_yaml(text)
    except UserError as error:
        raise UserError(f"--from {source}: {error}") from error
    kept, lacking = flatten(without_own_code(settings)), own_keys().keys() - named
    code = {key: value for key, value in flatten(settings).items() if key in lacking and kept.get(key) != value}
    if info.get(USED) and REWARD in lacking and reward_of(config) is None:
        code[REWARD] = "FILE.py:function"
    for key, value in code.items():
        raise UserError(f"--from {source}: {key} is not taken from a file: give it again, {key}={value}")
    return config


def _spelled(value: Any) -> str:
    """Return a value as the override grammar reads it."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_spelled(one)}' for key, one in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_spelled, value))}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if not isinstance(value, str):
        return repr(value)
    is_plain = re.fullmatch(r"[A-Za-z./][\w./-]*", value) and value.lower() not in NO_TEXTS
    return value if is_plain else quote(value)
