"""A task seen through a tokenizer: its template, its label words, its rows as token ids.

One kind of input for each objective (`INPUTS`); all turn `Example`s into `Encoded`s. The template language itself is
in `templates`.
"""

from mezo_cli.tasks.continued import Continued
from mezo_cli.tasks.inputs import Inputs
from mezo_cli.tasks.masked import Prompt, label_word_ids
from mezo_cli.tasks.plain import PlainInput
from mezo_cli.templates import Template

INPUTS: dict[str, type[Inputs]] = {"mlm": Prompt, "cls": PlainInput, "lm": Continued}

__all__ = ["INPUTS", "Continued", "Inputs", "PlainInput", "Prompt", "Template", "label_word_ids"]
