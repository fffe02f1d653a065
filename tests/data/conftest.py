"""Fixtures of the data tests."""

from pathlib import Path

import pytest

from tests.data.sample_data import HEADER, sst2_rows, write_tsv


@pytest.fixture
def glue(tmp_path: Path) -> Path:
    """Write a full GLUE folder (100 train rows, 20 dev rows, a test file without labels) and return it."""
    write_tsv(tmp_path / "SST-2/train.tsv", HEADER, sst2_rows(100, "train"))
    write_tsv(tmp_path / "SST-2/dev.tsv", HEADER, sst2_rows(20, "dev"))
    write_tsv(tmp_path / "SST-2/test.tsv", "index\tsentence", [[str(i), f"test {i}"] for i in range(30)])
    return tmp_path / "SST-2"
