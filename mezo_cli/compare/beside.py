"""Whether a group stands for a number of the paper's, and what its set-up has otherwise."""

from mezo_cli.compare import methods
from mezo_cli.compare.groups import Group
from mezo_cli.compare.paper import Number, Row, paper

PROMPT = ("template", "labels", "label_words")


def row_for(group: Group) -> Row | None:
    """Return the row of the paper's that a group stands for: same shots, method, model and objective, on its tasks."""
    same = group.model == paper().model and group.objective == paper().objective and group.metric == "accuracy"
    if not same or group.task not in paper().tasks or group.demo:
        return None
    return paper().row(group.shots, group.method, group.loss)


def number_for(group: Group) -> Number | None:
    """Return the paper's number for a group, None where the paper has none."""
    row = row_for(group)
    return None if row is None else row.numbers.get(group.task)


def difference(group: Group, number: Number | None) -> float | None:
    """Return the group's mean less the paper's, in points, None where one of them is lacking."""
    return None if number is None or group.mean is None else 100 * group.mean - number.mean


def unlike(group: Group) -> list[str]:
    """Say in what the group's set-up is not the paper's: the two numbers are beside each other, not the same."""
    said = [] if group.zero_shot else [*_settings(group), *_grid(group), *_seeds(group)]
    config = group.entries[0].config
    if _own_prompt(group):
        said.append("another prompt")
    if config.data.eval_limit is not None:
        said.append(f"tested on at most {config.data.eval_limit} rows")
    if group.zero_shot and config.data.shots is None and not group.recipe["data.shots"]:
        said.append("tested on all rows, the paper on at most 1000")
    return said


def _settings(group: Group) -> list[str]:
    held = paper().settings(group.method)
    if not held:  # LP has none that the paper tells
        return []
    given = methods.flat(group.entries[0].config)
    other = {key: value for key, value in held.items() if key in group.recipe and given[key] != value}
    return [
        f"{methods.told(key, given[key])} not {methods.number(value)}" for key, value in (other | group.unusual).items()
    ]


def _grid(group: Group) -> list[str]:
    said = []
    for key, ends in paper().grid(group.method).items():
        picked = {float(value) for pick in group.picks.values() for name, value in pick.point if name == key}
        outside = sorted(value for value in picked if not min(ends) <= value <= max(ends))
        if outside:
            span = " to ".join(f"{end:g}" for end in ends)
            said.append(f"{', '.join(methods.told(key, value) for value in outside)} not {span}")
    return said


def _seeds(group: Group) -> list[str]:
    ours = set(group.tests)
    if ours == paper().seeds:
        return []
    if ours < paper().seeds:
        return [f"{len(ours)} of {len(paper().seeds)} data seeds"]
    return [f"data seeds {', '.join(map(str, sorted(ours)))}"]


def _own_prompt(group: Group) -> bool:
    """Whether the prompt is not that of the built-in task of the same name."""
    ours, built_in = group.entries[0].config.task, methods.built_in("task", group.task)
    return any(getattr(ours, key) != built_in[key] for key in PROMPT)
