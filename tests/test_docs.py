"""README.md, SKILL.md, docs/: commands exist, links lead to files, every block is run or says what it needs."""

import ast
import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from mezo_cli.cli import app
from mezo_cli.config.compose import load
from mezo_cli.config.overrides import LAUNCHERS, is_installed
from mezo_cli.sweep.plan import plan_sweep
from tests import doc_blocks
from tests.command_line import HANGS, environment
from tests.doc_blocks import NEEDS, PAGES, ROOT, Block, blocks

COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
EXAMPLES = ROOT / "docs" / "examples"  # a folder per page that has some
COMPOSING = ("train", "data", "doctor")  # commands whose overrides are a whole config


@contextlib.contextmanager
def folder_of(page: Path, folder: Path) -> Iterator[None]:
    """Write the files of a page and its examples into a folder, and work there."""
    folder.mkdir(exist_ok=True)
    if (EXAMPLES / page.stem).is_dir():
        shutil.copytree(EXAMPLES / page.stem, folder, dirs_exist_ok=True)
    for name, text in doc_blocks.files(page).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    with contextlib.chdir(folder):
        yield


def check_command(command: str, composes: bool) -> None:
    """Check that the programs of a command line exist, with these options, and if `composes`, that settings compose."""
    for part in re.split(r" \|\|? | && ", command):
        words = [word for word in doc_blocks.words(re.split(" [<>] ", part)[0]) if word != "..."]
        if words[0] == "make":
            known = subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True)
            assert known.returncode == 0, known.stderr
        elif words[0].endswith("python") and words[1].endswith(".py"):
            assert (ROOT / words[1]).is_file() or Path(words[1]).is_file(), f"no such file: {words[1]}"
        elif words[0] == "mezo" and words[1] != "--version":
            assert words[1] in COMMANDS, f"no such command: {words[1]}"
            params = COMMANDS[words[1]].make_context(words[1], words[2:]).params
            if composes and words[1] in COMPOSING:
                compose = plan_sweep if params.get("multirun") else load
                compose(params["overrides"] or [], params.get("config_dir"))


def needs_launcher(command: str) -> bool:
    """Whether a command names a launcher whose package is not installed: then its settings are refused."""
    named = re.search(r"hydra/launcher=(\w+)", command)
    package = LAUNCHERS[named[1]] if named else None
    return package is not None and not is_installed(package)


@pytest.mark.parametrize("composes", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_command_exists(composes: bool, tmp_path: Path) -> None:
    """With `composes`, the settings of commands that no test runs are composed."""
    for page in PAGES:
        with folder_of(page, tmp_path / page.stem):
            for block in blocks(page):
                for command in block.commands() if block.is_shell else ():
                    try:
                        tested = block.is_run or "run by" in block.markers or needs_launcher(command)
                        check_command(command, composes and not tested)
                    except (Exception, SystemExit) as error:
                        pytest.fail(f"{block.place}: {command}: {error}")


def test_every_command_in_a_sentence_or_a_table_exists() -> None:
    for page in PAGES:
        for command in doc_blocks.inline_commands(page):
            name = doc_blocks.words(command)[1]
            assert name in COMMANDS or name == "COMMAND", (page.name, command)
            options = {option for param in COMMANDS[name].params for option in param.opts} if name in COMMANDS else {}
            assert set(re.findall(r"(?<=[\s\[])--?[a-z][a-z-]*", command)) <= {*options, "--help", "-m"}, command


def test_every_marker_is_known_and_every_program_compiles() -> None:
    for block in (block for page in PAGES for block in blocks(page)):
        assert set(filter(None, block.markers.get("needs", "").split(", "))) <= set(NEEDS), block.place
        if "run by" in block.markers:
            text = (ROOT / block.markers["run by"]).read_text(encoding="utf-8")
            assert block.page.name in text, f"{block.place}: {block.markers['run by']} does not read this page"
        if block.is_python:
            ast.parse(block.text)


def test_a_page_shows_its_examples_as_they_are() -> None:
    pages = {page.stem: page for page in PAGES}
    for folder in EXAMPLES.iterdir():
        assert str(folder.name) in pages[folder.name].read_text(encoding="utf-8")
        for name, text in doc_blocks.files(pages[folder.name]).items():
            example = folder / name
            assert not example.exists() or example.read_text(encoding="utf-8") == text, name


def test_every_link_leads_to_a_file_and_every_page_is_on_the_map() -> None:
    linked = set()
    for page in PAGES:
        text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target} does not exist"
                linked |= {(page.parent / target).resolve()} if page.name == "index.md" else set()
    assert [page.name for page in (ROOT / "docs").rglob("*.md") if page not in linked and page.name != "index.md"] == []


def run(block: Block, bin_folder: Path, folder: Path) -> None:
    """Run a block; each of its commands has to exit with 0. `mezo doctor` gets 10 seconds.

    Args:
        block: a shell or a Python block.
        bin_folder: a folder with the programs `mezo` and `python` of this environment.
        folder: the working directory.
    """
    env = environment(PATH=f"{bin_folder}{os.pathsep}{os.environ['PATH']}", COLUMNS="120", HF_HUB_OFFLINE="1")
    more = block.markers.get("shortened by the test", "")
    for command in [block.text] if block.is_python else block.commands():
        line = [*doc_blocks.words(command), *more.split()] if more and command.startswith("mezo train") else None
        if command.startswith("mezo doctor") and "--seconds" not in command:
            line = [*doc_blocks.words(command), "--seconds", "10"]
        words = ["python", "-c", command] if block.is_python else line or ["bash", "-o", "pipefail", "-c", command]
        done = subprocess.run(
            words, cwd=folder, env=env, text=True, timeout=HANGS, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert done.returncode == 0, f"{block.place}: {command}\n{done.stdout}"


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in PAGES if any(b.is_run for b in blocks(p))], ids=lambda page: page.stem)
def test_every_block_runs(page: Path, tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, call in {"mezo": "-m mezo_cli", "python": ""}.items():
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {call} "$@"\n')
        (programs / name).chmod(0o755)
    with folder_of(page, tmp_path / "work"):
        for block in filter(lambda block: block.is_run, blocks(page)):
            run(block, programs, tmp_path / "work")
