#!/usr/bin/env python3
"""Pretrain a small RoBERTa like the embedded demo model from a text file, one document a line.

    python scripts/pretrain_demo_model.py reviews.txt.xz --out my-model --minutes 45
    python scripts/pretrain_demo_model.py reviews.txt.xz --start my-model --opinion-words auto --prompt-share 0.9 \\
        --spaced-share 0.6 --evaluate SST-2/train.tsv --out my-second-model --minutes 75

The first form trains a byte-level BPE in which every label word of the built-in tasks is one token, and
`RobertaForMaskedLM` on windows of the text: masking without next-sentence prediction (Liu et al. 2019, section 3),
80/10/10 corruption (Devlin et al. 2019, section 3.1), more than the usual 15% masked (Wettig et al. 2023), Muon (Jordan
et al. 2024) on the encoder's matrices and AdamW on the rest. `--start` continues from a model with its tokenizer.

`--opinion-words` masks words of opinion more often and weighs them more in the loss (Gu et al. 2020; Tian et al. 2020).
`--prompt-share` mixes in batches of prompt rows: one to three sentences of a document and "It was <mask>.", where the
words to predict are the opinion words in the sentences around them. `--spaced-share` spells a share of the batches in
lower case with spaces around punctuation, as SST-2 is. No labels are used for training; `--evaluate` only reports.

A run that was stopped continues when the same command is given again. The result is a Hugging Face folder, weights as
float16 safetensors. A mistake in the arguments ends in exit status 2 and one line, a loss that is not finite in 1.
"""

import argparse
import csv
import dataclasses
import itertools
import json
import lzma
import math
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from safetensors.torch import load_file, save_file
from sklearn.metrics import roc_auc_score
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from transformers import AutoModelForMaskedLM, RobertaConfig, RobertaForMaskedLM

SPECIALS = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]  # ids 0 to 4
BOS, PAD, EOS, _, MASK = range(5)
LABEL_WORDS = [
    *["terrible", "great", "bad", "okay", "good", "Yes", "No", "Maybe"],
    *["Description", "Entity", "Expression", "Human", "Location", "Number"],
    *["subjective", "objective", "incorrect", "correct"],
]

INTENSIFIERS = "so|very|really|pretty|absolutely|truly|simply|quite|too|extremely|totally|utterly|incredibly|rather"
SUBJECTS = "movie|film|it|story|plot|acting|script|ending|cast|show|performance|direction|dialogue|humor|music"
# Words of function, amount, time and doing that stand where opinions do.
NOT_OPINIONS = """
    a able about above actually after again ago all almost alone already also always among an and another any anyway
    apart are as at available away back based because becoming been before beginning begins being below better
    beyond big both but by called can cannot cared cares changed coming complete couldn cut deserves despite did
    didn different directed do does doesn doing don done down due early either else end enough even ever every
    exactly feel felt few fewer first for forth from full getting given going gone got had happened happening
    happens has hasn have haven having he her here high him his hope how human i if impossible in instead into is
    isn it its itself just kind kinda last late later least left less let like likely little living long longer
    looking lost lot low made make makes making many matter me meant mere merely missed missing modern more most
    mostly much must my near nearly need needs neither never new next no non none nor not nothing now nowhere
    obviously of off often okay old on once one only or other our out over own part partly perhaps played playing
    please possible pretty probably quickly quite rather really recommend right said same seen set several she short
    shot should shown simply small so some something sometimes somewhat sort stands still sub such suppose supposed
    sure taken telling than that the their them then there these they this those though through thus time to
    together told too tried trying two under understand unlike until up upon us used usually very want wanted wants
    was wasn watching way we well were what when where whether which while who whole whom whose why will wish with
    without won would wouldn written yet you young your
"""
NEGATORS = "not n't 't never no hardly nothing without neither nor barely isn wasn don less cannot"
ENDINGS = [  # what prompt rows end in, before and after the mask, and how often
    (" It was", ".", 0.60),
    (" This movie is", ".", 0.10),
    (" The film is", " .", 0.10),
    (" All in all, it was", ".", 0.08),
    (" it was", " .", 0.08),
    (" It was", "!", 0.04),
]
SENTENCE_END = re.compile(r"[.!?]+[\"')\]]*(\s+)(?=\S)")


def fail(message: str) -> NoReturn:
    """End with exit status 2 and one line."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


# --- text -> tokens


def documents(path: Path) -> list[str]:
    """Read the documents of a plain or .xz file: one a line, empty lines dropped."""
    try:
        with lzma.open(path, "rb") if path.suffix == ".xz" else path.open("rb") as file:
            text = file.read().decode("utf-8")
    except OSError as error:
        fail(f"cannot read {path}: {error.strerror or error}")
    except (lzma.LZMAError, EOFError) as error:
        fail(f"{path} is not a whole .xz file: {error}")
    except UnicodeDecodeError as error:
        fail(f"{path} is not UTF-8 (byte {error.start})")
    lines = [line for line in (raw.strip() for raw in text.split("\n")) if line]
    return lines or fail(f"{path} holds no text: one document a line is expected")


def train_tokenizer(docs: list[str], size: int, share: float, seed: int) -> Tokenizer:
    """Train a byte-level BPE of at most `size` tokens on a share of the documents; label words are single tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=SPECIALS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    picked = np.random.default_rng(seed).permutation(len(docs))[: max(1, round(share * len(docs)))]
    tokenizer.train_from_iterator((docs[i] for i in sorted(picked)), trainer)
    tokenizer = with_single_tokens(tokenizer, LABEL_WORDS, size)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", EOS), ("<s>", BOS), add_prefix_space=False)
    return tokenizer


def with_single_tokens(tokenizer: Tokenizer, words: list[str], size: int) -> Tokenizer:
    """Return the tokenizer with each `" " + word` as one token, in at most `size` tokens.

    A word that was too rare gets its merges at the end of the list, in the place of the last ones learned. BPE applies
    merges in their order, so all else is as if fewer had been learned.
    """
    state = json.loads(tokenizer.to_str())
    learned: list[list[str]] = state["model"]["merges"]
    tokens = sorted(state["model"]["vocab"], key=state["model"]["vocab"].__getitem__)
    base = len(tokens) - len(learned)  # specials and bytes
    for kept in range(min(len(learned), size - base), -1, -1):
        merges = state["model"]["merges"] = learned[:kept]
        vocab = state["model"]["vocab"] = {token: i for i, token in enumerate(tokens[: base + kept])}
        for word in words:  # one at a time: a word may be helped by what an earlier one brought
            cut = Tokenizer.from_str(json.dumps(state)).encode(f" {word}", add_special_tokens=False).tokens
            for i in range(1, len(cut)):
                merges.append(["".join(cut[:i]), cut[i]])
                vocab.setdefault("".join(cut[: i + 1]), len(vocab))
        if len(vocab) <= size:
            return Tokenizer.from_str(json.dumps(state))
    fail(f"--vocab-size {size} is too small: {base} bytes and special tokens, and the label words, need more")


def sentences(document: str) -> list[str]:
    """Cut a document after its full stops; each sentence but the first keeps the space before it."""
    cuts = [0, *(match.start(1) for match in SENTENCE_END.finditer(document)), len(document)]
    return [document[begin:end] for begin, end in itertools.pairwise(cuts)]


def spaced(text: str) -> str:
    """Return the text in SST-2's spelling: lower case, words, clitics and punctuation with spaces between them."""
    text = re.sub(r'(^|[\s(])"', r"\1`` ", text.lower()).replace('"', " ''")
    text = re.sub(r"\.\.+", " ... ", text)
    text = re.sub(r"--+", " -- ", text)
    text = re.sub(r"([,;:!?()\[\]])", r" \1 ", text)
    text = re.sub(r"(?<!\.)\.(?=\s*['`]*\s*$)", " .", text)
    text = re.sub(r"n't\b", " n't", text)
    text = re.sub(r"(\w)('(?:s|re|ve|ll|d|m))\b", r"\1 \2", text)
    return " ".join(text.split())


# --- opinion words


def opinion_words(docs: list[str]) -> list[str]:
    """Return the text's opinion words, most frequent first: those that often stand where opinions do.

    That is after an intensifier ("so", "very", ...; at least 2% of the word's uses) or after "movie was", "acting is"
    and the like (1%), and in at least 2.6 (1.8) such places per million words of text. Function words and forms in -ly
    are left out, and forms in -ed unless an intensifier shows them.
    """
    after_intensifier = re.compile(rf"\b(?:{INTENSIFIERS}) ([a-z]{{3,}})\b")
    after_subject = re.compile(rf"\b(?:{SUBJECTS}) (?:is|was) (?:(?:{INTENSIFIERS}) )?([a-z]{{3,}})\b")
    others = set(NOT_OPINIONS.split())
    uses: Counter[str] = Counter()
    strong: Counter[str] = Counter()
    weak: Counter[str] = Counter()
    for document in docs:
        text = document.lower()
        uses.update(re.findall(r"[a-z]+", text))
        strong.update(after_intensifier.findall(text))
        weak.update(after_subject.findall(text))
    millions = uses.total() / 1e6
    by_strong = {w for w, n in strong.items() if n >= max(3, 2.6 * millions) and n >= 0.02 * uses[w]}
    by_weak = {w for w, n in weak.items() if n >= max(3, 1.8 * millions) and n >= 0.01 * uses[w] and w[-2:] != "ed"}
    found = {word for word in by_strong | by_weak if word not in others and not word.endswith("ly")}
    return sorted(found, key=lambda word: (-uses[word], word))


def read_opinion_words(path: Path) -> list[str]:
    """Read a JSON list of words."""
    try:
        words = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        fail(f"cannot read {path}: {error.strerror or error}")
    except ValueError:
        fail(f"{path} is not JSON")
    if not isinstance(words, list) or not words or not all(isinstance(word, str) and word.strip() for word in words):
        fail(f"{path} must hold a JSON list of words")
    return [word.strip() for word in words]


def marked(tokenizer: Tokenizer, words: Iterable[str], forms: tuple[str, ...]) -> np.ndarray:
    """Return a row of booleans, one per token: true where a form of a word is that single token."""
    table = np.zeros(tokenizer.get_vocab_size(), dtype=bool)
    for word in words:
        for form in forms:
            cut = tokenizer.encode(form.format(word=word, Word=word.capitalize()), add_special_tokens=False).ids
            if len(cut) == 1:
                table[cut[0]] = True
    return table


# --- the text as tokens


@dataclasses.dataclass
class Corpus:
    """The tokens of all documents in one row, `</s>` after each document, and where sentences and opinions stand."""

    tokens: np.ndarray  # uint16
    starts: np.ndarray  # where each sentence begins, and the end of the last
    first: np.ndarray  # for each sentence, the number of its document's first sentence
    last: np.ndarray  # and of the sentence after its document's last
    said: np.ndarray  # opinion tokens without a negation just before them
    said_in: np.ndarray  # the number of the sentence that each stands in


def tokenise(tokenizer: Tokenizer, docs: list[str], spelling: Any = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return tokens, sentence starts (and the end) and each sentence's document; `spelling` rewrites sentences."""
    parts: list[np.ndarray] = []
    owner: list[int] = []
    for i in range(0, len(docs), 1000):
        texts: list[str] = []
        for number, document in enumerate(docs[i : i + 1000], start=i):
            cut = sentences(document)
            if spelling is not None:
                cut = [(" " if k else "") + spelling(sentence) for k, sentence in enumerate(cut)]
            texts += cut
            owner += [number] * len(cut)
        for encoding in tokenizer.encode_batch(texts, add_special_tokens=False):
            number = owner[len(parts)]
            ends = len(parts) + 1 == len(owner) or owner[len(parts) + 1] != number
            parts.append(np.asarray([*encoding.ids, EOS] if ends else encoding.ids, dtype=np.uint16))
    starts = np.cumsum([0, *map(len, parts)])
    return np.concatenate(parts), starts, np.asarray(owner)


def corpus(tokenizer: Tokenizer, docs: list[str], opinions: np.ndarray, spelling: Any = None) -> Corpus:
    """Tokenise the documents and find the opinion tokens that are not negated within the three tokens before them."""
    tokens, starts, owner = tokenise(tokenizer, docs, spelling)
    places = np.flatnonzero(opinions[tokens])
    negation = marked(tokenizer, NEGATORS.split(), ("{word}", " {word}"))[tokens]
    for back in (1, 2, 3):
        places = places[~negation[np.maximum(places - back, 0)]]
    begins = np.flatnonzero(np.diff(owner, prepend=-1))
    first = begins[owner]  # documents are numbered from 0 and none is empty
    last = np.append(begins[1:], len(owner))[owner]
    said_in = np.searchsorted(starts, places, side="right") - 1
    return Corpus(tokens, starts, first, last, tokens[places].astype(np.int64), said_in)


# --- batches

Prompts = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # masks [B, L]; row, word and weight of each target


@dataclasses.dataclass
class Batch:
    """Rows of tokens, and what to predict in them.

    The positions that are true in `masked` count from 0 to m - 1, row by row; at position `place[i]` of these
    `word[i]` is to be predicted with weight `weight[i]`.
    """

    ids: Tensor  # [B, L]
    masked: Tensor  # [B, L]
    place: Tensor
    word: Tensor
    weight: Tensor


class Batches:
    """The batches of a run: batch number `step` depends on the seed and on `step` alone."""

    def __init__(self, corpora: list[Corpus], tokenizer: Tokenizer, opinions: np.ndarray, args: argparse.Namespace):
        self.corpora, self.opinions, self.args = corpora, opinions, args
        self.vocab = tokenizer.get_vocab_size()
        counts = sum(np.bincount(corpus.said, minlength=self.vocab) for corpus in corpora)
        self.rows = PromptRows(tokenizer, 1 / np.sqrt(np.maximum(counts, 1)), args) if args.prompt_share else None

    def __call__(self, step: int) -> Batch:
        """Return batch number `step`, from 1."""
        rng = np.random.default_rng([self.args.seed, step])
        while True:
            corpus = self.corpora[int(rng.random() < self.args.spaced_share)]
            if self.rows is not None and rng.random() < self.args.prompt_share:
                batch = self.corrupt(rng, *self.rows(rng, corpus))
            else:
                batch = self.corrupt(rng, self.windows(rng, corpus, step))
            if len(batch.word):
                return batch

    def windows(self, rng: np.random.Generator, corpus: Corpus, step: int) -> np.ndarray:
        """Return rows `<s> ... </s>` from anywhere in the text."""
        args = self.args
        length = args.long_length if args.long_every and step % args.long_every == 0 else args.length
        inner = min(length - 2, len(corpus.tokens))
        begin = rng.integers(len(corpus.tokens) - inner + 1, size=max(1, args.batch_tokens // length))
        ids = np.full((len(begin), inner + 2), EOS, dtype=np.int64)
        ids[:, 0] = BOS
        ids[:, 1:-1] = corpus.tokens[begin[:, None] + np.arange(inner)]
        return ids

    def corrupt(self, rng: np.random.Generator, ids: np.ndarray, prompts: Prompts | None = None) -> Batch:
        """Choose what to predict beside the prompts' masks and corrupt it: 80% `<mask>`, 10% random, 10% kept."""
        args, opinion = self.args, self.opinions[ids]
        share = args.mask if prompts is None else args.prompt_mask
        opinion_share = args.opinion_mask if prompts is None else args.prompt_opinion_mask
        chosen = (rng.random(ids.shape) < np.where(opinion, opinion_share, share)) & (ids >= len(SPECIALS))
        words, weights = ids[chosen], np.where(opinion[chosen], args.opinion_weight, 1.0)
        fate = rng.random(len(words))
        random = rng.integers(len(SPECIALS), self.vocab, size=len(words))
        ids[chosen] = np.where(fate < 0.8, MASK, np.where(fate < 0.9, random, words))
        if prompts is None:
            masked, places = chosen, np.arange(len(words))
        else:
            here, row, said, weight = prompts
            masked = chosen | here
            places = np.concatenate([np.flatnonzero(chosen[masked]), np.flatnonzero(here[masked])[row]])
            words, weights = np.concatenate([words, said]), np.concatenate([weights, weight])
        tensors = {"ids": ids, "masked": masked, "place": places, "word": words, "weight": weights.astype(np.float32)}
        return Batch(**{name: torch.from_numpy(value) for name, value in tensors.items()})


class PromptRows:
    """Rows of one to three sentences and an ending with a mask; what is to be predicted stands around them.

    The words to predict are the opinion words in up to `--reach` sentences of the same document before and after,
    their weights falling with the distance by the factor 0.6 per sentence and with the root of the word's frequency,
    their sum `--prompt-weight` per row.
    """

    def __init__(self, tokenizer: Tokenizer, rarity: np.ndarray, args: argparse.Namespace):
        def cut(text: str) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=False).ids

        self.args = args
        self.space = cut(" ")
        self.endings = [(cut(before), [*cut(after), EOS]) for before, after, _ in ENDINGS]
        self.shares = np.array([share for *_, share in ENDINGS])
        self.rarity = rarity
        self.bare = [cut(tokenizer.decode([i]).lstrip()) or [i] for i in range(tokenizer.get_vocab_size())]

    def __call__(self, rng: np.random.Generator, corpus: Corpus) -> tuple[np.ndarray, Prompts]:
        """Return the rows of a batch [B, L], and their prompts."""
        chosen, spans, said = self.choose(rng, corpus)
        rows = [self.row(rng, corpus.tokens[begin:end].astype(np.int64).tolist()) for begin, end in spans]
        ids = np.full((len(rows), max(len(row) for row, _ in rows)), PAD)
        here = np.zeros(ids.shape, dtype=bool)
        for i, (row, mask) in enumerate(rows):
            ids[i, : len(row)] = row
            here[i, mask] = True
        words, owners, weights = [], [], []
        for i, ((begin, end), (lo, a, b, hi)) in enumerate(zip(chosen, said, strict=True)):
            around = np.r_[lo:a, b:hi]
            sentence = corpus.said_in[around]
            distance = np.where(sentence < begin, begin - sentence, sentence - end + 1)
            weight = 0.6 ** (distance - 1.0) * self.rarity[corpus.said[around]]
            words.append(corpus.said[around])
            owners.append(np.full(len(around), i))
            weights.append(self.args.prompt_weight * weight / weight.sum())
        return ids, (here, np.concatenate(owners), np.concatenate(words), np.concatenate(weights))

    def choose(self, rng: np.random.Generator, corpus: Corpus) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return per row its sentences, its tokens, and where in `said` the words before and after it stand.

        The rows of a batch are of similar length, so that little is padded.
        """
        begin = rng.integers(len(corpus.first), size=max(64, self.args.batch_tokens // 8))
        end = np.minimum(begin + rng.choice([1, 2, 3], p=[0.7, 0.2, 0.1], size=len(begin)), corpus.last[begin])
        low = np.maximum(begin - self.args.reach, corpus.first[begin])
        high = np.minimum(end + self.args.reach, corpus.last[begin])
        said = np.stack([np.searchsorted(corpus.said_in, at) for at in (low, begin, end, high)], axis=1)
        spans = np.stack([corpus.starts[begin], corpus.starts[end]], axis=1)
        spans[:, 1] -= corpus.tokens[spans[:, 1] - 1] == EOS
        length = spans[:, 1] - spans[:, 0]
        around = said[:, 1] - said[:, 0] + said[:, 3] - said[:, 2]
        usable = np.flatnonzero((length >= 4) & (length <= self.args.length - 8) & (around > 0))
        if not len(usable):
            fail("no sentence of the text has an opinion word in the sentences around it: --prompt-share needs such")
        usable = usable[np.argsort(length[usable], kind="stable")]
        longest = int(rng.integers(len(usable)))
        rows = max(1, self.args.batch_tokens // (int(length[usable[longest]]) + 8))
        picked = usable[max(0, longest - rows + 1) : longest + 1]
        return np.stack([begin, end], axis=1)[picked], spans[picked], said[picked]

    def row(self, rng: np.random.Generator, body: list[int]) -> tuple[list[int], int]:
        """Return `<s> body ending </s>` and where its mask is; a share of the bodies is cut to a phrase.

        Half have a space after them, as the sentences of SST-2 do.
        """
        if rng.random() < self.args.phrase_share and len(body) > 6:
            begin = int(rng.integers(len(body) - 4))
            body = body[begin : int(rng.integers(begin + 4, len(body) + 1))]
        before, after = self.endings[rng.choice(len(self.endings), p=self.shares)]
        space = self.space if rng.random() < 0.5 else []
        row = [BOS, *self.bare[body[0]], *body[1:], *space, *before, MASK, *after]
        return row, len(row) - len(after) - 1


# --- the model


def fresh_model(vocab: int, args: argparse.Namespace) -> Any:
    """Return a random RobertaForMaskedLM whose positions start as sinusoids.

    From random positions the loss sits three times as long on the plateau of token frequencies.
    """
    torch.manual_seed(args.seed)
    model = RobertaForMaskedLM(
        RobertaConfig(
            vocab_size=vocab,
            num_hidden_layers=args.layers,
            hidden_size=args.width,
            num_attention_heads=args.heads,
            intermediate_size=args.ffn or 4 * args.width,
            max_position_embeddings=args.positions,
            type_vocab_size=1,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            bos_token_id=BOS,
            pad_token_id=PAD,
            eos_token_id=EOS,
            dtype="float32",  # to compute in; on disk the weights are halves
        )
    )
    model.set_attn_implementation("eager")  # on a CPU the backward pass of torch's own attention is twice as slow
    half = args.width // 2
    angle = torch.arange(args.positions)[:, None] * 10_000.0 ** (-torch.arange(half) / half)
    with torch.no_grad():
        model.roberta.embeddings.position_embeddings.weight.copy_(0.02 * torch.cat([angle.sin(), angle.cos()], dim=1))
    return model


def started_model(folder: Path, args: argparse.Namespace) -> tuple[Any, Tokenizer]:
    """Load a model of this script and its tokenizer."""
    if not folder.is_dir():
        fail(f"--start {folder} is not a folder")
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        if not (folder / name).is_file():
            fail(f"--start {folder} holds no {name}")
    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        model = AutoModelForMaskedLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
        )
    except Exception as error:  # each library has its own kinds
        fail(f"--start {folder} cannot be loaded: {str(error).splitlines()[0]}")
    if not isinstance(model, RobertaForMaskedLM) or [tokenizer.token_to_id(s) for s in SPECIALS] != list(range(5)):
        fail(f"--start {folder} is not a model of this script: a RoBERTa whose first tokens are {' '.join(SPECIALS)}")
    longest = model.config.max_position_embeddings - 2
    if max([args.length] + ([args.long_length] if args.long_every else [])) > longest:
        fail(f"--start {folder} takes rows of at most {longest} tokens: lower --length, --long-length")
    return model, tokenizer


def optimizers(model: Any, args: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """Return Muon for the encoder's matrices (none at rate 0), and AdamW for all other parameters."""
    matrices = [p for p in model.roberta.encoder.parameters() if p.ndim == 2] if args.muon_lr else []
    chosen = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    adam = torch.optim.AdamW(rest, lr=args.adam_lr, betas=(0.9, 0.98), weight_decay=args.weight_decay, fused=True)
    return [torch.optim.Muon(matrices, lr=args.muon_lr, weight_decay=0.0), adam] if matrices else [adam]


def multiplies_bf16(device: torch.device) -> bool:
    """Tell whether the device has instructions for bfloat16 products; elsewhere autocast only costs time."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported()
    flags = Path("/proc/cpuinfo")
    return flags.exists() and any(name in flags.read_text() for name in ("avx512_bf16", "amx_bf16"))


# --- evaluation

Labelled = tuple[list[str], np.ndarray]  # sentences, and their labels, 0 or 1


def labelled(path: Path, rows: int, seed: int) -> Labelled:
    """Read `rows` random rows (0: all) of a tab-separated file with the columns sentence and label (0 or 1)."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            lines = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    except (OSError, UnicodeDecodeError) as error:
        fail(f"cannot read {path}: {getattr(error, 'strerror', None) or error}")
    for number, line in enumerate(lines, start=2):  # line 1 names the columns
        if line.get("label") not in ("0", "1") or not line.get("sentence"):
            fail(f"{path}, line {number}: the columns sentence and label (0 or 1) are needed")
    if rows and rows < len(lines):
        lines = [lines[i] for i in np.random.default_rng(seed).permutation(len(lines))[:rows]]
    labels = np.array([int(line["label"]) for line in lines])
    if len(set(labels)) < 2:
        fail(f"{path} must hold rows of both labels")
    return [line["sentence"] for line in lines], labels


def margins(model: Any, tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """Return for each text the score of " great" less that of " terrible" in "{text} It was <mask>."."""
    body = [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]
    before, after, terrible, great = (
        tokenizer.encode(text, add_special_tokens=False).ids for text in (" It was", ".", " terrible", " great")
    )
    longest = model.config.max_position_embeddings - 2 - len([BOS, *before, MASK, *after, EOS])
    rows = [[BOS, *ids[:longest], *before, MASK, *after, EOS] for ids in body]
    device = next(model.parameters()).device
    found = np.zeros(len(rows))
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    for i in range(0, len(order), 100):
        part = order[i : i + 100]
        width = max(len(rows[k]) for k in part)
        ids = torch.tensor([rows[k] + [PAD] * (width - len(rows[k])) for k in part], device=device)
        with torch.no_grad():
            hidden = model.roberta(input_ids=ids, attention_mask=(ids != PAD).long()).last_hidden_state
            scores = model.lm_head(hidden[ids == MASK])
        found[part] = (scores[:, great[0]] - scores[:, terrible[0]]).cpu().numpy()
    return found


def quality(scores: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Return zero-shot accuracy, accuracy when the half with the higher scores is called positive, and AUC."""
    accuracy = float(np.mean((scores > 0) == labels))
    median = float(np.mean((scores > np.median(scores)) == labels))
    return {"accuracy": accuracy, "median": median, "auc": float(roc_auc_score(labels, scores))}


# --- training


def loss_of(model: Any, encoder: Any, batch: Batch, low: bool) -> Tensor:
    """Return the weighted mean cross-entropy of the batch."""
    device = next(model.parameters()).device
    ids = batch.ids.to(device)
    mask = (ids != PAD).long() if (batch.ids == PAD).any() else None
    with torch.autocast(device.type, torch.bfloat16, enabled=low):
        hidden = encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        scores = model.lm_head(hidden[batch.masked.to(device)])  # only masked positions go through the head
    likely = scores.float().log_softmax(-1)[batch.place.to(device), batch.word.to(device)]
    weight = batch.weight.to(device)
    return -(weight * likely).sum() / weight.sum()


@dataclasses.dataclass
class State:
    """How far a run has come."""

    step: int = 0
    seen: int = 0  # tokens
    minutes: float = 0.0
    recent: list[float] = dataclasses.field(default_factory=list)  # losses since the last line
    history: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # one entry per printed line

    def share(self, args: argparse.Namespace) -> float:
        """Return how much of `--steps` or `--minutes` is done, 1 for all."""
        return max(self.step / args.steps if args.steps else 0.0, self.minutes / args.minutes if args.minutes else 0.0)


class Run:
    """One training run: model, optimizers and progress, and their checkpoints under `out`/checkpoint."""

    def __init__(self, model: Any, tokenizer: Tokenizer, test: Labelled | None, args: argparse.Namespace):
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model, self.tokenizer, self.args = model.to(self.device).train(), tokenizer, args
        self.methods = optimizers(model, args)
        self.peaks = [method.param_groups[0]["lr"] for method in self.methods]
        self.at = State()
        self.test = test

    def train(self, batches: Batches) -> None:
        """Train until `--steps` or `--minutes` is reached; rates rise over `--warmup` steps and fall to 0."""
        args, at = self.args, self.at
        encoder = torch.compile(self.model.roberta) if args.compile else self.model.roberta
        low = multiplies_bf16(self.device)
        print(f"training on {self.device}, {'bf16 autocast' if low else 'float32'}", flush=True)
        if not at.step:
            self.evaluate()
        now = saved = time.monotonic()
        with bar() as progress:
            task = progress.add_task("training", total=1.0)
            while (done := at.share(args)) < 1:
                at.step += 1
                self.step(batches(at.step), encoder, low, done)
                if at.step == 1 or at.step % args.log_every == 0:
                    self.log()
                if at.step % args.evaluate_every == 0:
                    self.evaluate()
                before, now = now, time.monotonic()
                at.minutes += (now - before) / 60
                if now - saved > 60 * args.checkpoint_minutes:
                    self.checkpoint()
                    saved = now
                progress.update(task, completed=at.share(args))
        self.evaluate()
        print(f"trained {at.step} steps on {at.seen:,} tokens in {at.minutes:.1f} min", flush=True)

    def step(self, batch: Batch, encoder: Any, low: bool, done: float) -> None:
        """Do one step at the rates that belong to `done`, the share of the run behind it."""
        for method, peak in zip(self.methods, self.peaks, strict=True):
            method.param_groups[0]["lr"] = peak * (1 - done) * min(1.0, self.at.step / max(self.args.warmup, 1))
        loss = loss_of(self.model, encoder, batch, low)
        loss.backward()
        if self.args.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip)
        for method in self.methods:
            method.step()
            method.zero_grad()
        self.at.recent.append(loss.item())
        self.at.seen += batch.ids.numel()
        if not math.isfinite(self.at.recent[-1]):
            reason = f"the loss is {self.at.recent[-1]} at step {self.at.step}: lower --muon-lr, --adam-lr"
            print(f"error: {reason}", file=sys.stderr)
            sys.exit(1)

    def log(self) -> None:
        """Print and keep the mean loss since the last such line."""
        at = self.at
        loss = float(np.mean(at.recent))
        at.recent.clear()
        at.history.append({"step": at.step, "tokens": at.seen, "minutes": round(at.minutes, 2), "loss": round(loss, 4)})
        print(f"step {at.step}  loss {loss:.3f}  tokens {at.seen:,}  {at.minutes:.1f} min", flush=True)

    def evaluate(self) -> None:
        """Print and keep the zero-shot figures on the rows of `--evaluate`, if there are any."""
        if self.test is None:
            return
        at, (texts, labels) = self.at, self.test
        self.model.eval()
        found = quality(margins(self.model, self.tokenizer, texts), labels)
        self.model.train()
        at.history.append({"step": at.step, "tokens": at.seen} | {name: round(v, 4) for name, v in found.items()})
        figures = "  ".join(f"{name} {value:.4f}" for name, value in found.items())
        print(f"step {at.step}  evaluated on {len(texts)} rows: {figures}", flush=True)

    def checkpoint(self) -> None:
        """Write all that the run needs to go on; the checkpoint before it stays until this one is whole."""
        folder = self.args.out / "checkpoint"
        new, old = folder.with_name("checkpoint.new"), folder.with_name("checkpoint.old")
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        weights = {name: value.contiguous() for name, value in self.model.state_dict().items() if name not in TIED}
        save_file(weights, new / "model.safetensors")
        moments = {
            f"{i}.{key}.{name}": torch.as_tensor(value).contiguous()
            for i, method in enumerate(self.methods)
            for key, values in method.state_dict()["state"].items()
            for name, value in values.items()
        }
        save_file(moments, new / "optimizer.safetensors")
        self.tokenizer.save(str(new / "tokenizer.json"))
        state = {"arguments": remembered(self.args), "state": dataclasses.asdict(self.at)}
        (new / "state.json").write_text(json.dumps(state) + "\n")
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
            folder.rename(old)
        new.rename(folder)
        shutil.rmtree(old, ignore_errors=True)

    def resume(self, folder: Path) -> None:
        """Go on from a checkpoint of this run."""
        self.at = State(**json.loads((folder / "state.json").read_text())["state"])
        self.model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)  # without the tied decoder
        moments = load_file(folder / "optimizer.safetensors")
        for i, method in enumerate(self.methods):
            whole = method.state_dict()
            for path, value in moments.items():
                number, key, name = path.split(".")
                if number == str(i):
                    whole["state"].setdefault(int(key), {})[name] = value
            method.load_state_dict(whole)
        print(f"continued from step {self.at.step}", flush=True)


def bar() -> Progress:
    """Return a bar with the time left, on stderr, shown on terminals only."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True)


def remembered(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments that a run cannot change when it goes on."""
    free = ("out", "minutes", "steps", "log_every", "evaluate", "evaluate_rows", "evaluate_every", "checkpoint_minutes")
    return {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items() if k not in free}


def checkpoint_of(args: argparse.Namespace) -> Path | None:
    """Return the checkpoint that `--out` holds, if any, and refuse one of another run."""
    for name in ("checkpoint", "checkpoint.old"):  # the second if the run was stopped between two renames
        folder = args.out / name
        if not (folder / "state.json").is_file():
            continue
        try:
            then = json.loads((folder / "state.json").read_text())["arguments"]
        except (OSError, ValueError, KeyError):
            fail(f"{folder} is damaged: remove {args.out} to start anew")
        for key, value in remembered(args).items():
            if then.get(key) != value:
                option = f"--{key.replace('_', '-')}" if key != "text" else "its text"
                fail(f"--out {args.out} holds an unfinished run whose {option} is {then.get(key)}, not {value}")
        return folder
    return None


TIED = {"lm_head.decoder.weight", "lm_head.decoder.bias"}


def save(model: Any, tokenizer: Tokenizer, out: Path) -> None:
    """Write weights (float16, the tied decoder once), config and tokenizer as the Auto classes expect them."""
    weights = {k: v.half().cpu().contiguous() for k, v in model.state_dict().items() if k not in TIED}
    model.config.architectures = ["RobertaForMaskedLM"]
    model.config.save_pretrained(out)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(out / "tokenizer.json"))
    settings: dict[str, Any] = {"tokenizer_class": "RobertaTokenizer", "add_prefix_space": False}
    settings |= {"bos_token": "<s>", "cls_token": "<s>", "eos_token": "</s>", "sep_token": "</s>"}
    settings |= {"pad_token": "<pad>", "unk_token": "<unk>", "mask_token": "<mask>"}
    settings["model_max_length"] = model.config.max_position_embeddings - 2
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


# --- the door


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description="Pretrain a small RoBERTa like the demo model from a text file.")
    add = parser.add_argument
    add("text", type=Path, help="UTF-8 text, plain or .xz, one document a line")
    add("--out", type=Path, required=True, help="folder to write: new, empty, or of an unfinished run to continue")
    add("--steps", type=int, help="stop after so many steps")
    add("--minutes", type=float, help="stop after so many minutes; 45 unless --steps is given")
    add("--seed", type=int, default=42)
    add("--log-every", type=int, default=100, help="steps")
    add("--checkpoint-minutes", type=float, default=5.0, help="time between checkpoints")

    add = parser.add_argument_group("model").add_argument
    add("--start", type=Path, help="folder of a model to continue, with its tokenizer; its shape replaces these")
    add("--vocab-size", type=int, default=8192)
    add("--tokenizer-share", type=float, default=0.25, help="share of the documents that the BPE is trained on")
    add("--layers", type=int, default=4)
    add("--width", type=int, default=256)
    add("--heads", type=int, default=4)
    add("--ffn", type=int, help="feed-forward width; 4 times the width unless given")
    add("--positions", type=int, default=258, help="longest input + 2, as RoBERTa counts")

    add = parser.add_argument_group("batches").add_argument
    add("--batch-tokens", type=int, default=4200)
    add("--length", type=int, default=64, help="tokens per row, <s> and </s> included")
    add("--long-length", type=int, default=254)
    add("--long-every", type=int, default=10, help="every n-th batch has long rows; 0: none")
    add("--mask", type=float, default=0.25, help="share of the tokens to predict")
    add("--spaced-share", type=float, default=0.0, help="share of the batches in SST-2's spelling")

    add = parser.add_argument_group("words of opinion").add_argument
    add("--opinion-words", help="a JSON list of words, or auto: found in the text")
    add("--opinion-mask", type=float, default=0.6, help="share of the opinion words to predict")
    add("--opinion-weight", type=float, default=3.0, help="weight of an opinion word in the loss")
    add("--prompt-share", type=float, default=0.0, help="share of the batches that are prompt rows")
    add("--prompt-weight", type=float, default=10.0, help="weight of a prompt row's mask in the loss")
    add("--prompt-mask", type=float, default=0.05, help="share of the other tokens of prompt rows to predict")
    add("--prompt-opinion-mask", type=float, default=0.15, help="share of the opinion words of prompt rows to predict")
    add("--phrase-share", type=float, default=0.2, help="share of the prompt rows cut to a part of their sentences")
    add("--reach", type=int, default=4, help="sentences before and after, whose opinion words are to be predicted")

    add = parser.add_argument_group("optimizers").add_argument
    add("--muon-lr", type=float, default=0.012, help="for the encoder's matrices; 0: AdamW for them too")
    add("--adam-lr", type=float, default=0.0024)
    add("--weight-decay", type=float, default=0.0, help="of AdamW")
    add("--clip", type=float, default=0.0, help="greatest norm of the gradient; 0: any")
    add("--warmup", type=int, default=400, help="steps")
    add("--compile", action="store_true", help="torch.compile the encoder (on a CPU this needs a C++ compiler)")

    add = parser.add_argument_group("evaluation").add_argument
    add("--evaluate", type=Path, help="tab-separated file with the columns sentence and label, as SST-2's train.tsv")
    add("--evaluate-rows", type=int, default=2000, help="so many random rows of it; 0: all")
    add("--evaluate-every", type=int, default=500, help="steps")
    return parser


FROM_ZERO = ["seed", "long_every", "warmup", "muon_lr", "weight_decay", "clip", "spaced_share", "prompt_share"]
FROM_ZERO += ["phrase_share", "prompt_mask", "prompt_opinion_mask", "evaluate_rows"]


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line (argparse ends with 2 on a mistake) and refuse what cannot work."""
    args = parser().parse_args(argv)
    if args.steps is None and args.minutes is None:
        args.minutes = 45.0
    for name, value in vars(args).items():
        from_zero, option = name in FROM_ZERO, f"--{name.replace('_', '-')}"
        if type(value) in (int, float) and not (0 < value < math.inf or (from_zero and value == 0)):
            fail(f"{option} must be {'0 or more' if from_zero else 'above 0'}, not {value}")
        if name.endswith("_share") and value > 1:
            fail(f"{option} must be at most 1, not {value}")
        if name.endswith("mask") and value > (1 if "opinion" in name else 0.5):
            fail(f"{option} must be at most {1 if 'opinion' in name else 0.5}, not {value}")
    if args.vocab_size > 2**16:
        fail(f"--vocab-size must be at most 65536, not {args.vocab_size}")
    if args.width % args.heads or args.width % 2:
        fail(f"--width {args.width} must be even and a multiple of --heads {args.heads}")
    if args.prompt_share and not args.opinion_words:
        fail("--prompt-share needs --opinion-words")
    check_lengths(args)
    check_places(args)
    return args


def check_lengths(args: argparse.Namespace) -> None:
    """Refuse rows that are too short, or too long for the positions."""
    lengths = [args.length] + ([args.long_length] if args.long_every else [])
    most = "" if args.start else f" to {args.positions - 2} (--positions less 2)"
    if min(lengths) < 8 or (not args.start and max(lengths) > args.positions - 2):
        fail(f"rows of {', '.join(map(str, lengths))} tokens: 8{most} are allowed")
    if args.prompt_share and args.length < 24:
        fail(f"--prompt-share needs a --length of at least 24, not {args.length}")


def check_places(args: argparse.Namespace) -> None:
    """Refuse an output folder in use and a torch without Muon."""
    held = args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir()))
    if held and checkpoint_of(args) is None:
        fail(f"--out {args.out} exists and is not an empty folder")
    if args.muon_lr and not hasattr(torch.optim, "Muon"):
        fail(f"torch {torch.__version__} has no torch.optim.Muon: 2.9 or newer is needed, or --muon-lr 0")


def model_and_tokenizer(docs: list[str], resumed: Path | None, args: argparse.Namespace) -> tuple[Any, Tokenizer]:
    """Load `--start`, or make a random model and train its tokenizer, which an unfinished run has already."""
    if args.start:
        return started_model(args.start, args)
    if resumed:
        tokenizer = Tokenizer.from_file(str(resumed / "tokenizer.json"))
    else:
        tokenizer = train_tokenizer(docs, args.vocab_size, args.tokenizer_share, args.seed)
    return fresh_model(tokenizer.get_vocab_size(), args), tokenizer


def batches_of(docs: list[str], words: list[str], tokenizer: Tokenizer, args: argparse.Namespace) -> Batches:
    """Tokenise the text, in one spelling or both."""
    opinions = marked(tokenizer, words, (" {word}",))
    if args.opinion_words and not opinions.any():
        fail("no opinion word is a single token of the tokenizer: give other words with --opinion-words")
    corpora = [corpus(tokenizer, docs, opinions)]
    if args.spaced_share:
        corpora.append(corpus(tokenizer, docs, opinions, spaced))
    print(f"{len(docs):,} documents, {len(corpora[0].tokens):,} tokens, vocabulary {tokenizer.get_vocab_size()}")
    if words:
        print(f"{len(words)} opinion words: {', '.join(words[:12])}{', ...' * (len(words) > 12)}")
    return Batches(corpora, tokenizer, opinions | marked(tokenizer, words, (" {Word}",)), args)


def prepare(args: argparse.Namespace) -> tuple[Run, Batches, list[str]]:
    """Read all inputs, make or load the model, take up an unfinished run; return also the opinion words."""
    test = labelled(args.evaluate, args.evaluate_rows, 0) if args.evaluate else None
    auto = args.opinion_words == "auto"
    words = read_opinion_words(Path(args.opinion_words)) if args.opinion_words and not auto else []
    docs = documents(args.text)
    resumed = checkpoint_of(args) if args.out.exists() else None
    model, tokenizer = model_and_tokenizer(docs, resumed, args)
    if auto:
        words = opinion_words(docs)
    batches = batches_of(docs, words, tokenizer, args)
    run = Run(model, tokenizer, test, args)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    args.out.mkdir(parents=True, exist_ok=True)
    if resumed:
        run.resume(resumed)
    return run, batches, words


def main(argv: list[str] | None = None) -> None:
    """Read, tokenise, train, write."""
    args = arguments(argv)
    run, batches, words = prepare(args)
    run.train(batches)
    save(run.model, run.tokenizer, args.out)
    record: dict[str, Any] = {"arguments": {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}}
    record |= {"opinion_words": words, "history": run.at.history}
    (args.out / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    for name in ("checkpoint", "checkpoint.old", "checkpoint.new"):
        shutil.rmtree(args.out / name, ignore_errors=True)
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
