"""Limit what a YAML file can grow to: aliases of aliases are a few lines that become millions of values."""

from typing import Any

import yaml

from mezo_cli.errors import UserError

MAX_VALUES, MAX_DEPTH = 20_000, 32  # of a file, what its aliases stand for included


def check_yaml(text: str, name: object) -> None:
    """Count what a YAML text stands for, without making it; `name` is the file's, for the error line.

    Raises:
        UserError: when it has too many values or levels, or an alias that contains itself.
        yaml.YAMLError: when it is not YAML.
    """
    sizes: dict[str, int] = {}  # of the values with an anchor that are complete
    levels: list[tuple[str | None, int]] = []  # of those that are not: the anchor, and the count when it began
    total = 0
    events: Any = yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    for event in events:
        anchor = getattr(event, "anchor", None)
        if isinstance(event, yaml.AliasEvent):
            if any(anchor == open_anchor for open_anchor, _ in levels):
                raise UserError(f"{_place(name, event)}: the alias *{anchor} stands inside its own value")
            total += sizes.get(anchor or "", 0)
        elif isinstance(event, yaml.CollectionStartEvent):
            levels.append((anchor, total))
            total += 1
        elif isinstance(event, (yaml.CollectionEndEvent, yaml.ScalarEvent)):
            total += isinstance(event, yaml.ScalarEvent)
            anchor, before = levels.pop() if isinstance(event, yaml.CollectionEndEvent) else (anchor, total - 1)
            if anchor is not None:
                sizes[anchor] = total - before
        if total > MAX_VALUES or len(levels) > MAX_DEPTH:
            what = f"{MAX_DEPTH} levels" if len(levels) > MAX_DEPTH else f"{MAX_VALUES} values, aliases included"
            raise UserError(f"{_place(name, event)}: more than {what}")


def _place(name: object, event: yaml.Event) -> str:
    return f"{name}:{event.start_mark.line + 1}" if event.start_mark is not None else str(name)
