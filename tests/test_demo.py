"""The embedded demo: data balanced, varied and clean across splits; a model that loads and speaks the labels' words."""

import json
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForMaskedLM, AutoTokenizer

import mezo_cli
from tests.command_line import process

DEMO = Path(mezo_cli.__file__).parent / "demo"
SIZES = {"train": 848, "dev": 440, "test": 440}
LABEL_WORDS = ["terrible", "great", "bad", "okay", "good", "Yes", "No", "Maybe"]
LABEL_WORDS += ["Description", "Entity", "Expression", "Human", "Location", "Number"]
LABEL_WORDS += ["subjective", "objective", "incorrect", "correct"]


def rows(split: str) -> list[tuple[str, str]]:
    with (DEMO / "data" / f"{split}.jsonl").open(encoding="utf-8") as file:
        read = [json.loads(line) for line in file]
    assert all(list(row) == ["sentence", "label"] for row in read)
    return [(row["sentence"], row["label"]) for row in read]


def words(sentence: str) -> list[str]:
    return re.findall(r"[a-z0-9']+", sentence.lower())


ALL = {split: rows(split) for split in SIZES}
EVERY = [(split, *row) for split, read in ALL.items() for row in read]


@pytest.mark.parametrize("split", SIZES)
def test_splits_are_balanced_and_mixed(split: str) -> None:
    labels = [label for _, label in ALL[split]]
    assert Counter(labels) == {"negative": SIZES[split] // 2, "positive": SIZES[split] // 2}
    changes = sum(a != b for a, b in pairwise(labels))
    assert changes > len(labels) / 4  # not one class after another


def test_sentences_are_clean() -> None:
    for split, sentence, _ in EVERY:
        assert sentence == sentence.strip(), (split, sentence)
        assert sentence.isprintable(), (split, sentence)
        assert "  " not in sentence, (split, sentence)
        assert "<" not in sentence, (split, sentence)
        assert 3 <= len(words(sentence)) <= 40, (split, sentence)


def test_no_near_duplicates() -> None:
    """Two sentences share less than 0.8 of their words, and less than 0.65 across splits."""
    sets = sorted(
        ((split, sentence, frozenset(words(sentence))) for split, sentence, _ in EVERY), key=lambda row: len(row[2])
    )
    for number, (one, a, x) in enumerate(sets):
        for two, b, y in sets[number + 1 :]:
            if len(x) < 0.65 * len(y):  # and so for all longer ones: they share less than 0.65
                break
            assert len(x & y) / len(x | y) < (0.8 if one == two else 0.65), (one, a, two, b)


def test_no_word_gives_the_label_away() -> None:
    """Sentiment words are natural, but no single one, nor a length, may carry the task."""
    seen: dict[str, Counter[str]] = {"negative": Counter(), "positive": Counter()}
    for _, sentence, label in EVERY:
        seen[label].update(set(words(sentence)))
    half = len(EVERY) / 2
    for word in seen["negative"] | seen["positive"]:
        gap = abs(seen["negative"][word] - seen["positive"][word]) / half
        assert gap < 0.15, word
    means = [sum(len(words(s)) for _, s, y in EVERY if y == label) / half for label in seen]
    assert abs(means[0] - means[1]) < 1.0


def test_the_model_loads_whole() -> None:
    model, report = AutoModelForMaskedLM.from_pretrained(DEMO / "model", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert sum(p.numel() for p in model.parameters()) == 5_397_504
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_the_weights_are_halves_in_safetensors_and_nothing_else_is_shipped() -> None:
    names = {path.name for path in (DEMO / "model").iterdir()}
    assert names == {"README.md", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    with safe_open(DEMO / "model" / "model.safetensors", framework="pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.float16}  # noqa: SIM118
    assert sum(path.stat().st_size for path in DEMO.rglob("*") if path.is_file()) < 12e6


def test_every_label_word_of_the_built_in_tasks_is_one_token() -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "model")
    assert len(tokenizer) == 8192
    assert tokenizer.mask_token == "<mask>"
    for word in LABEL_WORDS:
        assert len(tokenizer(f" {word}", add_special_tokens=False)["input_ids"]) == 1, word


@pytest.mark.slow
def test_the_model_hears_the_difference() -> None:
    """Zero-shot, positive sentences lean to ` great` more than negative ones do: AUC well above one half."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "model")
    model = AutoModelForMaskedLM.from_pretrained(DEMO / "model", dtype=torch.float32).eval()
    terrible, great = (tokenizer(f" {w}", add_special_tokens=False)["input_ids"][0] for w in ("terrible", "great"))
    margins: dict[str, list[float]] = {"negative": [], "positive": []}
    with torch.inference_mode():
        for sentence, label in ALL["test"]:
            ids = tokenizer(f"{sentence} It was<mask>.", return_tensors="pt")["input_ids"]
            scores = model(input_ids=ids).logits[0, ids[0].tolist().index(tokenizer.mask_token_id)]
            margins[label].append((scores[great] - scores[terrible]).item())
    wins = [p > n for p in margins["positive"] for n in margins["negative"]]
    assert sum(wins) / len(wins) > 0.65


@pytest.mark.slow
def test_the_demo_gains_what_the_readme_says(tmp_path: Path) -> None:
    """`mezo train experiment=demo`, one seed: 5 points of dev accuracy (63% before), test above 67% (61%)."""
    run = tmp_path / "run"
    words = ["train", "experiment=demo", "seed=42", f"hydra.run.dir={run}"]
    result = process(*words, cwd=tmp_path, timeout=1500, MEZO_EAGER="")  # with the compiled noise, as users run it
    assert result.code == 0, result.err
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    before = next(line["accuracy"] for line in lines if line["kind"] == "eval")
    summary = json.loads((run / "summary.json").read_text())
    assert summary["dev"]["accuracy"] >= before + 0.05
    assert summary["test"]["accuracy"] > 0.67
    assert process("export", run, "--trajectory", "--out", tmp_path / "shared", cwd=tmp_path, timeout=300).code == 0
    assert sum(file.stat().st_size for file in (tmp_path / "shared").iterdir()) < 50_000
