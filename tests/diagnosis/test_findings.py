"""Findings, and the time that is left."""

import json

from mezo_cli.diagnosis.findings import OK, Deadline, Section


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
