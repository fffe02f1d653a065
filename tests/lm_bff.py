"""Shared by the tests of templates and tasks: LM-BFF's templates and rules, and tokenizers of three kinds."""

import re
import string
from pathlib import Path
from typing import Any

import yaml
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from mezo_cli.config.explain import validate
from mezo_cli.config.schema import Example, TaskConfig, TokenizedExample

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


def load_task(name: str, **changes: Any) -> TaskConfig:
    values: dict[str, object] = yaml.safe_load((ROOT / f"conf/task/{name}.yaml").read_text(encoding="utf-8"))
    task = validate(TaskConfig, values, "task.")
    nested = {key: getattr(task, key).replace(**value) for key, value in changes.items() if isinstance(value, dict)}
    return task.replace(**{**changes, **nested})


ALL_WORDS = sorted({word for name in LM_BFF for word in load_task(name).label_words})
CORPUS = [f"{w} . It was {w} . This is {w} , {w.lower()} ? no : yes a gripping , funny film" for w in ALL_WORDS] * 20


def byte_bpe() -> PreTrainedTokenizerFast:
    """Return a tokenizer like RoBERTa's: bytes, a space belongs to the word after it, no segments."""
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
    """Return a tokenizer like BERT's: lower-cased words, with segments."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tok = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tok.normalizer = normalizers.BertNormalizer(lowercase=True)
    tok.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tok.decoder = decoders.WordPiece(cleanup=False)
    tok.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=600, special_tokens=special))
    return _bert_like(tok, ["input_ids", "token_type_ids", "attention_mask"])


def sentencepiece() -> PreTrainedTokenizerFast:
    """Return a tokenizer like ALBERT's and XLM-R's: a unigram model in which every text starts with a space."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = sorted({word for line in CORPUS for word in line.split()})
    characters = sorted({*"\u2581", *string.printable.strip(), *"Üï☃"})
    scored = [(token, -9.0) for token in characters] + [("\u2581" + word, -8.0) for word in words]
    tok = Tokenizer(models.Unigram([(token, 0.0) for token in special] + scored, unk_id=1, byte_fallback=False))
    tok.pre_tokenizer = pre_tokenizers.Metaspace()
    tok.decoder = decoders.Metaspace()
    tok.add_special_tokens(special)
    return _bert_like(tok, ["input_ids", "token_type_ids", "attention_mask"])


def oracle(
    lm_bff: str, example: Example, task: TaskConfig, tokenizer: PreTrainedTokenizerFast
) -> TokenizedExample | None:
    """Encode one row by LM-BFF's rules, part by part from the string; return None where the mask is cut off."""

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
    return TokenizedExample(
        ids, segments[:limit] if has_segments else [0] * len(ids), ids.index(tokenizer.mask_token_id), example.label
    )


def rows(task: TaskConfig, texts: list[str]) -> list[Example]:
    """Return rows with every text in every column at least once."""
    turned = [texts[i:] + texts[:i] for i in range(len(task.columns))]
    return [Example(row, i % len(task.labels), f"rows:{i + 1}") for i, row in enumerate(zip(*turned, strict=True))]
