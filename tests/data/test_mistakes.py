"""Data paths and files that cannot be read: one line that names what is wrong."""

from pathlib import Path

import pytest

from mezo_cli.config.schema import DataConfig, FilesConfig
from mezo_cli.data import export, load
from mezo_cli.errors import UserError
from tests.data.sample_data import MRPC, SST2


def line(folder: Path | str) -> str:
    """Return the error of loading a path as the data of SST-2."""
    with pytest.raises(UserError) as caught:
        load(SST2, FilesConfig(name="files", dir=str(folder)), 42)
    return str(caught.value)


@pytest.mark.parametrize("name", ["train.jsonl", "train.json"])
def test_an_integer_of_many_digits(name: str, tmp_path: Path) -> None:
    row = f'{{"sentence": "a", "label": {"1" * 5000}}}'
    (tmp_path / name).write_text(f"[{row}]" if name == "train.json" else row)
    assert f"{name}:1: not a JSON" in line(tmp_path)


@pytest.mark.parametrize("path", ["/dev/full", "/dev/null"])
def test_a_device(path: str) -> None:
    assert line(path) == f"data.dir={path}: this is neither a folder nor a regular file"


def test_a_training_file_that_is_no_file(tmp_path: Path) -> None:
    train = tmp_path / "train.tsv"
    train.mkdir()
    assert line(tmp_path) == f"{train}: this is a folder; a file is needed"
    train.rmdir()
    for target in ("nowhere", "train.tsv"):  # dangling, a loop
        train.symlink_to(target)
        assert line(tmp_path) == f"{train}: this is a link that leads nowhere; a file is needed"
        train.unlink()


def test_an_export_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--export \S*/file/x: cannot be written: Not a directory$"):
        export(SST2, DataConfig(name="demo"), 42, tmp_path / "file" / "x")


def test_a_task_without_a_hub_data_set() -> None:
    with pytest.raises(UserError, match=r"'mrpc' has no data set on the hub .* data=files"):
        load(MRPC, DataConfig(name="hub"), 42)
