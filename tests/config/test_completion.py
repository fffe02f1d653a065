"""Completion of overrides, through the protocol of each shell."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mezo_cli.config.choices import find_choices
from mezo_cli.config.completion import complete
from tests.command_line import environment, process


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def completed(shell: str, line: str, here: Path) -> list[str]:
    """What `shell` is offered when TAB is pressed at the end of `line`."""
    if shell == "bash":
        return in_bash(line, here)
    extra = {"_MEZO_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_ARGS": line}
    extra["_TYPER_COMPLETE_FISH_ACTION"] = "get-args"
    out = process(cwd=here, **extra).out
    if shell == "fish":
        return [line.split("\t")[0] for line in out.splitlines() if line]
    return [word.strip('"') for word in out.removeprefix("_arguments '*: :((").removesuffix("))'\n").split()]


def in_bash(line: str, here: Path) -> list[str]:
    """Source the script that Typer gives bash, and press TAB: bash splits words at `=`."""
    script = process(cwd=here, _MEZO_COMPLETE="source_bash").out
    words = line.replace("=", " = ").split(" ")
    words = [word for i, word in enumerate(words) if word or i == len(words) - 1]
    if line.endswith("="):
        words.pop()
    array = " ".join(f"'{word}'" for word in words)
    program = f"{sys.executable} -m mezo_cli"
    test = (
        f'{script}\nmezo() {{ {program} "$@"; }}\n'
        # the script runs its first argument through env: give it a program in the place of mezo
        f"COMP_WORDS=({array}); COMP_CWORD={len(words) - 1}\n_mezo_completion ./mezo\n"
        'printf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    (here / "mezo").write_text(f'#!/bin/sh\nexec {program} "$@"\n')
    (here / "mezo").chmod(0o755)
    done = subprocess.run(["bash", "-c", test], cwd=here, env=environment(), capture_output=True, text=True)
    return done.stdout.split()


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_task_is_completed(shell: str, here: Path) -> None:
    before = "" if shell == "bash" else "task="  # bash expects what follows its `=`
    assert completed(shell, "mezo train task=ss", here) == [f"{before}sst2", f"{before}sst5"]
    assert completed(shell, "mezo train -m task=sst2,rt", here) == [f"{before}sst2,rte"]
    assert completed(shell, "mezo train nosuch=", here)[:1] in ([], ["_files"])


def test_keys_and_the_users_own_tasks_are_completed(here: Path) -> None:
    (here / "conf" / "task").mkdir(parents=True)
    (here / "conf" / "task" / "mine.yaml").write_text("name: mine\n")
    context = SimpleNamespace(params={"config_dir": "conf"})
    assert complete(context, "task=mi") == ["task=mine"]
    assert complete(context, "task=sst2,rt") == ["task=sst2,rte"]
    assert complete(context, "task=") == [f"task={name}" for name in sorted([*find_choices()["task"], "mine"])]
    assert complete(context, "ste") == ["steps="]
    assert complete(context, "optimizer.l") == ["optimizer.lr="]
    assert "objective=mlm" in complete(context, "obj")
    assert complete(context, "nosuch=") == []
    assert completed("fish", "mezo train --config-dir conf task=mi", here) == ["task=mine"]
