"""The script that rebuilds a model like the demo's: small, on a text made here."""

import importlib.util
import lzma
import random
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "pretrain_demo_model.py"
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


def run(*args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *map(str, args)], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pretrain_demo_model", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A model trained from an .xz file, and what the script printed."""
    folder = tmp_path_factory.mktemp("pretrain")
    (folder / "text.xz").write_bytes(lzma.compress(text().encode()))
    done = run(folder / "text.xz", "--out", folder / "model", *SMALL)
    assert done.returncode == 0, done.stderr
    return folder / "model", done.stdout


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


def test_every_label_word_is_one_token(made: tuple[Path, str], script: ModuleType) -> None:
    tokenizer = AutoTokenizer.from_pretrained(made[0])
    for word in script.LABEL_WORDS:
        assert len(tokenizer(f" {word}", add_special_tokens=False)["input_ids"]) == 1, word
    assert len(tokenizer) <= 512
    assert sorted(tokenizer.get_vocab().values()) == list(range(len(tokenizer)))
    said = "Jürgen’s naïve film ✓ was okay"
    assert tokenizer.decode(tokenizer(said)["input_ids"], skip_special_tokens=True) == said
    assert tokenizer("a film")["input_ids"][:1] == [tokenizer.bos_token_id] == [0]
    assert tokenizer.mask_token_id == 4


def test_label_words_take_the_place_of_the_last_merges(script: ModuleType) -> None:
    docs = text(2000).split("\n")
    plain = script.train_tokenizer([*docs, *[f" {word}" for word in script.LABEL_WORDS] * 2000], 460, 1.0, 0)
    forced = script.train_tokenizer(docs, 380, 1.0, 0)
    assert forced.get_vocab_size() == 380
    assert len(forced.encode(" Expression", add_special_tokens=False).ids) == 1
    assert len(plain.encode(" Expression", add_special_tokens=False).ids) == 1


def test_masking_follows_the_rule(script: ModuleType) -> None:
    tokens = np.random.default_rng(0).integers(5, 300, size=20_000).astype(np.uint16)
    args = script.arguments(["x", "--out", "nowhere", "--steps", "1", "--batch-tokens", "60000"])
    stream = script.batches(tokens, 300, args)
    for step in range(1, 11):
        ids, masked, targets = next(stream)
        assert ids.shape[1] == (254 if step == 10 else 64)
        assert (ids[:, 0] == script.BOS).all()
        assert (ids[:, -1] == script.EOS).all()
        assert not masked[:, [0, -1]].any()
        assert masked.float().mean() == pytest.approx(0.25 * (ids.shape[1] - 2) / ids.shape[1], abs=0.01)
        seen = ids[masked]
        assert (seen == script.MASK).float().mean() == pytest.approx(0.8, abs=0.02)
        assert (seen == targets).float().mean() == pytest.approx(0.1, abs=0.02)
    again = next(script.batches(tokens, 300, args))
    assert torch.equal(again[0], next(script.batches(tokens, 300, args))[0])


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        (["--width", "33"], "--width 33 must be even and a multiple of --heads 2"),
        (["--steps", "0"], "--steps must be above 0"),
        (["--muon-lr", "nan"], "--muon-lr must be above 0"),
        (["--warmup", "-1"], "--warmup must be 0 or more"),
        (["--length", "64"], "rows of 64, 32 tokens: 8 to 32"),
        (["--vocab-size", "300"], "--vocab-size 300 is too small"),
        (["--layers", "two"], "invalid int value"),
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
