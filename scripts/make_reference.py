"""Write docs/reference/: every command from the Typer app, every config key from the schema and conf/.

    python scripts/make_reference.py            # write the pages
    python scripts/make_reference.py --check    # compare them: exit status 1 if they are out of date

The meaning of a key is written once: under `Attributes` in the docstring of its dataclass (mezo_cli/config/schema.py),
or in the `help` of an optimizer's setting. The help of a command is its function's docstring in mezo_cli/cli.py.
"""

import argparse
import dataclasses
import inspect
import re
import sys
import textwrap
import typing
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import typer
import yaml

from mezo_cli.cli import app
from mezo_cli.config.choices import conf_dir
from mezo_cli.config.keys import groups, is_group, plain_type, type_hints
from mezo_cli.config.overrides import HYDRA_CHOICES
from mezo_cli.config.schema import MISSING, Config, OptimizerConfig, Owners, Setting
from mezo_cli.config.validation import CHOICES, default_of
from mezo_cli.optim import OPTIMIZERS, all_settings

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "reference"
COMMAND = "python scripts/make_reference.py"
MADE = f"<!-- made by `{COMMAND}`: change mezo_cli/ and run it again -->"
OPTIMIZER_FILES = "optimizer"  # the group whose files only set values of settings that several optimizers share


@dataclasses.dataclass(frozen=True)
class Key:
    """One row of the page: a config key, its type and range, its default and its meaning."""

    name: str
    type: str
    allowed: str
    default: str
    meaning: str


# --- the keys ---


def attributes(kind: type) -> dict[str, str]:
    """Return the meaning of each field of a dataclass, from `Attributes:` in its docstring."""
    _, _, section = (inspect.getdoc(kind) or "").partition("Attributes:\n")
    found = re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", section, re.M)
    return {name: " ".join(text.split()) for name, text in found}


def keys_of(kind: type, prefix: str = "") -> list[Key]:
    """Return the keys of a dataclass that take a value; those of a group inside it follow.

    Raises:
        KeyError: for a field without a meaning.
    """
    hints, meanings, own, inner = type_hints(kind), attributes(kind), [], []
    for item in dataclasses.fields(kind):
        name, hint = f"{prefix}{item.name}", hints[item.name]
        if is_group(plain_type(hint)):
            inner += [] if prefix == "" else keys_of(plain_type(hint), f"{name}.")
        elif not (kind is OptimizerConfig and item.name == "settings"):
            limits = {key: limit for key, limit in item.metadata.items() if key != "of"}
            setting = Setting(item.name, hint, default_of(item), meanings[item.name], **limits)
            own.append(_key(name, setting, item.metadata.get("of")))
    return own + inner


def optimizer_keys() -> list[Key]:
    """Return `optimizer.name` and the settings of all built-in optimizers, with the optimizers that read each."""
    found = keys_of(OptimizerConfig, "optimizer.")
    for name, setting in all_settings().items():
        read_by = [one for one in OPTIMIZERS.built_in if name in {s.name for s in OPTIMIZERS.load(one).settings}]
        key = _key(f"optimizer.{name}", setting, None)
        found.append(dataclasses.replace(key, meaning=f"{key.meaning}. Read by {_names(read_by)}."))
    return found


def _key(name: str, setting: Setting, owners: Owners | None) -> Key:
    group = name.split(".")[0]
    choices = CHOICES[name].built_in if name in CHOICES else setting.choices
    default = _value(setting.default)
    if setting.default == MISSING:
        default = f"of the file of `{group}=`"
    elif owners and owners.required:
        values = (f"{_value(_file(group, one)[name.split('.')[1]])} with `{group}={one}`" for one in owners.choices)
        default = "; ".join([default, *values])
    elif owners:
        default = f"{default}; only with {' and '.join(f'`{group}={one}`' for one in owners.choices)}"
    return Key(name, _type(setting.type), _allowed(setting, choices), default, setting.help)


def _type(hint: Any) -> str:
    kind = plain_type(hint)
    base = {str: "text", bool: "true or false", int: "whole number", float: "number"}
    base |= {list: "list of texts", dict: "texts by name"}
    shown = base[typing.get_origin(kind) or kind]
    return shown if kind is hint else f"{shown} or null"


def _allowed(setting: Setting, choices: Iterable[str]) -> str:
    """Return the choices, or the range in interval notation."""
    if choices:
        return _names(choices)
    if plain_type(setting.type) not in (int, float):
        return ""
    low = f"({setting.above:g}" if setting.above is not None else f"[{_number(setting.low)}"
    return f"{low}, {_number(setting.high)}" + ("]" if setting.high is not None else ")")


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


def _file(group: str, choice: str) -> dict[str, Any]:
    """Return the content of the file of a choice."""
    content = yaml.safe_load((conf_dir() / group / f"{choice}.yaml").read_text(encoding="utf-8"))
    return dict(content or {})


def choices_of(group: str) -> list[tuple[str, str]]:
    """Return each choice of a group and the first sentence of its file's comment."""
    folder = conf_dir() / group
    paths = sorted(folder.rglob("*.yaml"))
    return [(path.relative_to(folder).with_suffix("").as_posix(), _first_sentence(path)) for path in paths]


def _first_sentence(path: Path) -> str:
    """Return the first sentence of a file's comment, which ends before the first command at the latest."""
    comment = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#   ") or not line.startswith("#"):
            break
        comment += [] if "@package" in line else [line[1:].strip()]
    return re.match(r"(.+?\?|.+?)(?:(?<!et al)(?<!\.)\. |[.:]?$|(?<=\?) )", " ".join(comment))[1]  # type: ignore[index]


def default_choices() -> dict[str, str]:
    """Return the choice of each group that conf/config.yaml makes."""
    entries = yaml.safe_load((conf_dir() / "config.yaml").read_text(encoding="utf-8"))["defaults"]
    return {group: choice for entry in entries if isinstance(entry, dict) for group, choice in entry.items()}


# --- the page of keys ---


def config_page() -> str:
    """Return docs/reference/config.md."""
    lines = [
        MADE,
        "# Config keys",
        *_paragraph(
            "A key is set on the command line, `mezo train steps=200 optimizer.lr=1e-5`, or in a YAML file of your own"
            " (`--config-dir`). `mezo train ... --cfg job` prints the config that a command line composes. An unknown"
            " key, a wrong type and a value out of range end in one line and exit status 2."
        ),
        "A range `[1, )` begins at 1 and has no end; `(0, )` leaves 0 out. nan and inf are outside every range.",
        "",
        "## Choices",
        *_paragraph(
            "A choice is a file, and sets several keys at once: `task=rte` is `conf/task/rte.yaml`. On the command line"
            " a choice wins over that of an experiment, and a key over both."
        ),
        *_table(("choice", "default", "values"), _choice_rows()),
        "",
    ]
    hints = type_hints(Config)
    lines += ["## The run", *_keys(keys_of(Config)), ""]
    for item in dataclasses.fields(Config):
        kind = plain_type(hints[item.name])
        if is_group(kind):
            keys = optimizer_keys() if kind is OptimizerConfig else keys_of(kind, f"{item.name}.")
            lines += [f"## `{item.name}`", *_paragraph(_summary(kind)), *_keys(keys), ""]
            lines += _files(item.name) if item.name in groups() else []
    lines += ["## `experiment`", "A file that sets keys and choices of a whole run, or of a sweep.", ""]
    return "\n".join([*lines, *_files("experiment"), *_hydra()]).rstrip() + "\n"


def _choice_rows() -> Iterator[Sequence[str]]:
    for group in groups():
        chosen = default_choices()[group]
        yield f"`{group}=`", "none" if chosen is None else f"`{chosen}`", _names(name for name, _ in choices_of(group))


def _summary(kind: type) -> str:
    """Return the first paragraph of a class's docstring."""
    return " ".join((inspect.getdoc(kind) or "").partition("\n\n")[0].split())


def _keys(keys: Iterable[Key]) -> list[str]:
    rows = [(f"`{key.name}`", key.type, key.allowed, key.default, key.meaning) for key in keys]
    return _table(("key", "type", "allowed", "default", "meaning"), rows)


def _files(group: str) -> list[str]:
    """Return the table of a group's files, with the values that an optimizer's file sets."""
    rows = []
    for name, text in choices_of(group):
        values = {key: value for key, value in _file(group, name).items() if not isinstance(value, dict | list)}
        shown = ", ".join(f"`{key}={_plain(value)}`" for key, value in values.items() if key != "name")
        rows.append((f"`{group}={name}`", text, *([shown] if group == OPTIMIZER_FILES else [])))
    return [*_table(("choice", "what it is", *(["sets"] if group == OPTIMIZER_FILES else [])), rows), ""]


def _hydra() -> list[str]:
    """Return the section on Hydra's own keys."""
    rows = [
        ("`hydra.run.dir`", "the run directory"),
        ("`hydra.sweep.dir`", "the directory of a sweep"),
        ("`hydra.sweep.subdir`", "the directory of a job inside it"),
        *((f"`{group}=`", f"with `-m`: {_names(choices)}") for group, choices in HYDRA_CHOICES.items()),
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
            "`mezo COMMAND --help` prints the same. Exit status: 0 done; 2 a mistake of the user's, in one line; 1 a"
            " failure after training began, or a job of a sweep that failed; 130 interrupted. `mezo --version` prints"
            " the version."
        ),
        *_paragraph(", ".join(f"[{name}](#mezo-{name})" for name in commands)),
    ]
    for name, command in commands.items():
        lines += [f"## mezo {name}", *_command(name, command), ""]
    return "\n".join(lines).rstrip() + "\n"


def _command(name: str, command: Any) -> list[str]:
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    options = [param for param in command.params if param.param_type_name == "option" and "--help" not in param.opts]
    words = ["mezo", name, *(_metavar(param) for param in arguments), *(["[OPTIONS]"] if options else [])]
    rows = [(f"`{_metavar(param)}`", _help(param)) for param in arguments]
    rows += [(f"`{_option(param)}`", _help(param)) for param in options]
    table = ["", *_table(("argument or option", "meaning"), rows)] if rows else []
    return ["```text", " ".join(words), "```", " ".join((command.help or "").split()), *table]


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


def main() -> int:
    """Write the pages, or compare them. Return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is out of date")
    check = parser.parse_args().check
    stale = []
    for name, text in pages().items():
        path = FOLDER / name
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            stale.append(path)
            if not check:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
                print(f"wrote {path.relative_to(ROOT)}")
    for path in stale if check else ():
        print(f"{path.relative_to(ROOT)} is out of date: run {COMMAND}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
