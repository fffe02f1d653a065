"""Make tiny random checkpoints and small data files for tests, without a network."""

import functools
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from tokenizers import ByteLevelBPETokenizer, Tokenizer, decoders, models, normalizers, processors, trainers
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertTokenizerFast,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaForSequenceClassification,
)

WORDS = ["terrible", "great", "bad", "okay", "good", "Yes", "No", "Maybe", "Description", "Entity", "Expression"]
WORDS += ["Human", "Location", "Number", "It", "was"]
MADE = tempfile.TemporaryDirectory(prefix="tiny")  # removed when the process ends
ENCODER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
ENCODER |= {"max_position_embeddings": 80}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>", "mask_token": "<mask>"}


def made_once(make: Callable[..., Path]) -> Callable[..., Path]:
    """Let a function that saves a model into a folder make each model once per process, and copy it from then on."""
    made: dict[str, Path] = {}

    @functools.wraps(make)
    def copy(folder: Path, *words: object, **named: object) -> Path:
        key = repr((words, sorted(named.items())))
        if key not in made:
            made[key] = make(Path(tempfile.mkdtemp(dir=MADE.name)), *words, **named)
        shutil.copytree(made[key], folder, dirs_exist_ok=True)
        return folder

    return copy


def bpe(folder: Path) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer in which every label word is one token."""
    tokens = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trainer = ByteLevelBPETokenizer()
    trainer.train_from_iterator(
        [f" {word}" for word in WORDS] * 50, vocab_size=600, min_frequency=1, special_tokens=tokens
    )
    trainer.save(str(folder / "tokenizer.json"))
    return PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), cls_token="<s>", sep_token="</s>", model_max_length=64, **SPECIAL
    )


@made_once
def roberta(folder: Path, *, tied: bool = True, head: str = "mlm", seed: int = 0, **shape: int) -> Path:
    """Save a random RoBERTa with its tokenizer; `head` is mlm, cls, or none (a body alone)."""
    tokenizer = bpe(folder)
    ids = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "type_vocab_size": 1}
    more = {"tie_word_embeddings": tied, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    config = RobertaConfig(vocab_size=len(tokenizer), **ids, **more, **(ENCODER | shape))
    torch.manual_seed(seed)
    model = (RobertaForSequenceClassification if head == "cls" else RobertaForMaskedLM)(config)
    with torch.no_grad():
        for p in model.parameters():  # larger than the usual initial weights, so that losses differ
            p.add_(0.05 * torch.randn_like(p))
    (model.roberta if head == "none" else model).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@made_once
def bert(folder: Path, **shape: int) -> Path:
    """Save a random BERT with a WordPiece vocabulary."""
    letters = list("abcdefghijklmnopqrstuvwxyz0123456789.,?!':")
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{c}" for c in letters)]
    vocab += [word.lower() for word in WORDS]
    (folder / "vocab.txt").write_text("\n".join(dict.fromkeys(vocab)) + "\n")
    tokenizer = BertTokenizerFast(vocab=str(folder / "vocab.txt"), model_max_length=64)
    torch.manual_seed(0)
    config = BertConfig(vocab_size=len(tokenizer), **(ENCODER | shape))
    BertForMaskedLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


# family -> (prefix of its transformers classes, its config)
WIDE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 300}
GATED = WIDE | {"intermediate_size": 64, "num_key_value_heads": 2}  # two query heads share their keys
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 300}
DECODERS: dict[str, tuple[str, dict[str, object]]] = {
    "opt": ("OPT", WIDE | {"ffn_dim": 64, "word_embed_proj_dim": 32}),
    "gpt2": ("GPT2", GPT),
    "llama": ("Llama", GATED),
    "mistral": ("Mistral", GATED | {"sliding_window": None}),
    "qwen2": ("Qwen2", GATED),
    "qwen3": ("Qwen3", GATED | {"head_dim": 8}),
    "gpt_neox": ("GPTNeoX", WIDE | {"intermediate_size": 64}),
    "bloom": ("Bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4}),  # ALiBi instead of position ids: not packed
    "gptj": ("GPTJ", GPT | {"rotary_dim": 4}),  # its head has a bias
}


@made_once
def decoder(folder: Path, kind: str = "gpt2", *, tied: bool = True, seed: int = 0, **shape: int) -> Path:
    """Save a random decoder with a tokenizer like its family's: OPT's starts with </s>, Llama's with <s>."""
    tokenizer = metaspace() if kind == "llama" else decoder_bpe(folder, kind)
    name, size = DECODERS[kind][0], DECODERS[kind][1] | shape
    config = getattr(transformers, f"{name}Config")(
        vocab_size=len(tokenizer), tie_word_embeddings=tied, bos_token_id=0, eos_token_id=0, pad_token_id=None, **size
    )
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def decoder_bpe(folder: Path, kind: str) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE: OPT's with a padding and a start token, every other (GPT-2, SmolLM) with neither."""
    end = "</s>" if kind == "opt" else "<|endoftext|>"
    trainer = ByteLevelBPETokenizer()
    special = [end, "<pad>"] if kind == "opt" else [end]
    trainer.train_from_iterator([f" {word}" for word in WORDS] * 50, 500, 1, special_tokens=special)
    if kind == "opt":
        trainer._tokenizer.post_processor = processors.TemplateProcessing(f"{end} $A", special_tokens=[(end, 0)])
    trainer.save(str(folder / "tokenizer.json"))
    pad = {"pad_token": "<pad>"} if kind == "opt" else {}
    named = {"bos_token": end, "eos_token": end, "unk_token": end, **pad}
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **named)


def metaspace() -> PreTrainedTokenizerFast:
    """Return a tokenizer like Llama's: a text starts with an added space, and other bytes have own tokens."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special = ["<s>", "</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = list("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ▁,.?")
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special, initial_alphabet=letters, show_progress=False)
    tokenizer.train_from_iterator([*WORDS, *(f"{word}" for word in WORDS)] * 20, trainer)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def movie_rows(n: int, seed: int = 0) -> list[dict[str, str]]:
    """Return balanced rows that a tiny model can separate."""
    good = ["a joy from start to end", "the cast is lovely", "i laughed and cried", "what a fine film"]
    bad = ["a bore from start to end", "the cast is lost", "i yawned and left", "what a poor film"]
    rows = []
    for i in range(n):
        text = (good if i % 2 else bad)[(i // 2 + seed) % 4]
        rows.append({"sentence": f"{text} {i} ", "label": "positive" if i % 2 else "negative"})
    return rows


def write_jsonl(path: Path, rows: list[dict[str, str]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def movie_folder(folder: Path, train: int = 24, dev: int = 12, test: int = 12) -> Path:
    """Write train, dev and test as JSONL files and return their folder."""
    rows = movie_rows(train + dev + test)
    write_jsonl(folder / "train.jsonl", rows[:train])
    write_jsonl(folder / "dev.jsonl", rows[train : train + dev])
    write_jsonl(folder / "test.jsonl", rows[train + dev :])
    return folder
