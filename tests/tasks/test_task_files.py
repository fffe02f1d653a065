"""The built-in tasks: their files, their label order, and their tokens compared with LM-BFF's rules (lm_bff.py)."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mezo_cli.config.schema import Example
from mezo_cli.tasks import MlmEncoder, label_word_ids
from tests.lm_bff import LM_BFF, ODD_TEXTS, ROOT, byte_bpe, load_task, oracle, rows, sentencepiece, wordpiece
from tests.opt_tasks import CHOICES, GENERATED


@pytest.fixture(scope="module")
def mini() -> PreTrainedTokenizerFast:
    """The demo model's tokenizer: RoBERTa's kind, with a real vocabulary."""
    return AutoTokenizer.from_pretrained(ROOT / "mezo_cli/demo/model")


@pytest.fixture(scope="module", params=[byte_bpe, wordpiece, sentencepiece, None])
def tokenizer(request: pytest.FixtureRequest, mini: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    return mini if request.param is None else request.param()


@pytest.fixture(scope="module")
def bert() -> PreTrainedTokenizerFast:
    return wordpiece()


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
