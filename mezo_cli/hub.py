"""The Hugging Face hub, or the server that HF_ENDPOINT names: its URL, and whether it is reachable."""

import os
import socket
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

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


@contextmanager
def progress_bars(library: Any, shown: bool) -> Iterator[None]:
    """Turn the bars of `datasets` or `huggingface_hub.utils` off inside the block, unless they are to be shown."""
    if shown or library.are_progress_bars_disabled():
        yield
        return
    library.disable_progress_bars()
    try:
        yield
    finally:
        library.enable_progress_bars()
