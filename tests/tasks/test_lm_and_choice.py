"""Prompts for decoders whose label words or candidates are scored: their tokens, the cut, and every error line."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mezo_cli.config.schema import ChoicePrompt, Example, TaskConfig
from mezo_cli.errors import UserError
from mezo_cli.tasks import ChoiceEncoder, LmEncoder
from tests import tiny
from tests.lm_bff import LM_BFF, ODD_TEXTS, load_task, rows

FILM = Example(("a joy from start to end ",), 1)


def lm(name: str = "sst2", **changes: Any) -> Any:
    return load_task(name, lm=changes)


def check(task: Any, tokenizer: PreTrainedTokenizerFast, examples: list[Example]) -> None:
    """Check that prompt and word together are the tokens of the whole text, for every label."""
    inputs = LmEncoder(task, tokenizer)
    for example, row in zip(examples, inputs.encode_all(examples), strict=True):
        for index, word in enumerate(inputs.label_ids):
            whole = inputs.prompt(example.texts) + inputs.continuation(index)
            assert tokenizer(whole, split_special_tokens=True)["input_ids"] == [*row.input_ids, *word]
        assert row.position == len(row.input_ids) - 1
        assert row.label == example.label


@pytest.mark.parametrize("name", LM_BFF)
def test_the_tokens_are_those_of_the_whole_text(name: str, tokenizer: PreTrainedTokenizerFast) -> None:
    check(load_task(name), tokenizer, rows(load_task(name), [text for text in ODD_TEXTS if text.strip()]))


def test_the_prompts_are_the_papers(gpt2: PreTrainedTokenizerFast) -> None:
    sst2, rte = LmEncoder(load_task("sst2"), gpt2), LmEncoder(load_task("rte"), gpt2)
    assert sst2.prompt(["  a joy ; ride "]) == "a joy ; ride It was"
    assert [sst2.continuation(i) for i in range(2)] == [" terrible", " great"]
    asked = 'It rained .\nDoes this mean that "It was wet." is true? Yes or No?\n'
    assert rte.prompt(["It rained .", "It was wet."]) == asked
    assert load_task("rte").labels == ["entailment", "not_entailment"]
    assert [rte.continuation(i) for i in range(2)] == ["Yes", "No"]
    assert rte.decode(rte.encode(Example(("It rained .", "It was wet."), 0))) == asked.replace("\n", "\\n")


def test_a_prompt_that_is_too_long_loses_its_start(tokenizer: PreTrainedTokenizerFast) -> None:
    words = ["bad", "utterly dull"]
    whole = LmEncoder(lm(label_words=words), tokenizer)
    cut = LmEncoder(lm(label_words=words, max_length=24), tokenizer)
    bare = tokenizer("a joy from start to end It was", add_special_tokens=False)["input_ids"]
    start = len(whole.encode(FILM).input_ids) - len(bare)
    long = Example((" ".join(["so dull"] * 30),), 0)
    full, kept = whole.encode(long).input_ids, cut.encode(long).input_ids
    # The last token of a word is only scored, never fed.
    assert len(kept) == 24 - max(map(len, cut.label_ids)) + 1
    assert kept[:start] == full[:start]
    assert kept[start:] == full[start - len(kept) :]
    short = whole.encode(FILM).input_ids
    assert cut.encode(FILM).input_ids == short[:start] + short[start:][-len(kept) + start :]


def test_max_length_is_the_models_not_that_of_masked_prompts(gpt2: PreTrainedTokenizerFast, monkeypatch: Any) -> None:
    assert LmEncoder(load_task("sst2", max_length=8), gpt2).max_length > 1_000_000
    monkeypatch.setattr(gpt2, "model_max_length", 300)
    assert LmEncoder(load_task("sst2", max_length=8), gpt2).max_length == 300
    assert LmEncoder(lm(max_length=40), gpt2).max_length == 40
    assert LmEncoder(lm(max_length=400), gpt2).max_length == 300


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"template": None}, "has no template for decoders (objective=lm): set task.lm.template to one that ends in"),
        ({"template": "{sentence} It was {mask}."}, r"{mask}, the label word's place, must come last"),
        ({"template": "{mask}: {sentence}"}, r"must come last"),
        ({"template": "{sentence} It was"}, "has no masks; exactly one {mask} is needed"),
        ({"template": "{sentence} {sep} It was {mask}"}, r"has no {sep}; write the text that separates them, or \n"),
        ({"template": "{sentense} It was {mask}"}, "unknown column 'sentense' (did you mean 'sentence'?)"),
        ({"label_words": ["bad"]}, "has 2 labels (negative, positive) but 1 label words (bad); task.lm.label_words"),
        ({"label_words": ["bad", "bad"]}, "labels 'negative' and 'positive' share their tokens"),
        ({"label_words": ["bad", " "]}, "the label word ' ' (label 'positive') is not a word of the tokenizer"),
        ({"label_words": ["bad " * 9, "good"], "max_length": 8}, "a limit of 8 tokens leaves none for the prompt"),
    ],
)
def test_errors(settings: dict[str, Any], said: str, gpt2: PreTrainedTokenizerFast) -> None:
    with pytest.raises(UserError) as caught:
        LmEncoder(lm(**settings), gpt2)
    assert said in str(caught.value)
    assert "task 'sst2'" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_word_that_merges_with_the_text_before_it_is_refused() -> None:
    letters = ["<unk>", *"abcdefghijklmnopqrstuvwxyzYNI ,!\n", "\nY", "! "]
    merges = [("\n", "Y"), ("!", " ")]
    plain = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, merges, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="<unk>")
    said = "merges with the end of the text before it; end task.lm.template in other words"
    for words, label in ((["Yes", "No"], "negative"), (["No", "Yes"], "positive")):
        with pytest.raises(UserError, match=f"the label word 'Yes' .label '{label}'.: its first token {said}"):
            LmEncoder(lm(template="{sentence}\\n{mask}", label_words=words), tokenizer)
    inputs = LmEncoder(lm(template="{sentence} {mask}", label_words=["Yes", "No"]), tokenizer)
    assert inputs.encode(Example(("what, a film",), 0)).position == 11
    with pytest.raises(UserError, match=f"task 'sst2', dev.tsv:9: its first token {said}"):
        inputs.encode(Example(("what a film!",), 0, "dev.tsv:9"))


def test_an_empty_prompt_is_refused_without_a_start_token(gpt2: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    template, empty = "{sentence|strip} {mask}", Example((" ",), 0, "dev.tsv:7")
    with pytest.raises(UserError, match=r"task 'sst2', dev.tsv:7: the prompt is empty"):
        LmEncoder(lm(template=template), gpt2).encode(empty)
    begun = AutoTokenizer.from_pretrained(tiny.decoder(tmp_path, "opt"))
    assert LmEncoder(lm(template=template), begun).encode(empty).input_ids.tolist() == [begun.bos_token_id]


def test_a_prompt_to_predict_is_cut_as_one_to_train_on(gpt2: PreTrainedTokenizerFast) -> None:
    inputs = LmEncoder(lm(max_length=16), gpt2)
    examples = [Example(("a joy",), 0), Example(("a joy " * 30,), 0)]
    assert inputs.encode_to_fit(examples) == (inputs.encode_all(examples), [False, True])


LIST = ChoicePrompt(prompt="{text}\n-", candidates=[" {candidate} was it"], each="names", right="answers")
ROW = {"text": "It was good", "names": ["Human", "Entity", "Location"], "answers": ["Location", "Entity"]}


@pytest.fixture(scope="module")
def opt(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(tiny.decoder(tmp_path_factory.mktemp("opt"), "opt"))


def of_list(tokenizer: PreTrainedTokenizerFast, **changed: Any) -> ChoiceEncoder:
    return ChoiceEncoder(TaskConfig(name="names", choice=LIST.replace(**changed)), tokenizer)


def row(**columns: Any) -> Example:
    return Example((), -1, "train.jsonl:7", {**ROW, **columns})


def test_the_candidate_that_is_trained_is_the_first_right_one(opt: PreTrainedTokenizerFast) -> None:
    encoded = of_list(opt).encode(row())
    assert (encoded.right, encoded.label) == ((2, 1), 2)
    assert of_list(opt).encode(row(answers="Entity")).right == (1,)
    assert of_list(opt).encode_to_fit([row(answers=None)])[0][0].right == ()


def test_a_candidate_that_merges_with_the_prompt_has_as_many_tokens_as_the_text_has_more(
    opt: PreTrainedTokenizerFast,
) -> None:
    encoder = of_list(opt, prompt="{text}", candidates=["{candidate}"])
    encoded = encoder.encode(row(text="It", names=[" was great", "e good okay"], answers=" was great"))
    full = [opt(text)["input_ids"] for text in ("It was great", "Ite good okay")]
    assert [[*encoded.input_ids, *ids] for ids in encoded.candidates] == full
    assert list(encoded.scored) == [len(ids) - len(opt("It")["input_ids"]) for ids in full]


def test_a_prompt_is_cut_on_the_left_for_its_longest_candidate(opt: PreTrainedTokenizerFast) -> None:
    whole = of_list(opt).encode(row())
    limit = max(map(len, whole.candidates)) + 4
    cut = of_list(opt, max_length=limit).encode(row())
    assert list(cut.input_ids) == [whole.input_ids[0], *whole.input_ids[-3:]]
    assert (cut.candidates, cut.cut, whole.cut) == (whole.candidates, True, False)
    with pytest.raises(UserError, match=r"train.jsonl:7: .* the limit is .*; shorten the row, or give .*too_long=cut"):
        of_list(opt, max_length=limit, too_long="refuse").encode(row())


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        ({"names": []}, "task.choice.each=names is an empty list; it must be a list of texts"),
        ({"names": "Human"}, "task.choice.each=names is the str 'Human'; it must be a list of texts"),
        ({"names": ["Human", 3]}, r"task.choice.each=names is a list of 2 \(int, str\); it must be a list of texts"),
        ({"answers": "Number"}, "the right one, Number, is not among the 3 candidates"),
        ({"answers": 3}, "task.choice.right=answers is the int '3'; it must be a text or a list of texts"),
        ({"answers": []}, "the right one, , is not among the 3 candidates"),
        ({"names": ["Location", "a " * 200]}, r"the candidate .* tokens, and the limit is 64: it would be cut"),
    ],
)
def test_mistakes_in_rows(columns: dict[str, Any], line: str, opt: PreTrainedTokenizerFast) -> None:
    with pytest.raises(UserError, match=f"task 'names', train.jsonl:7: .*{line}"):
        of_list(opt, max_length=64).encode(row(**columns))


def test_an_empty_candidate_and_an_unknown_column(opt: PreTrainedTokenizerFast) -> None:
    with pytest.raises(UserError, match="candidate 2 of 2 is empty"):
        of_list(opt, candidates=["{candidate}"]).encode(row(names=["Human", " "], answers="Human"))
    words = ChoicePrompt(prompt="{sentense} It was", candidates=[" bad", " good"])
    with pytest.raises(UserError, match=r"unknown column 'sentense' \(did you mean 'sentence'\?\)"):
        ChoiceEncoder(TaskConfig(name="two", labels=["a", "b"], columns=["sentence"], choice=words), opt)
    with pytest.raises(UserError, match=r"no \{candidate\}: all would be the same"):
        of_list(opt, candidates=[" a"])


def test_demonstrations_come_before_the_prompt_with_their_right_candidates(opt: PreTrainedTokenizerFast) -> None:
    shown = replace(row(), demonstrations=(row(text="No"), row(text="Yes", answers="Human")))
    text = "No\n- Location was it\n\nYes\n- Human was it\n\nIt was good\n-"
    assert list(of_list(opt).encode(shown).input_ids) == opt(text)["input_ids"]
