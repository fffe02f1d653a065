"""Findings, and the time that is left."""

import json

import pytest

from mezo_cli.diagnosis.findings import DOUBT, OK, Deadline, Finding, Section, percent


def test_a_doubt_needs_advice_and_a_verdict_is_one_of_four() -> None:
    with pytest.raises(ValueError, match="needs advice"):
        Finding("x", DOUBT, "text")
    with pytest.raises(ValueError, match="ok, note, doubt or unknown, not fine"):
        Finding("x", "fine", "text")


def test_the_record_is_json_without_numbers_that_json_lacks() -> None:
    section = Section("signal")
    section.add(OK, "x", "text", table=[("a",)], error=float("inf"), rows=[{"correlation": float("nan")}])
    record = json.loads(json.dumps(section.record(), allow_nan=False))
    assert record["findings"] == [
        {
            "name": "x",
            "verdict": "ok",
            "text": "text",
            "advice": "",
            "figures": {"error": None, "rows": [{"correlation": None}]},
        }
    ]


@pytest.mark.parametrize(
    ("share", "text"), [(0.0, "0%"), (0.00001, "under 0.01%"), (0.0123, "1.2%"), (0.5, "50%"), (99.0, "over 1000%")]
)
def test_shares_are_short(share: float, text: str) -> None:
    assert percent(share) == text


def test_a_deadline_is_kept_by_its_clock() -> None:
    now = [10.0]
    deadline = Deadline(8.0, lambda: now[0])
    part = deadline.part(0.25)
    now[0] = 11.0
    assert deadline.left == 7.0
    assert part.left == 1.0
    assert part.allows(1.0)
    assert not part.allows(1.1)
    now[0] = 99.0
    assert deadline.left == 0.0
