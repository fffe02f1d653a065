"""docs/reference/ is what make_reference.py makes of the commands and the schema, and nothing is left out."""

import re
from pathlib import Path
from types import ModuleType

import pytest
import typer

from mezo_cli.cli import app
from mezo_cli.config.explain import key_owners
from tests.scripts.load import load_script

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("make_reference")


def test_the_pages_are_up_to_date(script: ModuleType) -> None:
    pinned = re.search(r"^typer==(\S+)$", (ROOT / "constraints" / "tested.txt").read_text(), re.M)
    assert pinned
    if typer.__version__ != pinned[1]:
        pytest.skip(f"the pages are made with typer {pinned[1]}; others print their arguments in other words")
    for name, text in script.pages().items():
        page = ROOT / "docs" / "reference" / name
        assert page.read_text(encoding="utf-8") == text, f"{page} is out of date: run `{script.COMMAND}` and commit it"


def test_every_key_has_a_row_with_its_type_default_and_meaning() -> None:
    page = (ROOT / "docs" / "reference" / "config.md").read_text(encoding="utf-8")
    rows = {key: rest for key, *rest in re.findall(r"^- `(\S+)` \((.+?); (.+?)\): (.+)$", page, re.M)}
    for key in key_owners():
        assert len(rows[key][-1]) > 8, f"{key}: say what it means in its description"


def test_every_command_and_option_is_on_the_page() -> None:
    page = (ROOT / "docs" / "reference" / "commands.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## mezo (\S+)\n(.*?)(?=^## |\Z)", page, re.M | re.S))
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert list(sections) == list(commands)
    for name, command in commands.items():
        options = {name for param in command.params for name in param.opts if name.startswith("--")} - {"--help"}
        assert [option for option in options if f"{option}" not in sections[name]] == [], name
