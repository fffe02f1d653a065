"""The tasks of the paper's OPT table: prompts and candidates character by character, and the first token."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mezo_cli.config.schema import Example, TaskConfig
from mezo_cli.errors import UserError
from mezo_cli.tasks import ChoiceEncoder, GenerateEncoder, LmEncoder
from tests import tiny
from tests.lm_bff import load_task
from tests.opt_tasks import CHOICES, GENERATED, WORDS, Row, expected, rows


@pytest.fixture(scope="module")
def opt(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(tiny.decoder(tmp_path_factory.mktemp("opt"), "opt"))


def columns(task: TaskConfig, row: Row) -> Row:
    """Return the columns of a row by the names that the task gives them."""
    return {task.rename.get(name, name): value for name, value in row.items()}


def example(task: TaskConfig, row: Row) -> Example:
    """Return a row as it is read: its texts and label, or all of its columns for a task without labels."""
    if not task.labels:
        return Example((), -1, "", row)
    _, candidates, (right, *_) = expected(task.name, row)
    return Example(tuple(columns(task, row)[name] for name in task.columns), candidates.index(right))


@pytest.mark.parametrize("name", CHOICES)
def test_prompts_and_candidates_are_those_of_the_released_templates(name: str, opt: PreTrainedTokenizerFast) -> None:
    task = load_task(name)
    encoder = ChoiceEncoder(task, opt)
    for row in rows(name):
        encoded = encoder.encode(example(task, row))
        prompt, candidates, right = expected(name, row)
        assert (encoder.decode(encoded), [*encoded.texts]) == ("</s>" + prompt, candidates)
        assert [candidates[number] for number in encoded.right] == right
        for text, ids, scored in zip(candidates, encoded.candidates, encoded.scored, strict=True):
            full = opt(prompt + text)["input_ids"]
            assert [*encoded.input_ids, *ids] == full
            assert scored == len(full) - len(opt(prompt)["input_ids"])


def test_three_of_them_in_full() -> None:
    wet, dry = " i'd crossed a stream.", " it had been dry."
    assert expected("copa", rows("copa")[6]) == ("My shoes were wet because", [dry, wet], [wet])
    assert expected("boolq", rows("boolq")[0])[0] == (
        "The Dorn -- The Dorn is a river. It flows through two countries. Is the river dorn in two countries?\n"
    )
    assert expected("record", rows("record")[2]) == (
        "Tor Lind wrote a book on Malta.\n- It took nine years\n-",
        [" Tor Lind is where Tor Lind's best book is set.", " Malta is where Malta's best book is set."],
        [" Malta is where Malta's best book is set."],
    )


@pytest.mark.parametrize("name", WORDS)
def test_prompts_and_words_of_objective_lm_are_the_same(name: str, opt: PreTrainedTokenizerFast) -> None:
    task = load_task(name)
    encoder = LmEncoder(task, opt)
    for row in rows(name):
        texts = [columns(task, row)[column] for column in task.columns]
        prompt, candidates, _ = expected(name, row)
        words = [encoder.continuation(index) for index in range(len(task.labels))]
        assert [encoder.prompt(texts) + word for word in words] == [prompt + text for text in candidates]


@pytest.mark.parametrize("kind", ["opt", "gpt2", "llama"])
@pytest.mark.parametrize("name", GENERATED)
def test_prompts_and_answers_of_squad_and_drop(name: str, kind: str, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny.decoder(tmp_path, kind))
    encoder = GenerateEncoder(load_task(name), tokenizer)
    for row in rows(name):
        prompt, _, (answer,) = expected(name, row)
        encoded = encoder.encode(Example((), -1, "", row))
        assert [*encoded.input_ids] == tokenizer(prompt)["input_ids"]
        assert [*encoded.input_ids, *encoded.answer_ids] == tokenizer(prompt + answer)["input_ids"]
        golds = row["answers"]["text"] if name == "squad" else row["answers_spans"]["spans"]
        assert encoded.golds == tuple(golds)


def test_the_first_token_is_the_tokenizers_or_the_one_of_the_released_code(opt: PreTrainedTokenizerFast) -> None:
    """OPT's tokenizer begins with </s>; the released code sets `bos_token_id` to 0. Here </s> is 0, so it is 1."""
    own, other = [], []
    for bos, ids in ((None, own), (1, other)):
        cb, record, squad = (load_task(name, bos_token_id=bos) for name in ("cb", "record", "squad"))
        ids.append(LmEncoder(cb, opt).encode(example(cb, rows("cb")[0])).input_ids)
        ids.append(ChoiceEncoder(cb, opt).encode(example(cb, rows("cb")[0])).input_ids)
        ids.append(ChoiceEncoder(record, opt).encode(example(record, rows("record")[0])).input_ids)
        ids.append(GenerateEncoder(squad, opt).encode(example(squad, rows("squad")[0])).input_ids)
    assert [one[0] for one in own] == [opt("a")["input_ids"][0]] * 4 == [0] * 4
    assert [one[0] for one in other] == [1] * 4
    assert [one[1:] for one in other] == [one[1:] for one in own]


def test_a_tokenizer_that_begins_with_nothing_gets_a_first_token(tmp_path: Path) -> None:
    gpt2 = AutoTokenizer.from_pretrained(tiny.decoder(tmp_path, "gpt2"))
    task, example = load_task("cb"), Example(("It", "was"), 0)
    own = LmEncoder(task, gpt2).encode(example).input_ids
    assert LmEncoder(task.replace(bos_token_id=7), gpt2).encode(example).input_ids == type(own)("i", [7, *own])
    with pytest.raises(UserError, match=rf"^task.bos_token_id=60000: the tokenizer .* has {len(gpt2)} tokens, from 0$"):
        LmEncoder(task.replace(bos_token_id=60_000), gpt2)
