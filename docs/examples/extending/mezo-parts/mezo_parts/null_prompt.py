"""Null prompts: the text, then a mask, and no template (Logan et al. 2021, arXiv 2106.13353)."""

from typing import ClassVar

import torch

from mezo_cli.config.schema import ObjectiveConfig, TokenizedExample
from mezo_cli.models import MASKED_LM
from mezo_cli.objectives.classification import Classification
from mezo_cli.objectives.collate import collate
from mezo_cli.tasks import ClassificationEncoder, label_word_ids
from mezo_cli.tasks.encoder import tokenize


class NullPromptConfig(ObjectiveConfig):
    """Its settings: a name and a loss."""

    implementation: ClassVar[str] = "mezo_parts.null_prompt:NullPrompt"


class NullPromptEncoder(ClassificationEncoder):
    """The texts of a row, joined, and then the mask: <s> text <mask> </s>."""

    scored_by = "label words at a mask after the text"

    def __init__(self, task, tokenizer):
        super().__init__(task, tokenizer, task.label_words)
        self.label_ids = label_word_ids(task, tokenizer)

    def encode_chunk(self, examples):
        """Tokenize the texts. A text that is too long is cut; the mask never is."""
        t = self.tokenizer
        texts = [" ".join(example.texts) for example in examples]
        for example, ids in zip(examples, tokenize(texts, t), strict=True):
            ids = [t.cls_token_id, *ids[: self.max_length - 3], t.mask_token_id, t.sep_token_id]
            yield TokenizedExample(ids, [0] * len(ids), len(ids) - 2, example.label)


class NullPrompt(Classification):
    """The logits of the label words at the mask, by the model's ordinary forward."""

    model_kind = MASKED_LM
    encoder_class = NullPromptEncoder

    @classmethod
    def plain_outputs(cls, loaded, rows, encoder):
        """Return the logits of the label words at the mask: [rows, labels]."""
        batch = collate(rows, loaded)
        logits = loaded.model(**batch.layout).logits
        return logits[torch.arange(len(rows)), batch.positions][:, list(encoder.label_ids)]

    def logits(self, batch):
        """Return the same. The model's modules are patched, so this forward sees perturbed weights."""
        return self.plain_outputs(self.loaded, batch.rows, self.encoder).float()
