"""Complete prompts with a decoder: a batch of rows, token by token, with a cache of keys and values."""

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from mezo_cli.errors import UserError
from mezo_cli.perturb.members import MemberRows
from mezo_cli.perturb.noise.kernels import philox
from mezo_cli.perturb.noise.spans import stream_key

# A prompt is padded to at most this many times its length, plus some tokens. On a CPU a batch by itself for each length
# takes two to four times as long, and one batch for lengths from 40 to 200 takes 1.3 times as long as these.
MAX_PADDING = 2.0
FREE_PADDING = 32
ANCHOR = "a"  # a text before the completion's, so that a tokenizer does not drop its leading space
BITS = 31  # of a random number that draws a token
BLOCKS = 1 << 14  # Philox blocks per call on a CPU, so that their words stay in cache

Prompts = Sequence[Sequence[int]]  # token ids, at least one each
Keys = Sequence[tuple[int, int]]  # (row, sample) of each prompt


@dataclass(frozen=True)
class Sampling:
    """How prompts are completed.

    Attributes:
        max_new_tokens: the most tokens of a completion.
        temperature: 0 for the likeliest token each time; else tokens are drawn from softmax(logits / temperature).
        stop: a completion ends where one of these strings appears in its text.
        keep_stop: whether the text keeps that string.
        seed, step: with a temperature, of the random numbers.
        stop_tokens: a completion ends with one of these tokens, as the published code ends it.
    """

    max_new_tokens: int
    temperature: float
    stop: tuple[str, ...]
    keep_stop: bool
    seed: int = 0
    step: int = 0
    stop_tokens: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Completion:
    """What a model says after a prompt.

    Attributes:
        ids: the tokens that were generated, with those of a stop string and the end token.
        text: decoded without special tokens, a leading space kept, and without the stop string unless it is to be kept.
        truncated: whether it ended at `max_new_tokens`.
    """

    ids: list[int]
    text: str
    truncated: bool


class Decoder:
    """Completes prompts. Completions are a function of the weights, the prompts, their keys and the settings alone.

    The model is a causal language model of transformers; it is run as it is, under whatever weights it has.

    Attributes:
        takes_positions: whether the model's forward takes `position_ids`.
        ends: the tokens that end a completion.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        parameters = inspect.signature(model.forward).parameters
        if "past_key_values" not in parameters:
            raise UserError(f"{type(model).__name__} keeps no keys and values of earlier tokens: it cannot generate")
        self._model, self._tokenizer = model, tokenizer
        self.takes_positions = "position_ids" in parameters
        ends = model.generation_config.eos_token_id
        ends = tokenizer.eos_token_id if ends is None else ends
        self.ends = frozenset([] if ends is None else [ends] if isinstance(ends, int) else ends)

    @torch.no_grad()
    def complete(
        self, prompts: Prompts, keys: Keys, sampling: Sampling, members: MemberRows | None = None
    ) -> list[Completion]:
        """Complete each prompt, by each member of a population where several are given.

        Args:
            prompts: those of similar lengths go through the model together.
            keys: with a temperature a prompt's random numbers are a function of the seed, the step, its key, the
                token's position in the completion and the word of the vocabulary.
            members: whose weights are active, as `Population.materialized` gave them; None: one weight set.

        Returns:
            One completion per prompt; with members those of the first member first.
        """
        if not all(prompts):
            raise UserError("task.generate.prompt: a prompt has no tokens, so there is nothing to complete")
        completions, count = dict[tuple[int, int], Completion](), 1 if members is None else members.count
        for group in length_classes([len(prompt) for prompt in prompts]):
            of_group = [prompts[i] for i in group] * count, [keys[i] for i in group] * count
            places = [(member, i) for member in range(count) for i in group]
            completions |= zip(places, self._complete(*of_group, sampling, members), strict=True)
        return [completions[member, i] for member in range(count) for i in range(len(prompts))]

    def _complete(
        self, prompts: Prompts, keys: Keys, sampling: Sampling, members: MemberRows | None
    ) -> list[Completion]:
        text = CompletionText(self._tokenizer, sampling.stop, sampling.keep_stop)
        ids, ended = [list[int]() for _ in prompts], [False] * len(prompts)
        rows = list(range(len(prompts)))  # those in the batch, which rows that have ended leave
        state = _DecodingState(self._model, prompts, self.takes_positions, members)
        device = state.logits.device
        noise = GumbelNoise(sampling.seed, sampling.step, keys, device) if sampling.temperature else None
        for position in range(sampling.max_new_tokens):
            scores = state.logits.float()
            if noise is not None:
                scores = scores / sampling.temperature + noise.draw(position, scores.shape[1])
            chosen = scores.argmax(-1)
            for row, token in zip(rows, chosen.tolist(), strict=True):
                ids[row].append(token)
                ended[row] = token in self.ends | sampling.stop_tokens or text.has_ended(ids[row])
            left = [i for i, row in enumerate(rows) if not ended[row]]
            if not left or position + 1 == sampling.max_new_tokens:
                break
            if len(left) < len(rows):
                rows, chosen = [rows[i] for i in left], chosen[torch.tensor(left).to(device)]
                state.select(left)
                if noise is not None:
                    noise.select(left)
            state.advance(chosen)
        dropped = self.ends if sampling.keep_stop else self.ends | sampling.stop_tokens
        return [
            Completion(tokens, text.of(tokens[:-1] if tokens[-1] in dropped else tokens), not done)
            for tokens, done in zip(ids, ended, strict=True)
        ]


class _DecodingState:
    """A batch of rows with the keys and values of their tokens so far.

    Attributes:
        logits: of each row's next token, [rows, words].
    """

    def __init__(self, model: Any, prompts: Prompts, takes_positions: bool, members: MemberRows | None) -> None:
        self._model, self._takes_positions, self._members = model, takes_positions, members
        self._cache: Any = DynamicCache(config=model.config)
        self._device = model.get_input_embeddings().weight.device
        width, count = max(map(len, prompts)), 1 if members is None else members.count
        keys = [(i * count // len(prompts), *prompt) for i, prompt in enumerate(prompts)]  # each member's prompts
        distinct = {key: place for place, key in enumerate(dict.fromkeys(keys))}  # a prompt's samples: it is read once
        ids = torch.tensor([[0] * (width + 1 - len(key)) + list(key[1:]) for key in distinct])
        mask = torch.tensor([[0] * (width + 1 - len(key)) + [1] * (len(key) - 1) for key in distinct])
        self._mask = None if len({len(prompt) for prompt in prompts}) == 1 else mask.to(self._device)
        positions = (mask.cumsum(1) - 1).clamp(min=0).to(self._device)
        self._positions = positions[:, -1:]
        self._set_members([key[0] for key in distinct])
        self.logits = self._forward(ids.to(self._device), positions)
        if len(distinct) < len(prompts):
            self.select([distinct[key] for key in keys])

    def _set_members(self, of_rows: list[int]) -> None:
        self._of_rows = of_rows
        if self._members is not None:
            self._members.set(of_rows, self._device)

    def select(self, rows: Sequence[int]) -> None:
        self._set_members([self._of_rows[row] for row in rows])
        index = torch.tensor(rows).to(self._device)
        self._cache.batch_select_indices(index)
        self._positions, self.logits = self._positions[index], self.logits[index]
        self._mask = None if self._mask is None else self._mask[index]

    def advance(self, tokens: Tensor) -> None:
        self._positions = self._positions + 1
        if self._mask is not None:
            self._mask = torch.cat([self._mask, self._mask.new_ones(len(tokens), 1)], dim=1)
        self.logits = self._forward(tokens[:, None], self._positions)

    def _forward(self, ids: Tensor, positions: Tensor) -> Any:
        inputs = {"input_ids": ids, "attention_mask": self._mask, "past_key_values": self._cache}
        if self._takes_positions:
            inputs["position_ids"] = positions
        return self._model(use_cache=True, logits_to_keep=1, **inputs).logits[:, -1]


class CompletionText:
    """Decodes completions, and finds stop strings in them, also across tokens."""

    def __init__(self, tokenizer: Any, stop: Sequence[str], keep_stop: bool) -> None:
        self._tokenizer, self._stop, self._keep_stop = tokenizer, stop, keep_stop
        self._special = set(tokenizer.all_special_ids)
        self._anchor, self._start = tokenizer.encode(ANCHOR, add_special_tokens=False), 0
        self._start = len(self._decode([]))
        self._tail = 1 + max((len(text.encode()) for text in stop), default=0)  # tokens: each has a byte or more
        self._may_end: dict[int, bool] = {}  # token -> whether a stop string may end in it

    def of(self, ids: Sequence[int]) -> str:
        """Return the text of tokens without special ones, up to the first stop string."""
        text = self._decode(ids)
        places = [(text.index(stop), -len(stop), stop) for stop in self._stop if stop in text]
        if not places:
            return text
        begin, _, stop = min(places)
        return text[: begin + len(stop) * self._keep_stop]

    def has_ended(self, ids: Sequence[int]) -> bool:
        """Return whether the last token completes a stop string."""
        if not self._stop:
            return False
        token = ids[-1]
        if token not in self._may_end:  # it may have a part of the last character
            text = self._decode([token])
            self._may_end[token] = any(stop[-1] in text for stop in self._stop) or "\N{REPLACEMENT CHARACTER}" in text
        if not self._may_end[token]:
            return False
        words = [token for token in ids[-2 * self._tail :] if token not in self._special][-self._tail :]
        text = self._decode(words)
        return any(stop in text for stop in self._stop)

    def _decode(self, ids: Sequence[int]) -> str:
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return str(self._tokenizer.decode([*self._anchor, *ids], **options))[self._start :]


def length_classes(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yield the numbers of the prompts that go together, by their lengths alone."""
    group: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if group and lengths[i] > MAX_PADDING * lengths[group[0]] + FREE_PADDING:
            yield group
            group = []
        group.append(i)
    if group:
        yield group


class GumbelNoise:
    """Noise for drawing tokens: argmax(logits / temperature + noise) is a draw from softmax(logits / temperature).

    A number is a pure function of (seed, step, row, sample, position of the token, word of the vocabulary), by Philox:
    it depends neither on the order of rows nor on how they share batches, and is the same for all members of a step.
    Maddison, Tarlow, Minka: "A* Sampling" (NeurIPS 2014), section 2, have the Gumbel-max trick.

    `keys` are those of the batch.
    """

    def __init__(self, seed: int, step: int, keys: Keys, device: torch.device) -> None:
        self._step, self._device = step, device
        self._of_rows = [tuple(stream_key(seed, f"completion {row} {sample}")) for row, sample in keys]
        self.select(range(len(keys)))

    def select(self, rows: Sequence[int]) -> None:
        """Keep these completions, in this order. Members of a population have the same keys: each is drawn once."""
        self._of_rows = [self._of_rows[row] for row in rows]
        place = {key: number for number, key in enumerate(dict.fromkeys(self._of_rows))}
        self._keys = torch.tensor(list(place)).to(self._device)
        shared = len(place) < len(rows)
        self._places = torch.tensor([place[key] for key in self._of_rows]).to(self._device) if shared else None

    def draw(self, position: int, words: int) -> Tensor:
        """Return standard Gumbel numbers, float32 [completions, words], for the token at a position (from 0)."""
        device = self._keys.device
        blocks = torch.arange(-(-words // 4), device=device)
        counter = [blocks, *(torch.full((), number, device=device) for number in (position, self._step, 0))]
        rows = max(1, BLOCKS // len(blocks)) if device.type == "cpu" else len(self._keys)
        numbers = list[Tensor]()  # four per block of each key, float32 [keys, 4 blocks]
        for keys in self._keys.split(rows):
            drawn = philox(counter[0], counter[1], counter[2], counter[3], keys[:, :1], keys[:, 1:])
            low = torch.stack([word.to(torch.int32) for word in drawn], dim=-1) & ((1 << BITS) - 1)
            uniform = (low.flatten(1).float() + 0.5) * 2.0**-BITS
            numbers.append(-torch.log(-torch.log1p(-uniform)))
        of_keys = torch.cat(numbers)[:, :words]
        return of_keys if self._places is None else of_keys[self._places]
