"""The layers of docs/concepts/design.md: which package may import which, and what is imported only when needed."""

import ast
import functools
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

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


@functools.cache
def syntax(name: str) -> list[ast.AST]:
    """Return every node of a module's syntax tree."""
    return list(ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))))


@functools.cache
def imports(name: str) -> set[str]:
    """Return every module that a module imports anywhere, TYPE_CHECKING included."""
    found = set()
    for node in syntax(name):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def own_imports(name: str) -> set[str]:
    """Return the modules of this package that a module imports."""
    inside = {full.removeprefix("mezo_cli.") for full in imports(name) if full.startswith("mezo_cli.")}
    return ({one if one in MODULES else one.rpartition(".")[0] for one in inside} & set(MODULES)) - {name}


def layer_of(name: str) -> int:
    """Return the number of a module's layer: its own, or else its package's."""
    names = next((one for one in (name, name.split(".")[0]) if any(one in layer for layer in LAYERS)), name)
    return next(i for i, layer in enumerate(LAYERS) if names in layer)


def test_imports_point_down() -> None:
    """Each import leads to a lower layer, or stays in the package."""
    upward = [
        f"{name} imports {other}"
        for name in MODULES
        for other in sorted(own_imports(name))
        if layer_of(other) >= layer_of(name) and other.split(".")[0] != name.split(".")[0]
    ]
    assert not upward, "\n".join(upward)


def test_no_module_imports_itself_by_way_of_others() -> None:
    TopologicalSorter({name: own_imports(name) for name in MODULES}).prepare()  # CycleError names the circle


def test_a_library_is_known_only_where_it_is_needed() -> None:
    elsewhere = [
        f"{name} imports {full}"
        for name in MODULES
        for full in sorted(imports(name))
        if not {name, name.split(".")[0]} & ALLOWED_USERS.get(full.split(".")[0], {name})
    ]
    assert not elsewhere, "\n".join(elsewhere)


def test_only_upper_layers_open_run_directories() -> None:
    opening = {name for name in MODULES if name.split(".")[0] == "runs"} - {"runs.files", "runs.output"}
    users = {name.split(".")[0] for name in MODULES if own_imports(name) & opening}
    assert users - {"runs"} <= OPENS_RUNS


def test_only_the_console_prints() -> None:
    """`console.print_line` and the tables escape what a terminal would act on."""
    users = {
        name
        for name in MODULES
        for node in syntax(name)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("print", "sys.stdout.write", "sys.stderr.write")
    }
    assert users == {"console", "__main__", "commands.train"}  # `--cfg` prints YAML, which escapes by its own rules


def imported_by(statement: str, watched: set[str], folder: Path) -> list[str]:
    """Run an import in a process of its own and return which of the watched packages it loaded."""
    code = f"import sys; {statement}; print(*sorted({watched!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_peft_sklearn_and_engines_are_imported_when_a_run_asks_for_them(tmp_path: Path) -> None:
    watched = {"peft", "sklearn.linear_model", "mezo_cli.engine", "mezo_cli.engine.engine", "mezo_cli.engine.process"}
    assert imported_by("import mezo_cli.training.loop", watched, tmp_path) == []


def test_what_runs_inside_an_engine_needs_torch_and_numpy_alone(tmp_path: Path) -> None:
    needed = "import mezo_cli.engine.worker, mezo_cli.engine.layout; from mezo_cli.perturb.noise import make_noise"
    missing_there = {"transformers", "datasets", "peft", "typer", "rich", "hydra", "omegaconf", "sklearn", "matplotlib"}
    assert imported_by(f"{needed}; make_noise('gaussian')", missing_there, tmp_path) == []


def test_what_needs_no_model_imports_no_torch(tmp_path: Path) -> None:
    heavy = {"torch", "transformers", "datasets", "matplotlib", "jinja2"}
    light = ("commands", "report", "api", "runs", "config.compose", "config.validation")
    assert imported_by("import " + ", ".join(f"mezo_cli.{name}" for name in light), heavy, tmp_path) == []
