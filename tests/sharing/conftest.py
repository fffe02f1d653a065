"""A hub on loopback that takes uploads."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.hub_server import Hub

TOKEN = "hf_of_the_tests"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The hub, with its own empty cache, and the token in the environment."""
    for name in ("HF_HUB_OFFLINE", "http_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no token"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    (tmp_path / "hub").mkdir()
    with Hub(tmp_path / "hub", token=TOKEN) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub
