"""Run directories that the tests of this package only read."""

from pathlib import Path

import pytest

from tests.report.run_directories import make_curves, make_two_methods


@pytest.fixture(scope="session")
def two_methods(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_two_methods(tmp_path_factory.mktemp("two") / "runs")


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of 40 steps, with curves and predictions."""
    return make_curves(tmp_path_factory.mktemp("curves") / "run", {"seed": 13}).path
