"""Write the Python code of a model card: label a text with transformers (and peft) alone, exactly as mezo does.

The input encoder writes what turns a text into probabilities, with transformers' pipeline and without; the code before
it, which loads the model, is written here.
"""

from collections.abc import Iterable

from mezo_cli.adapters.base import find_method
from mezo_cli.tasks.encoder import variable_names
from mezo_cli.tasks.template import quote
from mezo_cli.training.session import Session

EXAMPLE = "A text of your own."


def write_snippet(session: Session, folder: str, base: str) -> str | None:
    """Return a program that prints the probability of each label for a text; None for an encoder that it cannot repeat.

    Args:
        session: holds the exported weights.
        folder: of the exported files: its absolute path or a hub id.
        base: the hub id of an adapter's base model, or its folder.
    """
    names = variable_names(session.encoder.task.columns)
    code = session.encoder.write_snippet(names)
    return None if code is None else f"{_load(session, folder, base)}\n{_texts(names)}{code}"


def pipeline_task(session: Session) -> str | None:
    """Return the task of `transformers.pipeline` that the exported files are for; None where it cannot load them."""
    return session.loaded.model_kind.pipeline if find_method(session.config.peft).merges else None


def write_pipeline(session: Session, folder: str, base: str) -> str | None:
    """Return the same by a pipeline, or for text generation a program that continues the prompt.

    None where a pipeline cannot load the files, or would give the model other tokens than mezo does.
    """
    names, dtype = variable_names(session.encoder.task.columns), _stored_dtype(session)
    task = pipeline_task(session)
    code = None if task is None else session.encoder.write_pipeline(names)
    if code is None:
        return None
    if session.loaded.adapter is not None:
        load = _load(session, folder, base, "pipeline")
        load += f'pipe = pipeline("{task}", model=model.merge_and_unload(), tokenizer=tokenizer)\n'
    else:
        imports, computed = ("", "") if dtype == "float32" else ("import torch\n", ", dtype=torch.float32")
        made = f'pipe = pipeline("{task}", model={quote(folder)}{computed})\n'
        load = f"{imports}from transformers import pipeline\n\n{made}"
    return f"{load}\n{_texts(names)}{code}"


def _texts(names: Iterable[str]) -> str:
    return "".join(f"{name} = {quote(EXAMPLE)}\n" for name in names)


def _load(session: Session, folder: str, base: str, *more: str) -> str:
    """Return the code that makes `tokenizer` and `model`, and imports `more` from transformers."""
    loaded, dtype = session.loaded, _stored_dtype(session)
    auto, is_adapter = loaded.model_kind.auto_class, loaded.adapter is not None
    lines = [] if more and dtype == "float32" else ["import torch"]
    lines += ["from peft import PeftModel"] if is_adapter else []
    lines += [f"from transformers import {', '.join([auto, 'AutoTokenizer', *more])}", "", f"folder = {quote(folder)}"]
    lines += ["tokenizer = AutoTokenizer.from_pretrained(folder)"]
    # mezo computes in float32 from the weights that it stores; transformers would compute in the dtype of the file.
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


def _stored_dtype(session: Session) -> str:
    """Return the dtype that the weights are stored in."""
    loaded = session.loaded
    return session.config.model.dtype if loaded.adapter is not None else str(loaded.model.dtype).removeprefix("torch.")
