"""docs/design.md names modules and functions: each of them exists."""

import re
from pathlib import Path

import mezo_cli

PACKAGE = Path(mezo_cli.__file__).resolve().parent
PAGE = (PACKAGE.parent / "docs" / "design.md").read_text(encoding="utf-8")


def test_every_file_it_names_exists() -> None:
    named = set(re.findall(r"`((?:\w+/)+\w+\.py)`", PAGE))
    assert len(named) > 15
    assert [name for name in named if not (PACKAGE / name).is_file() and not (PACKAGE.parent / name).is_file()] == []


def test_every_function_it_names_beside_a_file_stands_in_it() -> None:
    pairs = re.findall(r"`((?:\w+/)+\w+\.py)` `([\w.]+)`", PAGE)
    assert len(pairs) > 8
    for file, name in pairs:
        text = (PACKAGE / file).read_text(encoding="utf-8")
        assert all(re.search(rf"\b{part}\b", text) for part in name.split(".")), f"{file}: {name}"


def test_every_package_is_drawn() -> None:
    drawing = PAGE.split("```")[1]
    packages = [p.name for p in PACKAGE.iterdir() if (p / "__init__.py").is_file()]
    assert [name for name in packages if f"{name}/" not in drawing] == []
