"""The embedded demo: a model that loads, speaks the labels' words, hears the difference, and gains by MeZO."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForMaskedLM, AutoTokenizer

import mezo_cli
from tests.command_line import process

DEMO = Path(mezo_cli.__file__).parent / "demo"


def test_the_weights_are_halves_in_safetensors_and_nothing_else_is_shipped() -> None:
    names = {path.name for path in (DEMO / "model").iterdir()}
    assert names == {"README.md", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    with safe_open(DEMO / "model" / "model.safetensors", framework="pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.float16}  # noqa: SIM118
    assert sum(path.stat().st_size for path in DEMO.rglob("*") if path.is_file()) < 12e6


@pytest.mark.slow
def test_the_model_hears_the_difference() -> None:
    """Zero-shot, positive sentences lean to ` great` more than negative ones do: AUC well above one half."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "model")
    model = AutoModelForMaskedLM.from_pretrained(DEMO / "model", dtype=torch.float32).eval()
    terrible, great = (tokenizer(f" {w}", add_special_tokens=False)["input_ids"][0] for w in ("terrible", "great"))
    margins: dict[str, list[float]] = {"negative": [], "positive": []}
    with torch.inference_mode():
        for row in map(json.loads, (DEMO / "data" / "test.jsonl").read_text(encoding="utf-8").splitlines()):
            ids = tokenizer(f"{row['sentence']} It was<mask>.", return_tensors="pt")["input_ids"]
            scores = model(input_ids=ids).logits[0, ids[0].tolist().index(tokenizer.mask_token_id)]
            margins[row["label"]].append((scores[great] - scores[terrible]).item())
    wins = [p > n for p in margins["positive"] for n in margins["negative"]]
    assert sum(wins) / len(wins) > 0.65


@pytest.mark.slow
def test_the_demo_gains_what_the_readme_says(tmp_path: Path) -> None:
    """`mezo train experiment=demo`, one seed: 5 points of dev accuracy (63% before), test above 67% (61%)."""
    run = tmp_path / "run"
    words = ["train", "experiment=demo", "seed=42", f"hydra.run.dir={run}"]
    result = process(*words, cwd=tmp_path, MEZO_EAGER="")  # with the compiled noise, as users run it
    assert result.code == 0, result.err
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    before = next(line["accuracy"] for line in lines if line["kind"] == "eval")
    summary = json.loads((run / "summary.json").read_text())
    assert summary["dev"]["accuracy"] >= before + 0.05
    assert summary["test"]["accuracy"] > 0.67
    assert process("export", run, "--trajectory", "--out", tmp_path / "shared", cwd=tmp_path).code == 0
    assert sum(file.stat().st_size for file in (tmp_path / "shared").iterdir()) < 200_000  # half of it predictions
