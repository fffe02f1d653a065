"""Findings, and the time that is left."""

import json

from mezo_cli.diagnosis.findings import OK, Section


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
