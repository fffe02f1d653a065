"""Prompts and answers for a decoder: the tokens are those of the whole text, what is cut, and every error line."""

from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mezo_cli.config.schema import Example, GeneratePrompt, TaskConfig
from mezo_cli.errors import UserError
from mezo_cli.tasks import GenerateEncoder
from tests import tiny

CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    tokenizer = AutoTokenizer.from_pretrained(tiny.decoder(tmp_path_factory.mktemp("chat")))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = CHAT
    return tokenizer


def encoder(tokenizer: PreTrainedTokenizerFast, **own: Any) -> GenerateEncoder:
    return GenerateEncoder(TaskConfig(name="qa", generate=GeneratePrompt(**own)), tokenizer)


def row(where: str = "", **columns: Any) -> Example:
    return Example((), -1, where, columns)


def test_the_answer_ends_with_the_end_token_unless_a_stop_text_ends_it(gpt2: PreTrainedTokenizerFast) -> None:
    def answer(**settings: Any) -> tuple[str, tuple[str, ...]]:
        inputs = encoder(gpt2, prompt="Q:", answer=" {a}\n", **settings)
        encoded = inputs.encode(row(a="yes"))
        return inputs.decode_ids(encoded.answer_ids), encoded.golds

    assert answer() == (" yes\n<|endoftext|>", (" yes\n",))
    assert answer(stop=["###"]) == (" yes\n<|endoftext|>", (" yes\n",))
    assert answer(stop=["###", "\n"]) == (" yes\n", (" yes",))
    assert answer(stop=["\n"], keep_stop=True) == (" yes\n", (" yes\n",))
    without = encoder(gpt2, prompt="Q:").encode(row())
    assert ([*without.answer_ids], without.golds) == ([], ())


def test_an_answer_that_merges_with_the_prompt_is_tokenized_by_itself(tokenizer: PreTrainedTokenizerFast) -> None:
    inputs = encoder(tokenizer, prompt="It ", answer="{a}")
    if "▁was" in tokenizer.get_vocab():  # Llama's: a text begins with a space, alone
        with pytest.raises(UserError, match=r"task 'qa', train.jsonl:3: the answer's first token merges"):
            inputs.encode(row("train.jsonl:3", a="was"))
        return
    encoded = inputs.encode(row("train.jsonl:3", a="was"))
    assert [*encoded.input_ids] == tokenizer("It ")["input_ids"]
    assert [*encoded.input_ids, *encoded.answer_ids][:-1] != tokenizer("It was")["input_ids"]
    text = inputs.decode_ids([*encoded.input_ids, *encoded.answer_ids])
    assert text.removeprefix("</s>").removesuffix(tokenizer.eos_token) == "It was"


def test_values_of_templates(gpt2: PreTrainedTokenizerFast) -> None:
    inputs = encoder(gpt2, prompt="{{{numbers}}} {target} {x} {names[-1]|upper_first} {a.b[0].c}")
    columns = {"numbers": [3, 5.5], "target": 8, "x": "[MASK]", "names": ["ann", "bob"], "a": {"b": [{"c": "d"}]}}
    assert inputs.decode(inputs.encode(row(**columns))) == "{[3, 5.5]} 8 [MASK] Bob d"
    rows = encoder(gpt2, prompt="{x}").encode_all([row(x=str(i)) for i in range(3)])
    assert [one.index for one in rows] == [0, 1, 2]


def test_a_row_that_is_too_long_is_refused_or_loses_the_start_of_its_prompt(tokenizer: PreTrainedTokenizerFast) -> None:
    long = row("dev.jsonl:9", x="so dull " * 30, a="yes")
    whole = encoder(tokenizer, prompt="{x}It was", answer=" {a}").encode(long)
    start = len(tokenizer("")["input_ids"])
    length = len(whole.input_ids) + len(whole.answer_ids)
    refusing = encoder(tokenizer, prompt="{x}It was", answer=" {a}", max_length=40)
    said = rf"task 'qa', dev.jsonl:9: {length} tokens of prompt and answer, and the limit is 40; .*too_long=cut"
    with pytest.raises(UserError, match=said):
        refusing.encode(long)
    cutting = encoder(tokenizer, prompt="{x}It was", answer=" {a}", max_length=40, too_long="cut")
    cut = cutting.encode(long)
    assert cut.cut
    assert len(cut.input_ids) + len(cut.answer_ids) == 40
    assert cut.answer_ids == whole.answer_ids
    assert cut.input_ids[:start] == whole.input_ids[:start]
    assert cut.input_ids[start:] == whole.input_ids[start - len(cut.input_ids) :]
    assert not cutting.encode(row(x="", a="yes")).cut
    assert cutting.without_limits().encode(long) == whole
    assert refusing.encode_to_fit([long, row(x="a")])[1] == [True, False]


def test_prompts_leave_room_for_a_completion(gpt2: PreTrainedTokenizerFast) -> None:
    example = row("dev.jsonl:9", x="so dull " * 30)
    cutting = encoder(gpt2, prompt="{x}It was", max_length=40, too_long="cut")
    cutting.leave_room(24)
    cut = cutting.encode(example)
    assert (len(cut.input_ids), cut.cut) == (16, True)
    cutting.leave_room(39)
    assert len(cutting.encode(example).input_ids) == 1
    with pytest.raises(UserError, match=r"objective.max_new_tokens=40: the limit of 40 tokens .* leaves none"):
        cutting.leave_room(40)
    refusing = encoder(gpt2, prompt="{x}It was", max_length=40)
    refusing.leave_room(24)
    with pytest.raises(UserError, match=r"dev.jsonl:9: \d+ tokens of prompt and objective.max_new_tokens=24"):
        refusing.encode(example)


def test_a_gold_answer_does_not_change_what_a_completion_follows(gpt2: PreTrainedTokenizerFast) -> None:
    inputs = encoder(gpt2, prompt="{x}It was", answer=" {a}", max_length=60, too_long="cut")
    inputs.leave_room(10)
    short, long = (inputs.encode(row(x="so dull " * 60, a=answer)) for answer in ("yes", "so very dull " * 8))
    assert short.input_ids == long.input_ids
    assert len(short.input_ids) == 50
    assert (short.skipped, short.text) == ((0, 0), [*short.input_ids, *short.answer_ids])
    assert len(long.text) == 60
    assert long.text == [*long.input_ids, *long.answer_ids][-60:]


def test_an_empty_prompt_is_plain_text(tokenizer: PreTrainedTokenizerFast) -> None:
    inputs = encoder(tokenizer, prompt="", answer="{text}", max_length=30, too_long="cut")
    encoded = inputs.encode(row(text="It was great"))
    whole = [*tokenizer("It was great")["input_ids"], tokenizer.eos_token_id]
    assert [*encoded.input_ids, *encoded.answer_ids] == whole
    assert len(encoded.input_ids) == 1  # the start token, or else the first of the text
    cut = inputs.encode(row(text="It was great " * 20))
    assert (len(cut.input_ids) + len(cut.answer_ids), cut.cut) == (30, True)


def test_a_chat_is_what_the_chat_template_makes_of_it(chat: PreTrainedTokenizerFast) -> None:
    question = {"role": "user", "content": "good or bad?"}
    said = {"role": "assistant", "content": "good"}
    wanted = chat.apply_chat_template([question], add_generation_prompt=True)["input_ids"]
    template = encoder(chat, prompt="{a} or {b}?", chat=True, answer="{c}")
    encoded = template.encode(row(a="good", b="bad", c="good"))
    assert [*encoded.input_ids] == wanted
    full = chat.apply_chat_template([question, said], tokenize=False).removesuffix("\n")
    assert [*encoded.input_ids, *encoded.answer_ids] == chat(full, add_special_tokens=False)["input_ids"]
    messages = encoder(chat, prompt="messages", chat=True, answer="{messages[-1].content}")
    for value in ([question], [question, said]):
        assert [*messages.encode(row(messages=value)).input_ids] == wanted
    assert messages.encode(row(messages=[question, said])).answer_ids == encoded.answer_ids
    system = encoder(chat, prompt="messages", chat=True, system="be brief")
    assert system.decode(system.encode(row(messages=[question]))).startswith("<|im_start|>system\nbe brief<|im_end|>\n")


def test_a_chat_has_the_same_prompt_on_every_day(chat: PreTrainedTokenizerFast, monkeypatch: Any) -> None:
    monkeypatch.setattr(chat, "chat_template", "{{ strftime_now('%d %b %Y') }} " + CHAT)
    inputs = encoder(chat, prompt="{x}", chat=True)
    assert inputs.decode(inputs.encode(row(x="a"))).startswith("26 Jul 2024 ")


@pytest.mark.parametrize(
    ("settings", "columns", "said"),
    [
        ({"prompt": "{x}"}, {"y": "a"}, "no column 'x'; the columns are: y"),
        ({"prompt": "{x}"}, {"x": None}, "'x' is null; a template takes a text, a number or a list of numbers"),
        ({"prompt": "{x}"}, {"x": True}, "'x' is the bool 'True'"),
        ({"prompt": "{x}"}, {"x": {"a": "b"}}, "'x' is a record with a; a template takes"),
        ({"prompt": "{x}"}, {"x": ["a", "b"]}, "'x' is a list of 2 (str)"),
        ({"prompt": "{x.b}"}, {"x": {"a": "b"}}, "no 'x.b': column 'x' is a record with a"),
        ({"prompt": "{x[2]}"}, {"x": ["a"]}, "no 'x[2]': column 'x' is a list of 1 (str)"),
        ({"prompt": "Q", "gold": "x"}, {"x": 4}, "task.generate.gold=x is the int '4'; it must be a text or a list"),
        ({"prompt": "Q", "gold": "x"}, {"x": ["a", 1]}, "task.generate.gold=x is a list of 2 (int, str)"),
        ({"prompt": "Q", "gold": "x"}, {"x": {"text": "a"}}, "task.generate.gold=x is a record with text"),
        ({"prompt": "{x}"}, {"x": ""}, "the prompt is empty, so nothing can follow it"),
        ({"prompt": "Q", "answer": "{x}\\n"}, {"x": " "}, r"the answer ' \n' is empty"),
        ({"prompt": "", "answer": "{x}"}, {"x": ""}, "the text is empty: there is nothing to learn"),
        ({"prompt": "m", "chat": True}, {"m": []}, "'m' is an empty list; a message is a record with role and content"),
        ({"prompt": "m", "chat": True}, {"m": [{"role": "user"}]}, "'m' is a record with role; a message"),
        (
            {"prompt": "m", "chat": True, "system": "be brief"},
            {"m": [{"role": "system", "content": "be long"}]},
            "'m' begins with a system message, and task.generate.system gives another",
        ),
    ],
)
def test_bad_rows(settings: dict[str, Any], columns: dict[str, Any], said: str, chat: PreTrainedTokenizerFast) -> None:
    with pytest.raises(UserError) as caught:
        encoder(chat, **settings).encode(row("train.jsonl:3", **columns))
    assert f"task 'qa', train.jsonl:3: {said}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_mistakes_in_settings(gpt2: PreTrainedTokenizerFast, chat: PreTrainedTokenizerFast, monkeypatch: Any) -> None:
    def refused(tokenizer: PreTrainedTokenizerFast, **settings: Any) -> str:
        with pytest.raises(UserError) as caught:
            encoder(tokenizer, **settings)
        return str(caught.value)

    assert "task 'qa', task.generate has no prompt" in refused(gpt2)
    assert "has no chat template; use a chat model" in refused(gpt2, prompt="{x}", chat=True)
    assert "task.generate.prompt is empty; and no answer" in refused(gpt2, prompt="")
    assert "task.generate.prompt is empty; chat=true needs" in refused(chat, prompt="", answer="{x}", chat=True)
    monkeypatch.setattr(chat, "chat_template", "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(UserError, match=r"train:1: the tokenizer's chat template takes no such messages: roles must"):
        encoder(chat, prompt="{x}", chat=True).encode(row("train:1", x="a"))
