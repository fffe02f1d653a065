"""The text of a completion: decoded token ids, and where a stop string ends it."""

from collections.abc import Sequence
from typing import Any

ANCHOR = "a"  # a text before the completion's, so that a tokenizer does not drop its leading space


class CompletionText:
    """Decodes completions, and finds stop strings in them, also across tokens.

    Args:
        tokenizer: of the model.
        stop: a completion ends at the first of these strings in its text.
        keep_stop: whether the text keeps that string.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str], keep_stop: bool) -> None:
        self._tokenizer, self._stop, self._keep_stop = tokenizer, stop, keep_stop
        self._special = set(tokenizer.all_special_ids)
        self._anchor = tokenizer.encode(ANCHOR, add_special_tokens=False)
        self._start = len(self._decode_ids(self._anchor))
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
        if not self._stop or not self._stop_may_end_in(ids[-1]):
            return False
        words = [token for token in ids[-2 * self._tail :] if token not in self._special][-self._tail :]
        text = self._decode(words)
        return any(stop in text for stop in self._stop)

    def _stop_may_end_in(self, token: int) -> bool:
        """Return whether a token has the last character of a stop string, or perhaps a part of it."""
        if token not in self._may_end:
            text = self._decode([token])
            self._may_end[token] = any(stop[-1] in text for stop in self._stop) or "\N{REPLACEMENT CHARACTER}" in text
        return self._may_end[token]

    def _decode(self, ids: Sequence[int]) -> str:
        return self._decode_ids([*self._anchor, *ids])[self._start :]

    def _decode_ids(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text
