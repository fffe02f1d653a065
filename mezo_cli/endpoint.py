"""The Hugging Face hub, or the hub-like server that HF_ENDPOINT names: its address, and whether it is there."""

import os
import socket
import urllib.request
from urllib.parse import urlsplit

_PATIENCE = 5.0  # seconds for a connection


def address() -> str:
    """Return the server's URL, without a slash at its end."""
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def switched_off() -> bool:
    """Whether HF_HUB_OFFLINE (or TRANSFORMERS_OFFLINE) forbids asking the hub."""
    from huggingface_hub import constants  # takes a moment, and most commands never get here

    return bool(constants.HF_HUB_OFFLINE)


def answers() -> bool:
    """Tell whether the server takes connections; behind a proxy this cannot be asked, so: yes.

    Asked first because the libraries, left alone, try an absent server again and again for half a minute a file before
    they turn to their cache or give up.
    """
    url = urlsplit(address())
    if url.hostname is None:
        return True
    if urllib.request.getproxies().get(url.scheme) and not urllib.request.proxy_bypass(url.hostname):
        return True
    try:
        port = url.port or (80 if url.scheme == "http" else 443)
        with socket.create_connection((url.hostname, port), timeout=_PATIENCE):
            return True
    except OSError:
        return False
