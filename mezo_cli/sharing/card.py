"""Write a model card (README.md) for what is exported: metadata for the hub, use, results, training, terms."""

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from mezo_cli.config.schema import Config, Example
from mezo_cli.console import format_duration, printable
from mezo_cli.objectives.metrics import find_metric
from mezo_cli.optim import optimizer_class
from mezo_cli.tasks import InputEncoder

PAPER = "[Malladi et al. 2023](https://arxiv.org/abs/2305.17333)"


@dataclass(frozen=True)
class Card:
    """What a model card is made from.

    Attributes:
        title: the name of the model.
        step: of the weights.
        base: the base model's hub id, or the name of its folder.
        base_on_hub: whether `base` is a hub id.
        base_revision: its commit on the hub.
        info: run.json.
        evaluations: the lines of metrics.jsonl with the scores of the weights, and dev's before training.
        summary: summary.json; empty if the run has not finished.
        base_terms: what the base model's own card says of its licence; "" if it is not known.
        adapter: whether an adapter is exported alone.
        base_card: the file beside the card that is the base model's own card; "" if there is none.
        library: what loads it; "" for transformers, or peft for an adapter.
    """

    title: str
    config: Config
    step: int
    base: str
    base_on_hub: bool
    base_revision: str | None
    info: Mapping[str, Any]
    evaluations: Sequence[Mapping[str, Any]]
    summary: Mapping[str, Any]
    base_terms: str = ""
    adapter: bool = False
    base_card: str = ""
    library: str = ""


def write_card(card: Card, sections: Iterable[tuple[str, str]]) -> str:
    """Return the text of README.md.

    Args:
        card: the facts.
        sections: (heading, text) of how to use it, which stand before the results.
    """
    config, task = card.config, card.config.task
    what = f"the step-{card.step} weights of a run" if card.step else "the weights before the first step of a run"
    optimizer = optimizer_class(config.optimizer)
    intro = (
        f"{code(card.base)} trained on the task {code(task.name)} ({', '.join(map(plain, task.labels))}) with "
        f"{optimizer.title} by the program mezo: {what}."
    )
    if not optimizer.needs_backward:
        intro += f" MeZO fine-tunes with forward passes only ({PAPER})."
    parts = [f"# {plain(card.title)}", intro]
    for heading, text in [
        *sections,
        ("Results", _results(card)),
        ("Training", _training(card)),
        ("Versions", _versions(card)),
        ("Terms", _terms(card)),
    ]:
        parts.append(f"## {heading}\n{text}")
    return f"---\n{_metadata(card)}---\n" + printable("\n\n".join(parts)) + "\n"


def plain(text: str) -> str:
    """Return a text of somebody else's (a name, a label) as one line of Markdown that shows it: no HTML, no markup."""
    return re.sub(r"([\\`*\[\]#])", r"\\\1", html.escape(" ".join(text.split()), quote=False))


def code(text: str) -> str:
    """Return such a text as Markdown's code, in which nothing is markup."""
    text = " ".join(text.split())
    fence = "`" * (max((len(run) for run in re.findall("`+", text)), default=0) + 1)
    return f"{fence}{text}{fence}" if len(fence) == 1 else f"{fence} {text} {fence}"


def prompt_section(encoder: InputEncoder) -> str:
    """Return a table of labels and label words, under the prompt as the model sees it."""
    task = encoder.task
    row = encoder.encode(Example(tuple(f"[{column}]" for column in task.columns), 0))
    words = encoder.label_words or [""] * len(task.labels)
    table = _table(
        ["label", "word"] if encoder.label_words else ["label"],
        [[plain(label), *([code(word)] if word else [])] for label, word in zip(task.labels, words, strict=True)],
    )
    return f"The model is given {code(encoder.decode(row))}, at most {encoder.max_length} tokens.\n\n{table}"


def read_terms(folder: Path) -> str:
    """Return the licence that the card in a model's folder names, "" if it names none."""
    try:
        text = (folder / "README.md").read_text(encoding="utf-8")
        values = yaml.safe_load(text.split("---")[1]) if text.startswith("---") else None
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError):
        return ""
    licence = values.get("license") if isinstance(values, dict) else None
    return licence if isinstance(licence, str) else ""


def _metadata(card: Card) -> str:
    from huggingface_hub import EvalResult, ModelCardData

    task, config = card.config.task, card.config
    on_hub = config.data.name == "hub"
    results = [
        EvalResult(
            task_type="text-classification",
            dataset_type=str(task.hub.path) if on_hub else f"{task.name}-{config.data.name}",
            dataset_name=task.name if on_hub else f"{task.name} (data={config.data.name})",
            dataset_config=task.hub.name if on_hub else None,
            dataset_split=_split_name(config, line["split"]),
            dataset_revision=card.info.get("data_revision"),
            metric_type=find_metric(name).hub_name or name,
            metric_name=f"{line['split']} {name}",
            metric_value=round(float(line[name]), 6),
        )
        for line in card.evaluations
        if line["step"] == card.step and line["split"] in ("dev", "test")
        for name in dict.fromkeys(("accuracy", task.metric))
    ]
    data = ModelCardData(
        base_model=card.base if card.base_on_hub else None,
        license=card.base_terms or None,
        library_name=card.library or ("peft" if card.adapter else "transformers"),
        pipeline_tag="text-classification",
        tags=["mezo", "zeroth-order-optimization"],
        datasets=[str(task.hub.path)] if on_hub else None,
        model_name=card.title,
        eval_results=results or None,
    )
    return f"{data.to_yaml()}\n"


def _split_name(config: Config, split: str) -> str:
    """Return the data set's own name of a split where it is taken whole, else mezo's."""
    own = config.task.hub.test if split == "test" else config.task.hub.dev
    return str(own) if config.data.name == "hub" and own else split


def _results(card: Card) -> str:
    metric = card.config.task.metric
    names = list(dict.fromkeys(("accuracy", metric, "loss")))
    rows = []
    for line in card.evaluations:
        when = "" if line["step"] == card.step else " before training"
        rows.append([f"{line['split']}{when}", str(line["step"]), *(f"{line[name]:.4f}" for name in names)])
    if not rows:
        return f"The weights of step {card.step} were not evaluated by the run."
    text = _table(["split", "step", *names], rows)
    return text + "\n\nThe best checkpoint is chosen on dev; train is a sample of the training rows."


def _training(card: Card) -> str:
    config, summary, info = card.config, card.summary, card.info
    settings = ", ".join(f"{name} {value}" for name, value in asdict(config.optimizer).items() if name != "name")
    trainable = info.get("trainable") or {}
    rows = [
        ["base model", code(card.base) + (f" at commit `{card.base_revision}`" if card.base_revision else "")],
        ["task", f"{plain(config.task.name)}, version {config.task.version}"],
        ["objective", f"{config.objective.name}, {config.objective.loss}"],
        ["optimizer", f"{config.optimizer.name}: {settings}" if settings else config.optimizer.name],
        ["trained", f"{trainable.get('count', 0):,} parameters ({100 * trainable.get('share', 0):.3g}%)"],
        ["adapter", config.peft.name if config.peft.name != "none" else "none: all parameters"],
        ["data", _data(config)],
        ["steps, batch size, seed", f"{config.steps}, {config.batch_size}, {config.seed}"],
        ["dtype", f"{config.model.dtype}, computed in {config.model.compute_dtype}"],
    ]
    if summary:
        rows.append(["cost", f"{summary['forwards']:,} forwards, {summary['backwards']:,} backwards"])
        rows.append(["time", f"{format_duration(summary['seconds'])} on {info.get('device', 'an unknown device')}"])
        rows.append(["peak memory", f"{summary['peak_memory_bytes'] / 1e9:.2f} GB"])
    return _table(["", ""], rows)


def _data(config: Config) -> str:
    hub, source = config.task.hub, config.data.name
    if source == "hub":
        source = f"{code(str(hub.path))} ({plain(str(hub.name))})"
    shots = "" if config.data.shots is None else f", {config.data.shots} rows per class"
    return f"{source}{shots}, drawn with seed {config.data_seed}"


def _versions(card: Card) -> str:
    versions = card.info.get("versions") or {}
    commit = card.info.get("git_commit")
    text = ", ".join(f"{name} {version}" for name, version in versions.items())
    return text + (f"; mezo at commit `{commit}`" if commit else "")


def _terms(card: Card) -> str:
    known = f" Its card names the licence {code(card.base_terms)}." if card.base_terms else ""
    where = f" (https://huggingface.co/{card.base})" if card.base_on_hub else ""
    own = f" Its own card is in {card.base_card}." if card.base_card else ""
    return (
        f"These weights are derived from {code(card.base)}{where}: its terms apply to them.{known}{own} The terms of "
        "the training data may apply too."
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    cells = [[" ".join(cell.split()).replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)
