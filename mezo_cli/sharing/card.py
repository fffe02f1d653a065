"""Write a model card (README.md) for what is exported: metadata for the hub, use, results, training, terms.

Its text is in card.md.jinja. Names and labels in it are somebody else's: none is read as markup.
"""

import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData, metadata_load

from mezo_cli.config.schema import Config, Example
from mezo_cli.console import format_duration, printable
from mezo_cli.objectives import METRICS
from mezo_cli.runs.scores import metrics_of
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


def write_card(card: Card, use: str = "", encoder: InputEncoder[Any] | None = None) -> str:
    """Return the text of README.md.

    Args:
        card: the facts.
        use: how to use it, in Markdown.
        encoder: of the model's rows, whose prompt and label words are told.
    """
    prompt, settings = "", card.config.optimizer.model_dump().items()
    if isinstance(encoder, ClassificationEncoder):
        columns = tuple(f"[{column}]" for column in encoder.task.columns)
        prompt = encoder.decode(encoder.encode(Example(columns, 0)))
    text = ModelCard.from_template(
        _metadata(card),
        template_str=files("mezo_cli.sharing").joinpath("card.md.jinja").read_text(encoding="utf-8"),
        card=card,
        config=card.config,
        task=card.config.task,
        optimizer=card.config.optimizer,
        settings=", ".join(f"{name} {value}" for name, value in settings if name != "name"),
        use=use,
        encoder=encoder,
        prompt=prompt,
        metrics=_metrics(card),
        duration=format_duration,
        plain=plain,
        code=code,
        cell=lambda text: code(text).replace("|", "\\|"),
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
            metric_type=(METRICS.load(name).hub_name if name in METRICS.names else "") or name,
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


def _split_name(config: Config, split: str) -> str:
    """Return the data set's own name of a split where it is taken whole, else mezo's."""
    own = config.task.hub.test if split == "test" else config.task.hub.dev
    return str(own) if config.data.name == "hub" and own else split
