"""`mezo verify`: rebuild a run's weights from base model and trajectory; compare them, and their scores, with its own.

It shows that these weights give these scores, not that they were trained on no row of test.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mezo_cli.commands.evaluate import with_own_settings
from mezo_cli.commands.open_run import Opened, open_run
from mezo_cli.config.schema import Splits
from mezo_cli.console import console_logging, make_console, print_line
from mezo_cli.errors import UserError, join
from mezo_cli.system import describe_arithmetic, import_torch

if TYPE_CHECKING:  # it imports torch
    from mezo_cli.objectives.scoring import Evaluation

MAX_OFF = 1e-4  # of a loss that another machine or another number of threads computes
MAX_CHANGED = 1 / 200  # of the rows whose prediction may differ there
LOOSE = f"loss to {MAX_OFF:g}, 1 prediction in {1 / MAX_CHANGED:.0f} may differ"
PREDICTED = ("predicted", "completion")  # of a row of predictions.jsonl

Check = tuple[bool, str, str]  # whether it holds; what was compared; the figures


def verify(path: Path, overrides: Sequence[str], base: Path | None) -> int:
    """Print a line per check; return 0 if all hold, 1 if one does not.

    Raises:
        UserError: for a run that is not finished, or that leaves no trajectory; and where its files are damaged.
    """
    import_torch()
    failed = 0
    with console_logging(make_console(), quiet=True):
        opened = with_own_settings(open_run(path, None, base), overrides)
        for holds, what, figures in _checks(opened):
            print_line(f"{'ok' if holds else 'DIFFERS':8}{what:9}{figures}")
            failed += not holds
    return int(failed > 0)


def _checks(opened: Opened) -> Iterator[Check]:
    """Yield the checks: rows, weights, and the scores on dev and test at the picked step."""
    from mezo_cli import models
    from mezo_cli.training import restore
    from mezo_cli.training.prepare import prepare

    run, config = opened.run, opened.config
    restore.require_trajectory(config, run, "verify")
    summary, info = run.read_summary(), run.info()
    step, recorded = summary["best"]["step"], (info.get("weights") or {}).get("best")
    if recorded is None:
        raise UserError(f"{run.path}: run.json has no sha256 of the weights: an earlier version trained it")
    seen: list[Splits] = []
    prepared = prepare(
        config, lambda: restore.replay_from_base(config, run, step, checks=False), seen.append, trains=True
    )
    same = seen[0].fingerprint == info["data_fingerprint"]
    yield same, "data", f"rows of sha256 {seen[0].fingerprint[:12]}, {_recorded(info['data_fingerprint'][:12], same)}"
    found = models.fingerprint(prepared.session.loaded.model)
    same = recorded == {"step": step, "sha256": found}
    yield same, "weights", f"step {step}, sha256 {found[:12]}, {_recorded(recorded['sha256'][:12], same)}"
    here = describe_arithmetic(prepared.session.loaded.device, config.model.compute_dtype)
    others = [name for name, value in here.items() if (info.get("arithmetic") or {}).get(name) != value]
    rule = f"{LOOSE}: other {join(others)}" if others else "exact"
    for split in ("dev", "test"):
        if split in prepared.rows:
            evaluation = prepared.session.objective.evaluate(prepared.rows[split])
            stored = run.predictions() if split == "test" else None
            holds, figures = _compare(evaluation, summary[split], stored or (), is_exact=not others)
            yield holds, split, f"{figures} [{rule}]"


def _compare(
    evaluation: "Evaluation", recorded: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], is_exact: bool
) -> tuple[bool, str]:
    """Return whether scores and predictions are those of the run, and their figures."""
    scores, count = evaluation.scores(), len(evaluation.values)
    off = {name: abs(value - recorded[name]) for name, value in scores.items()}
    changed = sum(
        any(row[key] != record[key] for key in PREDICTED if key in record)
        for row, record in zip(rows, evaluation.records, strict=bool(rows))
    )
    if is_exact:
        holds = not any(off.values()) and not changed
    else:
        # Without the predictions of the run the metrics tell how many rows differ at least.
        share = changed / count if rows else max((off[name] for name in evaluation.metrics), default=0.0)
        holds = off["loss"] <= MAX_OFF and share <= MAX_CHANGED
    said = ", ".join(f"{name} {recorded[name]:.6g}" + f" (off by {gap:.1e})" * (gap > 0) for name, gap in off.items())
    return holds, f"{said}, {changed} of {count:,} predictions differ" if rows else said


def _recorded(known: str, is_same: bool) -> str:
    return "as recorded" if is_same else f"but {known} is recorded"
