"""Ranks that each hold a part of the weights (distributed.shard=full)."""

import json
from pathlib import Path

import pytest
import torch

from mezo_cli.runs import Run
from tests import tiny
from tests.command_line import error_line, mezo, small
from tests.distributed.test_sharing import EACH, check, files, losses
from tests.models.test_loading import SERVED, family
from tests.ranks import run_ranks

FULL = "distributed.shard=full"
WIDE = {"hidden_size": 128, "intermediate_size": 256}  # so that matrices are large enough to be sharded


pytestmark = pytest.mark.usefixtures("eager_kernels")


@pytest.fixture(scope="module")
def roberta(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny RoBERTa with a tied decoder, whose matrices are sharded."""
    return tiny.roberta(tmp_path_factory.mktemp("wide"), **WIDE)


def train_both(model: Path, movies: Path, folder: Path, *words: str) -> None:
    """Train once by one process (`one`), and once by two ranks with shards (`two`)."""
    assert mezo("train", *small(model, movies, folder / "one", *EACH, *words)).code == 0
    two = ["train", *small(model, movies, folder / "two", *EACH, *words, FULL)]
    check(run_ranks(two, two))


def test_shards_end_in_the_bits_of_one_process(roberta: Path, movies: Path, tmp_path: Path) -> None:
    """Losses, trajectory, predictions and every file of weights are the same after 20 steps."""
    train_both(roberta, movies, tmp_path, "steps=20", "eval_every=10", "optimizer.lr=1e-3")
    assert files(tmp_path / "two") == files(tmp_path / "one")
    assert losses(tmp_path / "two") == losses(tmp_path / "one")
    shared = Run(tmp_path / "two").read_summary()["distributed"]
    assert (shared["ranks"], shared["split"]) == (2, "weights")
    assert shared["bytes_per_step"] > 100_000  # both signs of the matrices of two layers


MODELS = {
    "bert": lambda folder: (tiny.bert(folder, **WIDE), "mlm"),
    "electra": lambda folder: (family(folder, ("Electra", SERVED["electra"][1] | WIDE)), "mlm"),
    "untied": lambda folder: (tiny.roberta(folder, tied=False, **WIDE), "mlm"),
    "cls": lambda folder: (tiny.roberta(folder, head="cls", **WIDE), "cls"),
    "gpt2": lambda folder: (tiny.decoder(folder, "gpt2", n_embd=128), "lm"),
    "opt": lambda folder: (
        tiny.decoder(folder, "opt", hidden_size=128, word_embed_proj_dim=128, ffn_dim=256),
        "lm",
    ),
    "llama": lambda folder: (tiny.decoder(folder, "llama", tied=False, **WIDE), "lm"),
    "bloom": lambda folder: (tiny.decoder(folder, "bloom", hidden_size=128), "lm"),
    "gptj": lambda folder: (tiny.decoder(folder, "gptj", tied=False, n_embd=128, rotary_dim=16), "lm"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_family_ends_in_the_bits_of_one_process(name: str, movies: Path, tmp_path: Path) -> None:
    model, objective = MODELS[name](tmp_path / "model")
    words = [f"objective={objective}", "steps=20", "optimizer.lr=1e-3", "task.lm.label_words=[rather bad,rather good]"]
    train_both(model, movies, tmp_path, *words)
    assert files(tmp_path / "two") == files(tmp_path / "one")
    assert losses(tmp_path / "two") == losses(tmp_path / "one")


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("optimizer=mezo_momentum", "optimizer.samples=2"),
        ("optimizer=mezo_adam", "optimizer.noise=rademacher"),
        ("optimizer=mezo_adam", "optimizer.weight_decay=0.1", "model.paired_tokens=0"),
        ("model.dtype=bfloat16", "model.compute_dtype=bfloat16"),
    ],
)
def test_every_method_ends_in_the_bits_of_one_process(
    roberta: Path, movies: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    train_both(roberta, movies, tmp_path, "steps=8", "optimizer.lr=1e-3", *words)
    assert files(tmp_path / "two") == files(tmp_path / "one")


@pytest.mark.slow
def test_an_interrupted_run_goes_on_with_or_without_shards(roberta: Path, movies: Path, tmp_path: Path) -> None:
    """Moments are rebuilt from the trajectory, or read from a checkpoint that one process has written."""
    words = ["steps=12", "eval_every=4", "optimizer.lr=1e-3", "optimizer=mezo_momentum"]
    train_both(roberta, movies, tmp_path, *words)
    stopped = small(roberta, movies, tmp_path / "stopped", *EACH, *words, FULL, "max_seconds=1e-3")
    results = run_ranks(["train", *stopped], ["train", *stopped])
    assert [result.code for result in results] == [130, 130], results
    for size in (2, 1, 2):  # ranks of each attempt, which takes one step
        resume = ["resume", tmp_path / "stopped"]
        ended = [mezo(*resume)] if size == 1 else run_ranks(resume, resume)
        assert {result.code for result in ended} == {130}, ended
    resume = ["resume", tmp_path / "stopped", "max_seconds=null"]
    check(run_ranks(resume, resume))
    assert files(tmp_path / "stopped") == files(tmp_path / "one")


@pytest.mark.slow
def test_one_process_evaluates_and_replays_what_ranks_have_trained(roberta: Path, movies: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["train", *small(roberta, movies, run, FULL)]
    check(run_ranks(words, words))
    tested = json.loads(mezo("eval", run, "--json").out)
    assert tested["loss"] == Run(run).read_summary()["test"]["loss"]
    assert mezo("replay", run, "--step", "2", "--out", tmp_path / "replayed").code == 0


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (["peft=lora"], "distributed.shard=full shards the weights that are trained, all of them: use peft=none"),
        (["optimizer=adamw"], "distributed.shard=full: optimizer=adamw is not computed part by part"),
        (["optimizer.noise=torch"], "distributed.shard=full: optimizer.noise=torch draws whole tensors"),
        (["init=linear_probe"], "distributed.shard=full: init=linear_probe writes rows"),
        (["distributed.split=rows"], "does not go with distributed.split=rows; leave that null"),
        (["distributed.shard=half"], "distributed.shard"),
    ],
)
def test_what_needs_whole_weights_is_refused(
    roberta: Path, movies: Path, tmp_path: Path, words: list[str], wrong: str
) -> None:
    result = mezo("train", *small(roberta, movies, tmp_path / "run", FULL, *words))
    assert result.code == 2
    assert wrong in error_line(result)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_file_in_two_bytes_is_converted_part_by_part(roberta: Path, movies: Path, tmp_path: Path) -> None:
    """It gives the weights that one process gets, which converts all of it at once."""
    import transformers

    model = transformers.AutoModelForMaskedLM.from_pretrained(roberta, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "half")
    transformers.AutoTokenizer.from_pretrained(roberta).save_pretrained(tmp_path / "half")
    train_both(tmp_path / "half", movies, tmp_path, "steps=2")
    assert files(tmp_path / "two") == files(tmp_path / "one")
