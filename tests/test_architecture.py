"""The layers of docs/design.md: which package may import which, and what is imported only when it is needed."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import mezo_cli
from tests.command_line import environment

PACKAGE = Path(mezo_cli.__file__).resolve().parent

# From the bottom up. A module imports modules of lower layers, and of its own package.
LAYERS = [
    {"errors"},
    {"system", "hub", "runs.files", "runs.output"},
    {"config"},
    {"console"},
    {"distributed"},
    {"runs", "data", "tasks"},
    {"models", "perturb"},
    {"objectives", "optim"},
    {"engine"},
    {"training"},
    {"report", "sharing"},
    {"diagnosis", "library"},
    {"commands"},
    {"api"},
    {"testing", "cli"},
    {"__init__", "__main__"},
]
ALLOWED_USERS = {
    "hydra": {"config.compose", "commands.sweep"},
    "omegaconf": {"config.compose", "commands.sweep"},
    "typer": {"cli", "commands"},
    "peft": {"models"},
    "vllm": {"engine"},
    "matplotlib": {"report"},
    "jinja2": {"report"},
}
OPENS_RUNS = {"library", "training", "report", "sharing", "config", "commands", "api", "testing"}


def modules() -> dict[str, Path]:
    """Return module name inside the package -> file: `training.loop`, `optim` (its __init__)."""
    names = {".".join(p.relative_to(PACKAGE).with_suffix("").parts): p for p in sorted(PACKAGE.rglob("*.py"))}
    return {name.removesuffix(".__init__"): path for name, path in names.items()}


MODULES = modules()


def imports(path: Path) -> set[str]:
    """Return every module that a file imports anywhere, TYPE_CHECKING included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def own_imports(name: str) -> set[str]:
    """Return the modules of this package that a module imports."""
    inside = {full.removeprefix("mezo_cli.") for full in imports(MODULES[name]) if full.startswith("mezo_cli.")}
    return ({one if one in MODULES else one.rpartition(".")[0] for one in inside} & set(MODULES)) - {name}


def layer_of(name: str) -> int:
    """Return the number of a module's layer: its own, or else its package's."""
    names = next((one for one in (name, name.split(".")[0]) if any(one in layer for layer in LAYERS)), name)
    return next(i for i, layer in enumerate(LAYERS) if names in layer)


def test_the_top_level_holds_at_most_six_modules() -> None:
    assert (
        len([name for name in MODULES if "." not in name and MODULES[name].name != "__init__.py"]) <= 6 + 1
    )  # __main__


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_point_down(name: str) -> None:
    package = name.split(".")[0]
    for other in own_imports(name):
        assert layer_of(other) < layer_of(name) or other.split(".")[0] == package, f"{name} imports {other}"


def test_no_module_imports_itself_by_way_of_others() -> None:
    TopologicalSorter({name: own_imports(name) for name in MODULES}).prepare()  # CycleError names the circle


@pytest.mark.parametrize(("package", "users"), ALLOWED_USERS.items())
def test_a_library_is_known_only_where_it_is_needed(package: str, users: set[str]) -> None:
    found = {name for name, path in MODULES.items() for full in imports(path) if full.split(".")[0] == package}
    assert found
    assert all(name in users or name.split(".")[0] in users for name in found), found


def test_only_upper_layers_open_run_directories() -> None:
    opening = {name for name in MODULES if name.split(".")[0] == "runs"} - {"runs.files", "runs.output"}
    users = {name.split(".")[0] for name in MODULES if own_imports(name) & opening}
    assert users - {"runs"} <= OPENS_RUNS


def test_only_the_console_prints() -> None:
    """`console.print_line` and the tables escape what a terminal would act on."""
    users = {
        name
        for name, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("print", "sys.stdout.write", "sys.stderr.write")
    }
    assert users == {"console", "__main__", "commands.train"}  # `--cfg` prints YAML, which escapes by its own rules


@pytest.mark.parametrize("name", sorted(MODULES))
def test_a_module_has_a_first_line_and_a_name(name: str) -> None:
    docstring = ast.get_docstring(ast.parse(MODULES[name].read_text(encoding="utf-8")))
    assert docstring
    assert name.split(".")[-1] not in ("utils", "util", "helpers", "common", "misc")


def imported_by(statement: str, watched: set[str], folder: Path) -> list[str]:
    """Run an import in a process of its own and return which of the watched packages it loaded."""
    code = f"import sys; {statement}; print(*sorted({watched!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_peft_and_sklearn_are_imported_when_a_run_asks_for_them(tmp_path: Path) -> None:
    assert imported_by("import mezo_cli.training.loop", {"peft", "sklearn.linear_model"}, tmp_path) == []


def test_without_an_engine_nothing_of_it_is_imported(tmp_path: Path) -> None:
    watched = {"mezo_cli.engine", "mezo_cli.engine.engine", "mezo_cli.engine.process"}
    assert imported_by("import mezo_cli.training.loop", watched, tmp_path) == []


def test_what_runs_inside_an_engine_needs_torch_and_numpy_alone(tmp_path: Path) -> None:
    needed = "import mezo_cli.engine.worker, mezo_cli.engine.layout; from mezo_cli.perturb.noise import make_noise"
    missing_there = {"transformers", "datasets", "peft", "typer", "rich", "hydra", "omegaconf", "sklearn", "matplotlib"}
    assert imported_by(f"{needed}; make_noise('gaussian')", missing_there, tmp_path) == []


@pytest.mark.parametrize("name", ["commands", "report", "api", "runs", "config.compose", "config.validation"])
def test_what_needs_no_model_imports_no_torch(name: str, tmp_path: Path) -> None:
    heavy = {"torch", "transformers", "datasets", "matplotlib", "jinja2"}
    assert imported_by(f"import mezo_cli.{name}", heavy, tmp_path) == []
