"""scripts/: the step's bench and its records, the comparison of methods, the pages of docs/reference, the picture."""

import contextlib
import importlib.util
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
from PIL import Image
from scipy import stats

from mezo_cli.cli import app
from mezo_cli.config.explain import key_owners
from tests.report.run_directories import make_run

ROOT = Path(__file__).resolve().parents[2]


def load_script(name: str) -> ModuleType:
    """Return the script of that name as a module. It can import the scripts beside it, as when it is run."""
    (path,) = (ROOT / "scripts").rglob(f"{name}.py")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look for their module there
    spec.loader.exec_module(module)
    return module


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


SCRIPT = load_script("compare_methods")
COMMON = {"data.shots": 16, "forwards": 100, "eval_at_forwards": [20, 100], "steps": 50}
SAMPLES = {"optimizer.samples": 5, "steps": 10}  # 10 calls per step
TESTS = {13: (0.80, 0.90), 21: (0.84, 0.92), 42: (0.82, 0.94)}  # MeZO at lr 1e-6: dev and test


def output(*words: object) -> str:
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.setattr(sys, "argv", ["compare_methods", *map(str, words)])
        SCRIPT.main()
    return out.getvalue()


def make_bench(root: Path) -> Path:
    """MeZO, tuned on seed 1 with its best lr in the middle, and n-SPSA with its best at an end and one seed missing."""
    for number, (lr, dev) in enumerate({1e-7: 0.6, 1e-6: 0.8, 1e-5: 0.7}.items()):
        make_run(root / f"t{number}", {**COMMON, "seed": 1, "optimizer.lr": lr}, dev=dev, test=0.99)
        make_run(root / f"s{number}", {**COMMON, **SAMPLES, "seed": 1, "optimizer.lr": lr}, dev=0.5 + 0.1 * number)
    for seed, (dev, test) in TESTS.items():
        make_run(root / f"m{seed}", {**COMMON, "seed": seed}, dev=dev, test=test, between={10: 0.7})
        if seed != 42:
            settings = {**COMMON, **SAMPLES, "seed": seed, "optimizer.lr": 1e-5}
            make_run(root / f"n{seed}", settings, dev=0.65, test=test + 0.01 + 0.02 * (seed == 21), between={2: 0.6})
    return root


def methods_of(folder: Path) -> dict[str, Any]:
    (bench,) = json.loads(output(folder, "--json"))["benches"]
    assert bench["gain"] == pytest.approx(0.42)  # dev before training is 0.4
    return {one["method"]: one for one in bench["methods"]}


def test_lr_is_chosen_on_the_tuning_seed_and_tested_on_the_others(tmp_path: Path) -> None:
    tuned, other = methods_of(make_bench(tmp_path)).values()
    assert (tuned["lr"], tuned["trials"], tuned["at_end_of_grid"], tuned["seeds"]) == (1e-6, 3, False, [13, 21, 42])
    assert tuned["test"] == pytest.approx(0.92)
    assert tuned["difference"] is None
    assert (other["lr"], other["at_end_of_grid"], other["seeds"]) == (1e-5, True, [13, 21])
    assert other["difference"] == pytest.approx(0.02)
    assert other["difference_half"] == pytest.approx(stats.t.ppf(0.975, 1) * 0.01)


def test_the_page_has_the_table_of_every_lr() -> None:
    page = (ROOT / "docs" / "measurements" / "bench.md").read_text()
    seen = output("--rates", ROOT / "docs" / "measurements" / "bench-demo-reward.csv")
    rows = [line.split() for line in seen.splitlines() if " ± " in line]
    assert len(rows) == 5
    for row in rows:
        assert all(" ".join(words) in page for words in (row[2:4], row[4:6], row[-3:]))


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("make_reference")


def test_the_pages_are_up_to_date(script: ModuleType) -> None:
    pinned = re.search(r"^typer==(\S+)$", (ROOT / "constraints" / "tested.txt").read_text(), re.M)
    assert pinned
    if typer.__version__ != pinned[1]:
        pytest.skip(f"the pages are made with typer {pinned[1]}; others print their arguments in other words")
    for name, text in script.pages().items():
        page = ROOT / "docs" / "reference" / name
        assert page.read_text(encoding="utf-8") == text, f"{page} is out of date: run `{script.COMMAND}` and commit it"


def test_every_key_has_a_row_with_its_type_default_and_meaning() -> None:
    page = (ROOT / "docs" / "reference" / "config.md").read_text(encoding="utf-8")
    rows = {key: rest for key, *rest in re.findall(r"^- `(\S+)` \((.+?); (.+?)\): (.+)$", page, re.M)}
    for key in key_owners():
        assert len(rows[key][-1]) > 8, f"{key}: say what it means in its description"


def test_every_command_and_option_is_on_the_page() -> None:
    page = (ROOT / "docs" / "reference" / "commands.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## mezo (\S+)\n(.*?)(?=^## |\Z)", page, re.M | re.S))
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert list(sections) == list(commands)
    for name, command in commands.items():
        options = {name for param in command.params for name in param.opts if name.startswith("--")} - {"--help"}
        assert [option for option in options if f"{option}" not in sections[name]] == [], name


def test_the_picture_is_of_the_templates_as_they_are() -> None:
    script = load_script("make_report_picture")
    with Image.open(script.PICTURE) as picture:
        assert picture.size == script.SIZE
        assert picture.info["templates"] == script.digest(), "run scripts/make_report_picture.py"  # type: ignore[attr-defined]
