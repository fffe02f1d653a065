"""Credentials in addresses: they are in no line, no file and no log of a library."""

import logging
import sys
from pathlib import Path

import pytest

from mezo_cli.errors import without_credentials
from mezo_cli.process.streams import logs_without_credentials
from mezo_cli.runs import Run
from mezo_cli.sweep.plan import new_record
from tests.command_line import error_line, mezo

URL = "http://user:SECRET@127.0.0.1:9"  # the discard port: nobody listens


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("see (https://u:p@h:80/x) now", "see (https://h:80/x) now"),
        ("https://token@h", "https://h"),
        ("https://u:p@ss@h/x", "https://h/x"),
        ("https://u:p/q@h/x", "https://h/x"),
        ("redis://:p@h/0 https://u:p@h", "redis://h/0 https://h"),
        ("'https://h/x?X-Amz-Signature=abc&y=1&token=t'", "'https://h/x?X-Amz-Signature=...&y=1&token=...'"),
        ("https://h:80/path@v1 a@b.c git@h:x/y", "https://h:80/path@v1 a@b.c git@h:x/y"),
    ],
)
def test_what_is_cut(text: str, shown: str) -> None:
    assert without_credentials(text) == shown


def test_the_hubs_address_in_lines_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", URL)
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    line = error_line(mezo("train", "model.path=org/name", "data=demo", f"hydra.run.dir={run}"))
    assert "from http://127.0.0.1:9: " in line
    assert "SECRET" not in line
    assert not run.exists()
    env = mezo("env")
    assert "HF_ENDPOINT    http://127.0.0.1:9\n" in env.out
    assert "SECRET" not in env.out
    for words in ([f"model.path={URL}/x"], ["-m", "seed=1,2", f"task.hub.path={URL}/x"]):
        line = error_line(mezo("train", *words))
        assert "which the run would store; log in by hf auth login" in line
        assert "SECRET" not in line
    assert list(tmp_path.iterdir()) == []


def test_the_command_line_in_run_json_and_sweep_json(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    argv = ["mezo", "train", f"logger.project={URL}"]
    monkeypatch.setattr(sys, "argv", argv)
    info = Run.create(tmp_path / "run", "", argv).info()
    for stored in (info["argv"], new_record({Path("0"): []}, Path(), []).argv):
        assert stored == [*argv[:2], "logger.project=http://127.0.0.1:9"]


def test_what_libraries_log(caplog: pytest.LogCaptureFixture) -> None:
    """huggingface_hub logs the address of each request that it repeats."""
    with logs_without_credentials():
        logging.getLogger("huggingface_hub").warning("HTTP Error %d requesting %s", 500, f"{URL}/x")
    assert caplog.messages[0] == "HTTP Error 500 requesting http://127.0.0.1:9/x"
