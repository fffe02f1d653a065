"""README.md and docs/: every command exists and composes, every link leads to a file, every block is run or marked."""

import ast
import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from mezo_cli.cli import app
from mezo_cli.config.compose import compose_run
from mezo_cli.config.overrides import HYDRA_CHOICES, is_installed
from mezo_cli.config.sweep_plan import plan_sweep
from tests import doc_blocks
from tests.command_line import environment
from tests.conftest import MISSING
from tests.doc_blocks import NEEDS, PAGES, ROOT, Block, blocks

COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
COMPOSING = ("train", "data", "doctor", "fetch")  # commands whose overrides are a whole config
PLACEHOLDER = re.compile(r"\.\.\.|\[|\b[A-Z]+\b|…")  # `mezo resume RUN steps=N` cannot be composed

each_page = pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])


@contextlib.contextmanager
def folder_of(page: Path, folder: Path) -> Iterator[None]:
    """Write the files of a page into a folder, and work there."""
    for name, text in doc_blocks.files(page).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    with contextlib.chdir(folder):
        yield


# --- what is checked of every block ---


def check_command(command: str, composes: bool = True) -> None:
    """Check that the programs of a command line exist, with these options, and that its settings compose."""
    for part in re.split(r" \|\|? | && ", command):
        words = [word for word in doc_blocks.words(re.split(" [<>] ", part)[0]) if word != "..."]
        if words[0] == "make":
            targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
            assert set(words[1:]) <= set(targets), f"no such target of make: {words[1:]}"
        elif words[0].endswith("python") and words[1].endswith(".py"):
            assert (ROOT / words[1]).is_file(), f"no such file: {words[1]}"
        elif words[0] == "mezo" and words[1] != "--version":
            assert words[1] in COMMANDS, f"no such command: {words[1]}"
            check_mezo(words[1], words[2:], composes)


def needs_launcher(command: str) -> bool:
    """Whether a command names a launcher whose package is not installed: then its settings are refused."""
    named = re.search(r"hydra/launcher=(\w+)", command)
    package = HYDRA_CHOICES["hydra/launcher"][named[1]] if named else None
    return package is not None and not is_installed(package)


def check_mezo(name: str, words: list[str], composes: bool) -> None:
    """Parse a command as the command line does, and compose what it would train."""
    params = COMMANDS[name].make_context(name, list(words)).params
    if composes and name in COMPOSING:
        (plan_sweep if params.get("multirun") else compose_run)(params["overrides"] or [], params.get("config_dir"))


@pytest.mark.sample(9)
@each_page
def test_every_command_exists_and_its_settings_compose(page: Path, tmp_path: Path) -> None:
    with folder_of(page, tmp_path):
        for block in blocks(page):
            for command in block.commands() if block.is_shell else ():
                if MISSING and "logger=" in command:
                    continue  # a logger whose package is missing is refused
                try:
                    composes = "run by" not in block.markers and not needs_launcher(command)
                    check_command(command, composes)
                except (Exception, SystemExit) as error:
                    pytest.fail(f"{block.place}: {command}: {error}")


@each_page
def test_every_command_in_a_sentence_or_a_table_exists(page: Path) -> None:
    for command in doc_blocks.inline_commands(page):
        name, *words = doc_blocks.words(command)[1:]
        assert name in COMMANDS or name == "COMMAND", command
        options = {option for param in COMMANDS[name].params for option in param.opts} if name in COMMANDS else set()
        assert set(re.findall(r"(?<=[\s\[])--?[a-z][a-z-]*", command)) <= {*options, "--help", "-m"}, command
        if not PLACEHOLDER.search(command):
            check_mezo(name, words, composes=False)


@each_page
def test_every_marker_is_known_and_every_program_compiles(page: Path) -> None:
    for block in blocks(page):
        for need in filter(None, block.markers.get("needs", "").split(", ")):
            assert need in NEEDS, f"{block.place}: {need} is none of {', '.join(NEEDS)}"
        if "run by" in block.markers:
            text = (ROOT / block.markers["run by"]).read_text(encoding="utf-8")
            assert page.name in text, f"{block.place}: {block.markers['run by']} does not read this page"
        if block.is_python:
            ast.parse(block.text)


@each_page
def test_every_link_leads_to_a_file(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target} does not exist"


def test_every_page_is_on_the_map() -> None:
    index = ROOT / "docs" / "index.md"
    linked = {(index.parent / target).resolve() for target in re.findall(r"\]\(([^)#]+)", index.read_text("utf-8"))}
    assert [page.name for page in (ROOT / "docs").rglob("*.md") if page != index and page not in linked] == []


def test_a_block_is_found_as_it_is_written(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# Title\n    mezo env   # comment\n\n- a list\n    goes on\n\n<!-- needs: hub, gpu -->\n\n"
        "```sh\n# nothing\nmezo train \\\n  steps=1\n```\n```text\nstep 1\n```\n\n`a/b.yaml`\n```yaml\nname: b\n```\n"
    )
    indented, fenced, printed, file = blocks(page)
    assert indented.is_run
    assert doc_blocks.words(indented.commands()[0]) == ["mezo", "env"]
    assert fenced.commands() == ["mezo train steps=1"]
    assert fenced.markers == {"needs": "hub, gpu"}
    assert not fenced.is_run
    assert (printed.language, printed.text, printed.is_run) == ("text", "step 1\n", False)
    assert doc_blocks.files(page) == {"a/b.yaml": "name: b\n"}
    assert file.line == 19


def test_what_a_command_printed_is_compared_without_its_numbers() -> None:
    printed = "data   24 rows\nstep 1/2  loss 0.51\nstep 2/2  loss 0.49\n"
    assert missing_line("data 30 rows\n...\nstep   2/2 loss 0.5\n", printed) is None
    assert missing_line("data 30 rows\nstep 1/2 accuracy 0.5\n", printed) == "step 1/2 accuracy 0.5"
    assert missing_line("step 2/2 loss 0.5\ndata 30 rows\n", printed) == "data 30 rows"


# --- running them ---


def missing_line(expected: str, printed: str) -> str | None:
    """Return the first line of a page's transcript that was not printed, in that order; numbers may differ."""
    lines = iter(map(_without_numbers, printed.splitlines()))
    for line in expected.splitlines():
        if line.strip() not in ("", "...") and _without_numbers(line) not in lines:
            return line
    return None


def _without_numbers(line: str) -> str:
    """Return a line with its numbers and curves replaced, and its spaces and rules made short."""
    line = re.sub(r"\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?", "#", line)
    line = re.sub(r"# (?:s|min|h)\b", "# time", re.sub(r"[▁-█]+", "curve", line))
    line = re.sub(r"# threads?\b", "# threads", line)
    return " ".join(re.sub(r"[─━-]{3,}", "---", line).split())


def run(block: Block, bin_folder: Path, folder: Path) -> str:
    """Run a block; return what it prints.

    Args:
        block: a shell or a Python block.
        bin_folder: a folder with the programs `mezo` and `python` of this environment.
        folder: the working directory.
    """
    env = environment(PATH=f"{bin_folder}{os.pathsep}{os.environ['PATH']}", COLUMNS="120", HF_HUB_OFFLINE="1")
    env.pop("MEZO_EAGER")
    more = block.markers.get("shortened by the test", "")
    printed = ""
    for command in [block.text] if block.is_python else block.commands():
        line = [*doc_blocks.words(command), *more.split()] if more and command.startswith("mezo train") else None
        words = ["python", "-c", command] if block.is_python else line or ["bash", "-o", "pipefail", "-c", command]
        done = subprocess.run(
            words, cwd=folder, env=env, text=True, timeout=900, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert done.returncode == 0, f"{block.place}: {command}\n{done.stdout}"
        printed += done.stdout.replace(f"{folder}/", "")
    return printed


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in PAGES if any(b.is_run for b in blocks(p))], ids=lambda page: page.stem)
def test_every_block_runs(page: Path, tmp_path: Path) -> None:
    programs, folder = tmp_path / "bin", tmp_path / "work"
    programs.mkdir()
    folder.mkdir()
    for name, call in {"mezo": "-m mezo_cli", "python": ""}.items():
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {call} "$@"\n')
        (programs / name).chmod(0o755)
    with folder_of(page, folder):
        found = blocks(page)
        for block, after in zip(found, [*found[1:], None], strict=True):
            if block.is_run:
                printed = run(block, programs, folder)
                if after is not None and after.language == "text" and "shortened by the test" not in block.markers:
                    missing = missing_line(after.text, printed)
                    assert missing is None, f"{after.place}: '{missing}' is not printed any more:\n{printed}"
