"""Pieces of the Python code that an input encoder writes for a model card: it repeats the encoder's work in short."""

import keyword
import re
from collections.abc import Sequence

from mezo_cli.tasks.encoder import ClassificationEncoder
from mezo_cli.tasks.template import FILTERS, Sentence

_TAKEN = {"torch", "tokenizer", "model", "folder", "base", "ids", "parts", "input_ids", "segments", "logits", "scores"}
_TAKEN |= {"pipeline", "pipe", "labels", "found", "one", "total", "sum"}
_TAKEN |= {"inputs", "prompt", "prompt_ids", "word", "part", "i", "s", "text", "print", "dict", "zip", "range", "len"}

IDS = """

def ids(text):
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]


"""


def print_probabilities(encoder: ClassificationEncoder) -> str:
    """Return the line that prints the probability of each label, from the tensor `scores`."""
    return f"print(dict(zip([{', '.join(map(quote, encoder.task.labels))}], scores.softmax(-1).tolist())))\n"


def words_in_line(encoder: ClassificationEncoder) -> str:
    """Return the label words for a comment."""
    return " ".join(", ".join(encoder.label_words).split())


def sentence_code(sentence: Sentence, variables: Sequence[str]) -> str:
    """Return the code of the text that is tokenized for a sentence."""
    code = variables[sentence.column]
    for call in sentence.filters:
        arguments = (variables[value] if isinstance(value, int) else quote(value) for value in call.arguments)
        code = str(FILTERS[call.name].code).format(code, *arguments)
    return f'" " + {code}' if sentence.space else code


def variable_names(columns: Sequence[str]) -> list[str]:
    """Return a name of a Python variable for each column."""
    names: list[str] = []
    for column in columns:
        name = re.sub(r"\W", "_", column)
        usable = name.isidentifier() and not keyword.iskeyword(name) and name not in {*names, *_TAKEN}
        names.append(name if usable else f"text_{len(names)}")
    return names


def quote(text: str) -> str:
    """Return the code of a text, in double quotes."""
    code = repr(text)
    return f'"{code[1:-1]}"' if code[0] == "'" and '"' not in code else code
