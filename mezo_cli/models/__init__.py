"""Load and save models and tokenizers, add adapters, and save the initial weights that no checkpoint contains."""

from mezo_cli.models.loading import (
    CAUSAL_LM,
    MASKED_LM,
    SEQUENCE_CLASSIFIER,
    LoadedModel,
    ModelKind,
    load,
    load_tokenizer,
    pick_device,
    resolved,
    save,
    untie,
)
from mezo_cli.models.stored_tensors import check_fingerprint, fingerprint, load_initial_state, save_initial_state
