"""Read and write a run's `config.yaml`. Needs no Hydra: a stored config is complete and is never composed again."""

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from mezo_cli.config.own_code import without_own_code
from mezo_cli.config.schema import Config, to_dict
from mezo_cli.config.validation import build
from mezo_cli.errors import UserError, one_line


def to_yaml(config: Config) -> str:
    """Return the config as the text of `config.yaml`."""
    return dump(to_dict(config))


def dump(plain: Mapping[str, Any]) -> str:
    """Return plain nested values as YAML, in their order."""
    return yaml.safe_dump(plain, default_flow_style=False, allow_unicode=True, sort_keys=False)


def from_yaml(text: str) -> Config:
    """Return the config of `to_yaml`. The user's own code in it is ignored: it may be somebody else's (own_code.py)."""
    return build(without_own_code(read_settings(text)))


def read_config(path: Path, text: str | None = None) -> Config:
    """Read a run's `config.yaml` and validate it; `text` is what is in it, if it was read already."""
    try:
        return from_yaml(path.read_text(encoding="utf-8") if text is None else text)
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file") from error
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is damaged: {error}") from error


def is_same_run(stored: Config, job: Config) -> bool:
    """Return whether a stored config is that of a job, composed again; what is not stored does not count."""
    return from_yaml(to_yaml(job)) == stored


def read_settings(text: str) -> dict[str, Any]:
    """Return the settings in the text of a config.yaml as they were stored, nested, without validating them.

    For listing many runs: a top-level section is parsed once, and runs differ in few of them. `to_yaml` writes lines of
    a section indented, so a section begins where a line is not.
    """
    settings: dict[str, Any] = {}
    for section in re.split(r"^(?=[A-Za-z_])", text, flags=re.MULTILINE):
        settings |= _section(section)
    return settings


@functools.lru_cache(maxsize=4096)
def _section(text: str) -> dict[str, Any]:
    """Parse YAML by libyaml, which is 10 times faster.

    Aliases, with which few bytes can stand for millions of values, are refused: `to_yaml` writes none.
    """
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        if "&" in text and any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=loader)):
            raise UserError("config.yaml is damaged: it has an alias")
        values = yaml.load(text, Loader=loader)
    except (yaml.YAMLError, RecursionError) as error:
        raise UserError(f"config.yaml is damaged: {one_line(error)}") from error
    if not isinstance(values, dict | None):
        raise UserError("config.yaml is damaged: it has no keys")
    return values or {}
