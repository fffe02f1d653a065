"""Completions are those of transformers' own generation, with stop strings and the project's random numbers.

The text of a completion keeps its leading space; a stop string ends it at the token in which it is complete.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import decoders
from transformers import AutoModelForCausalLM, AutoTokenizer

from mezo_cli.errors import UserError
from mezo_cli.objectives.decoding import CompletionText, Decoder, Sampling
from tests import tiny

GREEDY = Sampling(max_new_tokens=12, temperature=0.0, stop=(), keep_stop=False)
PROMPTS = [[5, 17, 33, 21], [9, 8, 7, 6], [40, 41], [12] * 60, [50, 51, 52, 53, 54]]
KEYS = [(row, 0) for row in range(len(PROMPTS))]


def load(folder: Path, kind: str, **shape: Any) -> tuple[Any, Any]:
    tiny.decoder(folder, kind, **shape)
    return AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    return load(tmp_path_factory.mktemp("gpt2"), "gpt2")


def generated(model: Any, prompt: Sequence[int], new: int) -> list[int]:
    ids = torch.tensor([list(prompt)])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, pad_token_id=0)
    return out[0, len(prompt) :].tolist()


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", ["gpt2", "llama", "opt", "qwen3", "mistral", "qwen2", "gpt_neox", "bloom", "gptj"])
def test_greedy_completions_are_those_of_generate(kind: str, tmp_path: Path) -> None:
    """Prompts of several lengths, padded together or not; a row of the batch ends earlier than others."""
    model, tokenizer = load(tmp_path, kind)
    model.generation_config.eos_token_id = [0, generated(model, PROMPTS[1], 12)[4]]
    completions = Decoder(model, tokenizer).complete(PROMPTS, KEYS, GREEDY)
    assert [c.ids for c in completions] == [generated(model, prompt, 12) for prompt in PROMPTS]
    assert len(completions[1].ids) <= 5
    ends = model.generation_config.eos_token_id
    assert [c.truncated for c in completions] == [c.ids[-1] not in ends for c in completions]


def test_a_stop_token_ends_a_completion_as_in_the_published_code(gpt2: tuple[Any, Any]) -> None:
    """Its token alone does; as a stop text it may be in another token, which ends the completion sooner."""
    whole = generated(gpt2[0], PROMPTS[0], 12)
    stop = next(token for token in whole[2:] if token not in whole[:2])
    settings = {"max_new_tokens": 12, "temperature": 0.0, "stop": (), "stop_tokens": frozenset({stop})}
    for keep in (False, True):
        (completion,) = Decoder(*gpt2).complete(PROMPTS[:1], KEYS[:1], Sampling(keep_stop=keep, **settings))
        assert completion.ids == whole[: whole.index(stop) + 1]
        shown = completion.ids if keep else completion.ids[:-1]
        assert completion.text.strip() == gpt2[1].decode(shown, skip_special_tokens=True).strip()
        assert not completion.truncated


def sampled(step: int = 0, seed: int = 7, temperature: float = 1.0) -> Sampling:
    return Sampling(max_new_tokens=8, temperature=temperature, stop=(), keep_stop=False, seed=seed, step=step)


def test_random_numbers_depend_on_seed_step_row_and_sample_alone(gpt2: tuple[Any, Any]) -> None:
    decoder = Decoder(*gpt2)
    keys = [(3, 0), (3, 1), (4, 0), (5, 0), (6, 0)]
    prompts = [PROMPTS[0], PROMPTS[0], *PROMPTS[1:4]]
    whole = decoder.complete(prompts, keys, sampled())
    assert decoder.complete(prompts, keys, sampled()) == whole
    assert decoder.complete(prompts[::-1], keys[::-1], sampled()) == whole[::-1]
    apart = [decoder.complete([prompt], [key], sampled())[0] for prompt, key in zip(prompts, keys, strict=True)]
    assert apart == whole
    for other in (sampled(step=1), sampled(seed=8)):
        assert all(a.ids != b.ids for a, b in zip(decoder.complete(prompts, keys, other), whole, strict=True))
    assert whole[0].ids != whole[1].ids


def test_tokens_are_drawn_from_the_softmax(gpt2: tuple[Any, Any]) -> None:
    model, tokenizer = gpt2
    one_token = Sampling(max_new_tokens=1, temperature=0.7, stop=(), keep_stop=False)
    n = 8000
    drawn = Decoder(model, tokenizer).complete([PROMPTS[0]] * n, [(i, 0) for i in range(n)], one_token)
    with torch.no_grad():
        p = (model(torch.tensor([PROMPTS[0]])).logits[0, -1] / 0.7).softmax(-1)
    counts = torch.bincount(torch.tensor([c.ids[0] for c in drawn]), minlength=len(p))
    chi_square = ((counts - n * p) ** 2 / (n * p)).sum()
    assert abs(chi_square - len(p)) < 4 * (2 * len(p)) ** 0.5


def test_a_stop_string_ends_a_completion(gpt2: tuple[Any, Any]) -> None:
    decoder = Decoder(*gpt2)
    (free,) = decoder.complete([PROMPTS[0]], [(0, 0)], sampled())
    assert free.truncated
    stop = re.findall("[^\N{REPLACEMENT CHARACTER}]{3}", free.text)[0]  # no part of a character
    for keep in (False, True):
        (ended,) = decoder.complete([PROMPTS[0]], [(0, 0)], Sampling(8, 1.0, ("never", stop), keep, seed=7))
        assert ended.text == free.text[: free.text.index(stop) + 3 * keep]
        assert ended.ids == free.ids[: len(ended.ids)]
        assert len(ended.ids) < len(free.ids)
        assert not ended.truncated


def test_an_empty_prompt_and_a_model_without_a_cache_are_refused(gpt2: tuple[Any, Any]) -> None:
    with pytest.raises(UserError, match="no tokens"):
        Decoder(*gpt2).complete([PROMPTS[0], []], KEYS[:2], GREEDY)

    with pytest.raises(UserError, match="Linear keeps no keys and values"):
        Decoder(torch.nn.Linear(2, 2), gpt2[1])


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
