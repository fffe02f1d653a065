"""Write docs/reference/: every command from the Typer app, every config key from the schema and conf/.

    python scripts/reference/make_reference.py

The meaning of a key is written once: in the description of its field (mezo_cli/config/). The help of a command is its
function's docstring in mezo_cli/cli.py.
"""

import dataclasses
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import typer
import yaml

from mezo_cli.cli import app
from mezo_cli.config.base import MISSING, Settings
from mezo_cli.config.choices import CONF
from mezo_cli.config.explain import GROUPS, is_group, takes
from mezo_cli.config.overrides import LAUNCHERS
from mezo_cli.config.registry import CHOICES
from mezo_cli.config.schema import Config

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "reference"
FOR_PROGRAMS = Path(__file__).with_name("for_programs.md")  # what no class and no docstring says
COMMAND = "python scripts/reference/make_reference.py"
MADE = f"<!-- made by `{COMMAND}`: change mezo_cli/ and run it again -->"


@dataclasses.dataclass(frozen=True)
class Key:
    """One row of the page: a config key, what it takes, its default and its meaning."""

    name: str
    takes: str
    default: str
    meaning: str
    having: str = ""  # the choices that have it, where it is not all


# --- the keys ---


def keys_of(kind: type[Settings], prefix: str = "") -> list[Key]:
    """Return the keys of a class of settings that take a value; those of a group inside it follow."""
    own, inner = [], []
    for name, field in kind.model_fields.items():
        if is_group(field.annotation):
            inner += [] if prefix == "" else keys_of(cast("type[Settings]", field.annotation), f"{prefix}{name}.")
        else:
            own.append(_key(f"{prefix}{name}", kind, name, _default(field.default, prefix)))
    return own + inner


def keys_of_choices(group: str) -> list[Key]:
    """Return the keys of a group whose settings depend on the choice, with the choices that have each."""
    kinds, found = dict(CHOICES[group].all(plug_ins=False)), []
    for name in dict.fromkeys(name for kind in kinds.values() for name in kind.model_fields):
        having = {choice: kind for choice, kind in kinds.items() if name in kind.model_fields}
        defaults = {_default(kind.model_fields[name].default, f"{group}.") for kind in having.values()}
        lacking = [choice for choice in kinds if choice not in having]
        where = _names(having) if len(having) < len(lacking) else f"all but {_names(lacking)}" if lacking else ""
        kind = next(iter(having.values()))
        found.append(_key(f"{group}.{name}", kind, name, "; ".join(sorted(defaults)), where))
    return found


def _default(value: Any, prefix: str) -> str:
    return f"`{prefix[:-1]}=`" if value == MISSING else _value(value)


def _key(key: str, kind: type[Settings], name: str, default: str, having: str = "") -> Key:
    allowed, meaning = takes(kind, name), kind.model_fields[name].description
    assert meaning, f"{key}: say what it means, in its description"
    chosen = "a choice" if key.endswith(".name") and key[:-5] in CHOICES else ""
    values = chosen or _names(allowed.get("enum", ())) or _range(allowed) or TYPES[allowed["type"]]
    null = " or null" if allowed["null"] and default != "`null`" else ""
    return Key(key, values + null, default, meaning.rstrip("."), having)


TYPES = {
    "string": "text",
    "boolean": "boolean",
    "array": "list",
    "object": "texts by name",
    "any": "text, pairs or null",
}


def _range(allowed: Mapping[str, Any]) -> str:
    """Return a range in interval notation; empty for what is no number."""
    if allowed["type"] not in ("integer", "number"):
        return ""
    low = f"({allowed['gt']:g}" if "gt" in allowed else f"[{_number(allowed.get('ge'))}"
    return f"{low}, {_number(allowed.get('le'))}" + ("]" if "le" in allowed else ")")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value}" if isinstance(value, int) else f"{value:g}"


def _value(value: Any) -> str:
    return "empty" if value in ([], {}) else f"`{_plain(value)}`"


def _plain(value: Any) -> str:
    """Return a value as it is written on the command line: `null`, `false`, `1e-5`."""
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else f"{value:g}".replace("e-0", "e-") if isinstance(value, float) else str(value)


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


# --- the files of conf/ ---


def choices_of(group: str) -> list[str]:
    """Return the choices of a group."""
    folder = CONF / group
    return [path.relative_to(folder).with_suffix("").as_posix() for path in sorted(folder.rglob("*.yaml"))]


def default_choices() -> dict[str, str]:
    """Return the choice of each group that conf/config.yaml makes."""
    entries = yaml.safe_load((CONF / "config.yaml").read_text(encoding="utf-8"))["defaults"]
    return {group: choice for entry in entries if isinstance(entry, dict) for group, choice in entry.items()}


# --- the page of keys ---


def config_page() -> str:
    """Return docs/reference/config.md."""
    lines = [
        MADE,
        "# Config keys",
        *_paragraph(
            "You want to know what can be set, on the command line (`mezo train steps=200 optimizer.lr=1e-5`) or in a"
            " YAML file of your own (`--config-dir`). `mezo train ... --cfg job` prints the config that a command line"
            " composes."
        ),
        *_paragraph(
            "In parentheses: what a key takes, and its default. A range `[1, )` begins at 1 and has no end; `(0, )`"
            " leaves 0 out. nan and inf are outside every range."
        ),
        "## Choices",
        *_paragraph(
            "A choice is a file, and sets several keys at once: `task=rte` is `conf/task/rte.yaml`. On the command line"
            " a choice wins over that of an experiment, and a key over both."
        ),
        *_table(("choice", "default", "values"), _choice_rows()),
        "",
    ]
    lines += ["## The run", *_keys(keys_of(Config)), ""]
    for name, field in Config.model_fields.items():
        if is_group(field.annotation):
            kind = cast("type[Settings]", field.annotation)
            keys = keys_of_choices(name) if name in CHOICES else keys_of(kind, f"{name}.")
            lines += [f"## `{name}`", *_keys(keys), ""]
    return "\n".join([*lines, *_hydra()]).rstrip() + "\n"


def _choice_rows() -> Iterator[Sequence[str]]:
    for group in GROUPS:
        chosen = default_choices()[group]
        yield f"`{group}=`", "none" if chosen is None else f"`{chosen}`", _names(choices_of(group))


def _keys(keys: Iterable[Key]) -> list[str]:
    """Return a line per key; those that only some choices have follow together."""
    lines: dict[str, list[str]] = {}
    for key in keys:
        lines.setdefault(key.having, []).append(f"- `{key.name}` ({key.takes}; {key.default}): {key.meaning}")
    return [line for having, rows in lines.items() for line in (["", f"With {having}:", "", *rows] if having else rows)]


def _hydra() -> list[str]:
    """Return the section on Hydra's own keys."""
    rows = [
        ("`hydra.run.dir`", "the run directory"),
        ("`hydra.sweep.dir`", "the directory of a sweep"),
        ("`hydra.sweep.subdir`", "the directory of a job inside it"),
        ("`hydra/launcher=`", f"with `-m`: {_names(LAUNCHERS)}"),
        ("`hydra.launcher.*`, `hydra.sweeper.*`", "with `-m`: settings of the launcher or sweeper that was chosen"),
    ]
    intro = "Of Hydra's own keys these can be set, on the command line only:"
    return ["## Hydra's keys", intro, "", *_table(("key", "meaning"), rows)]


def _paragraph(text: str) -> list[str]:
    """Return the lines of a paragraph, and the empty line after it. Words with hyphens and code are kept whole."""
    return [*textwrap.wrap(text, 120, break_on_hyphens=False, break_long_words=False), ""]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a Markdown table; a `|` inside a cell is escaped."""
    body = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return ["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *body]


# --- the page of commands ---


def commands_page() -> str:
    """Return docs/reference/commands.md."""
    commands: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    lines = [
        MADE,
        "# Commands",
        *_paragraph(
            "You want to know what a command takes; `mezo COMMAND --help` prints the same. A program that runs mezo"
            " reads [the exit status](#exit-status) and [one document](#one-document)."
        ),
        *_paragraph(", ".join(f"[{name}](#mezo-{name})" for name in commands)),
    ]
    counts = Counter(row for command in commands.values() for row in _options(command).values())
    shared = [row for row, count in counts.items() if count > 2]
    lines += ["## Options of several commands", *shared, "", *FOR_PROGRAMS.read_text(encoding="utf-8").splitlines(), ""]
    for name, command in commands.items():
        lines += [f"## mezo {name}", *_command(command, shared), ""]
    return "\n".join(lines).rstrip() + "\n"


def _options(command: Any) -> dict[str, str]:
    """Return the options of a command: name -> its line."""
    options = [param for param in command.params if param.param_type_name == "option" and "--help" not in param.opts]
    return {param.opts[-1]: f"- `{_option(param)}`: {_help(param)}" for param in options}


def _command(command: Any, shared: Sequence[str]) -> list[str]:
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    options = _options(command)
    rows = [f"- `{_metavar(param)}`: {_help(param)}" for param in arguments]
    rows += [row for row in options.values() if row not in shared]
    above = [option for option, row in options.items() if row in shared]
    rows += [f"- {_names(above)}: [above](#options-of-several-commands)"] if above else []
    about = " ".join((command.help or "").split("\n\n")[0].split())
    return [about, *(["", *rows] if rows else [])]


def _metavar(param: Any) -> str:
    shown = param.metavar or param.name.upper()
    if not param.required and not shown.startswith("["):
        shown = f"[{shown}]"
    return f"{shown}..." if param.nargs == -1 and not shown.endswith("...") else shown


def _option(param: Any) -> str:
    names = ", ".join([*param.opts, *param.secondary_opts])
    return names if param.is_flag else f"{names} {param.metavar or param.opts[0].strip('-').upper()}"


def _help(param: Any) -> str:
    text = " ".join((param.help or "").split())
    if param.required and param.param_type_name == "option":
        return f"{text} Required."
    shown = isinstance(param.default, (str, int, float, Path)) and not getattr(param, "is_flag", False)
    return f"{text} Default: `{param.default}`." if shown else text


# --- writing ---


def pages() -> dict[str, str]:
    """Return the name and the text of each page."""
    return {"commands.md": commands_page(), "config.md": config_page()}


def main() -> None:
    """Write the pages."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
        print(f"wrote {(FOLDER / name).relative_to(ROOT)}")


if __name__ == "__main__":
    main()
