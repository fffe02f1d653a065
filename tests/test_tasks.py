"""The template language, the label words, the built-in tasks; checked against LM-BFF's rules written a second time."""

import re
import string
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mezo_cli.errors import UserError
from mezo_cli.schema import Encoded, Example, TaskConfig
from mezo_cli.tasks import PlainInput, Prompt, label_word_ids
from mezo_cli.templates import Literal, Sentence, Special, Template

ROOT = Path(__file__).resolve().parents[1]
YES_NO = "*cls**sent-_0*?*mask*,*+sentl_1**sep+*"
SAME = "*cls**sent_0**mask*,*+sentl_1**sep+*"
IT_WAS = "*cls**sent_0*_It_was*mask*.*sep+*"
THIS_IS = "*cls**sent_0*_This_is*mask*.*sep+*"
LM_BFF = {
    "sst2": IT_WAS,
    "sst5": IT_WAS,
    "mr": IT_WAS,
    "cr": IT_WAS,
    "mpqa": IT_WAS,
    "subj": THIS_IS,
    "cola": THIS_IS,
    "mnli": YES_NO,
    "snli": YES_NO,
    "rte": YES_NO,
    "qnli": YES_NO,
    "trec": "*cls**mask*:*+sent_0**sep+*",
    "mrpc": SAME,
    "qqp": SAME,
}
# Empty, one character, spaces at the ends, letters whose case changes their length, and spelled-out special tokens.
ODD_TEXTS = [
    "",
    "A",
    " ",
    "a gripping , funny film ",
    "Ünïcode ☃ 中文",
    "İstanbul ",
    "ß",
    "no . yes ? It was great",
    "<mask> [MASK] </s> [SEP] <s>",
]


def load_task(name: str, **changes: object) -> TaskConfig:
    schema = OmegaConf.structured(TaskConfig)
    for node in (schema, schema.hub, schema.files):
        OmegaConf.set_readonly(node, False)  # frozen in the schema, so that a finished config cannot change
    task = OmegaConf.to_object(OmegaConf.merge(schema, OmegaConf.load(ROOT / f"conf/task/{name}.yaml"), changes))
    assert isinstance(task, TaskConfig)
    return task


ALL_WORDS = sorted({word for name in LM_BFF for word in load_task(name).label_words})
CORPUS = [f"{w} . It was {w} . This is {w} , {w.lower()} ? no : yes a gripping , funny film" for w in ALL_WORDS] * 20


def byte_bpe() -> PreTrainedTokenizerFast:
    """RoBERTa's kind: bytes, a space belongs to the word after it, no segments."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tok.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=900, special_tokens=special, initial_alphabet=alphabet)
    )
    tok.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    names = {"cls_token": "<s>", "bos_token": "<s>", "sep_token": "</s>", "eos_token": "</s>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=tok,
        unk_token="<unk>",
        mask_token="<mask>",
        model_input_names=["input_ids", "attention_mask"],
        **names,
    )


def _bert_like(tok: Tokenizer, names: list[str]) -> PreTrainedTokenizerFast:
    ids = [("[CLS]", tok.token_to_id("[CLS]")), ("[SEP]", tok.token_to_id("[SEP]"))]
    tok.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ids
    )
    special = {f"{name.lower()}_token": f"[{name}]" for name in ("CLS", "SEP", "PAD", "UNK", "MASK")}
    return PreTrainedTokenizerFast(tokenizer_object=tok, model_input_names=names, **special)


def wordpiece() -> PreTrainedTokenizerFast:
    """BERT's kind: words, lower-cased, with segments."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tok = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tok.normalizer = normalizers.BertNormalizer(lowercase=True)
    tok.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tok.decoder = decoders.WordPiece(cleanup=False)
    tok.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=600, special_tokens=special))
    return _bert_like(tok, ["input_ids", "token_type_ids", "attention_mask"])


def sentencepiece() -> PreTrainedTokenizerFast:
    """ALBERT's and XLM-R's kind: a unigram model in which every text begins with a space."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = sorted({word for line in CORPUS for word in line.split()})
    characters = sorted({*"\u2581", *string.printable.strip(), *"Üï☃"})
    scored = [(token, -9.0) for token in characters] + [("\u2581" + word, -8.0) for word in words]
    tok = Tokenizer(models.Unigram([(token, 0.0) for token in special] + scored, unk_id=1, byte_fallback=False))
    tok.pre_tokenizer = pre_tokenizers.Metaspace()
    tok.decoder = decoders.Metaspace()
    tok.add_special_tokens(special)
    return _bert_like(tok, ["input_ids", "token_type_ids", "attention_mask"])


@pytest.fixture(scope="module")
def mini(shared: Path) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(shared / "models/roberta-mini")


@pytest.fixture(scope="module", params=["byte_bpe", "wordpiece", "sentencepiece", "roberta-mini"])
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    if request.param == "roberta-mini":
        return request.getfixturevalue("mini")
    return {"byte_bpe": byte_bpe, "wordpiece": wordpiece, "sentencepiece": sentencepiece}[request.param]()


@pytest.fixture(scope="module")
def bpe() -> PreTrainedTokenizerFast:
    return byte_bpe()


@pytest.fixture(scope="module")
def bert() -> PreTrainedTokenizerFast:
    return wordpiece()


def oracle(lm_bff: str, example: Example, task: TaskConfig, tokenizer: PreTrainedTokenizerFast) -> Encoded | None:
    """LM-BFF's rules, read part by part from the string, one row at a time; None where the mask is cut off."""

    def plain(text: str) -> list[int]:
        ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return [i for i in ids if i != tokenizer.mask_token_id]

    ids: list[int] = []
    segments: list[int] = []
    segment = 0
    for piece in filter(None, lm_bff.split("*")):
        found = re.fullmatch(r"(?P<plus>\+?)sent(?P<case>[lu]?)(?P<cut>-?)_(?P<number>\d)", piece)
        raises = 0
        if found:
            text = example.texts[int(found["number"])]
            head, tail = text[:1], text[1:]
            text = {"l": head.lower(), "u": head.upper(), "": head}[found["case"]] + tail
            text = text[: len(text) - 1] if found["cut"] and text else text
            limit = task.other_limit if int(found["number"]) else task.first_limit
            new = plain((" " if found["plus"] else "") + text)
            new = new if limit is None else new[:limit]
        elif piece in ("cls", "mask", "sep"):
            new = [
                {"cls": tokenizer.cls_token_id, "mask": tokenizer.mask_token_id, "sep": tokenizer.sep_token_id}[piece]
            ]
        elif piece == "sep+":
            new, raises = [tokenizer.sep_token_id], 1
        elif len(piece) == 1 and tokenizer.convert_tokens_to_ids(piece) not in (None, tokenizer.unk_token_id):
            new = [tokenizer.convert_tokens_to_ids(piece)]
        else:
            new = plain(piece.replace("_", " "))
        ids += new
        segments += [segment] * len(new)
        segment += raises
    limit = min(task.max_length, tokenizer.model_max_length)
    ids = ids[:limit]
    if tokenizer.mask_token_id not in ids:
        return None
    has_segments = "token_type_ids" in tokenizer.model_input_names
    return Encoded(
        ids, segments[:limit] if has_segments else [0] * len(ids), ids.index(tokenizer.mask_token_id), example.label
    )


def rows(task: TaskConfig, texts: list[str]) -> list[Example]:
    """Every text in every column at least once, neighbours paired."""
    turned = [texts[i:] + texts[:i] for i in range(len(task.columns))]
    return [Example(row, i % len(task.labels), f"rows:{i + 1}") for i, row in enumerate(zip(*turned, strict=True))]


# --- the built-in tasks -------------------------------------------------------------------------------------------


def test_every_task_is_there():
    assert {path.stem for path in (ROOT / "conf/task").glob("*.yaml")} == set(LM_BFF)


@pytest.mark.parametrize("name", LM_BFF)
def test_task_file(name: str):
    text = (ROOT / f"conf/task/{name}.yaml").read_text()
    assert len(text.splitlines()) < 25
    assert f"LM-BFF: {LM_BFF[name]}" in text
    raw = yaml.safe_load(text)
    assert all(isinstance(word, str) for key in ("labels", "label_words", "columns") for word in raw[key])
    task = load_task(name)
    assert task.name == name
    sizes = {len(task.labels), len(task.label_words), len(task.hub.labels), len(task.files.labels)}
    assert len(sizes) == 1
    assert all(
        len(set(names)) == len(names) for names in (task.labels, task.label_words, task.hub.labels, task.files.labels)
    )
    assert task.hub.path
    assert task.files.folder
    if task.files.columns:
        named = {task.rename.get(column, column) for column in task.files.columns}
        assert named >= {*task.columns, task.label_column}


def test_label_order_is_the_references():
    """By name: the reference's ids 0, 1, ... (FACTS section 2), which are not the hub's for MNLI, RTE and TREC."""
    assert dict(zip(load_task("mnli").labels, load_task("mnli").label_words, strict=True)) == {
        "contradiction": "No",
        "entailment": "Yes",
        "neutral": "Maybe",
    }
    assert dict(zip(load_task("rte").labels, load_task("rte").label_words, strict=True)) == {
        "entailment": "Yes",
        "not_entailment": "No",
    }
    trec = load_task("trec")
    assert dict(zip(trec.hub.labels, trec.label_words, strict=True)) == {
        "DESC": "Description",
        "ENTY": "Entity",
        "ABBR": "Expression",
        "HUM": "Human",
        "LOC": "Location",
        "NUM": "Number",
    }
    assert trec.files.labels == ["0", "1", "2", "3", "4", "5"]
    assert load_task("sst5").label_words == ["terrible", "bad", "okay", "good", "great"]


@pytest.mark.parametrize("name", LM_BFF)
def test_readable_template_is_lm_bffs(name: str):
    task = load_task(name)
    assert Template.parse(task.template, task.columns, name) == Template.parse(LM_BFF[name], task.columns, name)


@pytest.mark.parametrize("name", LM_BFF)
def test_tokens_are_lm_bffs(name: str, tokenizer: PreTrainedTokenizerFast):
    task = load_task(name)
    examples = rows(task, ODD_TEXTS)
    expected = [oracle(LM_BFF[name], example, task, tokenizer) for example in examples]
    assert Prompt(task, tokenizer).encode_all(examples) == expected
    assert Prompt(load_task(name, template=LM_BFF[name]), tokenizer).encode_all(examples) == expected


@pytest.mark.parametrize("name", LM_BFF)
def test_tokens_are_lm_bffs_on_real_rows(
    name: str, shared: Path, mini: PreTrainedTokenizerFast, bert: PreTrainedTokenizerFast
):
    task = load_task(name)
    if len(task.columns) == 1:
        table = [line.split("\t")[:1] for line in (shared / "data/glue/SST-2/dev.tsv").read_text().splitlines()[1:]]
    else:
        table = [line.split("\t")[1:3] for line in (shared / "data/glue/RTE/dev.tsv").read_text().splitlines()[1:]]
    examples = [Example(tuple(texts), 0, f"dev.tsv:{i + 2}") for i, texts in enumerate(table[:250])]
    for tokenizer in (mini, bert):
        pairs = []
        for example in examples:
            expected = oracle(LM_BFF[name], example, task, tokenizer)
            if expected is not None:
                pairs.append((example, expected))
        assert len(pairs) > 100
        assert Prompt(task, tokenizer).encode_all([example for example, _ in pairs]) == [row for _, row in pairs]


# --- the template language ------------------------------------------------------------------------------------------

CLS, MASK, SEP = Special("cls"), Special("mask"), Special("sep+")


def parsed(text: str, *columns: str) -> tuple[object, ...]:
    return Template.parse(text, list(columns or ("a", "b")), "t").parts


@pytest.mark.parametrize("mask", ["{mask}", "[MASK]", "<mask>", "{ mask }"])
def test_three_spellings_of_the_mask(mask: str):
    assert parsed(f"{{a}} It was {mask}.") == (CLS, Sentence(0), Literal(" It was"), MASK, Literal("."), SEP)


@pytest.mark.parametrize("sep", ["{sep}", "[SEP]", "</s>"])
def test_a_separator_in_the_middle(sep: str):
    assert parsed(f"{{a}} {sep} {{b}}: {{mask}}") == (
        CLS,
        Sentence(0),
        SEP,
        Sentence(1, (), True),
        Literal(":"),
        MASK,
        SEP,
    )


def test_a_last_separator_is_not_doubled():
    assert parsed("{a} {mask} {sep}\n") == parsed("{a} {mask}") == (CLS, Sentence(0), MASK, SEP)


def test_filters_are_lm_bffs_letters():
    assert parsed("{a|lower_first|drop_last} {b | upper_first}{mask}") == parsed(
        "*cls**sentl-_0**+sentu_1**mask**sep+*"
    )
    assert Sentence(0, ("lower_first", "drop_last"), True).render("A") == " "
    assert Sentence(0, ("strip", "upper_first")).render("  éa ") == "Éa"


def test_literal_braces_stars_and_underscores():
    assert parsed("{{{a}}} *_* {mask}") == (CLS, Literal("{"), Sentence(0), Literal("} *_*"), MASK, SEP)


def test_spaces_between_parts():
    assert parsed("  {a}  is {b}  {mask} , {mask}"[:-9]) == (
        CLS,
        Literal(" "),
        Sentence(0, (), True),
        Literal("  is"),
        Sentence(1, (), True),
        MASK,
        SEP,
    )


@st.composite
def both_spellings(draw: st.DrawFn) -> tuple[str, str]:
    """One template in both spellings, built part by part."""
    words = st.text(alphabet="abIt ,.?:", min_size=1, max_size=8).map(str.rstrip)
    slots = draw(st.lists(st.tuples(st.sampled_from([0, 1]), *[st.booleans()] * 2, st.sampled_from("lu-")), min_size=1))
    place = draw(st.integers(0, len(slots)))
    lm_bff, readable = "*cls*", ""
    for number in range(len(slots) + 1):
        literal = draw(words)
        lm_bff += literal.replace(" ", "_")
        readable += literal
        if number == place:
            lm_bff += "*mask*"
            readable += " " * draw(st.integers(0, 2)) + draw(st.sampled_from(["{mask}", "[MASK]", "<mask>"]))
        if number < len(slots):
            column, space, drop, case = slots[number]
            case = case.strip("-")
            lm_bff += f"*{'+' * space}sent{case}{'-' * drop}_{column}*"
            filters = {"l": "|lower_first", "u": "|upper_first", "": ""}[case] + "|drop_last" * drop
            readable += " " * space + "{" + "ab"[column] + filters + "}"
    return lm_bff + "*sep+*", readable


@given(both_spellings())
def test_both_spellings_parse_alike(spellings: tuple[str, str]):
    lm_bff, readable = spellings
    assert parsed(lm_bff) == parsed(readable)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{premise} It was great.", "has no masks; exactly one"),
        ("{premise} It was {mask}, <mask>.", "has 2 masks; exactly one"),
        ("*cls**sent_0*_It_was.*sep+*", "has no masks"),
        ("*cls**mask**sent_0**mask**sep+*", "has 2 masks"),
        ("It was {mask}.", "uses no column; write {column} for one of premise, hypothesis"),
        (
            "{premis} It was {mask}.",
            "unknown column 'premis' (did you mean 'premise'?); the columns are premise, hypothesis",
        ),
        ("{} It was {mask}.", "unknown column ''"),
        (
            "{premise|lower} It was {mask}.",
            "unknown filter 'lower' (did you mean 'lower_first'?); allowed are drop_last",
        ),
        ("{premise} was {mask|strip}.", "{mask} takes no filter, 'strip' was given"),
        ("{premise It was {mask}.", "unbalanced brace at character 1; a literal brace is written {{"),
        ("{premise} It was {mask}}.", "unbalanced brace at character 24; a literal brace is written }}"),
        ("[CLS] {premise} {mask}", "leave out [CLS], the start token comes by itself"),
        ("*cls**sent_0*_It_was*mask.*sep+*", "unbalanced stars"),
        ("*cls*sent_0*mask**sep+*", "'sent_0' stands outside its stars; write *sent_0*"),
        ("*cls**sent0*_It_was*mask*.*sep+*", "unknown part 'sent0' (did you mean 'sent_0'?)"),
        ("*cls**sent_2*_It_was*mask*.*sep+*", "'sent_2' asks for text 2, but the columns are only premise, hypothesis"),
    ],
)
def test_template_errors(template: str, message: str, bpe: PreTrainedTokenizerFast):
    task = load_task("rte", template=template)
    with pytest.raises(UserError) as error:
        Prompt(task, bpe)
    assert message in str(error.value)
    assert "task 'rte'" in str(error.value)
    assert "\n" not in str(error.value)


def test_columns_are_needed_and_not_called_mask():
    with pytest.raises(UserError, match="names no columns"):
        Template.parse("{a} {mask}", [], "t")
    with pytest.raises(UserError, match="cannot be called 'mask'"):
        Template.parse("{a} {mask}", ["a", "mask"], "t")


# --- label words ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LM_BFF)
def test_label_words_are_single_tokens(name: str, mini: PreTrainedTokenizerFast):
    task = load_task(name)
    assert mini.convert_ids_to_tokens(label_word_ids(task, mini)) == ["Ġ" + word for word in task.label_words]


def test_words_after_punctuation_take_no_space(bpe: PreTrainedTokenizerFast):
    ids = label_word_ids(load_task("sst2", label_words=[".", ","]), bpe)
    assert bpe.convert_ids_to_tokens(ids) == [".", ","]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["great"], "2 labels (negative, positive) but 1 label words (great)"),
        (["great", "great"], "labels 'negative' and 'positive' share one token, 'Ġgreat', through their words 'great'"),
        (["great", "unbelievable"], "label word 'unbelievable' (label 'positive') is not one token"),
        (["", "great"], "label word '' (label 'negative') is not one token"),
        (["<mask>", "great"], "label word '<mask>' (label 'negative') becomes '<mask>'"),
        (["<unk>", "great"], "becomes '<unk>'"),
    ],
)
def test_label_word_errors(words: list[str], message: str, bpe: PreTrainedTokenizerFast):
    with pytest.raises(UserError) as error:
        Prompt(load_task("sst2", label_words=words), bpe)
    assert message in str(error.value)
    assert "task 'sst2'" in str(error.value)


def test_the_tokens_of_a_split_word_are_named(bpe: PreTrainedTokenizerFast):
    tokens = bpe.tokenize(" zzz")
    assert len(tokens) == 4
    with pytest.raises(UserError) as error:
        Prompt(load_task("sst2", label_words=["zzz", "great"]), bpe)
    assert f"4: {', '.join(repr(token) for token in tokens)};" in str(error.value)


def test_words_that_differ_by_case_are_one_token_to_bert(bert: PreTrainedTokenizerFast):
    with pytest.raises(
        UserError, match="'negative' and 'positive' share one token, 'great', through their words 'Great'"
    ):
        Prompt(load_task("sst2", label_words=["Great", "great"]), bert)


def test_an_unknown_word_is_refused(bert: PreTrainedTokenizerFast):
    with pytest.raises(UserError, match=r"label word '☃' .* becomes '\[UNK\]'"):
        Prompt(load_task("sst2", label_words=["☃", "great"]), bert)


@pytest.mark.parametrize("labels", [["only"], ["same", "same"]])
def test_labels_are_two_or_more_and_differ(labels: list[str], bpe: PreTrainedTokenizerFast):
    task = load_task("sst2", labels=labels, label_words=["great", "terrible"][: len(labels)])
    for kind in (Prompt, PlainInput):
        with pytest.raises(UserError, match=r"task.labels needs two or more names, all different"):
            kind(task, bpe)


# --- prompts --------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(
    texts=st.lists(st.text(max_size=30), min_size=2, max_size=8), name=st.sampled_from(["rte", "mrpc", "sst5", "trec"])
)
def test_any_text(texts: list[str], name: str, bpe: PreTrainedTokenizerFast, bert: PreTrainedTokenizerFast):
    task = load_task(name, max_length=40, first_limit=16, other_limit=9)
    for tokenizer in (bpe, bert):
        prompt = Prompt(task, tokenizer)
        encoded = prompt.encode_all(rows(task, texts))
        assert encoded == [oracle(LM_BFF[name], row, task, tokenizer) for row in rows(task, texts)]
        for row in encoded:
            assert row.ids.count(tokenizer.mask_token_id) == 1
            assert row.ids[row.mask] == tokenizer.mask_token_id
            assert len(row.ids) == len(row.segments) <= 40


def test_special_tokens_spelled_in_the_data_are_text(tokenizer: PreTrainedTokenizerFast):
    task = load_task("sst2")
    said = f"no {tokenizer.mask_token} film {tokenizer.sep_token}{tokenizer.cls_token}{tokenizer.mask_token}"
    row = Prompt(task, tokenizer).encode(Example((said,), 0))
    assert row.ids.count(tokenizer.mask_token_id) == 1
    assert row.mask == len(row.ids) - 3


def test_one_by_one_in_chunks_and_none(bpe: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch):
    task = load_task("rte")
    examples = rows(task, ODD_TEXTS)
    for inputs in (Prompt(task, bpe), PlainInput(task, bpe)):
        whole = inputs.encode_all(examples)
        assert [inputs.encode(example) for example in examples] == whole
        monkeypatch.setattr("mezo_cli.tasks._CHUNK", 3)
        assert inputs.encode_all(examples) == whole
        assert inputs.encode_all([]) == []


def test_the_tokenizers_own_padding_and_truncation_do_not_matter(bpe: PreTrainedTokenizerFast):
    task = load_task("sst2")
    examples = rows(task, ODD_TEXTS)
    expected = Prompt(task, bpe).encode_all(examples)
    other = byte_bpe()
    other.backend_tokenizer.enable_padding(length=50)
    other.backend_tokenizer.enable_truncation(3)
    assert Prompt(task, other).encode_all(examples) == expected
    assert other("<mask>")["input_ids"] == bpe("<mask>")["input_ids"]  # its own calls still read special tokens


def test_segments_rise_after_a_separator_for_bert_only(bert: PreTrainedTokenizerFast, bpe: PreTrainedTokenizerFast):
    task = load_task("rte", template="{premise} {sep} {hypothesis}? {mask}")
    example = Example(("no film", "yes"), 0)
    row = Prompt(task, bert).encode(example)
    first = row.ids.index(bert.sep_token_id)
    assert row.segments == [0] * (first + 1) + [1] * (len(row.ids) - first - 1)
    assert set(Prompt(task, bpe).encode(example).segments) == {0}
    with pytest.raises(UserError, match="reaches segment 2"):
        Prompt(load_task("rte", template="{premise} {sep} {hypothesis}{sep} {mask}"), bert)


def test_sentence_limits(bpe: PreTrainedTokenizerFast):
    task = load_task("rte", first_limit=2, other_limit=1)
    row = Prompt(task, bpe).encode(Example(("no yes film no yes", "Yes no film"), 0))
    assert bpe.convert_ids_to_tokens(row.ids)[1:3] == bpe.tokenize("no yes film")[:2]
    assert len(row.ids) == 1 + 2 + 1 + 1 + 1 + 1 + 1  # cls, two tokens, ?, mask, comma, one token, sep


def test_a_mask_cut_off_names_row_length_and_limit(bpe: PreTrainedTokenizerFast):
    prompt = Prompt(load_task("sst2", max_length=16), bpe)
    text = "no " * 20
    length = 1 + len(bpe.tokenize(text)) + len(bpe.tokenize(" It was")) + 3
    with pytest.raises(UserError) as error:
        prompt.encode_all([Example(("no",), 0, "train.tsv:2"), Example((text,), 0, "train.tsv:3")])
    for said in ("task 'sst2', train.tsv:3:", f"{length} tokens", "limit of 16 (task.max_length)", "task.first_limit"):
        assert said in str(error.value)
    assert (
        len(Prompt(load_task("trec", max_length=16), bpe).encode(Example((text,), 0)).ids) == 16
    )  # its mask comes first


def test_the_mask_may_be_the_last_token_kept(bpe: PreTrainedTokenizerFast):
    example = Example(("no yes film",), 0, "x:1")
    mask = Prompt(load_task("sst2"), bpe).encode(example).mask
    assert mask >= 7
    assert Prompt(load_task("sst2", max_length=mask + 1), bpe).encode(example).ids[-1] == bpe.mask_token_id
    with pytest.raises(UserError, match=f"its mask is token {mask + 1}, cut off by the limit of {mask}"):
        Prompt(load_task("sst2", max_length=mask), bpe).encode(example)


def test_the_models_own_limit():
    tokenizer = byte_bpe()
    tokenizer.model_max_length = 12
    task = load_task("sst2")
    assert Prompt(task, tokenizer).limit == PlainInput(task, tokenizer).limit == 12
    with pytest.raises(UserError, match=r"limit of 12 \(the model takes no more\)") as error:
        Prompt(task, tokenizer).encode(Example(("no " * 20,), 0, "x:1"))
    assert "raise" not in str(error.value)


def test_a_tokenizer_without_a_mask():
    tokenizer = byte_bpe()
    tokenizer.mask_token = None
    with pytest.raises(UserError, match=r"task 'sst2': .* has no mask token"):
        Prompt(load_task("sst2"), tokenizer)
    assert PlainInput(load_task("sst2"), tokenizer).encode(Example(("no",), 1)).label == 1


def test_a_tokenizer_without_a_separator():
    tokenizer = byte_bpe()
    tokenizer.sep_token = None
    with pytest.raises(UserError, match="needs a sep token"):
        Prompt(load_task("sst2"), tokenizer)


def test_a_slow_tokenizer():
    slow = SimpleNamespace(is_fast=False, name_or_path="some/model")
    for kind in (Prompt, PlainInput):
        with pytest.raises(UserError, match=r"the tokenizer some/model .* is not a fast tokenizer"):
            kind(load_task("sst2"), slow)


def test_show(bpe: PreTrainedTokenizerFast, bert: PreTrainedTokenizerFast):
    example = Example(("no film ", "Yes, a film."), 0)
    prompt = Prompt(load_task("rte"), bpe)
    assert prompt.show(prompt.encode(example)) == "<s>no film?<mask>, yes, a film.</s>"
    plain = PlainInput(load_task("rte"), bert)
    assert plain.show(plain.encode(example)) == "[CLS] no film [SEP] yes , a film . [SEP]"


# --- plain inputs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sst2", "rte"])
def test_plain_input_is_the_tokenizers_own(name: str, tokenizer: PreTrainedTokenizerFast):
    task = load_task(name, max_length=12)
    plain = PlainInput(task, tokenizer)
    long = Example(("no yes film " * 9, "a funny film " * 7)[: len(task.columns)], 1)
    for example in [*rows(task, ODD_TEXTS), long]:
        # As a batch of one: alone, transformers takes an empty second text for none.
        own = tokenizer(*([t] for t in example.texts), truncation=True, max_length=12, split_special_tokens=True)
        ids = own["input_ids"][0]
        segments = own["token_type_ids"][0] if "token_type_ids" in own else [0] * len(ids)
        assert plain.encode(example) == Encoded(ids, segments, -1, example.label)
    assert len(plain.encode(long).ids) == 12


def test_plain_input_of_three_texts_is_refused(bpe: PreTrainedTokenizerFast):
    with pytest.raises(
        UserError, match=r"task 'rte': objective=cls reads one or two texts, task.columns has 3 \(a, b, c\)"
    ):
        PlainInput(load_task("rte", columns=["a", "b", "c"]), bpe)
