"""Fixtures that every room's tests share."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real data and the demo model that lies beside the repository (or in MEZO_SHARED)."""
    folder = Path(os.environ.get("MEZO_SHARED", Path(__file__).resolve().parents[2] / "shared"))
    if not (folder / "data").is_dir():
        pytest.skip("needs ../shared/data")
    return folder
