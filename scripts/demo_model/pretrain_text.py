"""The text that pretrain_demo_model.py trains on: documents, tokenizer, opinion words, and all of it as tokens."""

import dataclasses
import itertools
import json
import lzma
import re
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

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
SENTENCE_END = re.compile(r"[.!?]+[\"')\]]*(\s+)(?=\S)")


def fail(message: str) -> NoReturn:
    """End with exit status 2 and one line."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


# --- text -> tokens


def documents(path: Path) -> list[str]:
    """Read the documents of a plain or .xz file: one per line, empty lines dropped."""
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
    return lines or fail(f"{path} holds no text: one document per line is expected")


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
