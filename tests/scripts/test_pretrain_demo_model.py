"""The script that rebuilds a model like the demo's: small, on a text made here."""

import contextlib
import io
import json
import lzma
import random
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForMaskedLM, AutoTokenizer

from tests.scripts.load import load_script

SMALL = ["--vocab-size", "512", "--layers", "1", "--width", "32", "--heads", "2", "--positions", "34", "--length", "16"]
SMALL += ["--long-length", "32", "--steps", "60", "--warmup", "5", "--batch-tokens", "512", "--log-every", "20"]


def text(documents: int = 300) -> str:
    """Documents of a small grammar, no two labels of the built-in tasks in it except `good` and `great`."""
    rng = random.Random(0)
    subjects = ["the film is", "a story was", "this plot seems", "her acting was", "Jürgen’s score is"]
    words = ["good", "great", "dull", "fine", "long", "slow", "sweet"]
    tails = ["and the cast shines.", "but the end drags.", "so we left early.", "and I loved it!"]

    def sentence() -> str:
        return f"{rng.choice(subjects)} {rng.choice(words)} {rng.choice(tails)}"

    return "\n".join(" ".join(sentence() for _ in range(rng.randint(1, 6))) for _ in range(documents)) + "\n\n"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("pretrain_demo_model")


@pytest.fixture(scope="module")
def texts() -> ModuleType:
    return load_script("pretrain_text")


@pytest.fixture(scope="module")
def made(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A model trained from an .xz file, and what the script printed."""
    folder = tmp_path_factory.mktemp("pretrain")
    (folder / "text.xz").write_bytes(lzma.compress(text().encode()))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        script.main([str(folder / "text.xz"), "--out", str(folder / "model"), *SMALL])
    return folder / "model", printed.getvalue()


@pytest.mark.slow
def test_the_loss_falls_and_the_model_knows_the_text(made: tuple[Path, str]) -> None:
    folder, printed = made
    losses = [float(value) for value in re.findall(r"loss ([\d.]+)", printed)]
    assert len(losses) == 4  # steps 1, 20, 40, 60
    assert losses[-1] < losses[0] - 1.5
    model = AutoModelForMaskedLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = tokenizer("the film is good and the cast<mask>.", return_tensors="pt")
    scores = model(**batch).logits[0, batch["input_ids"][0].tolist().index(tokenizer.mask_token_id)].softmax(-1)
    assert scores[tokenizer(" shines", add_special_tokens=False)["input_ids"][-1]] > 5 / len(scores)


def test_what_is_written_loads_whole_and_small(made: tuple[Path, str]) -> None:
    folder, _ = made
    model, report = AutoModelForMaskedLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert model.dtype == torch.float32
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    size = sum(p.numel() for p in model.parameters())
    assert 2 * size <= (folder / "model.safetensors").stat().st_size < 2 * size + 8192  # halves, the decoder once


def test_every_label_word_is_one_token(made: tuple[Path, str], texts: ModuleType) -> None:
    tokenizer = AutoTokenizer.from_pretrained(made[0])
    for word in texts.LABEL_WORDS:
        assert len(tokenizer(f" {word}", add_special_tokens=False)["input_ids"]) == 1, word
    assert len(tokenizer) <= 512
    assert sorted(tokenizer.get_vocab().values()) == list(range(len(tokenizer)))
    said = "Jürgen’s naïve film ✓ was okay"
    assert tokenizer.decode(tokenizer(said)["input_ids"], skip_special_tokens=True) == said
    assert tokenizer("a film")["input_ids"][:1] == [tokenizer.bos_token_id] == [0]
    assert tokenizer.mask_token_id == 4


def batches(script: ModuleType, corpus: Any, tokenizer: Any, *options: str, opinions: list[int] | None = None) -> Any:
    """The batches of a run on this corpus; `opinions` are the tokens that count as opinion words."""
    args = script.arguments(["x", "--out", "nowhere", "--steps", "1", *options])
    table = np.zeros(tokenizer.get_vocab_size(), dtype=bool)
    table[opinions or []] = True
    return script.Batches([corpus], tokenizer, table, args)


def bare(texts: ModuleType, tokens: np.ndarray) -> Any:
    """A corpus of one sentence in which nothing is said."""
    zero = np.zeros(1, dtype=int)
    return texts.Corpus(tokens, np.array([0, len(tokens)]), zero, zero + 1, zero[:0], zero[:0])


def test_masking_follows_the_rule(made: tuple[Path, str], script: ModuleType, texts: ModuleType) -> None:
    tokens = np.random.default_rng(0).integers(5, 300, size=20_000).astype(np.uint16)
    tokenizer = script.Tokenizer.from_file(str(made[0] / "tokenizer.json"))
    stream = batches(script, bare(texts, tokens), tokenizer, "--batch-tokens", "60000")
    for step in range(1, 11):
        batch = stream(step)
        ids, masked = batch.ids, batch.masked
        assert ids.shape[1] == (254 if step == 10 else 64)
        assert (ids[:, 0] == texts.BOS).all()
        assert (ids[:, -1] == texts.EOS).all()
        assert not masked[:, [0, -1]].any()
        assert masked.float().mean() == pytest.approx(0.25 * (ids.shape[1] - 2) / ids.shape[1], abs=0.01)
        seen = ids[masked]
        assert (seen == texts.MASK).float().mean() == pytest.approx(0.8, abs=0.02)
        assert (seen == batch.word).float().mean() == pytest.approx(0.1, abs=0.02)
        assert batch.place.tolist() == list(range(len(seen)))
        assert (batch.weight == 1).all()
    assert torch.equal(stream(3).ids, stream(3).ids)
    assert not torch.equal(stream(3).ids, stream(4).ids)


@pytest.mark.slow
def test_a_stopped_run_goes_on_to_the_same_weights(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text(text())
    (tmp_path / "rows.tsv").write_text("sentence\tlabel\n" + "a great film \t1\na dull film \t0\n" * 5)
    command = [str(tmp_path / "text.txt"), *SMALL, "--opinion-words", "auto", "--prompt-share", "0.5", "--length", "24"]
    command += ["--spaced-share", "0.5", "--evaluate", str(tmp_path / "rows.tsv"), "--evaluate-every", "20"]
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    script.main([*command, "--out", str(whole)])
    step = script.Run.step

    def stop(run: Any, *args: Any) -> None:
        if run.at.step == 31:
            raise KeyboardInterrupt
        step(run, *args)

    often = ["--checkpoint-minutes", "1e-9"]  # after every step
    monkeypatch.setattr(script.Run, "step", stop)
    with pytest.raises(KeyboardInterrupt):
        script.main([*command, *often, "--out", str(stopped)])
    monkeypatch.setattr(script.Run, "step", step)
    assert [path.name for path in stopped.iterdir()] == ["checkpoint"]
    with pytest.raises(SystemExit):
        script.main([*command, "--mask", "0.1", "--out", str(stopped)])
    assert "unfinished run whose --mask is 0.25, not 0.1" in capsys.readouterr().err
    (stopped / "checkpoint").rename(stopped / "checkpoint.old")  # as if stopped between the two renames
    script.main([*command, "--out", str(stopped)])
    assert "continued from step 30" in capsys.readouterr().out
    one, two = (load_file(folder / "model.safetensors") for folder in (whole, stopped))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert recorded(whole) == recorded(stopped)
    assert "good" in recorded(whole)["opinion_words"]
    assert {p.name for p in stopped.iterdir()} == {p.name for p in whole.iterdir()}  # no checkpoint is left


def recorded(folder: Path) -> dict[str, Any]:
    """What training.json holds, without what no two runs share."""
    record: dict[str, Any] = json.loads((folder / "training.json").read_text())
    for entry in record["history"]:
        entry.pop("minutes", None)
    record["arguments"].pop("out")
    return record


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("evaluate", "text\tclass\na film\t1\n", "line 2: the columns sentence and label"),
        ("evaluate", "sentence\tlabel\na film\t1\nb\t2\n", "line 3: the columns sentence and label"),
        ("evaluate", "sentence\tlabel\na film\t1\n", "rows of both labels"),
        ("opinion-words", "good, bad", "is not JSON"),
        ("opinion-words", "[]", "must hold a JSON list of words"),
        ("opinion-words", '["unbelievablelongword"]', "no opinion word is a single token"),
        ("start", "", "is not a folder"),
    ],
)
def test_a_bad_file_ends_in_2_and_leaves_nothing(
    name: str, content: str, named: str, script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text(text())
    (tmp_path / "file").write_text(content)
    with pytest.raises(SystemExit) as stop:
        script.main(
            [str(tmp_path / "text.txt"), "--out", str(tmp_path / "m"), *SMALL, f"--{name}", str(tmp_path / "file")]
        )
    assert stop.value.code == 2
    assert named in capsys.readouterr().err
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        (["--width", "33"], "--width 33 must be even and a multiple of --heads 2"),
        (["--steps", "0"], "--steps must be above 0"),
        (["--muon-lr", "nan"], "--muon-lr must be 0 or more"),
        (["--adam-lr", "0"], "--adam-lr must be above 0"),
        (["--warmup", "-1"], "--warmup must be 0 or more"),
        (["--length", "64"], "rows of 64, 32 tokens: 8 to 32"),
        (["--vocab-size", "300"], "--vocab-size 300 is too small"),
        (["--layers", "two"], "invalid int value"),
        (["--prompt-share", "0.5"], "--prompt-share needs --opinion-words"),
        (["--prompt-share", "1.5"], "--prompt-share must be at most 1"),
        (["--opinion-mask", "1.5"], "--opinion-mask must be at most 1"),
        (["--prompt-share", "1", "--opinion-words", "auto"], "--prompt-share needs a --length of at least 24, not 16"),
    ],
)
def test_bad_arguments_end_in_2_with_one_clear_line(
    extra: list[str], named: str, script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text(text())
    with pytest.raises(SystemExit) as stop:
        script.main([str(tmp_path / "text.txt"), "--out", str(tmp_path / "model"), *SMALL, *extra])
    assert stop.value.code == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("text.txt", b"caf\xe9 noir\n", "is not UTF-8 (byte 3)"),
        ("text.txt", b" \n\n", "holds no text"),
        ("text.xz", b"not xz", "is not a whole .xz file"),
        ("text.xz", lzma.compress(b"a film " * 1000)[:-20], "is not a whole .xz file"),
        ("other.txt", b"a film\n", "cannot read"),
    ],
)
def test_bad_text_ends_in_2_and_leaves_nothing(
    name: str, content: bytes, named: str, script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(content)
    path = tmp_path / ("text.xz" if name == "text.xz" else "text.txt")
    with pytest.raises(SystemExit) as stop:
        script.main([str(path), "--out", str(tmp_path / "model"), *SMALL])
    assert stop.value.code == 2
    assert named in capsys.readouterr().err
    assert not (tmp_path / "model").exists()


def test_a_folder_in_use_is_not_written_to(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text(text())
    with pytest.raises(SystemExit) as stop:
        script.main([str(tmp_path / "text.txt"), "--out", str(tmp_path), *SMALL])
    assert stop.value.code == 2
    assert "is not an empty folder" in capsys.readouterr().err
