"""Turn a task's rows into token ids: the template language, the label words, one input encoder per objective.

Nothing here imports torch.
"""

from mezo_cli.tasks.choice import ChoiceEncoder, ChoiceRow
from mezo_cli.tasks.encoder import ClassificationEncoder, InputEncoder
from mezo_cli.tasks.generate import GenerateEncoder, PromptRow
from mezo_cli.tasks.lm import LmEncoder
from mezo_cli.tasks.mlm import ClsEncoder, MlmEncoder, label_word_ids
