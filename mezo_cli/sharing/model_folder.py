"""Write a folder that plain transformers (or peft) loads, and the model card (README.md) of all that is exported.

The card has metadata for the hub, use, results, training, terms; its text is in card.md.jinja. Names and labels in it
are somebody else's: none is read as markup.
"""

import html
import json
import re
import shutil
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData, metadata_load

from mezo_cli import models
from mezo_cli.adapters.methods import find_method
from mezo_cli.config.schema import Config, Example
from mezo_cli.console import format_duration, printable
from mezo_cli.models import download
from mezo_cli.objectives import METRICS
from mezo_cli.runs import Run
from mezo_cli.runs.atomic import write_atomically
from mezo_cli.runs.contents import metrics_of
from mezo_cli.session.session import Session
from mezo_cli.tasks import ClassificationEncoder
from mezo_cli.tasks.template import quote

CARD, BASE_CARD = "README.md", "BASE_MODEL.md"
EXAMPLE = "A text of your own."


def write_model_folder(folder: Path, run: Run, session: Session, step: int, where: str, repo: str | None) -> None:
    """Make a folder with the weights of a session: a plain model, or an adapter that names its base model.

    It will have the absolute path `where`, and the hub id `repo`, if it will be uploaded.
    """
    loaded, config, library, base_card = session.loaded, session.config, "transformers", ""
    models.save(loaded, folder)
    base = download.fetch(config.model)
    base_id = hub_id(config)
    if loaded.adapter is not None:
        library = "peft"
        loaded.tokenizer.save_pretrained(folder)
        named: dict[str, Any] = json.loads((folder / download.ADAPTER).read_text(encoding="utf-8"))
        named["base_model_name_or_path"] = base_id or str(base.resolve())
        named["revision"] = loaded.revision if base_id else None
        write_atomically(folder / download.ADAPTER, json.dumps(named, indent=2) + "\n")
    if base_id is None and (base / CARD).is_file():
        shutil.copyfile(base / CARD, folder / BASE_CARD)
        base_card = BASE_CARD
    use = _use(session, repo or where, base_id or str(base.resolve()))
    write_atomically(folder / CARD, write_card(run, session, step, repo, use, library, base_card))
    for file in folder.rglob("*.safetensors"):  # which are written for their owner alone
        file.chmod(0o644)


def _use(session: Session, where: str, base: str) -> str:
    """Return a program that prints the probability of each label for a text, and what else loads the folder.

    The input encoder writes what turns a text into probabilities, and of one that it cannot repeat nothing is told. The
    code before it loads the model with transformers (and peft) alone. `where` and `base`, of an adapter's base model,
    are absolute paths or hub ids.
    """
    columns = session.encoder.task.columns
    names = ["text"] if len(columns) == 1 else [f"text_{number + 1}" for number in range(len(columns))]
    task, program = pipeline_task(session), session.encoder.write_snippet(names)
    if program is None:
        return ""
    texts = "".join(f"{name} = {quote(EXAMPLE)}\n" for name in names)
    packages, more = "`transformers` and `torch`", ""
    if session.loaded.adapter is not None:
        packages += ", and `peft`"
        more = f"This is an adapter of the model {code(base)}, which has to be there.\n\n"
    last = "`transformers.pipeline` cannot load this folder: this adapter cannot be merged into the model."
    if task is not None:
        last = f'`pipeline("{task}", model=FOLDER)` opens it too; where it tokenizes the prompt in another way, its'
        last += " probabilities differ."
    start = f"With the packages {packages}, the probability of each label:"
    return f"{start}\n\n```python\n{_write_load(session, where, base)}\n{texts}{program}```\n\n{more}{last}"


def pipeline_task(session: Session) -> str | None:
    """Return the task of `transformers.pipeline` that the exported files are for; None where it cannot load them."""
    return session.loaded.model_kind.pipeline if find_method(session.config.peft).merges else None


def _write_load(session: Session, folder: str, base: str) -> str:
    loaded = session.loaded
    auto, is_adapter = loaded.model_kind.auto_class, loaded.adapter is not None
    lines = ["import torch", *(["from peft import PeftModel"] if is_adapter else [])]
    lines += [f"from transformers import {auto}, AutoTokenizer", "", f"folder = {quote(folder)}"]
    lines += ["tokenizer = AutoTokenizer.from_pretrained(folder)"]
    # mezo computes in float32 from the weights that it stores; transformers would compute in the dtype of the file.
    dtype = session.config.model.dtype if is_adapter else str(loaded.model.dtype).removeprefix("torch.")
    stored, widened = ("", "") if dtype == "float32" else (f", dtype=torch.{dtype}", ".float()")
    if not is_adapter:
        return "\n".join([*lines, f"model = {auto}.from_pretrained(folder{stored}){widened}.eval()", ""])
    options = f', revision="{loaded.revision}"' if loaded.revision else ""
    if loaded.model_kind.has_classifier:
        labels = [quote(label) for label in session.encoder.task.labels]
        options += f", id2label={{{', '.join(f'{i}: {label}' for i, label in enumerate(labels))}}}"
        options += f", label2id={{{', '.join(f'{label}: {i}' for i, label in enumerate(labels))}}}"
    lines.append(f"base = {auto}.from_pretrained({quote(base)}{options}{stored}){widened}")
    return "\n".join([*lines, "model = PeftModel.from_pretrained(base, folder).eval()", ""])


# --- the card ---


def write_card(
    run: Run, session: Session, step: int, repo: str | None, use: str, library: str, base_card: str = ""
) -> str:
    """Return the text of README.md about the weights of a step of a run.

    Args:
        run: has run.json, the scores of these weights and of dev before training, and summary.json if it has finished.
        session, step: of the weights.
        repo: the hub id that the folder will have; None if it will not be uploaded.
        use: how to use it, in Markdown.
        library: what loads it: transformers, peft (an adapter alone) or mezo, which knows the prompt and label words.
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
    pipeline, encoder = (None, None) if library == "mezo" else (pipeline_task(session), session.encoder)
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
