"""The real loading path: plain `mezo train task=sst2 objective=mlm` against a loopback hub, its cache, its failures."""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import safetensors.torch
import torch
from huggingface_hub import constants
from transformers import AutoModelForMaskedLM

from mezo_cli import models
from mezo_cli.config.schema import ModelConfig
from mezo_cli.errors import UserError
from mezo_cli.models import download as fetch
from tests import tiny
from tests.command_line import HANGS
from tests.doc_blocks import ROOT
from tests.hub_server import COMMIT, Hub
from tests.terminal import raw_on_a_terminal

CLOSED = "http://127.0.0.1:9"  # the discard port: nobody listens
PLAIN = ["train", "task=sst2", "objective=mlm"]
SHORT = ["steps=2", "batch_size=4", "eval_every=0", "data.eval_limit=8", "model.device=cpu"]
NAMES = ["negative", "positive"]


def glue(folder: Path) -> Path:
    """A data set repository as nyu-mll/glue is one: Parquet files, a README that declares splits, columns, classes."""
    kinds = {"sentence": datasets.Value("string"), "label": datasets.ClassLabel(names=NAMES)}
    features = datasets.Features(kinds | {"idx": datasets.Value("int32")})
    counts = {"train": 40, "validation": 12, "test": 6}
    datasets.disable_progress_bars()
    (folder / "sst2").mkdir(parents=True)
    for split, count in counts.items():
        rows = tiny.movie_rows(count)
        classes = [-1 if split == "test" else NAMES.index(row["label"]) for row in rows]  # GLUE keeps those to itself
        table = {"sentence": [row["sentence"] for row in rows], "label": classes, "idx": list(range(count))}
        path = folder / "sst2" / f"{split}-00000-of-00001.parquet"
        datasets.Dataset.from_dict(table, features=features).to_parquet(str(path))
    lines = ["---", "configs:", "- config_name: sst2", "  data_files:"]
    for split in counts:
        lines += [f"  - split: {split}", f"    path: sst2/{split}-*"]
    (folder / "README.md").write_text("\n".join([*lines, "---", "# GLUE, in small", ""]))
    return folder


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repositories that plain `mezo train` needs, and some that it must not take."""
    root = tmp_path_factory.mktemp("hub")
    large = tiny.roberta(root / "models/FacebookAI/roberta-large")
    (large / "rust_model.ot").write_bytes(b"not wanted")  # the real one has other frameworks' weights beside
    glue(root / "datasets/nyu-mll/glue")
    pickled = tiny.roberta(root / "models/old/pickled")
    torch.save(safetensors.torch.load_file(pickled / fetch.WEIGHTS), pickled / "pytorch_model.bin")
    (pickled / fetch.WEIGHTS).unlink()
    cut = tiny.roberta(root / "models/sad/cut") / fetch.WEIGHTS
    cut.write_bytes(cut.read_bytes()[:-100])
    shards = tiny.roberta(root / "models/big/shards")
    AutoModelForMaskedLM.from_pretrained(shards).save_pretrained(shards, max_shard_size="50KB")
    (shards / fetch.WEIGHTS).unlink(missing_ok=True)
    tiny.roberta(root / "models/meta/gated")
    own = tiny.roberta(root / "models/own/code")
    config = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModelForMaskedLM": "own.Model"}}))
    (root / "models/no/config").mkdir(parents=True)
    return root


def mezo(where: Path, url: str, home: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own: the libraries read HF_ENDPOINT and HF_HOME when they are imported."""
    return python(where, url, home, "-m", "mezo_cli", *words, **more)


def python(where: Path, url: str, home: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "TRANSFORMERS_"))}
    kept = {k: v for k, v in kept.items() if "proxy" not in k.lower()}
    where.mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, *words],
        env={**kept, "HF_ENDPOINT": url, "HF_HOME": str(home), "OMP_NUM_THREADS": "1", "MEZO_EAGER": "1", **more},
        cwd=where,
        capture_output=True,
        text=True,
        timeout=HANGS,
    )


def losses(run: Path) -> list[tuple[str, int, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["kind"], line["step"], line["loss"]) for line in lines]


@pytest.mark.slow
def test_plain_train_from_the_hub_then_from_its_cache(root: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    with Hub(root) as hub:
        done = mezo(tmp_path, hub.url, home, *PLAIN, *SHORT, "hydra.run.dir=first")
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        first = tmp_path / "first"
        assert all((first / "checkpoints" / name / fetch.WEIGHTS).is_file() for name in ("best", "last"))
        info = json.loads((first / "run.json").read_text())
        assert info["status"] == "finished"
        assert info["model_revision"] == info["data_revision"] == COMMIT
        summary = json.loads((first / "summary.json").read_text())
        assert (summary["steps"], summary["forwards"]) == (2, 4)
        assert {"accuracy", "loss"} <= set(summary["test"])
        assert "36 train, 4 dev, 8 test" in done.stdout
        large, data = "FacebookAI/roberta-large", "datasets/nyu-mll/glue"
        assert f"cdn/models/{large}/model.safetensors" in hub.seen
        assert f"cdn/{data}/sst2/train-00000-of-00001.parquet" in hub.seen
        assert f"api/resolve-cache/models/{large}/{COMMIT}/tokenizer.json" in hub.seen
        assert not [path for path in hub.seen if path.endswith((".ot", ".bin"))]
        assert {host.split(":")[0] for host in hub.hosts} == {"127.0.0.1", "localhost"}

    # The server is gone now. First nothing says so: the cache serves all the same, and at once.
    again = mezo(tmp_path, hub.url, home, *PLAIN, *SHORT, "hydra.run.dir=second")
    assert again.returncode == 0, again.stderr
    assert "Retrying" not in again.stderr
    assert losses(tmp_path / "second") == losses(first)
    log = (tmp_path / "second/train.log").read_text()
    for what in ("data set nyu-mll/glue", "FacebookAI/roberta-large"):
        assert f"{hub.url} does not answer: {what} is read from the local cache, at commit {COMMIT}" in log
    info = json.loads((tmp_path / "second/run.json").read_text())
    assert info["model_revision"] == info["data_revision"] == COMMIT
    offline = mezo(tmp_path, hub.url, home, *PLAIN, *SHORT, "steps=0", "hydra.run.dir=third", HF_HUB_OFFLINE="1")
    assert offline.returncode == 0, offline.stderr
    assert losses(tmp_path / "third")[0] == losses(first)[0]


@pytest.mark.slow
def test_what_hf_download_brings_is_enough_for_a_run_without_a_network(root: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    lines = (ROOT / "docs/reference/paper.md").read_text(encoding="utf-8").splitlines()
    commands = [shlex.split(line) for line in lines if line.startswith("hf download ")]
    assert len(commands) == 2
    with Hub(root) as hub:
        for words in commands:
            program = f"import sys; sys.argv = {words!r}; from huggingface_hub.cli.hf import main; main()"
            done = python(tmp_path, hub.url, home, "-c", program)
            assert done.returncode == 0, done.stderr
    offline = mezo(tmp_path, hub.url, home, *PLAIN, *SHORT, "steps=0", "hydra.run.dir=run", HF_HUB_OFFLINE="1")
    assert offline.returncode == 0, offline.stderr
    info = json.loads((tmp_path / "run/run.json").read_text())
    assert info["model_revision"] == info["data_revision"] == COMMIT


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["data set", "model"])
def test_no_network_and_no_copy_is_one_line(missing: str, movies: Path, tmp_path: Path) -> None:
    words = [] if missing == "data set" else ["data=files", f"data.dir={movies}"]
    done = mezo(tmp_path, CLOSED, tmp_path / "home", *PLAIN, *words, "hydra.run.dir=run")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    looked_for = "nyu-mll/glue (sst2)" if missing == "data set" else "FacebookAI/roberta-large"
    for part in (looked_for, CLOSED, "does not answer", "experiment=demo", "data.dir=PATH"):
        assert part in line
    assert missing == "data set" or "model.path=FOLDER" in line
    assert not (tmp_path / "run").exists()


@pytest.fixture
def hub(root: Path, tmp_path: Path, monkeypatch: Any) -> Iterator[Hub]:
    """The hub, looked at from this process, with an empty cache."""
    for name in [name for name in os.environ if "proxy" in name.lower()]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with Hub(root, gated=["meta/gated"]) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


def config(path: str, revision: str | None = None) -> ModelConfig:
    return ModelConfig(name="tiny", path=path, revision=revision, device="cpu")


def load(path: str, revision: str | None = None) -> models.LoadedModel:
    return models.load(config(path, revision), models.MASKED_LM, NAMES, 0)


def error_line(path: str, words: str, revision: str | None = None) -> str:
    with pytest.raises(UserError, match=re.escape(words)) as caught:
        load(path, revision)
    said = str(caught.value)
    assert "\n" not in said
    assert path in said
    return said


def test_a_second_load_asks_one_thing(hub: Hub) -> None:
    first = load("FacebookAI/roberta-large")
    asked = len(hub.seen)
    second = load("FacebookAI/roberta-large")
    assert hub.seen[asked:] == [
        "FacebookAI/roberta-large/resolve/main/config.json",
        f"api/resolve-cache/models/FacebookAI/roberta-large/{COMMIT}/config.json",
    ]
    assert models.fingerprint(first.model) == models.fingerprint(second.model)
    assert load("FacebookAI/roberta-large", COMMIT).fresh == []
    assert len(hub.seen) == asked + 2  # a commit cannot change: nothing to ask


def test_the_tokenizer_alone_does_not_fetch_the_weights(hub: Hub) -> None:
    assert models.load_tokenizer(config("FacebookAI/roberta-large"), models.MASKED_LM).mask_token == "<mask>"
    assert not [path for path in hub.seen if "safetensors" in path]


def test_shards_come_from_the_hub(hub: Hub, root: Path) -> None:
    whole = models.fingerprint(load("FacebookAI/roberta-large").model)
    assert models.fingerprint(load("big/shards").model) == whole
    assert len({path for path in hub.seen if path.startswith("cdn/models/big/shards/model-")}) > 1


def test_repositories_that_cannot_be_had(hub: Hub) -> None:
    said = error_line("FacebookAI/roberta-larg", "there is no such model, or it is private: check the spelling")
    assert f"model.path=FacebookAI/roberta-larg: cannot load it from {hub.url}" in said
    error_line("roberta-larg", "there is no such model, or it is private")
    said = error_line("meta/gated", f"it is gated: accept its terms at {hub.url}/meta/gated")
    assert "HF_TOKEN" in said
    error_line("FacebookAI/roberta-large", "at revision v9 from", "v9")
    error_line("FacebookAI/roberta-large", "the model has no such revision (model.revision)", "v9")
    error_line("no/config", "the repository lacks a file that is needed")
    error_line("not a/hub id", "HFValidationError")
    assert not [path for path in hub.seen if path.endswith(("safetensors", ".bin"))]


def test_pickles_are_neither_fetched_nor_sent_to_conversion(hub: Hub) -> None:
    error_line("old/pickled", "there is no model.safetensors; weights are read from safetensors alone")
    time.sleep(0.2)  # a thread that asks for a conversion would have begun
    assert not [path for path in hub.seen if path.endswith(".bin") or "refs" in path or "discussions" in path]
    assert {host.split(":")[0] for host in hub.hosts} == {"127.0.0.1"}


def test_code_is_refused_before_anything_else_is_fetched(hub: Hub) -> None:
    error_line("own/code", "its config.json asks for code that comes with the checkpoint (auto_map)")
    assert {path.rsplit("/", 1)[-1] for path in hub.seen} == {"config.json"}


def test_cut_weights_are_named_and_a_cut_download_is_not_kept(hub: Hub) -> None:
    assert "model.safetensors is damaged or missing" in error_line("sad/cut", "model.path=sad/cut")
    hub.cut["model.safetensors"] = 50
    error_line("FacebookAI/roberta-large", "Consistency check failed: file should be of size")
    hub.cut.clear()
    assert load("FacebookAI/roberta-large").fresh == []


def test_a_cache_without_the_weights_says_so(hub: Hub, monkeypatch: Any) -> None:
    models.load_tokenizer(config("FacebookAI/roberta-large"), models.MASKED_LM)
    monkeypatch.setenv("HF_ENDPOINT", CLOSED)
    said = error_line("FacebookAI/roberta-large", "the local cache lacks model.safetensors of FacebookAI/roberta-large")
    assert "with a network: hf download FacebookAI/roberta-large;" in said
    error_line("FacebookAI/roberta-base", "the server does not answer, and the local cache lacks config.json of")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    error_line("FacebookAI/roberta-base", "HF_HUB_OFFLINE is set, and the local cache lacks config.json of")


@pytest.mark.slow
def test_downloads_have_bars_on_a_terminal_but_not_in_ci(root: Path, movies: Path, tmp_path: Path) -> None:
    words = ["train", *SHORT, "steps=0", "data=files", f"data.dir={movies}"]
    with Hub(root) as hub:
        for variables, bars in (({}, True), ({"CI": "true"}, False)):
            home = str(tmp_path / f"home{bars}")
            env = {"HF_ENDPOINT": hub.url, "HF_HOME": home, "HF_HUB_OFFLINE": "0", **variables}
            code, seen = raw_on_a_terminal([*words, f"hydra.run.dir=run{bars}"], tmp_path, columns=80, **env)
            assert code == 0, seen
            assert ("100%|" in seen) == bars  # a bar; train says "(100%)" of the parameters
            assert "model  FacebookAI/roberta-large on" in seen
