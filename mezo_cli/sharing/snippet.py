"""Write the Python code of a model card: label a text with transformers (and peft) alone, exactly as mezo does.

The input encoder writes what turns a text into scores; the code before it, which loads the model, is written here.
"""

from dataclasses import dataclass

from mezo_cli.models import ModelKind
from mezo_cli.tasks import InputEncoder
from mezo_cli.tasks.snippet import quote, variable_names

EXAMPLE = "A text of your own."


@dataclass(frozen=True)
class Source:
    """Where the code loads the model from.

    Attributes:
        folder: of the exported files, as the code finds them: `.` or a hub id.
        kind: of the model.
        adapter: whether the folder holds an adapter alone.
        base: of an adapter: the hub id of its base model; None if that lies in the subfolder `base`.
        revision: of that base model.
        dtype: how the run stores its weights.
    """

    folder: str
    kind: ModelKind
    adapter: bool = False
    base: str | None = None
    revision: str | None = None
    dtype: str = "float32"


def write_snippet(source: Source, encoder: InputEncoder) -> str | None:
    """Return a program that prints the probability of each label for a text; None for an encoder that it cannot repeat.

    Args:
        source: where the model is.
        encoder: of the run, for its task.
    """
    names = variable_names(encoder.task.columns)
    code = encoder.write_snippet(names)
    if code is None:
        return None
    texts = "".join(f"{name} = {quote(EXAMPLE)}\n" for name in names)
    return f"{_load(source, len(encoder.task.labels))}\n{texts}{code}"


def _load(source: Source, labels: int) -> str:
    auto, inside = source.kind.auto_class, source.adapter and source.base is None
    lines, folder = ["import torch"], f'"{source.folder}"'
    if inside and source.folder != ".":  # transformers reads no model in a subfolder beside an adapter
        lines.append("from huggingface_hub import snapshot_download")
        folder = f"snapshot_download({folder})"
    lines += ["from peft import PeftModel"] if source.adapter else []
    lines += [f"from transformers import {auto}, AutoTokenizer", "", f"folder = {folder}"]
    lines += ["tokenizer = AutoTokenizer.from_pretrained(folder)"]
    # mezo computes in float32 from the weights that it stores; transformers would compute in the dtype of the file.
    stored, widened = ("", "") if source.dtype == "float32" else (f", dtype=torch.{source.dtype}", ".float()")
    if not source.adapter:
        return "\n".join([*lines, f"model = {auto}.from_pretrained(folder{stored}){widened}.eval()", ""])
    base = 'folder + "/base"' if inside else f'"{source.base}"'
    options = f', revision="{source.revision}"' if source.revision and not inside else ""
    options += f", num_labels={labels}" if source.kind.has_classifier else ""
    lines.append(f"base = {auto}.from_pretrained({base}{options}{stored}){widened}")
    return "\n".join([*lines, "model = PeftModel.from_pretrained(base, folder).eval()", ""])
