"""Backpropagation beside MeZO's step: real steps in processes of their own, and what the figures say."""

from pathlib import Path

import pytest

from mezo_cli.diagnosis import rival
from mezo_cli.diagnosis.findings import NOTE, OK, UNKNOWN, Deadline, Finding, Section
from tests.diagnosis.sessions import load, named

pytestmark = pytest.mark.usefixtures("eager_kernels")


def found(session: object, seconds: float = 300.0) -> Finding:
    section = Section("cost")
    rival.check(section, session, Deadline(seconds))  # type: ignore[arg-type]
    return named(section)["backprop"]


def test_each_takes_steps_in_a_process_of_its_own(roberta: Path, movies: Path) -> None:
    words = ["data=files", f"data.dir={movies}", "checkpoint=trajectory", "peft=lora"]  # its own rival is the LoRA's
    finding = found(load(roberta, *words).session)
    measured = finding.figures["measured"]
    assert list(measured) == ["mezo", "adamw peft=lora"]
    assert all(one["peak_bytes"] > 1e5 and one["seconds"] > 0 for one in measured.values())
    assert finding.text.count("s per step (the time of ") == 1


def test_what_it_says_of_the_figures(roberta: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = load(roberta).session
    peaks = {"mezo": 5e7, "adamw": 9e7}

    def measured(job: object, deadline: Deadline) -> dict[str, float]:
        return {"peak_bytes": peaks[job.optimizer.name], "seconds": 0.5}  # type: ignore[attr-defined]

    monkeypatch.setattr(rival, "_measured", measured)
    assert found(session).verdict == OK
    peaks["adamw"] = 4e7
    finding = found(session)
    assert (finding.verdict, finding.advice.split(" fits")[0]) == (NOTE, "adamw peft=none, adamw peft=lora")
    monkeypatch.setattr(rival, "free_memory", lambda: 1000)
    finding = found(session)
    assert (finding.verdict, finding.text.count("GB are free")) == (UNKNOWN, 2)


def test_without_time_nothing_is_known(roberta: Path) -> None:
    finding = found(load(roberta).session, 0.0)
    assert (finding.verdict, finding.advice) == (UNKNOWN, "give more --seconds")


@pytest.mark.parametrize("words", [["steps=0"], ["optimizer=adamw"]])
def test_a_run_that_takes_no_step_of_mezo_has_no_rival(words: list[str], roberta: Path) -> None:
    section = Section("cost")
    rival.check(section, load(roberta, *words).session, Deadline(0.0))
    assert not section.findings
