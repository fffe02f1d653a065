"""`mezo verify`: rebuild a run's weights from base model and trajectory; compare them, and their scores, with its own.

It shows that these weights give these scores, not that they were trained on no row of test.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mezo_cli.commands.evaluate import open_with_own
from mezo_cli.commands.open_run import Opened
from mezo_cli.console import console_logging, make_console, print_line
from mezo_cli.errors import join
from mezo_cli.process.signals import import_torch
from mezo_cli.process.versions import describe_arithmetic

if TYPE_CHECKING:  # it imports torch
    from mezo_cli.objectives.scoring import Evaluation

MAX_OFF = 1e-4  # of a loss that another machine or another number of threads computes
MAX_CHANGED = 1 / 200  # of the rows whose prediction may differ there
LOOSE = f"loss to {MAX_OFF:g}, 1 prediction in {1 / MAX_CHANGED:.0f} may differ"
PREDICTED = ("predicted", "completion")  # of a row of predictions.jsonl

VERDICTS = {True: "ok", False: "DIFFERS", None: "-"}
Check = tuple[bool | None, str, str]  # whether it holds, None: it is not known; what was compared; the figures


def verify(path: Path, overrides: Sequence[str], base: Path | None, as_json: bool = False) -> int:
    """Print a line per check, or with `as_json` one document; return 0 if all hold, 1 if one does not.

    Raises:
        UserError: for a run that is not finished, or that leaves no trajectory; and where its files are damaged.
    """
    import_torch()
    checks: list[Check] = []
    with console_logging(make_console(), quiet=True):
        for holds, what, figures in _checks(open_with_own(path, None, base, overrides)):
            checks.append((holds, what, figures))
            if not as_json:
                print_line(f"{VERDICTS[holds]:8}{what:9}{figures}")
    differs = any(holds is False for holds, _, _ in checks)
    if as_json:
        listed = [{"check": what, "holds": holds, "figures": figures} for holds, what, figures in checks]
        print_line(json.dumps({"run": str(path.absolute()), "verified": not differs, "checks": listed}, indent=2))
    return int(differs)


def _checks(opened: Opened) -> Iterator[Check]:
    from mezo_cli import models
    from mezo_cli.session import restore
    from mezo_cli.session.opening import opened as opened_at
    from mezo_cli.session.opening import prepare

    run, config = opened.run, opened.config
    summary, info = run.read_summary(), run.info()
    step, last, recorded = summary["best"]["step"], summary["steps"], info["weights"]
    load = partial(opened_at, config, run, None if config.optimizer.replayable else "best")
    prepared = prepare(config, load, trains=True)
    with prepared.session as session:
        rows, fingerprint = prepared.splits.fingerprint, info["data_fingerprint"]
        same = rows == fingerprint
        yield same, "data", f"rows of sha256 {rows[:12]}, {_recorded(fingerprint[:12], same)}"
        replay = restore.replayed(session, run, [step, last])
        if config.optimizer.replayable:
            next(replay)
        found = models.fingerprint(session.loaded.model)
        yield _compare_weights("weights", step, found, recorded["best"])
        here = describe_arithmetic(session.loaded.device, config.model.computes_in)
        there = info["arithmetic"]  # each from a step on
        others = [name for name, value in here.items() if any(part.get(name) != value for part in there)]
        rule = f"{LOOSE}: other {join(others)}" if others else "exact"
        for split in ("dev", "test"):
            if split in prepared.rows:
                evaluation = session.objective.evaluate(prepared.rows[split])
                stored = run.predictions() if split == "test" else None
                holds, figures = _compare(evaluation, summary[split], stored or (), is_exact=not others)
                yield holds, split, f"{figures} [{rule}]"
        if not config.optimizer.replayable:
            yield None, "last", f"training not replayed: optimizer={config.optimizer.name} leaves no trajectory"
            return
        for _ in replay:
            found = models.fingerprint(session.loaded.model)
    same, what, figures = _compare_weights("last", last, found, recorded["last"])
    yield same, what, f"{figures}; {last} of {last} steps replayed"


def _compare_weights(what: str, step: int, found: str, recorded: Mapping[str, Any]) -> Check:
    same = recorded == {"step": step, "sha256": found}
    return same, what, f"step {step}, sha256 {found[:12]}, {_recorded(recorded['sha256'][:12], same)}"


def _compare(
    evaluation: "Evaluation", recorded: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], is_exact: bool
) -> tuple[bool, str]:
    scores, count = evaluation.scores(), len(evaluation.values)
    off = {name: abs(value - recorded[name]) for name, value in scores.items()}
    changed = sum(
        any(row[key] != record[key] for key in PREDICTED if key in record and key in row)  # it may keep no texts
        for row, record in zip(rows, evaluation.records, strict=bool(rows))
    )
    if is_exact:
        holds = not any(off.values()) and not changed
    else:
        # Without the predictions of the run the metrics tell how many rows differ at least.
        share = changed / count if rows else max((off[name] for name in evaluation.metrics), default=0.0)
        holds = off["loss"] <= MAX_OFF and share <= MAX_CHANGED
    text = ", ".join(f"{name} {recorded[name]:.6g}" + f" (off by {gap:.1e})" * (gap > 0) for name, gap in off.items())
    return holds, f"{text}, {changed} of {count:,} predictions differ" if rows else text


def _recorded(recorded: str, is_same: bool) -> str:
    return "as recorded" if is_same else f"but {recorded} is recorded"
