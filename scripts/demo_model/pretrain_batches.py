"""The batches of pretrain_demo_model.py: windows of the text and prompt rows, with what is to be predicted in them."""

import argparse
import dataclasses

import numpy as np
import torch
from pretrain_text import BOS, EOS, MASK, PAD, SPECIALS, Corpus, fail
from tokenizers import Tokenizer
from torch import Tensor

ENDINGS = [  # what prompt rows end in, before and after the mask, and how often
    (" It was", ".", 0.60),
    (" This movie is", ".", 0.10),
    (" The film is", " .", 0.10),
    (" All in all, it was", ".", 0.08),
    (" it was", " .", 0.08),
    (" It was", "!", 0.04),
]

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
