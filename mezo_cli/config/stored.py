"""Read and write a run's `config.yaml`. Needs no Hydra: a stored config is complete and is never composed again."""

import functools
import re
from pathlib import Path
from typing import Any

import yaml

from mezo_cli.config.own_code import without_own_code
from mezo_cli.config.schema import Config, to_dict
from mezo_cli.config.validation import build
from mezo_cli.errors import UserError

# YAML 1.1 reads these words as booleans: a text like this is quoted.
_WORDS = ("y", "yes", "n", "no", "true", "false", "on", "off")
BOOLEANS = {spelling for word in _WORDS for spelling in (word, word.title(), word.upper())}


class _Dumper(yaml.Dumper):
    """YAML as OmegaConf writes it: texts that look like a boolean or a number are quoted. It has no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.Dumper, text: str) -> yaml.ScalarNode:
    quoted = text in BOOLEANS or _is_number(text)
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="'" if quoted else None)


_Dumper.add_representer(str, _represent_text)


def to_yaml(config: Config) -> str:
    """Return the config as the text of `config.yaml`, without what is not stored (own_code.py)."""
    plain = without_own_code(to_dict(config))
    return yaml.dump(plain, default_flow_style=False, allow_unicode=True, sort_keys=False, Dumper=_Dumper)


def from_yaml(text: str) -> Config:
    """Return the config of `to_yaml`."""
    return _build(_load(text))


def read_config(path: Path, text: str | None = None) -> Config:
    """Read a run's `config.yaml` and validate it. The user's own code in it is ignored: it may be
    somebody else's (own_code.py).

    Args:
        path: the file.
        text: what is in it, if it was read already, as of many runs: a section that runs share is parsed once.
    """
    try:
        plain = _load(path.read_text(encoding="utf-8")) if text is None else read_settings(text)
        return _build({} if plain is None else plain)
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file") from error
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise UserError(f"{path} is damaged: {' '.join(lines[:2])}") from error


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
        settings |= _load_section(section) or {}
    return settings


def _build(plain: Any) -> Config:
    return build(without_own_code(plain) if isinstance(plain, dict) else plain)


@functools.lru_cache(maxsize=4096)
def _load_section(text: str) -> dict[str, Any] | None:
    try:
        loaded: dict[str, Any] | None = _load(text)
        return loaded
    except (yaml.YAMLError, RecursionError) as error:
        raise UserError(f"config.yaml is damaged: {' '.join(str(error).split())}") from error


def _load(text: str) -> Any:
    """Parse YAML by libyaml, which is 10 times faster, and errors by the parser whose messages tests know.

    Aliases, with which few bytes can stand for millions of values, are refused: `to_yaml` writes none.
    """
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        if "&" in text and any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=loader)):
            raise UserError("config.yaml is damaged: it has an alias")
        return yaml.load(text, Loader=loader)
    except yaml.YAMLError:
        return yaml.safe_load(text)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
