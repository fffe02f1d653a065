"""The Hugging Face hub, or the server that HF_ENDPOINT names: its URL, and whether it is reachable."""

import os
import socket
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from mezo_cli.console import is_live, log

_TIMEOUT = 5.0  # seconds to connect


def hub_url() -> str:
    """Return the server's URL without a trailing slash."""
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def is_offline() -> bool:
    """Return whether HF_HUB_OFFLINE (or TRANSFORMERS_OFFLINE) is set."""
    from huggingface_hub import constants  # a slow import that most commands do not need

    return bool(constants.HF_HUB_OFFLINE)


def is_reachable() -> bool:
    """Return whether the server accepts connections; always true behind a proxy, where this cannot be known.

    It is checked first because the Hugging Face libraries retry an unreachable server for half a minute per file before
    they use their cache or give up.
    """
    url = urlsplit(hub_url())
    if url.hostname is None:
        return True
    if urllib.request.getproxies().get(url.scheme) and not urllib.request.proxy_bypass(url.hostname):
        return True
    try:
        port = url.port or (80 if url.scheme == "http" else 443)
        with socket.create_connection((url.hostname, port), timeout=_TIMEOUT):
            return True
    except OSError:
        return False


def warn_of_cache(what: str, commit: str | None) -> None:
    """Say that something comes from the local cache as the server does not answer, unless offline was asked for."""
    if not is_offline():
        said = "warning: %s does not answer: %s is read from the local cache, at commit %s"
        log.warning(said, hub_url(), what, commit or "unknown")


def not_cached(missing: str, repository: str, revision: str | None, options: str = "") -> str:
    """Return what the local cache lacks, why it is not downloaded, and the command that brings the repository."""
    why = "HF_HUB_OFFLINE is set" if is_offline() else "the server does not answer"
    command = f"hf download {options}{repository}{f' --revision {revision}' if revision else ''}"
    return f"{why}, and the local cache lacks {missing}; with a network: {command}"


@contextmanager
def progress_bars(library: Any) -> Iterator[None]:
    """Turn the bars of `datasets` or `huggingface_hub.utils` off inside the block, in CI and the like (`is_live`)."""
    if is_live(sys.stderr) or library.are_progress_bars_disabled():
        yield
        return
    library.disable_progress_bars()
    try:
        yield
    finally:
        library.enable_progress_bars()
