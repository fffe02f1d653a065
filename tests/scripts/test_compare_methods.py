"""compare_methods.py: what is tuned on, what is chosen, paired differences, calls to a share of MeZO's gain."""

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from tests.report.run_directories import make_run
from tests.scripts.load import load_script

ROOT = Path(__file__).parents[2]
SCRIPT = load_script("compare_methods")
COMMON = {"data.shots": 16, "forwards": 100, "eval_at_forwards": [20, 100], "steps": 50}
SAMPLES = {"optimizer.samples": 5, "steps": 10}  # 10 calls per step
TESTS = {13: (0.80, 0.90), 21: (0.84, 0.92), 42: (0.82, 0.94)}  # MeZO at lr 1e-6: dev and test


def output(*words: object) -> str:
    """Return what the script prints."""
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
