"""What the tests of overrides share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mezo_cli.config.compose import load
from mezo_cli.errors import UserError


def error_of(*words: str, config_dir: Path | None = None, compose: Callable[..., Any] = load) -> str:
    with pytest.raises(UserError) as error:
        compose(words, None if config_dir is None else str(config_dir))
    line = str(error.value)
    assert "\n" not in line
    return line
