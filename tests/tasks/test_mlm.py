"""Templates, and the input encoders of mlm and cls: label words, prompts, plain texts, and every error line."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from mezo_cli.config.schema import Example, TokenizedExample
from mezo_cli.errors import UserError
from mezo_cli.tasks import ClsEncoder, LmEncoder, MlmEncoder, label_word_ids
from mezo_cli.tasks.template import FILTERS, Literal, RowTemplate, Sentence, Special, parse_template
from tests.lm_bff import LM_BFF, ODD_TEXTS, byte_bpe, load_task, oracle, rows, sentencepiece, wordpiece

CLS, MASK, SEP = Special("cls"), Special("mask"), Special("sep+")


def parsed(text: str, *columns: str) -> tuple[object, ...]:
    return tuple(parse_template(text, list(columns or ("a", "b")), "t"))


@pytest.mark.parametrize(
    ("templates", "parts"),
    [
        (
            [f"{{a}} It was {mask}." for mask in ("{mask}", "[MASK]", "<mask>", "{ mask }")],
            (CLS, Sentence(0), Literal(" It was"), MASK, Literal("."), SEP),
        ),
        (
            [f"{{a}} {sep} {{b}}: {{mask}}" for sep in ("{sep}", "[SEP]", "</s>")],
            (CLS, Sentence(0), SEP, Sentence(1, (), True), Literal(":"), MASK, SEP),
        ),
        (["{a} {mask} {sep}\n", "{a} {mask}"], (CLS, Sentence(0), MASK, SEP)),
        (["{{{a}}} *_* {mask}"], (CLS, Literal("{"), Sentence(0), Literal("} *_*"), MASK, SEP)),
        (
            ["  {a}  is {b}  {mask} "],
            (CLS, Literal(" "), Sentence(0, (), True), Literal("  is"), Sentence(1, (), True), MASK, SEP),
        ),
    ],
)
def test_parts(templates: list[str], parts: tuple[object, ...]):
    assert [parsed(template) for template in templates] == [parts] * len(templates)


def test_filters_are_lm_bffs_letters():
    assert parsed("{a|lower_first|drop_last} {b | upper_first}{mask}") == parsed(
        "*cls**sentl-_0**+sentu_1**mask**sep+*"
    )
    assert rendered("lower_first|drop_last", "A") == ""
    assert rendered("strip|upper_first", "  éa ") == "Éa"


def rendered(filters: str, *texts: str) -> str:
    columns = dict(zip("abc", texts, strict=False))
    return RowTemplate(f"{{a|{filters}}}", "t").render(columns, "t")


FILTER_CASES = [  # filters, texts, result
    ("lower", ("The Büro",), "the büro"),
    ("end_with('?')", ("is it",), "is it?"),
    ("end_with('?')", ("is it?",), "is it?"),
    ("end_with('?') | upper_first", ("is iT? no",), "Is iT? no?"),
    ("drop_end('.')", ("It rained.",), "It rained"),
    ("drop_end('.')", ("It rained",), "It rained"),
    ("drop_end('.')", ("It rained..",), "It rained."),
    ("lower_first_word", ("The Man left",), "the Man left"),
    ("lower_first_word", ("TV was off",), "tv was off"),
    ("lower_first_word", ("I saw it",), "I saw it"),
    ("lower_first_word", ("I'm Here",), "i'm Here"),
    ("lower_first_word", ("I",), "I"),
    ("replace('@x', b)", ("@x and @x", "Ann, | (B)"), "Ann, | (B) and Ann, | (B)"),
    ("""replace("@h\\n", '- ')""", ("a\n@h\nb",), "a\n- b"),
    ("replace( ',' , '|' )|replace('|', '(')", ("a,b",), "a(b"),
]


@pytest.mark.parametrize(("filters", "texts", "result"), FILTER_CASES)
def test_filters_and_their_code_change_a_text(filters: str, texts: tuple[str, ...], result: str):
    assert rendered(filters, *texts) == result
    (sentence,) = RowTemplate(f"{{a|{filters}}}", "t").parts
    assert isinstance(sentence, Sentence)
    assert eval(sentence.write_code(["a", "b"]), dict(zip("ab", texts, strict=False))) == result


def test_choose_puts_a_word_for_the_value_of_a_column():
    choose = "choose('effect', 'so', 'cause', 'because')"
    assert (rendered(choose, "effect"), rendered(choose, "cause")) == ("so", "because")
    with pytest.raises(UserError, match=r"^t: filter 'choose' has no word for 'why', only for effect, cause$"):
        rendered(choose, "why")
    with pytest.raises(UserError, match=r"filter 'choose' is only for task.choice and task.generate"):
        parsed("{a|choose('x', 'y')} {mask}")


def test_every_filter_is_tested():
    names = {name for filters, _, _ in FILTER_CASES for name in re.findall(r"\w+", filters)}
    assert set(FILTERS) - names == {"drop_last", "lower_first", "strip", "choose"}  # the tests above


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{premise} It was great.", "has no masks; exactly one"),
        ("{premise} It was {mask}, <mask>.", "has 2 masks; exactly one"),
        ("*cls**sent_0*_It_was.*sep+*", "has no masks"),
        ("*cls**mask**sent_0**mask**sep+*", "has 2 masks"),
        ("It was {mask}.", "uses no column; write {column} for one of premise, hypothesis"),
        ("{premis} It was {mask}.", "unknown column 'premis' (did you mean 'premise'?); the columns are premise, hyp"),
        ("{} It was {mask}.", "unknown column ''"),
        ("{premise|lower_frst} {mask}.", "unknown filter 'lower_frst' (did you mean 'lower_first'?); allowed are drop"),
        ("{premise|replace('a')} {mask}.", "filter 'replace('a')' is written replace('OLD', 'NEW')"),
        ("{premise|end_with('?'} {mask}.", "filter 'end_with('?'' is written end_with('END')"),
        ("{premise|strip('x')} {mask}.", "filter 'strip('x')' is written strip"),
        ("{premise|replace('a', hypothesi)} {mask}.", "unknown column 'hypothesi' (did you mean 'hypothesis'?)"),
        ("{premise} was {mask|strip}.", "{mask} takes no filter, 'strip' was given"),
        ("{premise It was {mask}.", "unbalanced brace at character 1; a literal brace is written {{"),
        ("{premise} It was {mask}}.", "unbalanced brace at character 24; a literal brace is written }}"),
        ("[CLS] {premise} {mask}", "leave out [CLS], the start token comes by itself"),
        ("*cls**sent_0*_It_was*mask.*sep+*", "unbalanced stars"),
        ("*cls*sent_0*mask**sep+*", "'sent_0' is outside its stars; write *sent_0*"),
        ("*cls**sent0*_It_was*mask*.*sep+*", "unknown part 'sent0' (did you mean 'sent_0'?)"),
        ("*cls**sent_2*_It_was*mask*.*sep+*", "'sent_2' asks for text 2, but the columns are only premise, hypothesis"),
    ],
)
def test_template_errors(template: str, message: str):
    with pytest.raises(UserError) as error:
        parse_template(template, ["premise", "hypothesis"], "rte")
    assert message in str(error.value)
    assert "task 'rte'" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_template_needs_columns_and_none_is_called_mask():
    with pytest.raises(UserError, match="names no columns"):
        parse_template("{a} {mask}", [], "t")
    with pytest.raises(UserError, match="cannot be called 'mask'"):
        parse_template("{a} {mask}", ["a", "mask"], "t")


@pytest.fixture(scope="module", params=[byte_bpe, wordpiece, sentencepiece])
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    return request.param()


@pytest.fixture(scope="module")
def bpe() -> PreTrainedTokenizerFast:
    return byte_bpe()


def test_words_after_punctuation_take_no_space(bpe: PreTrainedTokenizerFast):
    ids = label_word_ids(load_task("sst2", label_words=[".", ","]), bpe)
    assert bpe.convert_ids_to_tokens(ids) == [".", ","]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["great"], "2 labels (negative, positive) but 1 label words (great)"),
        (["great", "great"], "labels 'negative' and 'positive' share their tokens, through their words 'great' and"),
        (["great", "unbelievable"], "label word 'unbelievable' (label 'positive') is not one token"),
        (["", "great"], "label word '' (label 'negative') is not one token"),
        (["<mask>", "great"], "label word '<mask>' (label 'negative') becomes '<mask>'"),
        (["<unk>", "great"], "becomes '<unk>'"),
    ],
)
def test_label_word_errors(words: list[str], message: str, bpe: PreTrainedTokenizerFast):
    with pytest.raises(UserError) as error:
        MlmEncoder(load_task("sst2", label_words=words), bpe)
    assert message in str(error.value)
    assert "task 'sst2'" in str(error.value)


def test_words_that_are_no_two_tokens_to_bert(bert: PreTrainedTokenizerFast):
    shared = "'negative' and 'positive' share their tokens, through their words 'Great' and 'great'"
    for word, said in (("Great", shared), ("☃", r"label word '☃' .* becomes '\[UNK\]'")):
        with pytest.raises(UserError, match=said):
            MlmEncoder(load_task("sst2", label_words=[word, "great"]), bert)


@pytest.mark.parametrize("labels", [["only"], ["same", "same"]])
def test_labels_must_be_two_or_more_and_distinct(labels: list[str], bpe: PreTrainedTokenizerFast):
    task = load_task("sst2", labels=labels, label_words=["great", "terrible"][: len(labels)])
    for kind in (MlmEncoder, ClsEncoder):
        with pytest.raises(UserError, match=r"task.labels needs two or more names, all different"):
            kind(task, bpe)


@settings(max_examples=60)
@given(
    texts=st.lists(st.text(max_size=30), min_size=2, max_size=8), name=st.sampled_from(["rte", "mrpc", "sst5", "trec"])
)
def test_any_text_as_lm_bff(texts: list[str], name: str, bpe: PreTrainedTokenizerFast, bert: PreTrainedTokenizerFast):
    task = load_task(name, max_length=40, first_limit=16, other_limit=9)
    for tokenizer in (bpe, bert):
        prompt = MlmEncoder(task, tokenizer)
        encoded = prompt.encode_all(rows(task, texts))
        assert encoded == [oracle(LM_BFF[name], row, task, tokenizer) for row in rows(task, texts)]
        for row in encoded:
            assert row.input_ids.count(tokenizer.mask_token_id) == 1
            assert row.input_ids[row.position] == tokenizer.mask_token_id
            assert len(row.input_ids) == len(row.token_type_ids) <= 40


def test_special_tokens_spelled_in_the_data_are_text(tokenizer: PreTrainedTokenizerFast):
    task = load_task("sst2")
    said = f"no {tokenizer.mask_token} film {tokenizer.sep_token}{tokenizer.cls_token}{tokenizer.mask_token}"
    row = MlmEncoder(task, tokenizer).encode(Example((said,), 0))
    assert row.input_ids.count(tokenizer.mask_token_id) == 1
    assert row.position == len(row.input_ids) - 3


def test_rows_one_by_one_and_no_rows(bpe: PreTrainedTokenizerFast):
    task = load_task("rte")
    examples = rows(task, ODD_TEXTS)
    for inputs in (MlmEncoder(task, bpe), ClsEncoder(task, bpe)):
        whole = inputs.encode_all(examples)
        assert [inputs.encode(example) for example in examples] == whole
        assert inputs.encode_all([]) == []


@pytest.mark.parametrize("encoder", [MlmEncoder, ClsEncoder, LmEncoder])
def test_encoding_leaves_the_tokenizers_options_as_they_were(encoder: Any):
    """They are saved in tokenizer.json: a checkpoint would carry those of the last rows that were encoded."""
    for options in ({}, {"enable_truncation": {"max_length": 9}, "enable_padding": {"length": 9}}):
        tokenizer = byte_bpe()
        for name, values in options.items():
            getattr(tokenizer.backend_tokenizer, name)(**values)
        before = tokenizer.backend_tokenizer.to_str()
        task = load_task("sst2", max_length=40, first_limit=16)
        encoder(task, tokenizer).encode_all(rows(task, ODD_TEXTS))
        assert tokenizer.backend_tokenizer.to_str() == before
        assert not tokenizer.backend_tokenizer.encode_special_tokens


def test_segment_ids_grow_after_a_separator_for_bert_only(bert: PreTrainedTokenizerFast, bpe: PreTrainedTokenizerFast):
    task = load_task("rte", template="{premise} {sep} {hypothesis}? {mask}")
    example = Example(("no film", "yes"), 0)
    row = MlmEncoder(task, bert).encode(example)
    first = row.input_ids.index(bert.sep_token_id)
    assert list(row.token_type_ids) == [0] * (first + 1) + [1] * (len(row.input_ids) - first - 1)
    assert set(MlmEncoder(task, bpe).encode(example).token_type_ids) == {0}
    with pytest.raises(UserError, match="reaches segment 2"):
        MlmEncoder(load_task("rte", template="{premise} {sep} {hypothesis}{sep} {mask}"), bert)


def test_a_mask_cut_off_names_row_length_and_limit(bpe: PreTrainedTokenizerFast):
    prompt = MlmEncoder(load_task("sst2", max_length=16), bpe)
    text = "no " * 20
    length = 1 + len(bpe.tokenize(text)) + len(bpe.tokenize(" It was")) + 3
    with pytest.raises(UserError) as error:
        prompt.encode_all([Example(("no",), 0, "train.tsv:2"), Example((text,), 0, "train.tsv:3")])
    for said in ("task 'sst2', train.tsv:3:", f"{length} tokens", "limit of 16 (task.max_length)", "task.first_limit"):
        assert said in str(error.value)
    first = MlmEncoder(load_task("trec", max_length=16), bpe)  # its mask comes first
    assert len(first.encode(Example((text,), 0)).input_ids) == 16


def test_the_mask_may_be_the_last_token(bpe: PreTrainedTokenizerFast):
    example = Example(("no yes film",), 0, "x:1")
    mask = MlmEncoder(load_task("sst2"), bpe).encode(example).position
    assert mask >= 7
    assert MlmEncoder(load_task("sst2", max_length=mask + 1), bpe).encode(example).input_ids[-1] == bpe.mask_token_id
    with pytest.raises(UserError, match=f"its mask is token {mask + 1}, cut off by the limit of {mask}"):
        MlmEncoder(load_task("sst2", max_length=mask), bpe).encode(example)


def test_the_models_own_limit():
    tokenizer = byte_bpe()
    tokenizer.model_max_length = 12
    task = load_task("sst2")
    assert MlmEncoder(task, tokenizer).max_length == ClsEncoder(task, tokenizer).max_length == 12
    with pytest.raises(UserError, match=r"limit of 12 \(the model takes no more\)") as error:
        MlmEncoder(task, tokenizer).encode(Example(("no " * 20,), 0, "x:1"))
    assert "raise" not in str(error.value)


def test_tokenizers_that_lack_something():
    for name, said in (("mask", r"task 'sst2': .* has no mask token"), ("sep", "needs a sep token")):
        tokenizer = byte_bpe()
        setattr(tokenizer, f"{name}_token", None)
        with pytest.raises(UserError, match=said):
            MlmEncoder(load_task("sst2"), tokenizer)
    assert ClsEncoder(load_task("sst2"), tokenizer).encode(Example(("no",), 1)).label == 1
    slow: Any = SimpleNamespace(is_fast=False, name_or_path="some/model")
    for kind in (MlmEncoder, ClsEncoder):
        with pytest.raises(UserError, match=r"the tokenizer some/model .* is not a fast tokenizer"):
            kind(load_task("sst2"), slow)


@pytest.mark.parametrize("name", ["sst2", "rte"])
def test_plain_texts_are_joined_by_the_tokenizer(name: str, tokenizer: PreTrainedTokenizerFast):
    task = load_task(name, max_length=12)
    plain = ClsEncoder(task, tokenizer)
    long = Example(("no yes film " * 9, "a funny film " * 7)[: len(task.columns)], 1)
    for example in [*rows(task, ODD_TEXTS), long]:
        # As a batch of one: alone, transformers takes an empty second text for none.
        own = tokenizer(*([t] for t in example.texts), truncation=True, max_length=12, split_special_tokens=True)
        ids = own["input_ids"][0]
        segments = own["token_type_ids"][0] if "token_type_ids" in own else [0] * len(ids)
        assert plain.encode(example) == TokenizedExample(ids, segments, -1, example.label)
    assert len(plain.encode(long).input_ids) == 12


def test_three_plain_texts_are_refused(bpe: PreTrainedTokenizerFast):
    said = r"task 'rte': objective=cls reads one or two texts, task.columns has 3 \(a, b, c\)"
    with pytest.raises(UserError, match=said):
        ClsEncoder(load_task("rte", columns=["a", "b", "c"]), bpe)


@pytest.mark.parametrize("name", ["sst2", "mnli"])
@pytest.mark.parametrize("kind", [MlmEncoder, ClsEncoder])
def test_rows_to_predict_are_cut_as_those_to_train_on(name: str, kind: Any, bpe: PreTrainedTokenizerFast):
    inputs = kind(load_task(name, max_length=24), bpe)
    fits = [Example((text, text)[: len(inputs.task.columns)], 0) for text in ("a fine film", "no")]
    assert inputs.encode_to_fit(fits) == (inputs.encode_all(fits), [False, False])


def test_a_row_to_predict_keeps_its_mask(bpe: PreTrainedTokenizerFast):
    task = load_task("mnli", max_length=24, first_limit=None)
    inputs, long = MlmEncoder(task, bpe), "a fine film " * 9
    with pytest.raises(UserError, match="its mask is token"):
        inputs.encode(Example((long, "b"), 0))
    encoded, cut = inputs.encode_to_fit([Example((long, "b"), 0), Example((long, long), 0), Example(("b", long), 0)])
    assert cut == [True, True, True]
    assert [len(row.input_ids) for row in encoded] == [24, 24, 24]
    for row in encoded:
        assert row.input_ids[row.position] == bpe.mask_token_id
    assert inputs.decode(encoded[0]).endswith(", b</s>")
    limited = MlmEncoder(load_task("mnli", max_length=24, first_limit=4), bpe)
    assert limited.encode_to_fit([Example((long, "b"), 0)]) == ([limited.encode(Example((long, "b"), 0))], [True])
    with pytest.raises(UserError, match="cut off by the limit of 8"):  # the template alone is too long
        MlmEncoder(load_task("sst2", max_length=8, template="a b c d e f g h i {sentence} {mask}"), bpe).encode_to_fit(
            [Example(("x",), 0)]
        )
