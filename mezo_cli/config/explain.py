"""The keys of a config, what each takes, and the one line that says why a value, or a key, is not valid.

Pydantic checks values, wherever they come from: the command line, a YAML file, a run's own config.yaml. What a key
takes is its JSON schema, which pydantic makes of the field's annotation.
"""

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from mezo_cli.config.base import MISSING, NO_WORD, SHOWN, SettingError, Settings, show
from mezo_cli.config.registry import CHOICES
from mezo_cli.config.schema import Config
from mezo_cli.errors import did_you_mean, join

# What other programs call a setting -> its key here, or the sentence that says what to give.
STEPS = "there are no epochs: give steps=N, where an epoch is the rows of train / batch_size"
SCHEDULE = "there is none: optimizer.schedule is the rate's course, constant or linear"
OTHER_NAMES = {
    **dict.fromkeys(("learning_rate", "lr"), "optimizer.lr"),
    **dict.fromkeys(("bs", "batch", "per_device_train_batch_size"), "batch_size"),
    **dict.fromkeys(("max_steps", "num_steps"), "steps"),
    **dict.fromkeys(("model_name", "model_name_or_path"), "model.path"),
    **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs"), STEPS),
    **dict.fromkeys(("warmup", "warmup_steps", "warmup_ratio"), SCHEDULE),
    **{"epsilon": "optimizer.eps", "output_dir": "hydra.run.dir", "predict RUN TEXT": "a text is given as --text TEXT"},
}
T = TypeVar("T", bound=Settings)
GROUPS = ("task", "objective", "optimizer", "model", "peft", "data", "logger", "engine", "experiment")  # choose a file
LIMITS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}  # pydantic's names, in words
OUTSIDE = ("greater_than_equal", "greater_than", "less_than_equal", "less_than", "finite_number")  # pydantic's errors
OF_SCHEMA = {"minimum": "ge", "exclusiveMinimum": "gt", "maximum": "le", "exclusiveMaximum": "lt"}


def validate(kind: type[T], values: Mapping[str, Any], parent: str = "") -> T:
    """Return settings made of plain values; groups that are made already are taken as they are.

    `parent` stands before a field's name in error lines: `optimizer.`.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise explain(error, kind, parent) from error


def explain(error: ValidationError, kind: type[BaseModel], parent: str = "") -> SettingError:
    """Return the first of pydantic's errors as a line that names the key, what was given and what is allowed."""
    errors = error.errors(include_url=False)
    first = next((each for each in errors if each["type"] == "extra_forbidden"), errors[0])  # it may explain others
    node: Any = kind
    owner, path = kind, list[str]()
    for part in map(str, first["loc"]):  # down to the field; what follows is the place in a list or a mapping
        if not is_group(node):
            break
        path.append(part)
        owner, node = node, node.model_fields[part].annotation if part in node.model_fields else None
    key, value, error_type = f"{parent}{'.'.join(path)}", first["input"], first["type"]
    if error_type == "extra_forbidden":
        siblings = [f"{key.rpartition('.')[0]}.{name}".lstrip(".") for name in owner.model_fields]
        return unknown_key(key, siblings, f".{next(iter(value))}" if isinstance(value, dict) and value else "")
    if error_type == "missing" or value == MISSING:
        return SettingError(key, f"{key} is not set: give {key}=...")
    if error_type == SHOWN:
        return SettingError(key, f"{key}{first['ctx']['why']}")
    if is_group(node):
        return SettingError(key, f"{key}={show(value)}: expected a group of keys")
    return SettingError(key, f"{key}{_reason(takes(owner, path[-1]), error_type, value, key)}")


def _reason(allowed: Mapping[str, Any], error_type: str, value: Any, key: str) -> str:
    """Return what follows the key in the line about a value that its JSON schema does not allow."""
    shown, null = f"={show(value)}", ", null" if allowed["null"] else ""
    if error_type in ("too_short", "string_too_short"):
        return " is empty: give a value, or leave it out"
    if "enum" in allowed:
        if isinstance(value, bool):
            return NO_WORD.format(value)
        return f"{shown}: not one of {join(allowed['enum'])}{did_you_mean(str(value), allowed['enum'])}"
    if allowed["type"] == "boolean":
        return f"{shown}: allowed are true, false{null}"
    if allowed["type"] == "array":
        return f"{shown}: expected a list, e.g. '{key}=[one,two]'"
    if allowed["type"] == "object":
        return f"{shown}: expected pairs, e.g. '{key}={{one: two}}'"
    outside = "out of range, " if error_type in OUTSIDE else ""
    words = [f"{word} {allowed[name]:.15g}" for name, word in LIMITS.items() if name in allowed]
    of = "whole" if allowed["type"] == "integer" else "finite"
    return f"{shown}: {outside}allowed is a {of} number {' and '.join(words)}".rstrip()


# --- keys ---


def is_group(node: Any) -> bool:
    """Return whether what a field holds is a group of keys."""
    return isinstance(node, type) and issubclass(node, Settings)


@cache
def takes(kind: type[BaseModel], name: str) -> dict[str, Any]:
    """Return the JSON schema of what a field takes, without null; `null` says whether that is allowed too."""
    schema = kind.model_json_schema()["properties"][name]
    options = schema.get("anyOf", [schema])
    (plain, *_) = [option for option in options if option.get("type") != "null"]
    if "const" in plain:
        plain = {"enum": [plain["const"]]}
    bounds = {OF_SCHEMA.get(word, word): value for word, value in plain.items()}  # `ge` itself: behind a validator
    return {"type": "any", **bounds, "null": len(options) > 1}


@cache
def key_owners(plug_ins: bool = False) -> dict[str, type[Settings]]:
    """Return every dotted key that takes a value, with the first class that has it.

    Those of choices that are not built in come with `plug_ins`, which imports them.
    """
    owners: dict[str, type[Settings]] = {}
    groups: list[tuple[str, list[Any]]] = [("", [Config])]
    for parent, kinds in groups:  # it grows
        for kind in kinds:
            for name, field in kind.model_fields.items():
                key, inner = f"{parent}{name}", field.annotation
                if not is_group(inner):
                    owners.setdefault(key, kind)
                else:
                    choices = [each for _, each in CHOICES[key].all(plug_ins)] if key in CHOICES else [inner]
                    groups.append((f"{key}.", choices))
    return owners


def readers(group: str, name: str) -> list[str]:
    """Return the choices of a group that have a setting."""
    return [choice for choice, kind in CHOICES[group].all() if name in kind.model_fields]


def key_schema(key: str) -> dict[str, Any]:
    """Return `takes` of a known key."""
    owners, (parent, _, name) = key_owners(plug_ins=True), key.rpartition(".")
    if key not in owners:
        raise unknown_key(key, [other for other in owners if other.startswith(f"{parent}.")] or Config.model_fields)
    return takes(owners[key], name)


def known_as(name: str) -> str:
    """Return what to give in place of a setting that other programs call so; empty if none is known by that name."""
    answer = OTHER_NAMES.get(name.rpartition(".")[2].replace("-", "_").lower(), "")
    return f"give {answer}=..." if answer and " " not in answer else answer


def unknown_key(key: str, siblings: Iterable[str], inner: str = "") -> SettingError:
    """Return the error for a key that does not exist, where one of `siblings` could stand.

    Of a key in a group that does not exist, `inner` is the rest: `.lr`.
    """
    parent, key = key.rpartition(".")[0], f"{key}{inner}"
    if answer := known_as(key):
        return SettingError(key, f"unknown key '{key}': {answer}")
    siblings, every_key = list(siblings), key_owners()
    alike = [other for other in every_key if other.endswith(f".{key}")]  # `optimizer.r` for `r`
    near = did_you_mean(alike[0], alike) if alike else did_you_mean(key, every_key if inner else siblings)
    near = near or did_you_mean(key, every_key)
    where = f" under {parent}" if parent else ""
    return SettingError(key, f"unknown key '{key}'{near}; known{where}: {join(siblings)}")
