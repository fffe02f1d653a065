"""Ranks that each hold a part of the weights (distributed.shard=full)."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

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


def wide_family(name: str, folder: Path, **more: Any) -> tuple[Path, str]:
    """Save a random masked language model of a family, whose matrices are sharded; return its folder and objective."""
    kind, shape = SERVED[name]
    return family(folder, (kind, shape | WIDE | more)), "mlm"


def wide_decoder(kind: str, folder: Path) -> tuple[Path, str]:
    """Save a random decoder of a family, whose matrices are sharded; return its folder and objective."""
    return tiny.decoder(folder, kind, **WIDE), "lm"


MODELS = {
    "bert": lambda folder: (tiny.bert(folder, **WIDE), "mlm"),
    **{name: partial(wide_family, name) for name in ("electra", "xlm-roberta", "modernbert", "mpnet", "deberta-v2")},
    "albert": partial(wide_family, "albert", embedding_size=128),
    "distilbert": partial(wide_family, "distilbert", dim=128, hidden_dim=256),
    "untied": lambda folder: (tiny.roberta(folder, tied=False, **WIDE), "mlm"),
    "cls": lambda folder: (tiny.roberta(folder, head="cls", **WIDE), "cls"),
    "gpt2": lambda folder: (tiny.decoder(folder, "gpt2", n_embd=128), "lm"),
    "opt": lambda folder: (
        tiny.decoder(folder, "opt", hidden_size=128, word_embed_proj_dim=128, ffn_dim=256),
        "lm",
    ),
    "llama": lambda folder: (tiny.decoder(folder, "llama", tied=False, **WIDE), "lm"),
    "bloom": lambda folder: (tiny.decoder(folder, "bloom", hidden_size=128), "lm"),
    **{kind: partial(wide_decoder, kind) for kind in ("mistral", "qwen2", "qwen3", "gpt_neox")},
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
def test_one_process_and_ranks_use_what_ranks_have_trained(roberta: Path, movies: Path, tmp_path: Path) -> None:
    """`eval` and `predict` print the same from whole weights and from shards; a replay is bitwise identical."""
    run = tmp_path / "run"
    words = ["train", *small(roberta, movies, run, FULL)]
    check(run_ranks(words, words))
    for words in (["eval", run, "--json", "-q"], ["predict", run, "--file", movies / "test.jsonl", "--json", "-q"]):
        alone, shared = mezo(*words), run_ranks(words, words)
        assert [alone.code, *(result.code for result in shared)] == [0, 0, 0], shared
        assert json.loads(shared[0].out) == json.loads(alone.out)
        assert (shared[1].out, shared[1].err) == ("", "")
        if words[0] == "eval":
            assert json.loads(alone.out)["loss"] == Run(run).read_summary()["test"]["loss"]
    assert mezo("replay", run, "--step", "6", "--out", tmp_path / "replayed").code == 0
    last = run / "checkpoints" / "last" / "model.safetensors"
    assert (tmp_path / "replayed" / "model.safetensors").read_bytes() == last.read_bytes()


@pytest.mark.slow
def test_a_family_that_reads_a_weight_of_another_module_is_refused(movies: Path, tmp_path: Path) -> None:
    """DeBERTa's layers read the table of relative positions, which is an embedding of the encoder."""
    relative = {"relative_attention": True, "position_buckets": 64, "pos_att_type": ["c2p", "p2c"]}
    model, _ = wide_family("deberta-v2", tmp_path / "model", **relative, share_att_key=True)
    words = ["train", *small(model, movies, tmp_path / "run", "steps=1")]
    assert mezo(*words).code == 0
    words = ["train", *small(model, movies, tmp_path / "two", "steps=1", FULL)]
    results = run_ranks(words, words)
    assert [result.code for result in results] == [2, 2]
    line = error_line(results[0])
    assert "DebertaV2ForMaskedLM: distributed.shard=full does not support this model family" in line
    assert "use distributed.shard=none" in line
    assert not (tmp_path / "two" / "trajectory.bin").exists()


@pytest.mark.slow
def test_damaged_weights_of_one_rank_are_named_as_such(roberta: Path, movies: Path, tmp_path: Path) -> None:
    """They are no reason to call the family unsupported."""
    damaged = shutil.copytree(roberta, tmp_path / "model")
    state = load_file(damaged / "model.safetensors")
    state["roberta.encoder.layer.0.output.dense.weight"].view(-1)[-1] = float("nan")  # in the last rank's part
    save_file(state, damaged / "model.safetensors", {"format": "pt"})
    words = ["train", *small(damaged, movies, tmp_path / "run", FULL)]
    results = run_ranks(words, words)
    assert [result.code for result in results] == [2, 2]
    assert "its scores are not finite: the weights are damaged" in error_line(results[0])


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (["peft=lora"], "distributed.shard=full shards the weights that are trained, all of them: use peft=none"),
        (["optimizer=adamw"], "distributed.shard=full: optimizer=adamw is not computed part by part"),
        (["optimizer.noise=torch"], "distributed.shard=full: optimizer.noise=torch draws whole tensors"),
        (["init=linear_probe"], "distributed.shard=full: init=linear_probe writes rows"),
        (["distributed.split=rows"], "distributed.split=rows; leave that null"),
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
