"""Write a model card (README.md) for what is exported: metadata for the hub, use, results, training, terms.

Its text is in card.md.jinja. Names and labels in it are somebody else's: none is read as markup.
"""

import html
import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData, metadata_load

from mezo_cli.config.schema import Config, Example
from mezo_cli.console import format_duration, printable
from mezo_cli.models import download
from mezo_cli.objectives import METRICS
from mezo_cli.runs import Run
from mezo_cli.runs.scores import metrics_of
from mezo_cli.session.session import Session
from mezo_cli.tasks import ClassificationEncoder, InputEncoder


def write_card(
    run: Run,
    session: Session,
    step: int,
    repo: str | None,
    use: str,
    library: str,
    pipeline: str | None = None,
    encoder: InputEncoder[Any] | None = None,
    base_card: str = "",
) -> str:
    """Return the text of README.md about the weights of a step of a run.

    Args:
        run: has run.json, the scores of these weights and of dev before training, and summary.json if it has finished.
        session, step: of the weights.
        repo: the hub id that the folder will have; None if it will not be uploaded.
        use: how to use it, in Markdown.
        library: what loads it: transformers, peft (an adapter alone) or mezo.
        pipeline: the task of the `transformers.pipeline` that loads it; None if none does.
        encoder: of the model's rows, whose prompt and label words are told.
        base_card: the file beside the card that is the base model's own card; "" if there is none.
    """
    config, info, base_id = session.config, run.info(), hub_id(session.config)
    base, task, optimizer = base_id or base_name(config), config.task, config.optimizer
    title = repo or f"{base.rpartition('/')[2]}-{task.name}-{optimizer.name}"
    lines = [line for line in run.metrics() if line["kind"] == "eval"]
    evaluations = [line for line in lines if line["step"] == step or (line["step"], line["split"]) == (0, "dev")]
    names = dict.fromkeys(name for line in evaluations for name in metrics_of(line))
    of_step = [line for line in evaluations if line["step"] == step and line["split"] in ("dev", "test")]
    metrics = sorted(names, key=lambda name: name == "loss")
    scores = [(line, name) for line in of_step for name in metrics if name != "loss" and name in line]
    terms, prompt = read_terms(download.fetch(config.model, weights=False)), ""
    if isinstance(encoder, ClassificationEncoder):
        columns = tuple(f"[{column}]" for column in encoder.task.columns)
        prompt = encoder.decode(encoder.encode(Example(columns, 0)))
    metadata = ModelCardData(
        base_model=base_id,
        license=terms or None,
        library_name=library,
        pipeline_tag=pipeline,
        tags=["mezo", "zeroth-order-optimization"],
        datasets=[str(task.hub.path)] if config.data.name == "hub" else None,
        model_name=title,
        eval_results=[_result(config, info, line, name, pipeline) for line, name in scores] or None,
    )
    text = ModelCard.from_template(
        metadata,
        template_str=files("mezo_cli.sharing").joinpath("card.md.jinja").read_text(encoding="utf-8"),
        title=title,
        step=step,
        base=base,
        base_id=base_id,
        base_card=base_card,
        base_terms=terms,
        revision=session.loaded.revision,
        info=info,
        evaluations=evaluations,
        summary=run.read_summary() if (run.path / "summary.json").is_file() else {},
        config=config,
        settings=", ".join(f"{name} {value}" for name, value in optimizer.model_dump().items() if name != "name"),
        library=library,
        use=use,
        encoder=encoder,
        prompt=prompt,
        metrics=metrics,
        duration=format_duration,
        plain=plain,
        code=code,
        cell=lambda text: code(text).replace("|", "\\|"),
    )
    return printable(str(text)).rstrip() + "\n"


def _result(
    config: Config, info: Mapping[str, Any], line: Mapping[str, Any], name: str, pipeline: str | None
) -> EvalResult:
    """Return a metric of an evaluation for the hub, with the data set's own name of a split that is taken whole."""
    task, on_hub, split = config.task, config.data.name == "hub", line["split"]
    own_name = task.hub.test if split == "test" else task.hub.dev
    return EvalResult(
        task_type=pipeline or "text-classification",
        dataset_type=str(task.hub.path) if on_hub else f"{task.name}-{config.data.name}",
        dataset_name=task.name if on_hub else f"{task.name} (data={config.data.name})",
        dataset_config=task.hub.name if on_hub else None,
        dataset_split=own_name if on_hub and own_name else split,
        dataset_revision=info.get("data_revision"),
        metric_type=(METRICS.load(name).hub_name if name in METRICS.names else "") or name,
        metric_name=f"{split} {name}",
        metric_value=round(float(line[name]), 6),
    )


def plain(text: str) -> str:
    """Return a text of somebody else's (a name, a label) as one line of Markdown that shows it: no HTML, no markup."""
    return re.sub(r"([\\`*\[\]#|])", r"\\\1", html.escape(" ".join(text.split()), quote=False))


def code(text: str) -> str:
    """Return such a text as Markdown's code, in which nothing is markup."""
    text = " ".join(text.split())
    fence = "`" * (max((len(run) for run in re.findall("`+", text)), default=0) + 1)
    return f"{fence}{text}{fence}" if len(fence) == 1 else f"{fence} {text} {fence}"


def hub_id(config: Config) -> str | None:
    """Return the base model's id on the hub; None for an embedded model and for a local folder."""
    path = config.model.path
    return None if config.model.is_embedded or download.local_folder(path) is not None else path


def base_name(config: Config) -> str:
    """Return a name of a base model that is not on the hub: that of its folder."""
    return config.model.path if config.model.is_embedded else Path(config.model.path).expanduser().resolve().name


def read_terms(folder: Path) -> str:
    """Return the licence that the card in a model's folder names, "" if it names none or cannot be read."""
    try:
        licence = (metadata_load(folder / "README.md") or {}).get("license")  # no warning for a card without metadata
    except Exception:  # whatever its YAML makes the library raise: the card is somebody else's
        return ""
    return licence if isinstance(licence, str) else ""
