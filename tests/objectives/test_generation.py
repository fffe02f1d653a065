"""Completions: transformers' own, with stop texts and own random numbers; runs are resumed and replayed bit for bit."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tokenizers import decoders
from transformers import AutoModelForCausalLM, AutoTokenizer

from mezo_cli.errors import UserError
from mezo_cli.objectives import generation
from mezo_cli.objectives.decoding import CompletionText, Decoder, Sampling
from mezo_cli.perturb import members
from mezo_cli.perturb.members import MemberRows
from mezo_cli.runs import Run
from tests import tiny
from tests.command_line import mezo
from tests.interruption import interrupt_and_resume, last_weights
from tests.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("eager_kernels")

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


DEMO = ["task=demo-arithmetic", "data=demo", "model=demo-decoder", "objective=generate", "objective.max_new_tokens=6"]
DEMO += ["objective.reward={contains: 0.1, countdown: {weight: 1, numbers_used: 0.1}}", "model.device=cpu"]
DEMO += ["data.eval_limit=6", "data.train_size=40", "batch_size=6", "steps=4", "eval_every=2", "log_every=1"]
DEMO += ["optimizer.lr=1e-2", "optimizer.eps=3e-2", "test_at_start=false"]
DRAWN = ["objective.temperature=1", "objective.samples=2", "objective.eval_temperature=0.7", "objective.eval_samples=2"]
CASES = {
    "greedy": [],
    "drawn, max": [*DRAWN, "objective.reduce=max"],
    "es": ["optimizer=es", "optimizer.members=4", *DRAWN],
    "es, pairs, lora": ["optimizer=es", "optimizer.members=4", "optimizer.antithetic=true", "peft=lora"],
    "lora": ["peft=lora", *DRAWN],
    "lm": ["objective.loss=lm", "objective.reward=countdown"],
}


def words(name: str) -> list[str]:
    keys = [word.split("=")[0] for word in CASES[name]]
    return [*(word for word in DEMO if word.split("=")[0] not in keys), *CASES[name]]


def figures(run: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl without times, and without what counts by process."""
    left_out = ("seconds", "completions", "crc")
    return [{key: value for key, value in line.items() if key not in left_out} for line in Run(run).metrics()]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", CASES)
def test_resumed_replayed_and_evaluated_it_is_bitwise_identical(name: str, tmp_path: Path) -> None:
    run, whole = interrupt_and_resume(words(name), tmp_path, "es" if "es" in name.split(",") else "mezo")
    assert figures(run) == figures(whole)
    assert (run / "predictions.jsonl").read_bytes() == (whole / "predictions.jsonl").read_bytes()
    assert mezo("replay", run, "--step", "4", "--out", tmp_path / "replayed").code == 0
    assert last_weights(tmp_path / "replayed") == last_weights(whole)
    summary = Run(run).read_summary()
    document = json.loads(mezo("eval", run, "--json").out)
    assert [document[key] for key in ("loss", "reward")] == [summary["test"][key] for key in ("loss", "reward")]
    lines = (run / "predictions.jsonl").read_text().splitlines(keepends=True)
    assert len(Run(run).predictions() or []) == len(lines)
    (run / "predictions.jsonl").write_text("".join(lines[:-1]))
    with pytest.raises(UserError, match=r"predictions\.jsonl is damaged"):
        Run(run).predictions()


def test_micro_batches_give_the_same_rewards(tmp_path: Path) -> None:
    for size in ("null", "2"):
        assert mezo("train", *words("es"), f"micro_batch_size={size}", f"hydra.run.dir={tmp_path / size}").code == 0
    assert figures(tmp_path / "2") == figures(tmp_path / "null")


@pytest.mark.sample(1)
@pytest.mark.parametrize("optimizer", ["mezo", "es", "fzoo"])
def test_members_of_a_lora_share_batches(optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more = ["peft=lora", f"optimizer={optimizer}", "eval_every=4"]
    more += {"mezo": DRAWN, "es": ["optimizer.members=6", "optimizer.antithetic=true"], "fzoo": []}[optimizer]
    lines, shared = [], []
    batches = mock.Mock(wraps=MemberRows)
    monkeypatch.setattr(members, "MemberRows", batches)
    for tokens in (generation.MEMBER_TOKENS, 0):
        monkeypatch.setattr(generation, "MEMBER_TOKENS", tokens)
        assert mezo("train", *DEMO, *more, f"hydra.run.dir={tmp_path / str(tokens)}").code == 0
        lines.append(figures(tmp_path / str(tokens)))
        shared.append([call.args[0] for call in batches.call_args_list])
        batches.reset_mock()
    count = {"mezo": 2, "es": 6, "fzoo": 9}[optimizer]  # FZOO's baseline is one of them
    assert shared == [[count] * 4, []]
    assert lines[0] == lines[1]  # the texts are the same
    assert any(line["reward_std"] for line in lines[0] if line["kind"] == "train")


@pytest.mark.sample(1)
@pytest.mark.parametrize("peft", ["lora", "none"])
def test_ranks_share_the_members(peft: str, tmp_path: Path) -> None:
    ours = [*words("es"), "distributed.split=directions", f"peft={peft}"]
    assert mezo("train", *ours, f"hydra.run.dir={tmp_path / 'single'}").code == 0
    ended = run_ranks(*[["train", *ours, f"hydra.run.dir={tmp_path / 'ranks'}"]] * 2)
    assert [rank.code for rank in ended] == [0, 0], ended
    single, both = (figures(tmp_path / name) for name in ("single", "ranks"))
    assert both == single
    assert last_weights(tmp_path / "ranks") == last_weights(tmp_path / "single")


def test_the_reward_length_is_not_the_length_of_completions(tmp_path: Path) -> None:
    more = ["objective.reward={length: 0.1, contains: 1}", "steps=0", f"hydra.run.dir={tmp_path / 'run'}"]
    assert mezo("train", *(word for word in DEMO if "reward" not in word), *more).code == 0
    line = Run(tmp_path / "run").metrics()[0]
    assert line["reward_length"] < 0 < line["length"]
    assert line["reward"] == pytest.approx(0.1 * line["reward_length"] + line["reward_contains"])
