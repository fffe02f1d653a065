"""Configs are composed here as a user's are."""

import pytest


@pytest.fixture(autouse=True)
def all_by_hydra(composing_all: None) -> None:
    """Let Hydra compose every file and value."""
