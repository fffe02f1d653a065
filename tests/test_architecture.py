"""The drawing of the house, kept: which way the arrows between the rooms point, and how large a file may be."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import mezo_cli
from tests.door import environment

HOME = Path(mezo_cli.__file__).resolve().parent
DOORS = {"__main__", "cli", "completion", "launch", "show", "compare", "api"}
BRIDGE = {"config", "overrides"}
PACKAGES_OF_THE_BRIDGE = {"hydra", "omegaconf", "yaml"}


def files() -> list[Path]:
    return sorted(HOME.rglob("*.py"))


def room(path: Path) -> str:
    """A module, or a package as a whole, by its name inside mezo_cli."""
    return path.relative_to(HOME).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """Every module that a file imports, wherever in it, type checking's included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def arrows() -> dict[str, set[str]]:
    """Room -> the rooms that it imports."""
    rooms = {room(path) for path in files()}
    found: dict[str, set[str]] = {name: set() for name in rooms}
    for path in files():
        for name in imported(path):
            parts = name.split(".")
            if parts[0] == "mezo_cli" and len(parts) > 1 and parts[1] in rooms:
                found[room(path)].add(parts[1])
    return {name: others - {name} for name, others in found.items()}


MIDDLE = sorted({room(path) for path in files()} - DOORS - BRIDGE - {"__init__"})


def test_the_rooms_are_found() -> None:
    assert {"data", "tasks", "models", "objectives", "optim", "noise", "loop", "runs", "loggers"} <= set(MIDDLE)
    assert {"data", "models", "runs", "evaluation", "loggers"} <= arrows()["loop"]


@pytest.mark.parametrize("name", MIDDLE)
def test_the_middle_knows_neither_the_doors_nor_hydra(name: str) -> None:
    assert not arrows()[name] & (DOORS | BRIDGE)
    for path in files():
        if room(path) == name:
            packages = {module.split(".")[0] for module in imported(path)}
            assert not packages & (PACKAGES_OF_THE_BRIDGE | {"typer", "click"}), path


def test_only_the_doors_know_typer() -> None:
    users = {room(path) for path in files() for module in imported(path) if module.split(".")[0] == "typer"}
    assert users == {"cli"}


def test_no_arrow_comes_back() -> None:
    TopologicalSorter(arrows()).prepare()  # raises CycleError, which names the circle


def test_nor_within_a_room() -> None:
    named = {".".join(path.relative_to(HOME.parent).with_suffix("").parts): path for path in files()}
    named = {name.removesuffix(".__init__"): path for name, path in named.items()}
    found: dict[str, set[str]] = {}
    for name, path in named.items():
        told = imported(path)  # a module, or a name in it; of a package's own names, the package
        found[name] = {whole if whole in named else whole.rpartition(".")[0] for whole in told} & set(named) - {name}
    TopologicalSorter(found).prepare()


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("errors", set()),
        ("schema", set()),
        ("noise", {"errors", "schema"}),
        ("params", {"lens", "noise", "errors", "schema"}),
        ("optim", {"noise", "params", "errors", "schema"}),
        ("data", {"schema", "errors", "endpoint"}),
        ("tasks", {"templates", "schema", "errors"}),
        ("signals", set()),
        ("models", {"endpoint", "errors", "schema"}),
        ("objectives", {"models", "params", "errors", "schema"}),
        ("runs", {"machine", "errors", "signals"}),
        ("loggers", {"schema", "errors"}),
    ],
)
def test_a_room_needs_no_more_than_this(name: str, allowed: set[str]) -> None:
    assert arrows()[name] <= allowed


def test_nobody_but_the_run_directorys_rooms_and_the_loop_opens_runs() -> None:
    users = {name for name, others in arrows().items() if "runs" in others}
    assert users <= {"loop", "weights", *DOORS}


@pytest.mark.parametrize("path", files(), ids=lambda path: path.relative_to(HOME).as_posix())
def test_a_file_is_about_300_lines_and_has_a_name(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 300
    assert path.stem not in ("utils", "util", "helpers", "common", "misc")


def test_peft_waits_until_a_run_asks_for_it(tmp_path: Path) -> None:
    code = "import sys, mezo_cli.loop; print(sorted({'peft', 'sklearn.linear_model'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.stdout == "[]\n", done


@pytest.mark.parametrize("name", ["launch", "show", "compare", "api", "runs", "config"])
def test_the_doors_wait_with_torch_until_it_is_needed(name: str, tmp_path: Path) -> None:
    code = f"import sys, mezo_cli.{name}; print(sorted({{'torch', 'transformers', 'datasets'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.stdout == "[]\n", done
