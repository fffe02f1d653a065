"""Write a model card (README.md) for what is exported: metadata for the hub, use, results, training, terms.

Its text is in card.md.jinja. Names and labels in it are somebody else's: none is read as markup.
"""

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData, metadata_load

from mezo_cli.config.schema import Config, Example
from mezo_cli.console import format_duration, printable
from mezo_cli.objectives import METRICS
from mezo_cli.objectives.metrics import find_metric
from mezo_cli.optim import optimizer_class
from mezo_cli.runs.metrics_log import metrics_of
from mezo_cli.tasks import ClassificationEncoder, InputEncoder


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
        pipeline: the task of the `transformers.pipeline` that loads it; None if none does.
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
    pipeline: str | None = None


def write_card(card: Card, sections: Iterable[tuple[str, str]]) -> str:
    """Return the text of README.md.

    Args:
        card: the facts.
        sections: (heading, text) of how to use it, which stand before the results.
    """
    text = ModelCard.from_template(
        _metadata(card),
        template_str=files("mezo_cli.sharing").joinpath("card.md.jinja").read_text(encoding="utf-8"),
        card=card,
        task=card.config.task,
        optimizer=optimizer_class(card.config.optimizer),
        sections=sections,
        metrics=_metrics(card),
        training=_training(card),
        plain=plain,
        code=code,
    )
    return printable(str(text)).rstrip() + "\n"


def plain(text: str) -> str:
    """Return a text of somebody else's (a name, a label) as one line of Markdown that shows it: no HTML, no markup."""
    return re.sub(r"([\\`*\[\]#|])", r"\\\1", html.escape(" ".join(text.split()), quote=False))


def code(text: str) -> str:
    """Return such a text as Markdown's code, in which nothing is markup."""
    text = " ".join(text.split())
    fence = "`" * (max((len(run) for run in re.findall("`+", text)), default=0) + 1)
    return f"{fence}{text}{fence}" if len(fence) == 1 else f"{fence} {text} {fence}"


def _cell(text: str) -> str:
    """Return such a text as code in a cell of a table."""
    return code(text).replace("|", "\\|")


def prompt_section(encoder: InputEncoder[Any]) -> str:
    """Return a table of labels and label words, under the prompt as the model sees it; or the templates of rows."""
    if not isinstance(encoder, ClassificationEncoder):
        rows = [f"| {name} | {_cell(repr(text))} |" for name, text in encoder.templates().items()]
        given = f"The model is given at most {encoder.max_length} tokens, made by these templates."
        return "\n".join([given, "", "| part | template |", "| --- | --- |", *rows])
    task = encoder.task
    row = encoder.encode(Example(tuple(f"[{column}]" for column in task.columns), 0))
    lines = [f"The model is given {code(encoder.decode(row))}, at most {encoder.max_length} tokens.", ""]
    if encoder.label_words:
        lines += ["| label | word |", "| --- | --- |"]
        pairs = zip(task.labels, encoder.label_words, strict=True)
        lines += [f"| {plain(label)} | {_cell(word)} |" for label, word in pairs]
    else:
        lines += ["| label |", "| --- |", *(f"| {plain(label)} |" for label in task.labels)]
    return "\n".join(lines)


def read_terms(folder: Path) -> str:
    """Return the licence that the card in a model's folder names, "" if it names none or cannot be read."""
    try:
        licence = (metadata_load(folder / "README.md") or {}).get("license")  # no warning for a card without metadata
    except Exception:  # whatever its YAML makes the library raise: the card is somebody else's
        return ""
    return licence if isinstance(licence, str) else ""


def _metadata(card: Card) -> ModelCardData:
    task, config = card.config.task, card.config
    on_hub = config.data.name == "hub"
    results = [
        EvalResult(
            task_type=card.pipeline or "text-classification",
            dataset_type=str(task.hub.path) if on_hub else f"{task.name}-{config.data.name}",
            dataset_name=task.name if on_hub else f"{task.name} (data={config.data.name})",
            dataset_config=task.hub.name if on_hub else None,
            dataset_split=_split_name(config, line["split"]),
            dataset_revision=card.info.get("data_revision"),
            metric_type=_hub_name(name),
            metric_name=f"{line['split']} {name}",
            metric_value=round(float(line[name]), 6),
        )
        for line in card.evaluations
        if line["step"] == card.step and line["split"] in ("dev", "test")
        for name in _metrics(card)
        if name != "loss" and name in line
    ]
    return ModelCardData(
        base_model=card.base if card.base_on_hub else None,
        license=card.base_terms or None,
        library_name=card.library or ("peft" if card.adapter else "transformers"),
        pipeline_tag=card.pipeline,
        tags=["mezo", "zeroth-order-optimization"],
        datasets=[str(task.hub.path)] if on_hub else None,
        model_name=card.title,
        eval_results=results or None,
    )


def _metrics(card: Card) -> list[str]:
    """Return the names of the metrics that the evaluations have, the loss last."""
    names = dict.fromkeys(name for line in card.evaluations for name in metrics_of(line))
    return sorted(names, key=lambda name: name == "loss")


def _hub_name(metric: str) -> str:
    return (find_metric(metric).hub_name if metric in METRICS.names else "") or metric


def _split_name(config: Config, split: str) -> str:
    """Return the data set's own name of a split where it is taken whole, else mezo's."""
    own = config.task.hub.test if split == "test" else config.task.hub.dev
    return str(own) if config.data.name == "hub" and own else split


def _training(card: Card) -> list[tuple[str, str]]:
    """Return the rows of the table of settings and cost."""
    config, summary, info = card.config, card.summary, card.info
    settings = ", ".join(f"{name} {value}" for name, value in asdict(config.optimizer).items() if name != "name")
    trainable, hub, source = info.get("trainable") or {}, config.task.hub, config.data.name
    if source == "hub":
        source = f"{_cell(str(hub.path))} ({plain(str(hub.name))})"
    shots = "" if config.data.shots is None else f", {config.data.shots} rows per class"
    rows = {
        "base model": _cell(card.base) + (f" at commit {code(card.base_revision)}" if card.base_revision else ""),
        "task": f"{plain(config.task.name)}, version {config.task.version}",
        "objective": f"{config.objective.name}, {config.objective.loss}",
        "optimizer": f"{config.optimizer.name}: {plain(settings)}" if settings else config.optimizer.name,
        "trained": f"{trainable.get('count', 0):,} parameters ({100 * trainable.get('share', 0):.3g}%)",
        "adapter": config.peft.name if config.peft.name != "none" else "none: all parameters",
        "data": f"{source}{shots}, drawn with seed {config.data_seed}",
        "steps, batch size, seed": f"{config.steps}, {config.batch_size}, {config.seed}",
        "dtype": f"{config.model.dtype}, computed in {config.model.compute_dtype}",
    }
    if config.model.quantize != "none":
        rows["base stored in"] = f"{config.model.quantize}; on a float base the scores differ by the quantisation"
    if summary:
        time = f"{format_duration(summary['seconds'])} on {plain(info.get('device', 'an unknown device'))}"
        rows |= {"cost": f"{summary['forwards']:,} forwards, {summary['backwards']:,} backwards", "time": time}
        rows["peak memory"] = f"{summary['peak_memory_bytes'] / 1e9:.2f} GB"
    return list(rows.items())
