"""task.demonstrations: which rows come before a row, the text that the model sees, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from mezo_cli import data
from mezo_cli.config.compose import build_config
from mezo_cli.config.schema import Config, GeneratePrompt, TaskConfig
from mezo_cli.data.sampling import demonstrations
from mezo_cli.errors import UserError
from mezo_cli.objectives import OBJECTIVES
from mezo_cli.tasks import GenerateEncoder
from tests import command_line, opt_tasks, tiny
from tests.data.sample_data import files_config, write_jsonl

SEEDED_LIKE_THE_RELEASE = 4


def published(count: int, pool: int, rows: int) -> list[list[int]]:
    """Draw as the published code does, from numpy's global generator."""
    state = np.random.get_state()
    try:
        np.random.seed(SEEDED_LIKE_THE_RELEASE)
        sets = []
        for seed in np.random.randint(0, 10000, rows):
            np.random.seed(seed)
            sets.append(np.random.permutation(pool)[:count].tolist())
        return sets
    finally:
        np.random.set_state(state)


def test_each_row_has_a_set_of_its_own_as_in_the_published_code() -> None:
    wanted = published(3, 10, 5)
    assert demonstrations(3, 10, [None] * 5, SEEDED_LIKE_THE_RELEASE) == wanted
    assert demonstrations(3, 10, [None] * 2, SEEDED_LIKE_THE_RELEASE) == wanted[:2]
    assert len(set(map(tuple, wanted))) == 5
    own = [rows[1] for rows in wanted]  # a row of the pool is none of its own: the next one takes its place
    for numbers, alone, rows in zip(
        demonstrations(3, 10, own, SEEDED_LIKE_THE_RELEASE), own, published(4, 10, 5), strict=True
    ):
        assert numbers == [row for row in rows if row != alone]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """RTE rows: 6 of train and 3 of test."""
    for stem, count in (("train", 6), ("test", 3)):
        rows = [
            {"premise": f"{stem} {i}.", "hypothesis": f"It is {i}.", "label": ("entailment", "not_entailment")[i % 2]}
            for i in range(count)
        ]
        tiny.write_jsonl(tmp_path / "rte" / f"{stem}.jsonl", rows)
    return tmp_path / "rte"


def config_of(opt: Path, folder: Path, *words: str) -> Config:
    common = [f"model.path={opt}", "objective=lm", "steps=0", "data=files", f"data.dir={folder}"]
    return build_config(["task=rte", *common, "task.demonstrations=2", *words])


def encoder_of(config: Config) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    return OBJECTIVES.implementation(config.objective.name).encoder_class(config.task, tokenizer)


def test_the_text_is_the_papers(opt: Path, folder: Path) -> None:
    config = config_of(opt, folder, "data.seed=4")
    splits, encoder = data.load_splits(config), encoder_of(config)
    first, second = published(2, 6, 1)[0]  # of all rows of train, the row that is held out as dev included
    answers = ["Yes", "No"]

    def asked(stem: str, i: int) -> str:
        return f'{stem} {i}.\nDoes this mean that "It is {i}." is true? Yes or No?\n'

    assert splits.test is not None
    text = "".join(f"{asked('train', i)}{answers[i % 2]}\n\n" for i in (first, second)) + asked("test", 0)
    assert encoder.decode(encoder.encode(splits.test[0])) == "</s>" + text.replace("\n", "\\n")
    assert all(len(row.demonstrations) == 2 for row in [*splits.dev, *splits.test])
    assert not any(row.demonstrations for row in splits.train)
    for row in splits.dev:
        assert row.texts not in [shown.texts for shown in row.demonstrations]
    plain = data.load_splits(config_of(opt, folder, "data.seed=4", "task.demonstrations=0"))
    assert plain.fingerprint == splits.fingerprint


def test_a_long_prompt_is_cut_on_the_left_and_keeps_its_first_token(opt: Path, folder: Path) -> None:
    words = ("data.seed=4", "task.demonstrations=4")
    whole, cut = (encoder_of(config_of(opt, folder, *words, *more)) for more in ((), ("task.lm.max_length=40",)))
    row = (data.load_splits(config_of(opt, folder, *words)).test or [])[0]
    full, kept = whole.encode(row).input_ids, cut.encode(row).input_ids
    assert len(full) > 40 >= len(kept) > 30
    assert (kept[0], kept[1:]) == (full[0], full[1 - len(kept) :])


def test_generation_shows_answers_and_cuts(opt: Path, tmp_path: Path) -> None:
    prompt = GeneratePrompt(
        prompt="{question}\\nAnswer:", answer=" {answers.text[0]}\\n", gold="answers.text", stop=["\\n"]
    )
    task = TaskConfig(name="qa", generate=prompt, demonstrations=2)
    rows = [{"question": f"What is {i}?", "answers": {"text": [f"It is {i}", "x"]}} for i in range(8)]
    write_jsonl(tmp_path / "train.jsonl", rows)
    write_jsonl(tmp_path / "test.jsonl", [{"question": "Who?", "answers": {"text": ["me"]}}])
    encoder = GenerateEncoder(task, AutoTokenizer.from_pretrained(opt))
    (row,) = data.load(task, files_config(tmp_path), 4).test or []
    shown = "".join(f"What is {i}?\nAnswer: It is {i}\n\n" for i in published(2, 8, 1)[0])
    encoded = encoder.encode(row)
    assert encoder.decode(encoded) == f"</s>{shown}Who?\nAnswer:"
    assert (encoder.decode_ids(encoded.answer_ids), encoded.golds) == (" me\n", ("me",))
    encoder.max_length = 30
    cut = encoder.encode(row)
    assert cut.cut
    assert [*cut.input_ids] == [encoded.input_ids[0], *encoded.input_ids[-(29 - len(cut.answer_ids)) :]]


@pytest.mark.parametrize("name", ["copa", "record", "multirc"])
def test_choice_shows_the_right_candidate(name: str, opt: Path, tmp_path: Path) -> None:
    """The released text of each row's prompt and right candidate (tests/opt_tasks.py), joined by an empty line."""
    rows = opt_tasks.rows(name)
    tiny.write_jsonl(tmp_path / "train.jsonl", rows[:6])
    tiny.write_jsonl(tmp_path / "test.jsonl", rows[6:])
    common = [f"task={name}", f"model.path={opt}", "data=files", f"data.dir={tmp_path}", "task.demonstrations=2"]
    config = build_config(["experiment=paper/opt-13b/icl", *common, "data.seed=4"])
    encoder, (row, *_) = encoder_of(config), data.load_splits(config).test or []
    texts = [opt_tasks.expected(name, rows[number]) for number in published(2, 6, 1)[0]]
    shown = "".join(f"{(prompt + right[0]).strip()}\n\n" for prompt, _, right in texts)
    first = 6 + np.random.RandomState(4).permutation(len(rows) - 6)[0]  # test is permuted by data.seed
    prompt, candidates, _ = opt_tasks.expected(name, rows[first])
    encoded = encoder.encode(row)
    assert [*encoded.texts] == candidates
    assert encoder.decode_ids([*encoded.input_ids, *encoded.candidates[0]]) == f"</s>{shown}{prompt}{candidates[0]}"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["steps=1"], "task.demonstrations=2: it is for an evaluation of the model, not with steps=1; give steps=0"),
        (["init=linear_probe"], "it is for an evaluation of the model, not with init=linear_probe"),
        (["objective=mlm"], "task.demonstrations=2: objective=mlm reads none, only lm"),
        (["task.demonstrations=6"], "task.demonstrations=6 needs more than 6 rows of train to draw from, and there"),
    ],
)
def test_what_is_refused(words: list[str], said: str, opt: Path, folder: Path) -> None:
    with pytest.raises(UserError) as caught:
        data.load_splits(config_of(opt, folder, *words))
    assert said in str(caught.value)


def test_a_run_is_evaluated_with_its_demonstrations_and_predicts_none(opt: Path, folder: Path, tmp_path: Path) -> None:
    words = ["task=rte", f"model.path={opt}", "objective=lm", "steps=0", "data=files", f"data.dir={folder}"]
    scores = []
    for count in (0, 2):
        run = tmp_path / str(count)
        trained = command_line.mezo("train", *words, f"task.demonstrations={count}", f"hydra.run.dir={run}")
        assert trained.code == 0, trained
        scores.append(json.loads(command_line.mezo("eval", run, "--json").out)["loss"])
    assert scores[0] != scores[1]
    said = command_line.mezo("predict", tmp_path / "2", "--text", "a film")
    assert said.code == 2
    assert "task.demonstrations=2, and a row of one's own has none" in said.err
    assert "ICL" in command_line.mezo("compare", tmp_path).out
