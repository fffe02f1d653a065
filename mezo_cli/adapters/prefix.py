"""Prefix tuning: trainable keys and values before those of the text, in every layer (Li and Liang 2021, 2101.00190).

As in the paper (section 3), the prefix starts from real activations: the keys and values that the model computes for
some tokens. It takes the first positions and the text those after it, as `peft` loads it again. So in a decoder the
initial prefix is exactly the model that has read those tokens.
"""

from typing import Any

from mezo_cli.adapters.base import LoadedModel, PeftMethod, classifier_modules
from mezo_cli.config.adapters import PrefixConfig
from mezo_cli.errors import UserError


class Prefix(PeftMethod):
    """Prefix tuning, from the keys and values of tokens drawn from the vocabulary."""

    size_setting = "length"
    merges = False
    config: PrefixConfig

    def insert(self, loaded: LoadedModel, name: str) -> Any:
        """Insert the table of keys and values, which the model's forwards then get as `past_key_values`."""
        import peft
        import torch

        from mezo_cli.adapters import prefix_cache

        model, tokenizer, length = loaded.model, loaded.tokenizer, self.config.length
        words = sorted(set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids))
        ids = torch.tensor(words)[torch.randint(len(words), (length,))].to(loaded.device)
        body = prefix_cache.find_cached_forward(model)
        if body is None:
            raise UserError(
                f"{name} is a model family that peft=prefix does not support: it takes no past_key_values; use "
                "peft=lora, or a model like RoBERTa, BERT, OPT, GPT-2 or Llama"
            )
        if length >= tokenizer.model_max_length:
            raise UserError(
                f"peft.length={length}: {name} takes {tokenizer.model_max_length} tokens, so none would be left for "
                "the text"
            )
        with torch.no_grad():
            key_values, shape = prefix_cache.compute_key_values(body, ids)
        settings = peft.PrefixTuningConfig(
            task_type=loaded.model_kind.task_type
            or "FEATURE_EXTRACTION",  # with None, peft's own forward ignores the prefix
            num_virtual_tokens=length,
            num_layers=shape[0],
            num_attention_heads=shape[1],
            token_dim=shape[1] * shape[2],
            num_transformer_submodules=1,
            modules_to_save=classifier_modules(loaded),
        )
        wrapped = peft.get_peft_model(model, settings)
        encoder: Any = wrapped.prompt_encoder["default"]
        encoder.load_prompt_embeddings(key_values)
        prefix_cache.PrefixInput(body, encoder.embedding, shape)
        model.add_module("prefix", encoder.embedding)  # gives its parameter a name in the model
        tokenizer.model_max_length -= length
        return wrapped
