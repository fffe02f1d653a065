"""Write a folder that plain transformers (or peft) loads: model or adapter, tokenizer, model card."""

import json
import shutil
from pathlib import Path
from typing import Any

from mezo_cli import models
from mezo_cli.adapters.methods import find_method
from mezo_cli.models import download
from mezo_cli.runs import Run
from mezo_cli.runs.atomic import write_atomically
from mezo_cli.session.session import Session
from mezo_cli.sharing.card import code, hub_id, write_card
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
    use, pipeline = _use(session, repo or where, base_id or str(base.resolve())), pipeline_task(session)
    text = write_card(run, session, step, repo, use, library, pipeline, session.encoder, base_card)
    write_atomically(folder / CARD, text)
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
