"""What a decoder says of texts, by plain transformers: one text at a time, no padding, no template."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer


class PlainDecoder:
    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()

    def log_probs(self, prompt: str, text: str) -> Tensor:
        """Return the log-probability of each token of a text after a prompt."""
        ids = torch.tensor(self.tokenizer(prompt + text)["input_ids"])
        first = len(self.tokenizer(prompt)["input_ids"])
        assert first < len(ids)
        return (
            self.model(input_ids=ids[None]).logits[0, first - 1 : -1].log_softmax(-1).gather(1, ids[first:, None])[:, 0]
        )
