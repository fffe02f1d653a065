"""Numbers for figures: thinning, counting, labels, trials of a search."""

import shutil
from pathlib import Path

import numpy as np
import pandas as pd

from mezo_cli.report.details import read_details, thin_indices
from mezo_cli.report.figures import CURVE_POINTS, extremes, run_figures
from mezo_cli.report.read import read_run
from mezo_cli.runs import Run


def test_thinning_keeps_the_ends_and_the_extremes() -> None:
    assert thin_indices(1000, 5).tolist() == [0, 250, 500, 749, 999]
    assert thin_indices(3, 5).tolist() == [0, 1, 2]
    assert thin_indices(0, 5).tolist() == []
    values = pd.Series(np.zeros(1000), index=np.arange(1, 2001, 2))
    values.iloc[[3, 777]] = 9.0, -9.0
    kept = extremes(values)
    assert len(kept) <= CURVE_POINTS
    assert (kept.max(), kept.min()) == (9.0, -9.0)
    assert kept.index.is_monotonic_increasing


def test_an_evaluation_that_a_crash_has_repeated(finished: Path, tmp_path: Path) -> None:
    run = Run(Path(shutil.copytree(finished, tmp_path / "run")))
    last = run.evaluations("dev")[-1]
    run.log_metrics(last["kind"], **{name: value for name, value in last.items() if name not in ("kind", "crc")})
    figures = {figure.title: figure for figure in run_figures(read_details(read_run(run.path)), "r")}
    assert f"at step {last['step']}; lowest" in figures["Loss on dev"].note
