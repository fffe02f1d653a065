"""A run to share, and a hub on loopback that takes uploads."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests import tiny
from tests.command_line import finished_runs, ok
from tests.hub_server import Hub

START = "start.safetensors"
TOKEN = "hf_of_the_tests"


@pytest.fixture(autouse=True)
def eager(eager_kernels: None) -> None:
    """Run the noise of all tests here without compiling it."""


@pytest.fixture(scope="package")
def run(roberta: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with a new head, which start.safetensors has; `shared` beside it is its `--trajectory`."""
    folder, words = tmp_path_factory.mktemp("sharing"), ["objective=cls", "optimizer.lr=0.1"]
    finished_runs(folder, roberta, tiny.movie_folder(folder / "movies"), {"run": words})
    result = ok("export", folder / "run", "--trajectory", "--out", folder / "shared")
    size = (folder / "run" / START).stat().st_size
    assert f"{size:,} bytes  {START}\n" in result.out
    return folder / "run"


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
