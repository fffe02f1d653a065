"""The tables: groups of runs, the paper's table, and objectives run by run."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

from mezo_cli.report import paper
from mezo_cli.report.read import read_runs
from mezo_cli.report.views import INFERRED
from tests.command_line import environment, error_line, mezo
from tests.report.run_directories import SEEDS, first_table_cells, make_grid, make_run, make_two_methods

FEW = {"data.shots": 16}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return make_two_methods(tmp_path / "runs")


def titles(out: str) -> list[str]:
    return [block.splitlines()[0] for block in out.split("\n\n") if block.startswith("sst2, ")]


@pytest.fixture
def four(tmp_path: Path) -> Path:
    """mlm and cls, each by cross-entropy and by accuracy, on one split."""
    root, still = tmp_path / "runs", {"objective.loss": "accuracy"}
    make_run(root / "d", {"objective": "cls", **still}, grads=[0.0] * 4, predicted=(0, 10))
    make_run(root / "c", {"objective": "cls"}, test=0.6, grads=[1.0, -2.0, 0.5], predicted=(1, 39))
    make_run(root / "b", still, test=0.7, grads=[0.0, 0.0, -0.5, 0.0])
    make_run(root / "a", test=0.9, grads=[1.0, -3.0, 2.0, 0.5], predicted=(4, 6))
    return root


# --- groups ---


def rows(out: str) -> list[str]:
    return [" ".join(line.split()) for line in out.splitlines()]


def test_the_table(runs: Path) -> None:
    said = mezo("compare", runs)
    assert said.code == 0, said
    assert rows(said.out)[:4] == [
        "roberta-large, mlm, cross_entropy",
        "task shots method steps seeds dev test paper diff",
        "sst2 16 MeZO 100000 5 82.0 91.0 (2.0) 90.5 (1.2) +0.5",
        "sst2 16 MeZO (noise=rademacher) 100000 1/5 70.0 60.0 90.5 (1.2) -30.5 *",
    ]
    assert rows(said.out)[5:] == [
        "- sst2 k=16 MeZO: lr=1e-07: not run: seeds 21, 42, 87, 100",
        "- sst2 k=16 MeZO (noise=rademacher): not run: seeds 42, 87, 100",
        "- sst2 k=16 MeZO (noise=rademacher): seed 21 failed (the disk | is full)",
        "- sst2 k=16 MeZO (noise=rademacher): * unlike the paper: noise=rademacher not gaussian; 1 of 5 data seeds",
        f"- {INFERRED}",
    ]


def test_the_picked_points(runs: Path) -> None:
    told = rows(mezo("compare", "--seeds", runs).out)
    at = told.index("picked per data seed")
    assert told[at + 1 : at + 4] == [
        "task shots method picked seed dev test",
        "sst2 16 MeZO lr=1e-07 13 90.0 95.0",
        "sst2 16 MeZO lr=1e-06 21 80.0 90.0",
    ]


@pytest.mark.parametrize("width", [80, 140])
def test_the_tables_fit_the_terminal(width: int, runs: Path) -> None:
    """In a process on a terminal of that width no number is folded and no line is longer."""
    code = (
        "import io, sys\nfrom pathlib import Path\nfrom rich.console import Console\n"
        "from mezo_cli import console\nfrom mezo_cli.cli import main\n"
        f"console.make_console = lambda: Console(width={width}, file=sys.stdout)\n"
        f"sys.argv = ['mezo', 'compare', '--seeds', {str(runs)!r}]\nmain()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done
    assert max(len(line.rstrip()) for line in done.stdout.splitlines()) <= width
    assert "90.5 (1.2)" in done.stdout
    assert "91.0 (2.0)" in done.stdout
    assert "-30.5 *" in done.stdout


# --- the paper's table ---


def test_the_papers_table_without_runs(tmp_path: Path) -> None:
    said = mezo("compare", "--paper", tmp_path)
    assert said.code == 0, said
    lines = said.out.splitlines()
    assert lines[0].split() == ["shots", "method", *paper.paper().tasks]
    assert sum(line.strip().startswith("yours") for line in lines) == 14
    assert "64.3 (0.8)?" in said.out
    assert "read from a damaged table" in said.out
    assert paper.paper().source in said.out


def test_own_results_are_below_the_papers_rows(tmp_path: Path) -> None:
    make_grid(tmp_path / "a", FEW, {1e-6: dict.fromkeys(SEEDS, (0.5, 0.91))})
    make_grid(tmp_path / "b", {**FEW, "task": "trec"}, {1e-6: {13: (0.5, 0.75)}})
    short = {**FEW, "optimizer.noise": "rademacher", "steps": 9}
    make_grid(tmp_path / "c", short, {1e-6: dict.fromkeys(SEEDS, (0.5, 0.9))})
    make_grid(tmp_path / "d", {**FEW, "model.path": "distilroberta"}, {1e-6: dict.fromkeys(SEEDS, (0.5, 0.8))})
    make_grid(tmp_path / "e", {"task": "mr"}, {1e-6: {13: (0.5, 0.5)}})
    said = mezo("compare", "--paper", tmp_path)
    lines = [" ".join(line.split()) for line in said.out.splitlines()]
    at = lines.index("MeZO 90.5 (1.2) 45.5 (2.0) 68.5 (3.9) 58.7 (2.5) 64.0 (3.3) 76.9 (2.7)")
    assert lines[at + 1 : at + 5] == [
        "yours 91.0 (0.0) - - - - 75.0 1/5",
        "difference +0.5 -1.9",
        "yours: noise=rademacher, steps=9 90.0 (0.0) - - - - -",
        "difference -0.5",
    ]
    assert "yours: MeZO, distilroberta, steps=100000 80.0 (0.0) - - - - -" in lines
    assert "- 1 group of other tasks, data or shots: see mezo compare" in lines
    assert any("trec k=16 MeZO: not run: seeds 21, 42, 87, 100" in line for line in lines)


def test_the_papers_table_as_json_has_a_record_per_number(tmp_path: Path) -> None:
    make_grid(tmp_path / "runs", FEW, {1e-6: dict.fromkeys(SEEDS, (0.5, 0.91))})
    assert mezo("compare", "--paper", tmp_path / "runs", "--out", tmp_path / "t.json").code == 0
    cells = json.loads((tmp_path / "t.json").read_text())["cells"]
    assert len(cells) == 6 * 13 + 4
    (mine,) = (cell for cell in cells if cell["n"])
    assert (mine["row"], mine["task"], mine["test_mean"], mine["difference"]) == ("MeZO, k=16", "sst2", 91.0, 0.5)
    assert {cell["paper_uncertain"] for cell in cells} == {True, False}


@pytest.mark.parametrize("width", [80, 140])
def test_the_papers_table_fits_the_terminal(width: int) -> None:
    from mezo_cli.report.views import paper_view

    tables = paper_view([], width).tables
    assert [len(table.columns) for table in tables] == ([5, 5] if width == 80 else [8])


# --- objectives ---


def test_four_runs_in_one_table(four: Path) -> None:
    said = mezo("compare", "--objectives", four)
    assert said.code == 0, said
    table = first_table_cells(said.out)
    assert titles(said.out) == ["sst2, roberta-large, all, seed 42, data rows-42-"]
    assert table["objective"] == ["mlm", "mlm", "cls", "cls"]
    assert table["loss"] == ["cross_entropy", "accuracy", "cross_entropy", "accuracy"]
    assert table["g = 0 in"] == ["0.0%", "75.0%", "0.0%", "100.0%"]
    assert table["|g| mean"] == ["1.62", "0.125", "1.17", "0"]
    assert table["|g| min"] == ["0.5", "0", "0.5", "0"]
    assert table["|g| max"] == ["3", "0.5", "2", "0"]
    assert table["train loss, first"] == ["0.7000"] * 4
    assert table["train loss, last"] == ["0.6700", "0.6700", "0.6800", "0.6700"]
    assert table["train accuracy"] == ["90.0"] * 4
    assert table["dev accuracy"] == ["50.0"] * 4
    assert table["test accuracy"] == ["90.0", "70.0", "60.0", "50.0"]
    assert table["predicted negative"] == ["40.0%", "50.0%", "2.5%", "0.0%"]
    assert table["predicted positive"] == ["60.0%", "50.0%", "97.5%", "100.0%"]
    assert table["one label only?"] == ["no", "no", "NEARLY", "positive", "ALL", "positive"]
    assert table["forwards"] == ["200000"] * 4
    assert table["time"] == ["9", "s"] * 4
    assert said.out.split("\n\n")[1].splitlines() == [
        "- mlm accuracy, lr=1e-06: g is exactly 0 in 75.0% of all samples, which then change nothing",
        "- cls cross_entropy, lr=1e-06: predicts positive for 97.5% of test rows",
        "- cls accuracy, lr=1e-06: predicts positive for every test row",
        "- cls accuracy, lr=1e-06: g is exactly 0 in 100.0% of all samples, which then change nothing",
    ]


@pytest.mark.parametrize(
    ("settings", "rows", "tables", "other_rows"),
    [
        ({}, "rows", 1, False),
        ({"optimizer.lr": 1e-5, "batch_size": 8}, "rows", 1, False),
        ({"optimizer.noise": "rademacher"}, "rows", 1, False),
        ({"seed": 7, "data.seed": 42}, "rows", 2, False),
        ({"model.path": "other"}, "rows", 2, False),
        ({"data.seed": 7}, "rows", 2, True),
        ({}, "others", 2, True),
    ],
)
def test_a_table_compares_only_runs_with_the_same_rows_seed_and_model(
    settings: dict[str, object], rows: str, tables: int, other_rows: bool, tmp_path: Path
) -> None:
    make_run(tmp_path / "a")
    make_run(tmp_path / "b", {"objective.loss": "accuracy", **settings}, rows=rows)
    out = mezo("compare", "--objectives", tmp_path).out
    assert len(titles(out)) == tables
    assert ("a table compares only runs on the same rows, with the same seed and from the same model" in out) == (
        tables == 2
    )
    assert ("only one objective and one loss each" in out) == (tables == 2)
    assert ("sst2, seed 42: the runs had different rows (data" in out) == other_rows


def test_runs_with_no_other_objective_to_compare_are_counted(four: Path, tmp_path: Path) -> None:
    for seed in (1, 2):
        make_run(four / f"alone{seed}", {"seed": seed})
    out = mezo("compare", "--objectives", four).out
    assert len(titles(out)) == 1
    assert "- not shown: 2 runs with no other objective or loss to compare" in out


def test_means_over_the_seeds(tmp_path: Path) -> None:
    for seed, test in ((13, 0.7), (21, 0.9)):
        make_run(tmp_path / f"a{seed}", {"seed": seed}, test=test, grads=[1.0, 0.0])
        still = {"seed": seed, "objective.loss": "accuracy"}
        make_run(tmp_path / f"b{seed}", still, grads=[0.0, 0.0], predicted=(0, 10) if seed == 13 else (4, 6))
    out = mezo("compare", "--objectives", tmp_path).out
    assert len(titles(out)) == 3
    lines = [" ".join(line.split()) for line in out.splitlines()]
    at = lines.index("sst2, roberta-large, all, over the seeds above")
    assert lines[at + 1 : at + 4] == [
        "objective method runs g = 0 |g| train dev test one label",
        "mlm cross_entropy MeZO, lr=1e-06 2 50.0% 0.5 90.0 50.0 80.0 (10.0) 0 of 2",
        "mlm accuracy MeZO, lr=1e-06 2 100.0% 0 90.0 50.0 50.0 (0.0) 1 of 2",
    ]


def test_settings_in_which_runs_differ_are_rows(tmp_path: Path) -> None:
    make_run(tmp_path / "a", start="2026-01-01")
    make_run(tmp_path / "b", {"optimizer.noise": "rademacher", "batch_size": 8}, start="2026-01-02")
    table = first_table_cells(mezo("compare", "--objectives", tmp_path).out)
    assert (table["noise"], table["batch_size"]) == (["gaussian", "rademacher"], ["64", "8"])
    assert "eps" not in table


def test_another_metric_is_shown_with_accuracy(tmp_path: Path) -> None:
    make_run(tmp_path / "a", {"task": "mrpc"}, test=0.8)
    assert first_table_cells(mezo("compare", "--objectives", tmp_path).out)["test f1"] == ["80.0"]


def test_unfinished_runs_show_their_status(tmp_path: Path) -> None:
    make_run(tmp_path / "a", start="2026-01-01")
    make_run(tmp_path / "b", {"steps": 9}, ended="the loss is not finite", grads=[1.0, 2.0], start="2026-01-02")
    said = mezo("compare", "--objectives", tmp_path)
    table = first_table_cells(said.out)
    assert (table["status"], table["steps"]) == (["finished", "failed"], ["0", "2"])
    assert (table["test accuracy"], table["predictions on"]) == (["50.0", "-"], ["test", "dev"])
    assert "mlm cross_entropy, lr=1e-06: failed (the loss is not finite)" in said.out


def test_a_run_with_a_damaged_trajectory_is_left_out(four: Path) -> None:
    file = four / "a" / "trajectory.bin"
    file.write_bytes(b"X" + file.read_bytes()[1:])
    said = mezo("compare", "--objectives", four)
    assert said.code == 0
    assert first_table_cells(said.out)["objective"] == ["mlm", "cls", "cls"]
    assert "a is left out: " in said.out + said.err
    assert "does not begin with a trajectory header" in said.out + said.err


def test_a_damaged_last_record_is_named_and_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", ended="interrupted", grads=[1.0, 2.0])
    data = bytearray(run.trajectory.read_bytes())
    data[-1] ^= 1
    run.trajectory.write_bytes(data)
    said = mezo("compare", "--objectives", tmp_path)
    assert said.code == 0
    assert first_table_cells(said.out)["|g| mean"] == ["1"]
    assert f"{run.trajectory} is damaged: its last record" in said.out
    run.update(status="finished")
    run.write_summary({"dev": {"accuracy": 0.5, "loss": 0.7}})
    said = mezo("compare", "--objectives", tmp_path)
    assert said.code == 2
    assert "trajectory.bin is damaged" in said.err


def test_the_damaged_file_is_named_when_no_run_can_be_compared(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", grads=[1.0, 2.0])
    run.trajectory.write_bytes(b"X" + run.trajectory.read_bytes()[1:])
    said = mezo("compare", "--objectives", tmp_path)
    assert said.code == 2
    assert "trajectory.bin" in said.err


def test_no_run_was_evaluated(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", ended="interrupted")
    (run.path / "metrics.jsonl").unlink()
    assert "no run here has been evaluated yet" in error_line(mezo("compare", "--objectives", tmp_path))


def test_objectives_as_files(four: Path, tmp_path: Path) -> None:
    for ending in ("md", "csv", "json"):
        assert mezo("compare", "--objectives", four, "--out", tmp_path / f"t.{ending}").code == 0
    runs = json.loads((tmp_path / "t.json").read_text())["runs"]
    assert [run["zero_fraction"] for run in runs] == [0.0, 0.75, 0.0, 1.0]
    assert [run["one_answer"] for run in runs] == [None, None, "positive", "positive"]
    assert runs[0]["predicted"] == {"negative": 4, "positive": 6}
    with open(tmp_path / "t.csv", newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert [line["test_accuracy"] for line in lines] == ["90.0", "70.0", "60.0", "50.0"]
    assert lines[0]["predicted"] == "negative:4 positive:6"
    assert "| g = 0 in | 0.0% | 75.0% | 0.0% | 100.0% |" in (tmp_path / "t.md").read_text()


def test_a_narrow_terminal_gets_several_tables(four: Path) -> None:
    from mezo_cli.report.views import objective_view

    entries, _ = read_runs([four])
    assert [len(table.columns) for table in objective_view(entries, 80).tables] == [5]
    narrow = objective_view(entries, 60).tables
    assert [len(table.columns) for table in narrow] == [4, 2]
    for table in narrow:
        lines = [table.columns, *table.rows]
        assert sum(1 + max(len(line[number]) for line in lines) for number in range(len(table.columns))) <= 60
    assert narrow[1].title.endswith(", continued")
