"""scripts/bench/bench_step.py and the records of docs/measurements/machines."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.scripts.load import load_script

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def machine_record() -> ModuleType:
    return load_script("machine_record")


@pytest.fixture(scope="module")
def tables(machine_record: ModuleType) -> ModuleType:
    load_script("step_works")
    return load_script("make_step_tables")


def one_result(batch: str = "16x32", seconds: float = 2.0) -> dict[str, Any]:
    def spread() -> dict[str, float]:
        return {"min": seconds - 0.5, "median": seconds, "max": seconds + 1.0}

    ratios = {"reference_over_this": None, "this_over_floor": spread()}
    rows = [
        {"name": "floor fp32", "seconds": spread(), **ratios},
        {"name": "ours fp32 gaussian", "seconds": spread(), **ratios, "reference_over_this": spread()},
    ]
    known = {"shape": "large", "batch": batch, "tokens": 512, "rounds": 3, "rows": rows, "threads": 1, "device": "cpu"}
    peaks = {"floor fp32": 1_000_000, "ours fp32 gaussian": 1_250_000}
    origin = {"commit": "0123456789", "dirty": False, "versions": {"torch": "2.13"}, "date": "2026-11-22"}
    return {**known, **origin, "load": [1.0, 2.0], "command": "python scripts/bench/bench_step.py", "peaks": peaks}


def test_every_record_has_a_table(tables: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    tables.main()
    shown = capsys.readouterr().out
    records = tables.load_records()
    assert records, "docs/measurements/machines/ is empty"
    assert [name for name in records if f"### {name}\n" not in shown] == []


def test_readme_names_the_range_of_the_records(tables: ModuleType) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(r"([\d.]+) to ([\d.]+) times as fast as the published step, ([\d.]+) to ([\d.]+) of two", text)
    assert found is not None
    rows = [
        next(row for row in result["rows"] if row["name"] == "ours fp32 gaussian")
        for record in tables.load_records().values()
        for result in record["results"]
        if (result["shape"], result["batch"], result.get("limits", [])) == ("large", "16x32", [])
    ]
    faster, floor = ([row[name]["median"] for row in rows] for name in ("reference_over_this", "this_over_floor"))
    assert [float(one) for one in found.groups()[:2]] == [round(min(faster), 1), round(max(faster), 1)]
    assert [float(one) for one in found.groups()[2:]] == [round(min(floor), 2), round(max(floor), 2)]


def test_results_of_other_batches_are_kept_and_those_of_another_machine_refused(
    machine_record: ModuleType, tmp_path: Path
) -> None:
    import torch

    machine, path = machine_record.describe(torch.device("cpu")), tmp_path / "a.json"
    machine_record.write(path, machine_record.merge(path, machine, [one_result("16x32", 2.0), one_result("64x32")]))
    merged = machine_record.merge(path, machine, [one_result("16x32", 3.0)])
    assert [(r["batch"], r["rows"][0]["seconds"]["median"]) for r in merged["results"]] == [("16x32", 3), ("64x32", 2)]
    with pytest.raises(ValueError, match="another machine"):
        machine_record.merge(path, machine | {"cpu": "Z80"}, [])
    damaged = one_result()
    del damaged["commit"], damaged["rows"][1]["seconds"]["max"]
    with pytest.raises(ValueError, match=r"b\.json lacks results\.commit, ours fp32 gaussian\.max"):
        machine_record.merge(tmp_path / "b.json", machine, [damaged])


@pytest.mark.slow
def test_the_bench_shows_progress_and_writes_a_record(tmp_path: Path, machine_record: ModuleType) -> None:
    words = ["--shapes", "tiny", "--batches", "2x8", "--rounds", "2", "--only", "ours fp32 gaussian"]
    command = [sys.executable, "scripts/bench/bench_step.py", *words, "--memory", "--out", str(tmp_path / "here.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "round 2 of 2, 2 of 2: ours fp32 gaussian" in done.stderr
    record = machine_record.check(json.loads((tmp_path / "here.json").read_text()), "here.json")
    (result,) = record["results"]
    assert [row["name"] for row in result["rows"]] == ["floor fp32", "ours fp32 gaussian"]
    assert result["rounds"] == 2
    ratio = result["rows"][1]["this_over_floor"]
    assert 0 < ratio["min"] <= ratio["median"] <= ratio["max"]
    assert set(result["peaks"]) == {"floor fp32", "ours fp32 gaussian"}
