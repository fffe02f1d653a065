"""Objectives and losses beside each other, run by run: what each saw, how often it stood still, what it answers.

Only runs on the same rows (the data fingerprint), with the same seed and from the same model are laid side by side.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mezo_cli import terminal
from mezo_cli.compare import methods
from mezo_cli.compare.collect import Entry, Scores
from mezo_cli.compare.facts import Facts, facts_of
from mezo_cli.compare.groups import shots_told
from mezo_cli.compare.overseeds import over_seeds
from mezo_cli.compare.overview import percent
from mezo_cli.compare.sheet import Sheet, View
from mezo_cli.errors import UserError

NAMES, COLUMN = 21, 14  # characters of a table's first column, and of a run's
STILL = 0.5  # share of steps with g = 0 from which on a note says so


class Common(NamedTuple):
    """What runs must share to be laid side by side."""

    task: str
    model: str
    seed: int
    fingerprint: str


def objectives(entries: Sequence[Entry], width: int) -> View:
    """Return a table for each set of runs that can be held against one another, for a terminal of `width` columns.

    Raises:
        UserError: when no run has evaluated anything yet.
    """
    sets: dict[Common, list[Facts]] = defaultdict(list)
    left_out = []
    for entry in entries:
        try:
            facts = facts_of(entry)
        except UserError as error:
            left_out.append(f"{entry.where} is left out: {error}")
            continue
        if facts is None:
            left_out.append(f"{entry.where} is left out: {entry.trouble()}, before its first evaluation")
        else:
            config = entry.config
            sets[Common(config.task.name, config.model.path, config.seed, str(entry.fingerprint))].append(facts)
    if not sets:
        raise UserError("no run here has been evaluated yet")
    shown = {common: sorted(runs, key=_order) for common, runs in sorted(sets.items()) if _compares(runs)} or sets
    sheets: list[Sheet] = []
    said = [*_differences(list(sets)), *_alone(sets, shown)]
    for common, runs in shown.items():
        sheets += _sheets(common, runs, width)
        said += _told(common, runs, len(shown) > 1)
    sheets += over_seeds([facts for runs in shown.values() for facts in runs])
    told = [{**common._asdict(), **_record(facts)} for common, runs in shown.items() for facts in runs]
    return View(sheets, [*said, *left_out], [_flat(record) for record in told], {"unit": "percent", "runs": told})


def _compares(runs: Sequence[Facts]) -> bool:
    """Whether there are two objectives, or two losses, to hold against each other."""
    return len({methods.place(facts.entry.config) for facts in runs}) > 1


def _order(facts: Facts) -> tuple[Any, ...]:
    config = facts.entry.config
    return (*methods.place(config), methods.method(config), config.optimizer.lr, facts.entry.start)


# --- the tables ---


def _sheets(common: Common, runs: Sequence[Facts], width: int) -> list[Sheet]:
    """Return tables with a run a column, as many beside each other as the terminal holds."""
    shots = shots_told(runs[0].entry.shots)
    title = f"{common.task}, {Path(common.model).name}, {shots}, seed {common.seed}, data {common.fingerprint[:8]}"
    each = max(1, (width - NAMES) // COLUMN)
    sheets = []
    for start in range(0, len(runs), each):
        columns = [_column(facts, runs) for facts in runs[start : start + each]]
        names = list(dict.fromkeys(name for column in columns for name in column))
        rows = [[name, *(column.get(name, "-") for column in columns)] for name in names]
        head, *body = rows
        sheets.append(Sheet(title if start == 0 else f"{title}, continued", head, body))
    return sheets


def _column(facts: Facts, runs: Sequence[Facts]) -> dict[str, str]:
    """Return the cells of a run by their names; settings but its lr only where the runs differ in them."""
    entry, config = facts.entry, facts.entry.config
    told = {"objective": config.objective.name, "loss": config.objective.loss}
    if len({methods.method(other.entry.config) for other in runs}) > 1:
        told["method"] = methods.method(config)
    if any(not other.entry.finished for other in runs):
        told["status"] = entry.status
    told |= {"steps": str(entry.reached), "lr": methods.number(config.optimizer.lr)}
    told |= {key.split(".", 1)[-1]: methods.number(methods.flat(config).get(key)) for key in _varying(runs)}
    told |= _gradient(facts) | _losses(facts)
    for split in ("train", "dev", "test"):
        scores: Scores | None = getattr(entry, split)
        told[f"{split} accuracy"] = percent(None if scores is None else scores.accuracy)
        if config.task.metric != "accuracy":
            told[f"{split} {config.task.metric}"] = percent(None if scores is None else scores.score)
    rows = sum(facts.answers.values())
    told["answers on"] = facts.answered
    told |= {f"says {label}": f"{n / rows:.1%}" for label, n in facts.answers.items()}
    told["one answer?"] = _one_answer(facts)
    told["forwards"] = "-" if facts.forwards is None else str(facts.forwards)
    if any(other.backwards for other in runs):
        told["backwards"] = "-" if facts.backwards is None else str(facts.backwards)
    told["time"] = terminal.duration(facts.seconds)
    return told


def _varying(runs: Sequence[Facts]) -> list[str]:
    """Return the settings by which the runs differ, but for those that every table has."""
    had = ("objective.name", "objective.loss", "optimizer.name", "optimizer.lr", "peft.name", "init", "steps")
    given = [methods.recipe(facts.entry) | methods.setting(facts.entry.config) for facts in runs]
    keys = dict.fromkeys(key for settings in given for key in settings if key not in had and key != "data.dir")
    values = {key: {methods.number(settings[key]) for settings in given if key in settings} for key in keys}
    return [key for key, seen in values.items() if len(seen) > 1]


def _gradient(facts: Facts) -> dict[str, str]:
    if facts.zero is None or facts.size is None:
        return {}
    mean, least, most = facts.size
    told = {"g = 0 in": f"{facts.zero:.1%}", "|g| mean": f"{mean:.3g}"}
    return told | {"|g| least": f"{least:.3g}", "|g| greatest": f"{most:.3g}"}


def _losses(facts: Facts) -> dict[str, str]:
    pairs = {"dev loss": facts.dev_losses} | ({"train loss": facts.losses} if facts.losses else {})
    return {
        f"{name}, {end}": f"{pair[i]:.4f}" for name, pair in pairs.items() for i, end in enumerate(("first", "last"))
    }


def _one_answer(facts: Facts) -> str:
    label, share = facts.favourite
    if share == 1:
        return f"ALL {label}"
    return f"NEARLY {label}" if facts.one_answer else "no"


# --- the notes ---


def _differences(sets: Sequence[Common]) -> list[str]:
    """Say why there is more than one table."""
    if len(sets) < 2:
        return []
    said = ["only runs on the same rows, with the same seed and from the same model are laid side by side"]
    for common in sorted({each._replace(fingerprint="") for each in sets}):
        prints = sorted(each.fingerprint[:8] for each in sets if each._replace(fingerprint="") == common)
        if len(prints) > 1:
            said.append(f"{common.task}, seed {common.seed}: the runs had different rows (data {', '.join(prints)})")
    return said


def _alone(sets: Mapping[Common, Sequence[Facts]], shown: Mapping[Common, Sequence[Facts]]) -> list[str]:
    """Say that there is nothing to compare, or which runs had nothing to be compared with."""
    if not any(map(_compares, sets.values())):
        return ["one objective and one loss each: `mezo train -m experiment=objectives` runs four side by side"]
    rest = sum(len(runs) for common, runs in sets.items() if common not in shown)
    return [f"not shown: {rest} run{'s' if rest > 1 else ''} without another objective or loss beside"] if rest else []


def _told(common: Common, runs: Sequence[Facts], several: bool) -> list[str]:
    """Say what must not be overlooked: one answer to everything, steps that stand still, runs without an end."""
    here = f"{common.task}, seed {common.seed}, data {common.fingerprint[:8]}: " if several else ""
    said = []
    for facts in runs:
        config = facts.entry.config
        name = f"{here}{config.objective.name} {config.objective.loss}, lr={methods.number(config.optimizer.lr)}"
        label, share = facts.favourite
        if facts.one_answer:
            which = "every" if share == 1 else f"{share:.1%} of"
            said.append(f"{name}: gives {which} {facts.answered} row{'' if share == 1 else 's'} the label {label}")
        if facts.zero is not None and facts.zero >= STILL:
            said.append(f"{name}: g is exactly 0 in {facts.zero:.1%} of all steps, which move nothing")
        if not facts.entry.finished:
            said.append(f"{name}: {facts.entry.trouble()}")
    return said


# --- for programs ---


def _record(facts: Facts) -> dict[str, Any]:
    entry, config = facts.entry, facts.entry.config
    mean, least, most = facts.size or (None, None, None)
    first, last = facts.losses or (None, None)
    scores = {
        f"{split}_accuracy": None if seen is None else round(100 * seen.accuracy, 4)
        for split, seen in (("train", entry.train), ("dev", entry.dev), ("test", entry.test))
    }
    return {
        "shots": entry.shots,
        "data_seed": entry.data_seed,
        "objective": config.objective.name,
        "loss": config.objective.loss,
        "method": methods.method(config),
        **{key.removeprefix("optimizer."): value for key, value in methods.setting(config).items()},
        "steps": entry.reached,
        "status": entry.status,
        "zero_fraction": facts.zero,
        "mean_abs": mean,
        "min_abs": least,
        "max_abs": most,
        "loss_first": first,
        "loss_last": last,
        "dev_loss_first": facts.dev_losses[0],
        "dev_loss_last": facts.dev_losses[1],
        **scores,
        "predicted": dict(facts.answers),
        "predicted_on": facts.answered,
        "one_answer": facts.favourite[0] if facts.one_answer else None,
        "forwards": facts.forwards,
        "backwards": facts.backwards,
        "seconds": facts.seconds,
        "run": entry.where,
    }


def _flat(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record for CSV: the label counts in words."""
    return {**record, "predicted": " ".join(f"{label}:{n}" for label, n in record["predicted"].items())}
