"""`--json` of a command that trains: one document at the end on standard output, everything else on standard error."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from mezo_cli.console import print_line
from mezo_cli.errors import UserError
from mezo_cli.runs import Run
from mezo_cli.runs.contents import read_contents

Tell = Callable[[Path, Callable[[], Mapping[str, Any]]], None]


@contextmanager
def json_at_end(wanted: bool) -> Iterator[Tell]:
    """Yield a function that takes a directory and what returns its document, which is printed when the block ends.

    It is printed also where the block ends with an error, but not where that came before there was a directory.
    """
    told: list[tuple[Path, Callable[[], Mapping[str, Any]]]] = []
    output = sys.stdout
    try:
        with redirect_stdout(sys.stderr if wanted else output):
            yield lambda path, describe: told.append((path, describe))
    finally:
        for path, describe in told if wanted else ():
            if path.is_dir():
                print_line(json.dumps(describe(), indent=2), output)


def describe_run(path: Path) -> dict[str, Any]:
    """Return a run's directory, status, error and, once it is finished, summary. One that did not start is missing."""
    document: dict[str, Any] = {"run": str(path.absolute()), "status": "missing", "error": None, "summary": None}
    if not (path / "config.yaml").exists():
        return document
    try:
        found = read_contents(Run(path))
    except UserError as error:
        return {**document, "status": "damaged", "error": str(error)}
    return {**document, "status": found.status, "error": found.info.get("error"), "summary": found.summary or None}
