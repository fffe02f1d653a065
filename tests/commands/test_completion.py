"""What must be quick: completion of overrides in each shell, and how little a command loads."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mezo_cli.commands.completion import complete
from mezo_cli.config.choices import find_choices
from tests.command_line import environment, process

pytestmark = pytest.mark.usefixtures("in_tmp_path")


def completed(shell: str, line: str) -> list[str]:
    """What `shell` is offered when TAB is pressed at the end of `line`."""
    if shell == "bash":
        return in_bash(line)
    extra = {"_MEZO_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_ARGS": line}
    out = process(cwd=Path.cwd(), **extra, _TYPER_COMPLETE_FISH_ACTION="get-args").out
    if shell == "fish":
        return [line.split("\t")[0] for line in out.splitlines() if line]
    return [word.strip('"') for word in out.removeprefix("_arguments '*: :((").removesuffix("))'\n").split()]


def in_bash(line: str) -> list[str]:
    """Source the script that Typer gives bash, and press TAB: bash splits words at `=`."""
    words = line.replace("=", " = ").split(" ")
    words = [word for i, word in enumerate(words) if word or i == len(words) - 1]
    array = " ".join(f"'{word}'" for word in words)
    program = f'{sys.executable} -m mezo_cli "$@"'
    # the script runs its first argument through env: give it a program in the place of mezo
    Path("mezo").write_text(f"#!/bin/sh\nexec {program}\n")
    Path("mezo").chmod(0o755)
    script = process(cwd=Path.cwd(), _MEZO_COMPLETE="source_bash").out
    pressed = f"COMP_WORDS=({array}); COMP_CWORD={len(words) - 1}\n_mezo_completion ./mezo\n"
    test = f'{script}\nmezo() {{ {program}; }}\n{pressed}printf "%s\\n" "${{COMPREPLY[@]}}"\n'
    return subprocess.run(["bash", "-c", test], env=environment(), capture_output=True, text=True).stdout.split()


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_task_is_completed(shell: str) -> None:
    before = "" if shell == "bash" else "task="  # bash expects what follows its `=`
    assert completed(shell, "mezo train task=ss") == [f"{before}sst2", f"{before}sst5"]
    assert completed(shell, "mezo train -m task=sst2,rt") == [f"{before}sst2,rte"]
    assert completed(shell, "mezo train nosuch=x")[:1] in ([], ["_files"])


def test_keys_and_the_users_own_tasks_are_completed() -> None:
    Path("conf/task").mkdir(parents=True)
    Path("conf/task/mine.yaml").write_text("name: mine\n")
    context = SimpleNamespace(params={"config_dir": "conf"})
    for word, expected in {"task=mi": "task=mine", "task=sst2,rt": "task=sst2,rte", "ste": "steps="}.items():
        assert complete(context, word) == [expected]
    assert complete(context, "task=") == [f"task={name}" for name in sorted([*find_choices()["task"], "mine"])]
    assert complete(context, "optimizer.l") == ["optimizer.lr="]
    assert "objective=mlm" in complete(context, "obj")
    assert complete(context, "nosuch=") == []
    assert completed("fish", "mezo train --config-dir conf task=mi") == ["task=mine"]


CODE = """
import sys
from mezo_cli.__main__ import main
heavy = sys.argv.pop(1).split()
try:
    main()
except SystemExit as end:
    print("\\nloaded", end.code, [name for name in heavy if name in sys.modules])
"""
MODELS = "torch transformers datasets"
PAGES = "matplotlib jinja2"
ALL = f"{MODELS} {PAGES} hydra omegaconf numpy sklearn yaml pyarrow pandas"
# `import transformers` needs none of these, and each takes a tenth of a second or more
NOT_FOR_A_MODEL = (
    "datasets hydra matplotlib omegaconf optuna pandas peft pyarrow sklearn tensorboard wandb transformers.pipelines "
    "transformers.trainer torch._inductor.codecache torch._inductor.compile_fx"
)


@pytest.mark.parametrize(
    ("words", "heavy", "status"),
    [
        ("--help", ALL, 0),
        ("train --help", ALL, 0),
        ("nosuch", ALL, 2),
        ("data data=files data.dir={movies} data.shots=3 --export out", f"{MODELS} tokenizers", 0),
        ("compare --paper", f"{MODELS} {PAGES}", 0),
        pytest.param("compare {run}", f"{MODELS} {PAGES}", 0, marks=pytest.mark.slow),
        pytest.param("predict {run} --text dull", NOT_FOR_A_MODEL, 0, marks=pytest.mark.slow),
    ],
)
def test_a_command_loads_no_more(words: str, heavy: str, status: int, run: Path, movies: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", CODE, heavy, *words.format(run=run, movies=movies).split()]
    env = {name: value for name, value in environment().items() if name != "MEZO_EAGER"}  # nothing is compiled
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == f"loaded {status} []", done
