"""The layers of docs/concepts/design.md: which package may import which, and what is imported only when needed."""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mezo_cli
from tests.command_line import environment

PACKAGE = Path(mezo_cli.__file__).resolve().parent

# From the bottom up. A module imports modules of lower layers, and of its own package.
LAYERS = [
    {"errors"},
    {"process", "runs.atomic"},
    {"config"},
    {"console"},
    {"distributed", "hub"},
    {"tasks"},
    {"runs", "data"},
    {"perturb", "rewards"},
    {"models"},
    {"adapters", "objectives", "optim"},
    {"engine"},
    {"session"},
    {"training"},
    {"report", "sharing"},
    {"diagnosis", "library"},
    {"sweep"},
    {"commands"},
    {"api"},
    {"testing", "cli", "methods"},
    {"__init__", "__main__"},
]
ALLOWED_USERS = {
    "hydra": {"config.compose", "config.overrides"},
    "omegaconf": {"config.compose", "sweep.plan"},
    "typer": {"cli", "commands"},
    "peft": {"adapters"},
    "vllm": {"engine"},
    "matplotlib": {"report"},
    "jinja2": {"report"},
    "pandas": {"report"},
}


def modules() -> dict[str, Path]:
    """Return module name inside the package -> file: `training.loop`, `optim` (its __init__)."""
    names = {".".join(p.relative_to(PACKAGE).with_suffix("").parts): p for p in sorted(PACKAGE.rglob("*.py"))}
    return {name.removesuffix(".__init__"): path for name, path in names.items()}


MODULES = modules()
NAMED = re.compile(r"(?P<module>mezo_cli\.[\w.]+)(?P<attribute>:\w+)?")  # in a string
COMPOSED = {"__init__", "commands.preload", "config.registry"}  # may put such a name together


@functools.cache
def imports(name: str) -> set[str]:
    """Return every module that a module imports anywhere, TYPE_CHECKING and names in strings included."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and (named := NAMED.fullmatch(str(node.value))):
            # what a name in the config stands for is imported when it is chosen
            if not (name.startswith("config.") and named["attribute"]):
                found.add(named["module"])
        elif isinstance(node, ast.JoinedStr):
            begin = node.values[0]
            assert name in COMPOSED or not str(getattr(begin, "value", "")).startswith("mezo_cli."), f"{name}: {begin}"
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def own_imports(name: str) -> set[str]:
    """Return the modules of this package that a module imports."""
    found = set()
    for full in imports(name):
        package, _, one = full.partition(".")
        while one and one not in MODULES:  # an attribute
            one = one.rpartition(".")[0]
        found |= {one or "__init__"} if package == "mezo_cli" else set()
    return found - {name}


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


def test_a_library_is_known_only_where_it_is_needed() -> None:
    elsewhere = [
        f"{name} imports {full}"
        for name in MODULES
        for full in sorted(imports(name))
        if not {name, name.split(".")[0]} & ALLOWED_USERS.get(full.split(".")[0], {name})
    ]
    assert not elsewhere, "\n".join(elsewhere)


@pytest.mark.parametrize(
    "imports",
    [  # in one process, each line allowed more than those before it
        {
            # what runs in the worker of rewards
            "import mezo_cli.rewards.worker": ("torch numpy pydantic transformers hydra multiprocessing"),
            "import mezo_cli.rewards.built_in": "torch numpy transformers hydra",
            "from mezo_cli.optim import OPTIMIZERS as o; [*map(o.implementation, o.names)]": "torch transformers",
            "import mezo_cli.api, mezo_cli.commands.show, mezo_cli.commands.runs": (
                "torch transformers pandas matplotlib"
            ),
        },
        {
            # what will run inside an engine's own environment
            "import mezo_cli.engine.layout; from mezo_cli.perturb.noise import make_noise; make_noise('gaussian')": (
                "transformers datasets peft typer rich hydra omegaconf sklearn matplotlib"
            ),
            "import mezo_cli.training.loop": "peft sklearn.linear_model mezo_cli.engine.engine",
        },
    ],
    ids=["light", "with torch"],
)
def test_what_is_imported_only_when_needed(imports: dict[str, str], tmp_path: Path) -> None:
    checks = [f"{line}; print(*set({heavy.split()!r}) & set(sys.modules))" for line, heavy in imports.items()]
    code = "\n".join(["import sys", *checks])
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr
