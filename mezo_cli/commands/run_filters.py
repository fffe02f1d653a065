"""Choose and order runs on the command line: KEY=VALUE, --status, --sort."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mezo_cli.config.explain import GROUPS, key_owners, key_schema
from mezo_cli.config.registry import OBJECTIVES
from mezo_cli.config.schema import MISSING, Config
from mezo_cli.config.validation import defaults
from mezo_cli.errors import UserError, did_you_mean, join
from mezo_cli.runs import STATUSES

SCORES = ("dev", "test")  # sorted from the best to the worst


@dataclass(frozen=True)
class Filter:
    """A setting and the values that it may have.

    Attributes:
        text: as it was given.
        key: the dotted key.
        values: the values, separated by commas on the command line.
    """

    text: str
    key: str
    values: tuple[str, ...]

    def matches(self, settings: Mapping[str, Any]) -> bool:
        """Return whether a run has one of the values; a run whose settings cannot be read has none."""
        return any(_equal(own, value) for own in self._values(settings) for value in self.values)

    def shown(self, settings: Mapping[str, Any]) -> str:
        """Return the value of a run as text."""
        return _text(self._values(settings)[0])

    def _values(self, settings: Mapping[str, Any]) -> list[Any]:
        """Return what a run has for the key. `model.name` counts unless the model is a folder, which has its own."""
        if not settings:
            return []
        value = setting(settings, self.key)
        if self.key != "model.name":
            return [value]
        path = Path(str(setting(settings, "model.path")))
        return [path.name] if path.is_absolute() else [path.name, value]


def parse_filters(words: Sequence[str]) -> list[Filter]:
    """Return the filters that words mean: a key (`optimizer.lr=1e-5,1e-6`), or a group, whose choice is meant."""
    filters = []
    for word in words:
        key, _, value = word.partition("=")
        if key == "status":
            raise UserError(f"'{word}': it is no setting; give --status {value}")
        takes = key_schema(key)
        if key in GROUPS:
            key = f"{key}.names" if key == "logger" else f"{key}.name"
        elif not takes:
            raise UserError(f"'{word}': {key} is a group of keys; name one of them")
        values = tuple(value.strip("[]").split(","))
        for item in values:
            if takes.get("type") in ("integer", "number") and item != "null" and _number(item) is None:
                raise UserError(f"'{word}': {key} is a number, not '{item}'")
        filters.append(Filter(word, key, values))
    return filters


def parse_statuses(text: str | None) -> tuple[str, ...]:
    """Return the statuses that `--status` names, separated by commas."""
    names = () if text is None else tuple(text.split(","))
    allowed = (*STATUSES, "damaged")
    for name in names:
        if name not in allowed:
            raise UserError(f"--status {name}: allowed are {join(allowed)}{did_you_mean(name, allowed)}")
    return names


def parse_sort(
    name: str | None, columns: Sequence[str]
) -> Callable[[Mapping[str, Any], Mapping[str, Any]], tuple[bool, Any]] | None:
    """Return the sort key of a run, given its record and its settings; None for the order in which they began.

    Scores are sorted from the best on, everything else from the least on. Runs without the value come last.
    """
    known = (*columns, "start", "end")
    if name is None:
        return None
    if name not in known and name not in key_owners():
        near = did_you_mean(name, (*known, *key_owners()))
        raise UserError(f"--sort {name}: allowed are {join(known)}, and the key of a setting{near}")

    def order(record: Mapping[str, Any], settings: Mapping[str, Any]) -> tuple[bool, Any]:
        value = record.get({"method": "optimizer"}.get(name, name)) if name in known else setting(settings, name)
        if value is None or not settings:
            return True, 0
        if name in SCORES:
            return False, -judging_config(record["objective"]).order_of(record["metric"]) * value
        return False, value if isinstance(value, (int, float)) else _text(value)

    return order


@cache
def judging_config(objective: str) -> Config:
    """Return a config that orders values of an objective's metrics; as usual for a plug-in that is not installed."""
    try:
        return Config(objective=OBJECTIVES.load(objective)(name=objective))
    except UserError:
        return Config()


def setting(settings: Mapping[str, Any], key: str) -> Any:
    """Return a setting of a stored config, or the default of a key that did not exist when it was stored."""
    for source in (settings, _defaults()):
        value: Any = source
        for part in key.split("."):
            value = value.get(part, _MISSING) if isinstance(value, Mapping) else _MISSING
        if value not in (_MISSING, MISSING):
            return value
    return None


_MISSING = object()
_defaults = cache(defaults)


def _equal(value: Any, text: str) -> bool:
    if isinstance(value, list):
        return text in value or (not value and text in ("none", ""))
    number = _number(text)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and number is not None:
        return float(value) == number
    return _text(value) == text


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "+".join(map(str, value)) or "none"
    return "null" if value is None else str(value)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
