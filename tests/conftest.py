"""Fixtures that the tests of all packages share."""

import functools
import gc
import importlib.util
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# Before torch is imported anywhere: parallel tests on few cores must not each take all of them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no network; the hub tests start subprocesses against a loopback server

import pytest
from hypothesis import settings

settings.register_profile("any load", deadline=None)
settings.load_profile("any load")

MISSING = [name for name in ("tensorboard", "wandb", "trackio") if importlib.util.find_spec(name) is None]
collect_ignore = ["training/test_loggers.py"] if MISSING else []


def pytest_report_header() -> list[str]:
    """Say what is left out for want of a package: `make test-oldest` installs no loggers."""
    return [f"left out: {', '.join(collect_ignore)}, without {', '.join(MISSING)}"] if MISSING else []


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs: the tests compare bits and messages of a CPU. Only `pytest -m cuda` sees them.

    Handle SIGINT even in the background of a shell, which lets all processes ignore it: some tests send it.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("markexpr") != "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.fixture(scope="module", autouse=True)
def frozen_heap() -> None:
    """Keep the garbage collector off what lives for ever: each run collects, and would look through all of torch."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def spared() -> Iterator[Callable[[], Any]]:
    """Spare what costs each run time, and what a test that observes it puts back; yield the list of mapped files."""
    from mezo_cli.config import compose
    from mezo_cli.perturb.noise import spans
    from mezo_cli.process import memory, versions
    from mezo_cli.session import session
    from tests import compositions, random_words

    def check(file: int) -> None:
        os.fstat(file)  # a closed file still raises

    listing = memory.mapped_files
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", check)
        patch.setattr(compose, "compose_node", compositions.composing_once())
        patch.setattr(compose, "parse", compositions.parsing_once())
        # Each run collects the garbage for the next one's memory: see `live_models.count_live`.
        patch.setattr(session, "gc", SimpleNamespace(collect=lambda: 0))
        for module in (memory, spans):  # to list the maps of a process takes milliseconds
            patch.setattr(module, "mapped_files", lambda: [])
        for module in random_words.USERS:  # z of eager tests is that of a few tiny models, at the same steps
            patch.setattr(module, "random_words", random_words.drawing_once())
        for name in ("installed", "git_state"):  # each question to git and the packages starts a process
            patch.setattr(versions, name, functools.cache(getattr(versions, name)))
        yield listing


@pytest.fixture
def eager_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the noise without compiling it: bitwise identical, and for tiny tensors it takes less time."""
    monkeypatch.setenv("MEZO_EAGER", "1")


@pytest.fixture
def in_tmp_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Work in a folder of the test's own."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def installed_loggers() -> None:
    """Skip the test where a logger's package is missing: its name is refused then."""
    if MISSING:
        pytest.skip(f"needs {', '.join(MISSING)}")


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real data and the demo model that lies beside the repository (or in MEZO_SHARED)."""
    folder = Path(os.environ.get("MEZO_SHARED", Path(__file__).resolve().parents[2] / "shared"))
    if not (folder / "data").is_dir():
        pytest.skip("needs ../shared/data")
    return folder


@pytest.fixture(scope="module")
def composing_all() -> Iterator[None]:
    """Let Hydra compose everything each time."""
    from mezo_cli.config import compose
    from tests import compositions

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compose, "compose_node", compositions.whole)
        yield


@pytest.fixture
def released_pages(spared: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Release the pages of model files, as a run does: for a test of its memory."""
    for module in ("mezo_cli.process.memory", "mezo_cli.perturb.noise.spans"):
        monkeypatch.setattr(f"{module}.mapped_files", spared)


def tiny_model(name: str, make: str, **shape: Any) -> Any:
    """Return a fixture: the folder of a tiny random model."""

    @pytest.fixture(scope="session", name=name)
    def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
        from tests import tiny

        made: Path = getattr(tiny, make)(tmp_path_factory.mktemp(name), **shape)
        return made

    return model


roberta, bert = tiny_model("roberta", "roberta"), tiny_model("bert", "bert")
untied = tiny_model("untied", "roberta", tied=False)  # with a decoder of its own
gpt2, opt = tiny_model("gpt2", "decoder"), tiny_model("opt", "decoder", kind="opt")


@pytest.fixture
def movies(tmp_path: Path) -> Path:
    from tests import tiny

    return tiny.movie_folder(tmp_path / "movies")


@pytest.fixture
def train(roberta: Path, movies: Path) -> Callable[..., Any]:
    """Return a function that trains the tiny RoBERTa in a run directory, with further words."""
    from tests.command_line import mezo, small

    return lambda run, *words: mezo("train", *small(roberta, movies, run, *words))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow all but n evenly spaced cases of each test that is marked `sample(n)`."""
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sample") is not None:
            groups.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in groups.values():
        marker = cases[0].get_closest_marker("sample")
        assert marker is not None
        ordinary = {len(cases) * i // marker.args[0] for i in range(marker.args[0])}
        for number, item in enumerate(cases):
            if number not in ordinary:
                item.add_marker(pytest.mark.slow)
