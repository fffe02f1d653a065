"""scripts/bench/bench_step.py and the records of docs/measurements/machines."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

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
