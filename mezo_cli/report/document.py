"""Everything that is told about one run, as one JSON document. The page and the terminal are views of it.

It needs the run's directory only: no model and no torch.
"""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mezo_cli.config.optimizers import PerturbationConfig
from mezo_cli.config.schema import Config, data_dir
from mezo_cli.console import relative_path
from mezo_cli.errors import UserError
from mezo_cli.optim import OPTIMIZERS
from mezo_cli.report.entries import Entry, baselines, predicted_fractions, result_split
from mezo_cli.report.settings import changed_settings, leave_out, method_name
from mezo_cli.runs import trajectory
from mezo_cli.runs.contents import MARK, NOTE, TEXTS, format_difference, format_score, metrics_of
from mezo_cli.runs.run import own_reward

EXAMPLES = 10  # right and wrong test rows each
ONE_LABEL = 0.95  # fraction of rows from which on a run counts as predicting one label only
MOSTLY_ZERO = 0.5  # fraction of projected gradients that are exactly 0 from which on a note says so
OPEN_END = "Test rows appear once the run has finished."
HIDDEN, KEYS = ("crc", "kind", "split"), ("kind", "step", "crc", "row")  # of a line: of dev, of a completion


def document(run: Entry) -> dict[str, Any]:
    """Return the document of a run, for which all its files are read. It may be running."""
    try:
        config, info, logged = run.config, run.info, run.metrics[0]
        optimizer = OPTIMIZERS.implementation(config.optimizer.name)
        gradients = trajectory.scalar_stats(projected_grads(run))
        return {
            "run": run.location,
            "title": f"{method_name(config)} on {config.task.name} with {run.model}",
            "status": run.status,
            "outcome": run.outcome,
            "error": info.get("error"),
            "verdict": run.verdict,
            "sentence": _sentence(run),
            "warnings": _warnings(run, gradients["zero_fraction"], optimizer.symbol),
            "prompt": info.get("prompt"),
            "label_words": dict(zip(config.task.labels, info.get("label_words") or (), strict=False)),
            "steps": {"done": run.steps_done, "planned": config.steps},
            "metric": run.metric,
            "results": results(run),
            "conclusions": [*filter(None, [conclusion(run.summary, config)])],
            **{key: run.summary.get(key) for key in ("difference", "baselines")},
            "dev": [{**leave_out(line, HIDDEN), "predicted_fractions": predicted_fractions(line)} for line in run.dev],
            "loss": {"steps": logged["step"].tolist(), "values": logged["loss"].tolist()} if logged else None,
            "scalar": optimizer.scalar,
            "symbol": optimizer.symbol,
            optimizer.scalar: dict(gradients),
            **_examples(run),
            **_completions(run),
            "settings": changed_settings(config),
            "facts": _facts(run),
            "versions": {name: str(version) for name, version in (info.get("versions") or {}).items()},
            "commands": _commands(run),
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{run.run.path} is damaged: a file lacks what belongs there ({error!r})") from error


def _sentence(run: Entry) -> str:
    config, rows, trainable = run.config, run.info.get("rows") or {}, run.info.get("trainable")
    reward, loss = (run.info.get("reward") or {}).get("name"), config.objective.loss
    measure = f"reward {reward}" if reward and loss == "reward" else f"{loss.replace('_', '-')} loss"
    scored = f"{run.info.get('scored_by') or config.objective.name}, {measure}"
    count = f"{config.data.name} data" if rows.get("train") is None else f"{rows['train']:,} training rows"
    count += f", {run.shots} per label" if run.shots else ""
    data = f"{config.task.name} ({count}; {scored})"
    if config.steps == 0:
        what = "was evaluated" if config.init == "none" else "got a linear probe on its features and was evaluated"
        return f"{run.model} {what} on {data}; nothing else was trained."
    trained = "the parameters"
    if trainable:
        share, trained = float(trainable["share"]), f"{int(trainable['count']):,} parameters"
        trained = f"all {trained}" if share == 1 else f"{trained} ({100 * share:.2g}%)"
    eps = f", eps {config.optimizer.eps:g}" if isinstance(config.optimizer, PerturbationConfig) else ""
    verb = "trains" if run.status == "running" else "trained"
    steps = f"{config.steps:,}" if run.steps_done == config.steps else f"{run.steps_done:,} of {config.steps:,}"
    size = min(config.batch_size, rows.get("train") or config.batch_size)
    what = f"{method_name(config)} {verb} {trained} of {run.model} on {data}"
    return f"{what} for {steps} steps of {size} rows: learning rate {config.optimizer.lr:g}{eps}, seed {config.seed}."


def _facts(run: Entry) -> dict[str, str]:
    info, summary = run.info, run.summary
    dirty = " with uncommitted changes" if info.get("git_dirty") else ""
    values = {
        "started": info.get("start"),
        "ended": info.get("end"),
        "device": info.get("device"),
        "host": info.get("host"),
        "training": f"{float(summary['seconds']):,.0f} s" if "seconds" in summary else None,
        "forwards": f"{summary['forwards']:,}" if "forwards" in summary else None,
        "backwards": f"{summary['backwards']:,}" if summary.get("backwards") else None,
        "peak memory": f"{summary['peak_memory_bytes'] / 1e9:.2f} GB" if summary.get("peak_memory_bytes") else None,
        "noise": info.get("noise_kernels"),
        "data": (info.get("data_fingerprint") or "")[:12] or None,
        "data revision": info.get("data_revision"),
        "model revision": info.get("model_revision"),
        "mezo commit": f"{info['git_commit']}{dirty}" if info.get("git_commit") else None,
    }
    return {name: str(value) for name, value in values.items() if value is not None}


def results(run: Entry) -> list[dict[str, Any]]:
    """Return dev before training and its best, test before training, baselines, test at best, as far as known.

    Each has its name, step, the 95% interval of the run's metric as text, and the scores. A baseline has no loss.
    """
    if run.best is None:
        return []
    last = {line["split"]: line for line in run.metrics[1]}
    last |= {name: {"step": 0, "split": name, **scores} for name, scores in baselines(run.summary).items()}
    mark = f" {MARK}" if run.picked_start else ""
    lines = {"dev after the linear probe" if run.config.init == "linear_probe" else "dev before training": run.dev[0]}
    if len(run.dev) > 1:
        lines[f"dev best{mark}" if run.finished else "dev best so far"] = run.best
    names = {"test_before": "test before training", "test": f"test at best{mark}"}
    others = [split for split in last if split not in ("dev", "train", "test")]
    lines |= {names.get(split, split): last[split] for split in (*others, "test") if split in last}
    found = []
    for name, line in lines.items():
        ends, scores = run.intervals(line).get(run.metric, ()), metrics_of(line)
        interval = " to ".join(format_score(run.metric, end) for end in ends)
        ordered = {metric: scores[metric] for metric in (run.metric, *scores) if metric in scores}
        found.append({"name": name, "step": line["step"], "interval": interval, **ordered})
    return found


def conclusion(summary: Mapping[str, Any], config: Config) -> str:
    """Return the verdict with its figures, and beside it what removing the bias between the labels gives; may be empty.

    One rule for both: only an improvement is told to be more, or no more, than a removed bias. With metric=loss the
    bias is told of the task's metric: scores with a bias removed have no loss.
    """
    verdict, unbiased = summary.get("verdict"), baselines(summary)
    if verdict is None:
        return ""
    split, metric, text = result_split(summary), config.shown_metric, f"{verdict}: {summary.get('verdict_reason')}."
    if not unbiased:
        return text
    best = max(unbiased.values(), key=lambda scores: config.order_of(metric) * float(scores[metric]))
    score = format_score(metric, best[metric], "%")
    text += f" The untrained model has {score} on {split} once the bias between its labels is removed"
    interval = (best.get("difference") or {"intervals": {}})["intervals"].get(metric)  # none of a single row
    if verdict != "improved" or interval is None:
        return f"{text}."
    more = "nothing shows that it is more than"
    if all(config.better(metric, end, 0.0) for end in interval):
        more = "it is more than"
    elif all(config.better(metric, 0.0, end) for end in interval):
        more = "it is worse than"
    return f"{text}; the result is {format_difference(metric, best['difference'])} from that: {more} a removed bias."


def _warnings(run: Entry, zero: float | None, symbol: str) -> list[str]:
    """Return what a reader must know before believing the numbers of a run."""
    verbs = {"running": "is still ", "interrupted": "was "}
    texts = [] if run.finished else [f"The run {verbs.get(run.status, '')}{run.trouble()}."]
    if run.verdict == "diverged" and run.finished:
        texts.append(f"The run diverged: it ended at step {run.steps_done:,} of {run.config.steps:,}.")
    if run.picked_start:
        texts.append(f"{NOTE}.")
    lines = {line["split"]: line for line in run.metrics[1]}
    split = "test" if "test" in lines else "dev"
    for label, share in predicted_fractions(lines.get(split, {})).items():
        if share >= ONE_LABEL:
            texts.append(f"{label} is predicted for {100 * share:.0f}% of the {split} rows.")
    if zero is not None and zero >= MOSTLY_ZERO:
        texts.append(f"{symbol} is exactly 0 in {100 * zero:.0f}% of all samples, which then change nothing.")
    return texts


def projected_grads(run: Entry) -> np.ndarray | None:
    """Return those of all steps, or what is recorded in their place; None where nothing is, and before the first."""
    file, config = run.run.trajectory, run.config
    if not config.optimizer.replayable or not file.exists() or not file.stat().st_size:
        return None
    optimizer: Any = OPTIMIZERS.implementation(config.optimizer.name)(config.optimizer, config.seed, config.steps)
    grads = run.run.read_trajectory().drawn_grads(optimizer.samples)
    return grads if grads.size else None


def _examples(run: Entry) -> dict[str, Any]:
    """Return test rows to look at, or in `no_test_rows` why there are none.

    They are spread evenly over all `right` and all `wrong` rows, from the surest prediction to the least sure;
    `test_rows` has the numbers of both. Of a run that generates text they are `completions`, from best to worst.
    """
    found: dict[str, Any] = {"right": [], "wrong": [], "completions": [], "test_rows": {}, "no_test_rows": ""}
    rows = run.run.predictions()
    if rows and not {*TEXTS} & {*rows[0]}:
        found["no_test_rows"] = "It keeps no texts of rows."
    elif not rows:
        found["no_test_rows"] = "It has no predictions of test rows." if run.finished else OPEN_END
    elif "predicted" not in rows[0]:
        ordered = sorted(rows, key=lambda row: (-metrics_of(row).get(run.metric, 0.0), row["row"]))
        found["completions"] = thin(ordered, EXAMPLES)
    else:
        rows = sorted(rows, key=lambda row: (-row["probabilities"][row["predicted"]], row["row"]))
        right = [row for row in rows if row["predicted"] == row["label"]]
        wrong = [row for row in rows if row["predicted"] != row["label"]]
        found |= {"right": thin(right, EXAMPLES), "wrong": thin(wrong, EXAMPLES)}
        found["test_rows"] = {"correct": len(right), "wrong": len(wrong)}
    return found


def thin(rows: Sequence[Any], most: int) -> list[Any]:
    """Return at most `most` evenly spaced ones of some rows, the first and the last among them."""
    return [rows[at] for at in np.linspace(0, len(rows) - 1, min(len(rows), most)).round().astype(int)]


def _completions(run: Entry) -> dict[str, Any]:
    """Return what the model said of some dev rows at the start, the best step and the last, by step; {} for most."""
    kept, best = run.run.completions(), 0 if run.best is None else int(run.best["step"])
    marks = {"start": min(kept, default=0), "best": best, "last": max(kept, default=0)}
    steps = sorted({*marks.values()} & {*kept})
    names = {step: [f"step {step:,}", *(name for name, at in marks.items() if at == step)] for step in steps}
    return {
        "dev_completions": {step: [leave_out(row, KEYS) for row in kept[step]] for step in steps},
        "step_names": {step: ", ".join(words) for step, words in names.items()},
    }


def _commands(run: Entry) -> dict[str, str]:
    info, commands, words = run.info, {}, _words(run.info)
    if words[:1] == ["finetune"]:
        commands["Run again"] = f"finetune({', '.join(words[1:])})"
    elif words:
        commands["Run again"] = shlex.join(["mezo", *words])
    commands["With changes"] = shlex.join(["mezo", "train", "--from", relative_path(run.run.path), *own_reward(info)])
    if "argv" in info and run.status in ("interrupted", "failed"):  # not of a run that `mezo export --trajectory` wrote
        commands["Resume"] = run.run.command("resume", info=info)
    if run.finished:
        commands |= {"Next": found} if (found := next_command(run)) else {}
        data = ["data.dir=DIR"] if run.config.data.name == "files" and data_dir(run.config.data) is None else []
        commands["Evaluate"] = run.run.command("eval", "--split", "test", *data, info=info)
    return commands


def _words(info: Mapping[str, Any]) -> list[str]:
    """Return the words of the command line that began a run, without its directory; empty where none is known."""
    words = [str(word) for word in info.get("argv") or ()][1:]
    if words and not any("objective.reward=" in word for word in words):  # a job gets it from its environment
        words += own_reward(info)
    return [word for word in words if word != "-q" and not word.startswith("hydra.run.dir=")]


def next_command(run: Entry) -> str:
    """Return the one command to go on with after a run's verdict, and why; empty where nothing is compared.

    Gained: more seeds. Worse or diverged: a lower rate. Else the label words, where they do not tell the labels apart
    even with their bias removed, or the doctor. Nothing is measured for it.
    """
    config, verdict, words = run.config, run.verdict, _words(run.info)
    if verdict in (None, "not_compared") or words[:1] != ["train"]:
        return ""
    accuracies = [scores.get("intervals", {}).get("accuracy") for scores in baselines(run.summary).values()]
    labels, lows, lr = config.task.labels, [interval[0] for interval in accuracies if interval], config.optimizer.lr
    verb, key, value, why = ["doctor"], "", "", "what keeps it from learning"
    if verdict == "improved":
        verb, key, value, why = ["train", "-m"], "seed", "=13,21,42,87,100", "the same with more seeds"
    elif verdict in ("worse", "diverged"):
        verb, key, value, why = ["train"], "optimizer.lr", f"={lr / 3:.1g}", f"a lower rate than {lr:g}"
    elif config.objective.name in ("mlm", "lm") and len(labels) > 1 and lows and max(lows) <= 1 / len(labels):
        verb, why = ["data", "--words"], "words that the model tells apart"
    if isinstance(config.optimizer, PerturbationConfig) and config.objective.is_differentiable:
        doctor = "it" if verb == ["doctor"] else "mezo doctor"
        why += f"; {doctor} measures AdamW of a LoRA beside {config.optimizer.name}"
    kept = [word for word in words[1:] if word != "-m" and word.partition("=")[0] != key]
    return f"{shlex.join(['mezo', *verb, *kept, *[key + value] * bool(key)])}  # {why}"
