"""The text of a completion keeps its leading space; a stop string ends it at the token in which it is complete."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import decoders

from mezo_cli.models.decoding import CompletionText
from tests import tiny

TEXT = " great was Yes, okay. No"


@pytest.fixture(scope="module", params=["bytes", "metaspace"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One like GPT-2's, and one like Llama's, which drops the space before a text."""
    if request.param == "bytes":
        return tiny.decoder_bpe(tmp_path_factory.mktemp("bpe"), "gpt2")
    tokenizer = tiny.metaspace()
    backend = tokenizer.backend_tokenizer
    backend.decoder = decoders.Sequence([backend.decoder, decoders.Strip(" ", 1, 0)])
    return tokenizer


def encode(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a text that follows others."""
    before = tokenizer.encode("was", add_special_tokens=False)
    ids: list[int] = tokenizer.encode("was" + text, add_special_tokens=False)
    assert ids[: len(before)] == before
    return ids[len(before) :]


def test_text_is_decoded_as_it_follows_the_prompt(tokenizer: Any) -> None:
    ids = encode(tokenizer, TEXT)
    assert CompletionText(tokenizer, (), False).of([*ids, tokenizer.eos_token_id]) == TEXT


@pytest.mark.parametrize("stop", [" was", "was", "Yes, ", "t was Y", ". No", "never"])
def test_a_stop_string_is_found_when_it_is_complete(stop: str, tokenizer: Any) -> None:
    ids = encode(tokenizer, TEXT)
    text = CompletionText(tokenizer, (stop, "never"), False)
    whole = CompletionText(tokenizer, (), False)
    for n in range(1, len(ids) + 1):
        complete = stop in whole.of(ids[:n]) and stop not in whole.of(ids[: n - 1])
        assert text.has_ended(ids[:n]) is complete or stop in whole.of(ids[: n - 1])
    assert text.of(ids) == TEXT.partition(stop)[0]
    kept = CompletionText(tokenizer, (stop,), True).of(ids)
    assert kept == "".join(TEXT.partition(stop)[:2])


def test_the_first_of_several_stop_strings_ends_the_text(tokenizer: Any) -> None:
    ids = encode(tokenizer, TEXT)
    assert CompletionText(tokenizer, ("okay", "Yes", "Ye"), True).of(ids) == " great was Yes"


def test_a_stop_string_may_end_inside_several_bytes(tmp_path: Path) -> None:
    tokenizer = tiny.decoder_bpe(tmp_path, "gpt2")
    ids = encode(tokenizer, " great \N{CLAPPER BOARD}\n\n")
    assert len(ids) > 6
    text = CompletionText(tokenizer, ("\N{CLAPPER BOARD}",), False)
    assert next(n for n in range(1, len(ids) + 1) if text.has_ended(ids[:n])) == len(ids) - 2
    assert text.of(ids) == " great "
