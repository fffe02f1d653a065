"""The user's mistakes, as one clear line each.

Every room raises `UserError` for what its user can mend; the doors (cli.py) print it and exit with 2.
"""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A mistake of the user's: its text says what was wrong, where, and what is allowed. Exit status 2."""


class RunFailed(Exception):  # noqa: N818 (it names a state, as run.json does)
    """A run that failed after training began (a loss that is not finite, a full disk). Exit status 1."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `" (did you mean 'x'?)"` for the known spelling nearest to `word`, or `""` when none is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean '{near[0]}'?)" if near else ""


def listed(known: Iterable[str]) -> str:
    """Join the allowed spellings for an error line."""
    return ", ".join(known)
