"""The embedded demo of rewards is what its script makes: problems without leaks, right answers, the card's figures."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

import mezo_cli
from tests.scripts.load import load_script

DEMO = Path(mezo_cli.__file__).parent / "demo"
script = load_script("make_arithmetic_demo")


def test_the_rows_are_those_of_the_script_and_no_problem_is_in_two_splits(tmp_path: Path) -> None:
    right, splits = script.make_problems()
    assert {name: len(set(problems)) for name, problems in splits.items()} == {"train": 833, "dev": 192, "test": 320}
    assert sum(map(len, splits.values())) == len(right) == len(set().union(*splits.values()))
    script.write_rows(tmp_path, right, splits)
    for name in splits:
        assert (tmp_path / f"{name}.jsonl").read_bytes() == (DEMO / "arithmetic" / f"{name}.jsonl").read_bytes()


@pytest.mark.parametrize("split", ["train", "dev", "test"])
def test_every_answer_has_each_digit_once_and_the_target_as_value(split: str) -> None:
    for line in (DEMO / "arithmetic" / f"{split}.jsonl").read_text().splitlines():
        row = json.loads(line)
        expression = re.fullmatch(r"\((\d[-+*]\d[-+*]\d)\)", row["answer"])
        assert expression is not None, row
        assert sorted(map(int, re.findall(r"\d", expression[1]))) == row["numbers"], row
        assert eval(expression[1]) == int(row["target"]), row  # Python's own precedence, not the script's
        assert len(row["target"]) == 2, row


def test_the_decoder_loads_whole_and_what_is_shipped_is_small() -> None:
    folder = DEMO / "decoder"
    assert {path.name for path in folder.iterdir()} == {
        *("README.md", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    }
    assert sum(path.stat().st_size for name in ("decoder", "arithmetic") for path in (DEMO / name).iterdir()) < 500e3
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.float16}  # noqa: SIM118
    _, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]


def test_its_tokenizer_has_a_token_per_character() -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "decoder")
    text = "357>09= (7+5-3)*4"
    assert tokenizer(text)["input_ids"] == [script.IDS["<s>"], *script.encode(text)]
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<pad>", "</s>")


def test_the_card_has_the_accuracies_of_the_decoder_as_shipped() -> None:
    """It starts near 10%, and the better style, forced, gives near 40%."""
    right, splits = script.make_problems()
    model = AutoModelForCausalLM.from_pretrained(DEMO / "decoder", dtype=torch.float32)
    card = (DEMO / "decoder" / "README.md").read_text()
    for name in ("dev", "test"):
        greedy, forced, other = (script.accuracy(model, splits[name], right, start) for start in ("", "(", " "))
        figures = re.search(rf"\| {name} \| \d+ \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", card)
        assert figures is not None
        assert [float(figure) for figure in figures.groups()] == pytest.approx([greedy, forced, other], abs=0.6)
        assert greedy < 15
        assert forced > 35
