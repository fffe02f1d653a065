"""Find a model's output layer over the vocabulary, and untie it from the input embeddings."""

from typing import Any

from torch import nn


def vocabulary_head(model: Any) -> nn.Linear | None:
    """Return the linear layer that scores the vocabulary, or None.

    When `peft` trains a copy of the layer (`modules_to_save`), that copy is returned: it is the one that computes.
    """
    head = model.get_output_embeddings()
    if hasattr(head, "original_module"):
        head = head.modules_to_save["default"]
    return head if isinstance(head, nn.Linear) else None


def untie(model: Any) -> list[str]:
    """Give the output layer its own copy of the tied weight, and of a tied bias, and say so in the model's config.

    The input embeddings stay the same tensors. The bias is untied too: with an untied config transformers looks for a
    bias in the output layer, and initializes a new one where a checkpoint has stored only the head's.
    Call it before `Params` is made, which reads the parameters' names.

    Args:
        model: a transformers model; one that is not tied is left as it is.

    Returns:
        The names of the new parameters, clones that require a gradient.
    """
    tied = [target for target, source in model.all_tied_weights_keys.items() if _is_shared(model, target, source)]
    for name in tied:
        owner, _, key = name.rpartition(".")
        setattr(model.get_submodule(owner), key, nn.Parameter(model.get_parameter(name).detach().clone()))
    model.all_tied_weights_keys = {}
    model.config.tie_word_embeddings = False
    return tied


def _is_shared(model: Any, one: str, other: str) -> bool:
    return model.get_parameter(one) is model.get_parameter(other)
