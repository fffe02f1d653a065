"""Write the Python code of a model card: label a text with transformers (and peft) alone, exactly as mezo does.

The code joins the token ids of the template's parts, which mezo's input encoder has computed.
"""

import keyword
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mezo_cli.models import ModelKind
from mezo_cli.tasks import ClsEncoder, InputEncoder, LmEncoder, MlmEncoder
from mezo_cli.tasks.template import Sentence

EXAMPLE = "A text of your own."
_TAKEN = {"torch", "tokenizer", "model", "folder", "base", "ids", "parts", "input_ids", "segments", "logits", "scores"}
_TAKEN |= {"inputs", "prompt", "prompt_ids", "word", "part", "i", "s", "text", "print", "dict", "zip", "range", "len"}
_UNLIMITED = 1 << 20  # tokens; a prompt without a limit is not cut

FILTERS: dict[str, Callable[[str], str]] = {  # the code of mezo_cli.tasks.template.FILTERS
    "drop_last": lambda code: f"{code}[:-1]",
    "lower_first": lambda code: f"({code}[:1].lower() + {code}[1:])",
    "upper_first": lambda code: f"({code}[:1].upper() + {code}[1:])",
    "strip": lambda code: f"{code}.strip()",
}


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
    names = _variables(encoder.task.columns)
    if type(encoder) is MlmEncoder:
        code = _mlm(encoder, names)
    elif type(encoder) is ClsEncoder:
        code = _cls(encoder, names)
    elif type(encoder) is LmEncoder:
        code = _lm(encoder, names)
    else:
        return None
    texts = "".join(f"{name} = {_quote(EXAMPLE)}\n" for name in names)
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


_IDS = """

def ids(text):
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]


"""


def _mlm(encoder: MlmEncoder, names: Sequence[str]) -> str:
    parts, segments = [], []
    for part, limit, segment in encoder.layout():
        if isinstance(part, Sentence):
            cut = "" if limit is None else f"[:{limit}]"
            parts.append(f"ids({_expression(part, names)}){cut}")
        else:
            parts.append(str(part))
        segments.append(segment)
    mask, limit = encoder.tokenizer.mask_token_id, encoder.max_length
    lines = [f"parts = [{', '.join(parts)}]", f"input_ids = [i for part in parts for i in part][:{limit}]"]
    lines.append('inputs = {"input_ids": torch.tensor([input_ids]), "attention_mask": torch.ones(1, len(input_ids))}')
    if any(segments):
        lines.append(f"segments = [s for part, s in zip(parts, {segments}) for _ in part][:{limit}]")
        lines.append('inputs["token_type_ids"] = torch.tensor([segments])')
    lines += [
        "with torch.no_grad():",
        "    logits = model(**inputs).logits",
        f"scores = logits[0, input_ids.index({mask}), {encoder.label_ids}]  # at the mask: {_words(encoder)}",
        _print(encoder),
    ]
    return _IDS + "\n".join(lines)


def _cls(encoder: ClsEncoder, names: Sequence[str]) -> str:
    options = f"truncation=True, max_length={encoder.max_length}, split_special_tokens=True"
    return "\n".join(
        [
            f'inputs = tokenizer({", ".join(names)}, {options}, return_tensors="pt")',
            "with torch.no_grad():",
            "    scores = model(**inputs).logits[0]",
            _print(encoder),
        ]
    )


def _lm(encoder: LmEncoder, names: Sequence[str]) -> str:
    start, parts, longest = encoder.layout()
    prompt = " + ".join(_quote(part) if isinstance(part, str) else _expression(part, names) for part in parts)
    word = encoder.label_ids[0]
    cut = f"[-{longest}:]" if longest < _UNLIMITED else ""
    lines = [
        f"prompt = {prompt}",
        f"prompt_ids = {start} + ids(prompt + {_quote(encoder.continuation(0))})[:-{len(word)}]{cut}",
        "scores = []",
        f"for word in {encoder.label_ids}:  # after the prompt: {_words(encoder)}",
        "    with torch.no_grad():",
        "        logits = model(input_ids=torch.tensor([prompt_ids + word])).logits[0, -len(word) - 1 : -1]",
        "    scores.append(logits.log_softmax(-1)[range(len(word)), word].sum())",
        "scores = torch.stack(scores)",
        _print(encoder),
    ]
    return _IDS + "\n".join(lines)


def _print(encoder: InputEncoder) -> str:
    return f"print(dict(zip([{', '.join(map(_quote, encoder.task.labels))}], scores.softmax(-1).tolist())))\n"


def _words(encoder: InputEncoder) -> str:
    return " ".join(", ".join(encoder.label_words).split())


def _expression(sentence: Sentence, names: Sequence[str]) -> str:
    """Return the code of the text that is tokenized for a sentence."""
    code = names[sentence.column]
    for name in sentence.filters:
        code = FILTERS[name](code)
    return f'" " + {code}' if sentence.space else code


def _variables(columns: Sequence[str]) -> list[str]:
    """Return a name of a Python variable for each column."""
    names: list[str] = []
    for column in columns:
        name = re.sub(r"\W", "_", column)
        usable = name.isidentifier() and not keyword.iskeyword(name) and name not in {*names, *_TAKEN}
        names.append(name if usable else f"text_{len(names)}")
    return names


def _quote(text: str) -> str:
    """Return the code of a text, in double quotes."""
    code = repr(text)
    return f'"{code[1:-1]}"' if code[0] == "'" and '"' not in code else code
