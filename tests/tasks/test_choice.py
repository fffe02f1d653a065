"""Prompts with candidates: the tokens of the paper's tasks, the cut, and what is refused."""

from dataclasses import replace
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mezo_cli.config.schema import ChoicePrompt, Example, TaskConfig
from mezo_cli.errors import UserError
from mezo_cli.tasks import ChoiceEncoder
from tests import tiny

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
