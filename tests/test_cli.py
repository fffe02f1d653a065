"""The doors: exit statuses, one-line errors, --cfg, completion, and how little `mezo --help` loads."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from mezo_cli import checks, config
from mezo_cli.errors import UserError
from tests.door import environment, mezo, process, refused


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


# --- help ---


def test_help_and_no_words_exit_0_and_name_the_commands() -> None:
    for words in (["--help"], ["-h"], []):
        said = mezo(*words)
        assert said.code == 0
        assert all(name in said.out for name in ("train", "eval", "resume", "replay", "runs", "data", "env"))
    assert mezo("train", "--help").code == 0


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["nosuch"]])
def test_help_imports_nothing_heavy(words: list[str], here: Path) -> None:
    """The clock depends on the machine; what makes it slow does not."""
    code = (
        "import sys\n"
        f"sys.argv = ['mezo', *{words!r}]\n"
        "from mezo_cli.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'hydra', 'omegaconf', 'numpy', 'transformers', 'datasets', 'sklearn', 'yaml', 'pyarrow'}\n"
        "print('loaded', sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=here, env=environment(), capture_output=True, text=True)
    assert done.stdout.endswith("loaded []\n"), done


def test_the_installed_command_leads_to_main(here: Path) -> None:
    command = shutil.which("mezo", path=os.path.dirname(sys.executable))
    if command is None:
        pytest.skip("the project is not installed")
    said = subprocess.run([command, "runs", "nowhere"], cwd=here, capture_output=True, text=True)
    assert (said.returncode, said.stderr) == (2, "error: nowhere: no such folder\n")


# --- mistakes: exit 2, one line, nothing run, nothing left ---


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["trian"], "Did you mean 'train'?"),
        (["nosuch"], "Commands: train, eval"),
        (["--nosuch"], "No such option"),
        (["train", "--multirum"], "--multirun"),
        (["train", "--cfg"], "requires an argument"),
        (["train", "--cfg", "jb"], "allowed are job, hydra, all"),
        (["train", "-m", "--cfg", "job"], "leave -m out"),
        (["train", "--config-dir", "nowhere"], "no such folder"),
        (["eval"], "Missing argument 'RUN'"),
        (["resume"], "Missing argument 'RUN'"),
        (["replay", "x"], "Missing option"),
        (["replay", "x", "--step", "a", "--out", "b"], "--step"),
        (["train", "nosuch=1"], "unknown key 'nosuch'"),
        (["train", "task=nosuch"], "allowed: cola"),
        (["train", "task=sst2,rte"], "add -m"),
        (["train", "-m", "task=sst2,nosuch"], "task=nosuch: no such task"),
        (["train", "steps=-1"], "out of range"),
        (["train", "optimizer.lr=nan"], "out of range"),
        (["train", "experiment=nosuch"], "no such experiment"),
        (["train", "steps=${nosuch}"], "does not resolve"),
        (["train", "--cfg", "job", "steps=ten"], "whole number"),
        (["data", "task=nosuch"], "allowed: cola"),
        (["eval", "nowhere"], "nowhere: no such folder"),
        (["resume", "nowhere"], "nowhere holds no run"),
        (["replay", "nowhere", "--step", "0", "--out", "out"], "nowhere holds no run"),
        (["runs", "nowhere"], "nowhere: no such folder"),
    ],
)
def test_a_mistake_is_exit_2_and_one_line_and_leaves_nothing(words: list[str], part: str, here: Path) -> None:
    assert part in refused(mezo(*words))
    assert list(here.iterdir()) == []


def test_a_mistake_is_one_line_in_a_process_of_its_own_too(here: Path) -> None:
    """No library prints a traceback or a line of its own beside it."""
    said = process("train", "task=nosuch", cwd=here)
    assert "no such task" in refused(said)
    assert said.out == ""
    assert list(here.iterdir()) == []


def test_a_message_of_several_lines_is_told_in_one() -> None:
    def several(**_: object) -> None:
        raise UserError("one\n  two\nthree")

    assert refused(mezo(run=several)) == "error: one two three\n"


def test_a_file_that_may_not_be_read_is_one_line_too() -> None:
    def denied(**_: object) -> None:
        raise PermissionError(13, "Permission denied", "runs/config.yaml")

    assert refused(mezo(run=denied)) == "error: [Errno 13] Permission denied: 'runs/config.yaml'\n"


def test_a_closed_pipe_ends_quietly(here: Path) -> None:
    command = f"{sys.executable} -m mezo_cli train --cfg job | true"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"], cwd=here, env=environment(), capture_output=True, text=True
    )
    assert "Traceback" not in done.stderr


# --- the composed config ---


def test_cfg_job_prints_the_composed_config_and_runs_nothing(here: Path) -> None:
    said = mezo("train", "task=rte", "--cfg", "job", "steps=5", "optimizer.lr=0.5")
    assert said.code == 0
    shown = yaml.safe_load(said.out)
    assert (shown["task"]["name"], shown["steps"], shown["optimizer"]["lr"]) == ("rte", 5, 0.5)
    assert set(shown) == {key.split(".")[0] for key in checks.all_keys()}
    assert list(here.iterdir()) == []


def test_a_task_of_the_users_own_by_config_dir(here: Path) -> None:
    folder = here / "my conf"
    (folder / "task").mkdir(parents=True)
    text = (config.conf_dir() / "task" / "sst2.yaml").read_text()
    (folder / "task" / "mine.yaml").write_text(text.replace("name: sst2", "name: mine", 1))
    said = mezo("train", "--config-dir", folder, "task=mine", "--cfg", "job")
    assert yaml.safe_load(said.out)["task"]["name"] == "mine"


# --- completion, through the protocol of each shell ---


def completed(shell: str, line: str, here: Path) -> list[str]:
    """What `shell` is offered when TAB is pressed at the end of `line`."""
    if shell == "bash":
        return in_bash(line, here)
    extra = {"_MEZO_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_ARGS": line}
    extra["_TYPER_COMPLETE_FISH_ACTION"] = "get-args"
    out = process(cwd=here, **extra).out
    if shell == "fish":
        return [told.split("\t")[0] for told in out.splitlines() if told]
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
        # the script runs its first argument through env: give it a program that stands for mezo
        f"COMP_WORDS=({array}); COMP_CWORD={len(words) - 1}\n_mezo_completion ./mezo\n"
        'printf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    (here / "mezo").write_text(f'#!/bin/sh\nexec {program} "$@"\n')
    (here / "mezo").chmod(0o755)
    done = subprocess.run(["bash", "-c", test], cwd=here, env=environment(), capture_output=True, text=True)
    return done.stdout.split()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_task_is_completed(shell: str, here: Path) -> None:
    before = "" if shell == "bash" else "task="  # bash wants what stands behind its `=`
    assert completed(shell, "mezo train task=ss", here) == [f"{before}sst2", f"{before}sst5"]
    all_tasks = [f"{before}{name}" for name in sorted(config.choices()["task"])]
    assert completed(shell, "mezo train steps=5 task=", here) == all_tasks
    assert completed(shell, "mezo train -m task=sst2,rt", here) == [f"{before}sst2,rte"]
    assert completed(shell, "mezo train nosuch=", here)[:1] in ([], ["_files"])


def test_keys_and_the_users_own_tasks_are_completed(here: Path) -> None:
    (here / "conf" / "task").mkdir(parents=True)
    (here / "conf" / "task" / "mine.yaml").write_text("name: mine\n")
    assert completed("fish", "mezo train --config-dir conf task=mi", here) == ["task=mine"]
    assert completed("bash", "mezo train --config-dir conf task=mi", here) == ["mine"]
    assert completed("fish", "mezo train ste", here) == ["steps="]
    assert completed("fish", "mezo train optimizer.l", here) == ["optimizer.lr="]
    assert completed("fish", "mezo data task=sst", here) == ["task=sst2", "task=sst5"]
    assert completed("fish", "mezo eval run task=sst", here) == ["task=sst2", "task=sst5"]
    assert "objective=mlm" in completed("fish", "mezo train obj", here)
    assert completed("fish", "mezo tra", here) == ["train"]
    assert completed("fish", "mezo compare --ob", here) == ["--objectives"]


# --- data and env ---


def test_data_shows_balance_lengths_and_prompts(roberta: Path, movies: Path) -> None:
    said = mezo("data", "task=sst2", f"model.path={roberta}", "data=files", f"data.dir={movies}")
    assert said.code == 0, said
    lines = said.out.splitlines()
    assert [line.split() for line in lines[:4]] == [
        ["rows", "per", "label", "negative", "positive"],
        ["train", "12", "12"],
        ["dev", "6", "6"],
        ["test", "6", "6"],
    ]
    assert "It was<mask>.</s>   [negative -> 'terrible'; " in said.out
    assert "It was<mask>.</s>   [positive -> 'great'; " in said.out


def test_data_shows_plain_inputs_for_cls(roberta: Path, movies: Path) -> None:
    said = mezo("data", "objective=cls", f"model.path={roberta}", "data=files", f"data.dir={movies}")
    assert said.code == 0, said
    assert "<mask>" not in said.out
    assert "   [negative; " in said.out


def test_data_export_loads_no_tokenizer_and_no_model(movies: Path, here: Path) -> None:
    code = (
        "import sys\n"
        f"sys.argv = ['mezo', 'data', 'data=files', 'data.dir={movies}', 'data.shots=3', '--export', 'out']\n"
        "from mezo_cli.cli import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    print('code', end.code)\n"
        "print('loaded', sorted({'torch', 'transformers', 'tokenizers'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=here, env=environment(), capture_output=True, text=True)
    assert done.stdout.endswith("code 0\nloaded []\n"), done
    rows = [json.loads(line) for line in (here / "out" / "train.jsonl").read_text().splitlines()]
    assert sorted(row["label"] for row in rows) == ["negative"] * 3 + ["positive"] * 3


def test_a_short_group_is_exported_with_a_warning(movies: Path, here: Path) -> None:
    said = mezo("data", "data=files", f"data.dir={movies}", "data.shots=13", "--export", here / "out")
    assert said.code == 0
    assert "warning: " in said.err
    assert "fewer than 13 rows" in said.err


def test_env_tells_versions_device_and_cores() -> None:
    said = mezo("env")
    assert said.code == 0
    told = {line.split()[0] for line in said.out.splitlines()}
    assert {"python", "torch", "transformers", "datasets", "hydra-core", "platform", "cores", "cuda"} <= told
