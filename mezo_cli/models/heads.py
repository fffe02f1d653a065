"""The output layer of a model: a decoder over the vocabulary, which most checkpoints tie to the input embeddings."""

from typing import Any

from torch import nn


def over_vocabulary(model: Any) -> nn.Linear | None:
    """Return the layer that scores the vocabulary, where it is a linear one; the copy that computes of a tuned head."""
    head = model.get_output_embeddings()
    if hasattr(head, "original_module"):  # what `peft` puts around a whole module that is tuned
        head = head.modules_to_save["default"]
    return head if isinstance(head, nn.Linear) else None


def untie(model: Any) -> list[str]:
    """Give a tied decoder a weight, and where it is tied a bias, of its own, and say so in the model's config.

    The input embeddings stay the very tensors they were. Both parts have to be untied: an untied config makes
    transformers look for a bias in the decoder too, and draw one where a checkpoint has stored only the head's.
    It comes before `Params`, which reads the model's names.

    Args:
        model: a transformers model; one that is untied already is left as it is.

    Returns:
        The names of the new parameters, clones that require a gradient.
    """
    tied = [target for target, source in model.all_tied_weights_keys.items() if _shared(model, target, source)]
    for name in tied:
        owner, _, key = name.rpartition(".")
        setattr(model.get_submodule(owner), key, nn.Parameter(model.get_parameter(name).detach().clone()))
    model.all_tied_weights_keys = {}
    model.config.tie_word_embeddings = False
    return tied


def _shared(model: Any, one: str, other: str) -> bool:
    return model.get_parameter(one) is model.get_parameter(other)
