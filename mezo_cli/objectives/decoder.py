"""Score what may follow prompts, by a decoder: the log-probability of each candidate of each row, in one forward.

The objective `lm` scores label words so, and `choice` (choice.py) the candidates of each row.

A row is its prompt and then what is read of its candidates: all but their last tokens, which are only scored. What one
candidate begins with is read once, for all that begin so. A token attends to the prompt and to the earlier tokens of
its own continuation, and its position continues the prompt's:

    prompt  p p p p          continuations (a b), (c d e):  after the prompt a b c d e, at positions 4 5 4 5 6
    keys that d attends to   p p p p c d

So a prompt is computed once for all of its candidates. Rows are laid end to end, without padding (packing.py), for a
model whose attention goes through transformers' registry and takes our position ids, and that has no sliding window.
For every other model there is one right-padded row per prompt and continuation. Both are exact: no keys and values are
kept for the next forward, whose weights are others.

The head is computed at the positions that a scored token follows, in float32 whatever the compute dtype is; what is
computed over the whole vocabulary in parts, so that no [positions, vocabulary] is ever in memory.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mezo_cli.config.registry import DECODER_FAMILIES
from mezo_cli.config.schema import Config, TokenizedExample
from mezo_cli.errors import UserError
from mezo_cli.models import CAUSAL_LM, LoadedModel
from mezo_cli.objectives.base import linear_in_float32
from mezo_cli.objectives.classification import Classification
from mezo_cli.objectives.collate import Arrays, Batch
from mezo_cli.objectives.frozen_layers import packed_forward
from mezo_cli.objectives.packing import ATTENTION, PackedLayout, pack_rows
from mezo_cli.objectives.scoring import in_float64
from mezo_cli.perturb.forward import PerturbedForward
from mezo_cli.perturb.functional import swapped
from mezo_cli.tasks import LmEncoder

PROMPT = -1  # in place of the number of a continuation
_ROWS = 8192  # of the head that are perturbed and multiplied at a time
_POSITIONS = 256  # that they are multiplied with at a time

Ids = Sequence[int]
Row = tuple[Ids, Sequence[Ids], Sequence[int]]  # a prompt, its candidates, and how many last tokens of each are scored
# Where a token is among the hidden states, laid end to end, of (row, continuation, token); token -1: the prompt's last.
Place = Callable[[int, int, int], int]


class CandidateScorer:
    """A decoder and its head. Where its family is supported, its attention is replaced for good, and the head always.

    Args:
        model: the decoder.
        forward: runs it with perturbed weights.
        read: returns the prompt and the candidates of a row.
        objective: for the error line.
        normalizes_first: whether the token after the prompt is normalized over the vocabulary. The normalizer there is
            the same for all candidates of a row, and cancels in every softmax over them.

    Attributes:
        head: the linear layer over the vocabulary. Where `peft` trains a copy of it, that copy: it computes.
        is_packed: whether its batches are packed, and one forward can compute both signs.
        frozen: its lowest layers, if it is packed.
        engine: what computes `log_probs` instead of the model: an inference engine; None: the model.
        whole_vocabulary: whether the logits of every token after the prompt are returned instead, by the model.
    """

    def __init__(
        self, model: Any, forward: PerturbedForward, read: Callable[[Any], Row], objective: str, normalizes_first: bool
    ) -> None:
        head = model.get_output_embeddings()
        head = head.modules_to_save["default"] if hasattr(head, "original_module") else head
        if not isinstance(head, nn.Linear):
            raise UserError(f"{type(model).__name__} has no head over the vocabulary: objective={objective} needs one")
        self.head, self._model, self._forward, self.read = head, model, forward, read
        self.normalizes_first, self.whole_vocabulary = normalizes_first, False
        self.engine: Callable[[Batch], Tensor] | None = None
        self._layout: Mapping[str, Tensor] = {}  # of the batch that runs
        self._inputs: dict[str, Any] = {}  # the model's keyword arguments for it
        has_window = getattr(model.config, "sliding_window", None) is not None
        self.is_packed, self.frozen = model.config.model_type in DECODER_FAMILIES.targets and not has_window, None
        if self.is_packed:
            self.frozen = packed_forward(model, forward, self._inputs_of, self._tokens_of, reads=False)
            model.config._attn_implementation = ATTENTION
        forward.unpatch(head)
        head.register_forward_pre_hook(self._select_positions)
        head.forward = self._score  # type: ignore[method-assign,assignment]

    def lay_out(self, rows: Sequence[Any]) -> Arrays:
        """Lay prompts and candidates out for one forward.

        Return what the model reads (`pack`, `pad`), and read: the positions that the head reads, [read]; head_rows: the
        tokens that are scored, each once; read_of and token_of: for each token that is scored its position in `read`
        and its number in `head_rows`, [scored]; normalized and normalizer_of: the positions in `read` that a normalizer
        is computed at, and for each token that is scored 1 + its own among them, or 0; slots: the scored tokens of each
        candidate, [rows, most candidates, most tokens], of which the first `counts` are valid, [rows, most candidates].
        """
        texts = [self.read(row) for row in rows]
        starts = [distinct_starts(candidates) for _, candidates, _ in texts]
        read = [(prompt, of_row) for (prompt, _, _), (of_row, _) in zip(texts, starts, strict=True)]
        arrays, place = (pack if self.is_packed else pad)(read)
        width = max(len(scored) for _, _, scored in texts)
        counts = np.array([[*scored, *[0] * (width - len(scored))] for _, _, scored in texts])
        slots = np.zeros((*counts.shape, counts.max()), dtype=np.int64)
        positions, tokens, normalizes = list[int](), list[int](), list[bool]()
        for i, ((_, candidates, scored), (_, places)) in enumerate(zip(texts, starts, strict=True)):
            for j, (ids, count) in enumerate(zip(candidates, scored, strict=True)):
                slots[i, j, :count] = range(len(tokens), len(tokens) + count)
                before = range(len(ids) - count, len(ids))
                positions += [place(i, *places[tuple(ids[:n])]) for n in before]
                normalizes += [n > 0 or self.normalizes_first for n in before]
                tokens += ids[len(ids) - count :]
        read_at, read_of = np.unique(positions, return_inverse=True)
        head_rows, token_of = np.unique(tokens, return_inverse=True)
        normalized = np.unique(read_of[normalizes])
        return arrays | {
            "read": read_at,
            "read_of": read_of,
            "head_rows": head_rows,
            "token_of": token_of,
            "normalized": normalized,
            "normalizer_of": np.where(normalizes, np.searchsorted(normalized, read_of) + 1, 0),
            "slots": slots,
            "counts": counts,
        }

    def log_probs(self, batch: Batch) -> Tensor:
        """Return the sum of each candidate's log-probabilities, 0 where a row has fewer: float64 [signs, rows, n].

        Under both signs of a perturbation in one paired forward, if the batch is packed.
        """
        if self.engine is not None and not self.whole_vocabulary:
            return self.engine(batch)
        return self._model(**self._inputs_of(batch)).logits if self.frozen is None else self.frozen.logits(batch)

    def _tokens_of(self, row: Any) -> int:
        prompt, candidates, _ = self.read(row)
        return len(prompt) + sum(map(len, distinct_starts(candidates)[0]))

    def _inputs_of(self, batch: Batch) -> dict[str, Any]:
        layout, names = batch.layout, ("input_ids", "attention_mask")
        if layout is not self._layout:  # a step may ask twice for the same batch
            self._layout = layout
            self._inputs = packed_inputs(batch) if self.is_packed else {name: layout[name] for name in names}
        return {**self._inputs, "use_cache": False}

    def _select_positions(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        """Keep only the hidden states that the head scores: float32 [signs, read, width].

        A hook before the head, so that the input of the head is what it scores: the linear probe reads it there.
        """
        states = args[0] if self.is_packed else args[0].flatten(0, 1).unsqueeze(0)
        return (states[:, self._layout["read"]].float(),)

    def _score(self, hidden: Tensor) -> Tensor:
        """Replace the head's forward: hidden states at `read`, [signs, read, width] -> `log_probs`."""
        layout = self._layout
        rows = None if self.whole_vocabulary else layout["head_rows"]
        logits_of = linear_in_float32(self._forward, self.head, rows)
        if self.whole_vocabulary:
            return logits_of(hidden[:, layout["read_of"][layout["slots"][:, 0, 0]]])
        # In float64 a normalizer cancels where candidates are single tokens.
        scores = in_float64(logits_of(hidden)[:, layout["read_of"], layout["token_of"]])
        if len(layout["normalized"]):
            log_sum, hidden = self._log_sum, hidden[:, layout["normalized"]]
            if torch.is_grad_enabled():  # it computes the parts again, and keeps none of them
                log_sum = partial(checkpoint, self._log_sum, use_reentrant=False)
            vocabulary = torch.arange(len(self.head.weight), device=hidden.device).split(_ROWS)
            normalizers = torch.stack([log_sum(hidden, rows) for rows in vocabulary]).logsumexp(0)
            scores = scores - torch.nn.functional.pad(in_float64(normalizers), (1, 0))[:, layout["normalizer_of"]]
        return sum_of_candidates(scores, layout)

    def _log_sum(self, hidden: Tensor, rows: Tensor) -> Tensor:  # of exponentials over a part of the vocabulary
        logits_of = linear_in_float32(self._forward, self.head, rows)
        return torch.cat([logits_of(part).logsumexp(-1) for part in hidden.split(_POSITIONS, dim=1)], dim=-1)


def sum_of_candidates(log_probs: Tensor, layout: Mapping[str, Tensor]) -> Tensor:
    """Return the sum of the log-probabilities of each candidate's tokens: `CandidateScorer.log_probs`.

    Args:
        log_probs: of all tokens that are scored, float64 [signs, tokens], in the order of the rows and candidates.
        layout: of the batch.
    """
    slots = layout["slots"]
    is_token = torch.arange(slots.shape[-1], device=slots.device) < layout["counts"].unsqueeze(-1)
    return torch.where(is_token, log_probs[:, slots], 0.0).sum(-1)


def plain_log_probs(loaded: LoadedModel, row: Row, number: int, normalizes_first: bool = True) -> Tensor:
    """Return the log-probabilities of a candidate's scored tokens by the model's own forward, with it alone."""
    prompt, candidates, scored = row
    ids = torch.tensor([*prompt, *candidates[number]]).to(loaded.device)
    last, first = ids[-scored[number] :], 0 if normalizes_first else 1
    logits = loaded.model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0].float()[-len(last) - 1 : -1]
    return torch.cat([logits[:first], logits[first:].log_softmax(-1)]).gather(1, last.unsqueeze(1)).squeeze(1)


class Lm(Classification):
    """Objective `lm`: how likely a decoder continues a prompt with each label word (paper, section 3.2: OPT).

    The score of a label is the sum of the log-probabilities of its word's tokens after the prompt. The loss is
    cross-entropy over the labels' scores. The normalizer at the end of the prompt cancels there, so it is left out:
    where each word is a single token, only the last position goes through the head, and only the words' rows of the
    head are computed. The further tokens of a word are normalized over the whole vocabulary.
    """

    model_kind = CAUSAL_LM
    encoder_class = LmEncoder

    def __init__(self, config: Config, loaded: LoadedModel, forward: PerturbedForward, encoder: Any) -> None:
        super().__init__(config, loaded, forward, encoder)
        words = encoder.label_ids  # the candidates of every row
        lengths = list(map(len, words))
        self.scorer = CandidateScorer(
            loaded.model, forward, lambda row: (row.input_ids, words, lengths), "lm", normalizes_first=False
        )
        self.supports_paired_forward, self.frozen = self.scorer.is_packed, self.scorer.frozen

    @classmethod
    def plain_outputs(cls, loaded: LoadedModel, rows: Sequence[TokenizedExample], encoder: Any) -> Tensor:
        """Return the scores by the model's own forward: each row with each word alone, over the whole vocabulary."""
        words = encoder.label_ids
        texts = [(row.input_ids, words, list(map(len, words))) for row in rows]
        scores = [plain_log_probs(loaded, text, n, False).sum() for text in texts for n in range(len(words))]
        return torch.stack(scores).view(len(rows), len(words))

    def lay_out(self, rows: Sequence[TokenizedExample]) -> Arrays:
        """Lay out prompts and label words for one forward."""
        return self.scorer.lay_out(rows)

    def logits(self, batch: Batch) -> Tensor:
        """Return the labels' scores, float32: [rows, labels], or [2, rows, labels] in a paired forward."""
        return self.scorer.log_probs(batch).float().squeeze(0)

    def fits_paired_forward(self, batch: Batch) -> bool:
        """Return whether one forward should compute both signs; an engine makes batches of its own."""
        return self.scorer.engine is not None or super().fits_paired_forward(batch)

    def vocabulary_logits(self, batch: Batch) -> Tensor:
        """Return the logits of every token after the prompt, float32 [rows, tokens]."""
        with swapped("whole_vocabulary", {self.scorer: True}):
            return self.scorer.log_probs(batch).squeeze(0)

    def output_layer(self) -> tuple[nn.Linear, Tensor]:
        """Return the head, and its rows of the label words, in label order."""
        head, words = self.scorer.head, self.encoder.label_ids
        for number, word in enumerate(words, 1):
            if len(word) > 1:
                raise UserError(f"a linear probe needs label words of one token each, and number {number} has more")
        return head, torch.tensor([word[0] for word in words]).to(head.weight.device)


# --- the layout of prompts and continuations ---


def distinct_starts(candidates: Sequence[Ids]) -> tuple[list[Ids], dict[tuple[int, ...], tuple[int, int]]]:
    """Return what is read of candidates, and where each beginning of one ends: its continuation and token.

    What a longer one begins with is read there. One continuation at least is returned, perhaps an empty one.
    """
    places: dict[tuple[int, ...], tuple[int, int]] = {(): (0, -1)}
    continuations: list[Ids] = []
    for start in sorted(dict.fromkeys(tuple(ids[:-1]) for ids in candidates), key=len, reverse=True):
        if start not in places:
            for n in range(1, len(start) + 1):
                places.setdefault(start[:n], (len(continuations), n - 1))
            continuations.append(start)
    return continuations or [()], places


def pack(rows: Sequence[tuple[Ids, Sequence[Ids]]]) -> tuple[Arrays, Place]:
    """Lay prompts and their continuations end to end.

    Return the arrays that `packed_inputs` reads: those of `pack_rows`; position_ids, [tokens]; and branch, the number
    of each token's continuation, or PROMPT, [rows, length].
    """
    packed = pack_rows([[*prompt, *chain.from_iterable(continuations)] for prompt, continuations in rows])
    branch = np.full((len(rows), packed["lengths"].max()), PROMPT)
    position_ids, firsts = packed["positions"].copy(), []
    for row, (prompt, continuations) in enumerate(rows):
        start = int(packed["starts"][row])
        firsts.append([start + at for at in accumulate(map(len, continuations), initial=len(prompt))])
        for number, (first, ids) in enumerate(zip(firsts[row][:-1], continuations, strict=True)):
            branch[row, first - start : first - start + len(ids)] = number
            position_ids[first : first + len(ids)] = range(len(prompt), len(prompt) + len(ids))

    def place(row: int, number: int, token: int) -> int:
        return firsts[row][0] - 1 if token < 0 else firsts[row][number] + token

    return packed | {"position_ids": position_ids, "branch": branch}, place


def packed_inputs(batch: Batch) -> dict[str, Any]:
    """Return the model's keyword arguments for what `pack` laid out."""
    layout, branch = batch.layout, batch.layout["branch"]
    rows, length = branch.shape
    position = torch.arange(length, device=branch.device)
    visible = (position <= position.unsqueeze(1)).expand(rows, length, length)  # the padding is at the end
    if layout["input_ids"].numel() > sum(len(row.input_ids) for row in batch.rows):  # there are continuations
        same = (branch.unsqueeze(1) == branch.unsqueeze(2)).logical_or_(branch.unsqueeze(1) == PROMPT)
        visible = same.logical_and_(visible)
    mask = visible.unsqueeze(1)
    return {
        "input_ids": layout["input_ids"].unsqueeze(0),
        "position_ids": layout["position_ids"].unsqueeze(0),
        "attention_mask": mask[:1, :, :1, :1],  # four-dimensional, so transformers makes no mask from it
        "packed_layout": PackedLayout(layout["rows"], layout["positions"], mask, (rows, length)),
    }


def pad(rows: Sequence[tuple[Ids, Sequence[Ids]]]) -> tuple[Arrays, Place]:
    """Lay prompts out in right-padded rows, one per continuation.

    No token attends to the padding after it, and positions count from the left as in every model. Return input_ids and
    attention_mask, [continuations of all rows, length].
    """
    texts = [[*prompt, *ids] for prompt, continuations in rows for ids in continuations]
    length, firsts = max(map(len, texts)), list(accumulate((len(ids) for _, ids in rows), initial=0))

    def place(row: int, number: int, token: int) -> int:
        return (firsts[row] + number) * length + len(rows[row][0]) + token

    ids = np.array([text + [0] * (length - len(text)) for text in texts])
    mask = np.array([[1] * len(text) + [0] * (length - len(text)) for text in texts])
    return {"input_ids": ids, "attention_mask": mask}, place
