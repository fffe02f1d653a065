"""Write the Python code of a model card: label a text with transformers (and peft) alone, exactly as mezo does.

The input encoder writes what turns a text into scores; the code before it, which loads the model, is written here.
"""

from mezo_cli.tasks.snippet import quote, variable_names
from mezo_cli.training.session import Session

EXAMPLE = "A text of your own."


def write_snippet(session: Session, folder: str, base: str | None) -> str | None:
    """Return a program that prints the probability of each label for a text; None for an encoder that it cannot repeat.

    Args:
        session: holds the exported weights.
        folder: of the exported files, as the code finds them: `.` or a hub id.
        base: the hub id of the base model; None if that lies in the subfolder `base` of an adapter's folder.
    """
    names = variable_names(session.encoder.task.columns)
    code = session.encoder.write_snippet(names)
    if code is None:
        return None
    texts = "".join(f"{name} = {quote(EXAMPLE)}\n" for name in names)
    return f"{_load(session, folder, base)}\n{texts}{code}"


def _load(session: Session, folder: str, base: str | None) -> str:
    """Return the code that makes `tokenizer` and `model`."""
    loaded, dtype = session.loaded, session.config.model.dtype
    auto, is_adapter = loaded.model_kind.auto_class, loaded.adapter is not None
    lines, folder_code = ["import torch"], f'"{folder}"'
    if is_adapter and base is None and folder != ".":  # transformers reads no model in a subfolder beside an adapter
        lines.append("from huggingface_hub import snapshot_download")
        folder_code = f"snapshot_download({folder_code})"
    lines += ["from peft import PeftModel"] if is_adapter else []
    lines += [f"from transformers import {auto}, AutoTokenizer", "", f"folder = {folder_code}"]
    lines += ["tokenizer = AutoTokenizer.from_pretrained(folder)"]
    # mezo computes in float32 from the weights that it stores; transformers would compute in the dtype of the file.
    stored, widened = ("", "") if dtype == "float32" else (f", dtype=torch.{dtype}", ".float()")
    if not is_adapter:
        return "\n".join([*lines, f"model = {auto}.from_pretrained(folder{stored}){widened}.eval()", ""])
    options = f', revision="{loaded.revision}"' if loaded.revision and base is not None else ""
    options += f", num_labels={len(session.encoder.task.labels)}" if loaded.model_kind.has_classifier else ""
    of_base = 'folder + "/base"' if base is None else f'"{base}"'
    lines.append(f"base = {auto}.from_pretrained({of_base}{options}{stored}){widened}")
    return "\n".join([*lines, "model = PeftModel.from_pretrained(base, folder).eval()", ""])
