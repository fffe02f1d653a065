"""`mezo example`: the tutorial's files, which train as they are; nothing of the user's is written over."""

from pathlib import Path

import pytest

from mezo_cli.config.compose import build_config
from mezo_cli.data import load_splits
from tests.command_line import error_line, mezo


def test_it_writes_the_files_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        result = mezo("example", "comments")
        assert result.code == 0, result
        assert result.out.splitlines() == [
            *("comments/dev.csv", "comments/test.csv", "comments/train.csv", "mine/task/comments.yaml"),
        ]
    config = build_config(["task=comments", "data=files", "data.dir=comments", "model=demo"], config_dir="mine")
    assert list(config.task.labels) == ["unhappy", "happy"]
    splits = load_splits(config)
    assert [len(rows) for rows in (splits.train, splits.dev, splits.test)] == [32, 16, 16]


def test_mistakes(tmp_path: Path) -> None:
    (tmp_path / "comments").mkdir()
    (tmp_path / "comments" / "test.csv").write_text("mine")
    assert "there already, with another content; nothing was written" in error_line(
        mezo("example", "comments", "--out", tmp_path)
    )
    assert [path.name for path in tmp_path.rglob("*.*")] == ["test.csv"]
    assert "did you mean 'comments'?" in error_line(mezo("example", "coments"))
    assert "no such folder" in error_line(mezo("example", "comments", "--out", tmp_path / "none"))
