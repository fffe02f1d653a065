"""Errors that are reported to the user as one clear line.

Any function may raise `UserError` for what the user can correct, so docstrings name only other errors; cli.py prints
it and exits with 2.
"""

import difflib
import errno
import re
from collections.abc import Iterable

SHOWN_CHARACTERS = 80  # characters of a value in an error line
FULL = (errno.ENOSPC, errno.EDQUOT)  # a disk, or the user's quota on it, is full


class UserError(Exception):
    """A mistake of the user. Its text says what was wrong, where, and what is allowed. Exit status 2."""


class RunFailed(Exception):  # noqa: N818 (it names a status of run.json)
    """A run that failed after training began (a loss that is not finite, a full disk). Exit status 1."""


class RunStopped(Exception):  # noqa: N818 (it names what happened)
    """A run that `max_seconds` stopped early, with `at_limit=stop`. It can be resumed. Exit status 130."""


def is_interruption(error: BaseException | None) -> bool:
    """Return whether an error is a KeyboardInterrupt or was raised during one: a library's clean-up can fail then."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text that is not blank, or the name of its type."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def one_line(error: BaseException) -> str:
    """Return an error's whole text as one line, or the name of its type."""
    return " ".join(str(error).split()) or type(error).__name__


# `user:password@` of an address, also with a slash that should have been encoded, and the values of such parameters.
_CREDENTIALS = re.compile(
    r"(?<=://)(?:[^\s/?#]*@|[^\s/:?#]*:(?!\d+(?:[/?#\s]|$))\S*@)"
    r"|(?<=[?&])([^=\s&#]*(?:token|key|secret|password|signature|credential)[^=\s&#]*=)[^\s&#'\")]+",
    re.IGNORECASE,
)


def without_credentials(text: str) -> str:
    """Return a text without the user names, passwords and keys of the addresses (`https://...`) in it."""
    return _CREDENTIALS.sub(lambda match: f"{match[1]}..." if match[1] else "", text)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `" (did you mean 'x'?)"` for the known word nearest to `word`, or `""` if none is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean '{near[0]}'?)" if near else ""


def install(extra: str) -> str:
    """Return the command that installs an extra of this package, for an error line."""
    return f'pip install -e ".[{extra}]" -c constraints/tested.txt'


def shorten(text: str, limit: int = 2000) -> str:
    """Return a text whose middle is left out where it has more characters than `limit`."""
    return text if len(text) <= limit else f"{text[: limit // 2]} [...] {text[-limit // 2 :]}"


def join(known: Iterable[str]) -> str:
    """Return the words separated by commas, for an error line."""
    return ", ".join(known)
