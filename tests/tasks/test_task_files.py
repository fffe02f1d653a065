"""The built-in tasks: their files and label order; their tokens by LM-BFF's rules, and by the OPT table's templates."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mezo_cli.config.schema import Example, TaskConfig
from mezo_cli.errors import UserError
from mezo_cli.tasks import ChoiceEncoder, GenerateEncoder, LmEncoder, MlmEncoder, label_word_ids
from tests import tiny
from tests.lm_bff import LM_BFF, ODD_TEXTS, ROOT, byte_bpe, load_task, oracle, rows, sentencepiece, wordpiece
from tests.opt_tasks import CHOICES, GENERATED, WORDS, Row, expected
from tests.opt_tasks import rows as rows_of


@pytest.fixture(scope="module")
def mini() -> PreTrainedTokenizerFast:
    """The demo model's tokenizer: RoBERTa's kind, with a real vocabulary."""
    return AutoTokenizer.from_pretrained(ROOT / "mezo_cli/demo/model")


@pytest.fixture(scope="module", params=[byte_bpe, wordpiece, sentencepiece, None])
def tokenizer(request: pytest.FixtureRequest, mini: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    return mini if request.param is None else request.param()


def test_every_task_is_there():
    names = {path.stem for path in (ROOT / "conf/task").glob("*.yaml")}
    assert names == {*LM_BFF, *CHOICES, *GENERATED, "demo-arithmetic", "demo-sums", "own"}


def test_label_order_is_that_of_the_reference():
    """By name: the reference's ids 0, 1, ... (FACTS section 2), which are not the hub's for MNLI, RTE and TREC."""
    mnli, rte, trec = map(load_task, ("mnli", "rte", "trec"))
    assert (mnli.labels, mnli.label_words) == (["contradiction", "entailment", "neutral"], ["No", "Yes", "Maybe"])
    assert (rte.labels, rte.label_words) == (["entailment", "not_entailment"], ["Yes", "No"])
    words = {"DESC": "Description", "ENTY": "Entity", "ABBR": "Expression", "HUM": "Human", "LOC": "Location"}
    assert dict(zip(trec.hub.labels, trec.label_words, strict=True)) == words | {"NUM": "Number"}
    assert trec.files.labels == ["0", "1", "2", "3", "4", "5"]
    assert load_task("sst5").label_words == ["terrible", "bad", "okay", "good", "great"]


@pytest.mark.parametrize("name", LM_BFF)
def test_tokens_are_lm_bffs(name: str, tokenizer: PreTrainedTokenizerFast):
    task = load_task(name)
    examples = rows(task, ODD_TEXTS)
    expected = [oracle(LM_BFF[name], example, task, tokenizer) for example in examples]
    assert MlmEncoder(task, tokenizer).encode_all(examples) == expected
    assert MlmEncoder(load_task(name, template=LM_BFF[name]), tokenizer).encode_all(examples) == expected


@pytest.mark.parametrize("name", LM_BFF)
def test_tokens_of_real_rows(name: str, shared: Path, mini: PreTrainedTokenizerFast, bert: PreTrainedTokenizerFast):
    task = load_task(name)
    if len(task.columns) == 1:
        table = [line.split("\t")[:1] for line in (shared / "data/glue/SST-2/dev.tsv").read_text().splitlines()[1:]]
    else:
        table = [line.split("\t")[1:3] for line in (shared / "data/glue/RTE/dev.tsv").read_text().splitlines()[1:]]
    examples = [Example(tuple(texts), 0, f"dev.tsv:{i + 2}") for i, texts in enumerate(table[:250])]
    for tokenizer in (mini, bert):
        pairs = [(example, oracle(LM_BFF[name], example, task, tokenizer)) for example in examples]
        pairs = [(example, expected) for example, expected in pairs if expected is not None]
        assert len(pairs) > 100
        assert MlmEncoder(task, tokenizer).encode_all([example for example, _ in pairs]) == [row for _, row in pairs]


@pytest.mark.parametrize("name", LM_BFF)
def test_label_words_are_single_tokens(name: str, mini: PreTrainedTokenizerFast):
    task = load_task(name)
    assert mini.convert_ids_to_tokens(label_word_ids(task, mini)) == ["Ġ" + word for word in task.label_words]


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
    for row in rows_of(name):
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
    assert expected("copa", rows_of("copa")[6]) == ("My shoes were wet because", [dry, wet], [wet])
    assert expected("boolq", rows_of("boolq")[0])[0] == (
        "The Dorn -- The Dorn is a river. It flows through two countries. Is the river dorn in two countries?\n"
    )
    assert expected("record", rows_of("record")[2]) == (
        "Tor Lind wrote a book on Malta.\n- It took nine years\n-",
        [" Tor Lind is where Tor Lind's best book is set.", " Malta is where Malta's best book is set."],
        [" Malta is where Malta's best book is set."],
    )


@pytest.mark.parametrize("name", WORDS)
def test_prompts_and_words_of_objective_lm_are_the_same(name: str, opt: PreTrainedTokenizerFast) -> None:
    task = load_task(name)
    encoder = LmEncoder(task, opt)
    for row in rows_of(name):
        texts = [columns(task, row)[column] for column in task.columns]
        prompt, candidates, _ = expected(name, row)
        words = [encoder.continuation(index) for index in range(len(task.labels))]
        assert [encoder.prompt(texts) + word for word in words] == [prompt + text for text in candidates]


@pytest.mark.parametrize("kind", ["opt", "gpt2", "llama"])
@pytest.mark.parametrize("name", GENERATED)
def test_prompts_and_answers_of_squad_and_drop(name: str, kind: str, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny.decoder(tmp_path, kind))
    encoder = GenerateEncoder(load_task(name), tokenizer)
    for row in rows_of(name):
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
        ids.append(LmEncoder(cb, opt).encode(example(cb, rows_of("cb")[0])).input_ids)
        ids.append(ChoiceEncoder(cb, opt).encode(example(cb, rows_of("cb")[0])).input_ids)
        ids.append(ChoiceEncoder(record, opt).encode(example(record, rows_of("record")[0])).input_ids)
        ids.append(GenerateEncoder(squad, opt).encode(example(squad, rows_of("squad")[0])).input_ids)
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
