"""`mezo doctor`: lines of at most 80 columns, JSON, exit statuses; it writes nothing and refuses what train does."""

import json
from pathlib import Path

import pytest

from tests import tiny
from tests.command_line import Result, error_line, mezo, ok, small

CHECKS = ["label words", "data", "signal", "cost"]

pytestmark = pytest.mark.usefixtures("eager_kernels", "in_tmp_path")


@pytest.fixture(scope="module")
def movies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of which one of test is also in train, and one has no text."""
    folder = tiny.movie_folder(tmp_path_factory.mktemp("movies"))
    rows = tiny.movie_rows(48)
    tiny.write_jsonl(folder / "test.jsonl", [*rows[36:], rows[0], {"sentence": " ", "label": "positive"}])
    return folder


def words(roberta: Path, movies: Path, *more: str) -> list[str]:
    return [f"model.path={roberta}", "data=files", f"data.dir={movies}", "batch_size=8", "steps=20", *more]


def test_plain_lines_begin_with_the_verdict_and_the_doubts(roberta: Path, movies: Path, tmp_path: Path) -> None:
    said = ok("doctor", *words(roberta, movies), "--seconds", 1)
    lines = said.out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith(f"loading {roberta.name} and its data;")
    verdicts = [line[:10].strip() for line in lines if line[:10].strip() in ("doubt", "unknown", "note", "ok")]
    order, worst = ["doubt", "unknown", "note", "ok"].index, []
    for part in "\n".join(lines).split("\n\n")[1:]:  # a section: what to look at first, in it and among them
        of_part = [line[:10].strip() for line in part.splitlines()]
        found = [order(word) for word in of_part if word in ("doubt", "unknown", "note", "ok")]
        assert found == sorted(found)
        worst.append(found[0])
    assert worst == sorted(worst)
    assert verdicts.count("doubt") > 1
    assert lines[1].startswith(f"{verdicts.count('doubt')} doubts")
    assert (f"{verdicts.count('unknown')} unknown" in lines[1]) == ("unknown" in verdicts)
    assert sorted(line for line in lines if line in CHECKS) == sorted(CHECKS)
    assert any(line.startswith("          -> ") for line in lines)
    assert list(tmp_path.iterdir()) == []  # nothing is written


def test_json_has_the_same_as_data_and_nothing_else_on_standard_output(roberta: Path, movies: Path) -> None:
    said = ok("doctor", *words(roberta, movies), "--json", "--seconds", 0.01)
    document = json.loads(said.out)
    assert [check["check"] for check in document["checks"]] == CHECKS
    found = {one["name"]: one for check in document["checks"] for one in check["findings"]}
    for verdict in ("doubt", "unknown", "note"):
        assert document[f"{verdict}s"] == sum(one["verdict"] == verdict for one in found.values())
    assert all(one["advice"] for one in found.values() if one["verdict"] == "doubt")
    assert found["shared_rows"]["figures"]["splits"]["test_in_train"]["rows"] == 1
    assert found["empty_texts"]["verdict"] == "doubt"
    assert found["learning_rate"]["verdict"] == found["resolution"]["verdict"] == "unknown"  # there was no time
    plan = found["plan"]["figures"]
    assert (plan["steps"], plan["forwards"]) == (20, 40)


def refused(*given: object) -> tuple[str, str]:
    """Return the error lines of doctor and of train."""
    results: list[Result] = [mezo(command, *given) for command in ("doctor", "train")]
    return error_line(results[0]), error_line(results[1])


@pytest.mark.parametrize("more", [["task.label_words=[terrible,grreat]"], ["seed=1,2"]])
def test_what_train_refuses_is_refused_in_its_words(more: list[str], roberta: Path, movies: Path) -> None:
    doctor, train = refused(*words(roberta, movies, *more))
    assert doctor == train


def test_a_directory_that_is_in_use_is_refused(roberta: Path, movies: Path, tmp_path: Path) -> None:
    given = small(roberta, movies, tmp_path / "run", "steps=0")
    assert mezo("train", *given).code == 0
    doctor, train = refused(*given)
    assert doctor == train


@pytest.mark.parametrize("seconds", ["0", "nan"])
def test_the_time_must_be_positive(seconds: str) -> None:
    assert "--seconds" in error_line(mezo("doctor", "--seconds", seconds))


REWARDED = ["task=demo-arithmetic", "model=demo-decoder", "data=demo", "objective=generate", "steps=20"]
REWARDED += ["batch_size=32", "objective.max_new_tokens=8", "objective.reward=countdown", "model.device=cpu"]
REWARDED += ["--seconds", "0.5"]


def test_rewards_are_compared_over_members_in_place_of_the_signal(tmp_path: Path) -> None:
    said = ok("doctor", *REWARDED, "optimizer.eps=1e-2", "--json")
    document = json.loads(said.out)
    assert [check["check"] for check in document["checks"]] == ["data", "rewards", "cost"]
    found = {one["name"]: one for check in document["checks"] for one in check["findings"]}
    spread = found["spread"]["figures"]
    assert spread["reward_min"] < spread["reward"] < spread["reward_max"]
    assert (spread["rows"], spread["eps"], found["spread"]["verdict"]) == (16, 0.01, "ok")
    assert 0 <= found["agreement"]["figures"]["agreeing_rows"] < 1
    assert found["truncated"]["figures"]["truncated"] == 0
    assert list(tmp_path.iterdir()) == []


def test_an_eps_that_changes_no_completion_and_a_limit_that_cuts_all_are_doubted() -> None:
    said = ok("doctor", *REWARDED, "optimizer.eps=1e-7", "objective.max_new_tokens=2")
    told = " ".join(said.out.split())
    assert "doubt no signal: all of" in told
    assert "-> a step with equal members changes nothing: raise optimizer.eps (1e-07 changes" in told
    assert "doubt 100% of the completions are cut at objective.max_new_tokens=2" in told


def test_the_likelihood_of_answers_has_a_signal() -> None:
    said = ok("doctor", *REWARDED, "objective.loss=lm", "--json")
    assert [check["check"] for check in json.loads(said.out)["checks"]] == ["data", "signal", "cost"]
