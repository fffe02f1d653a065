"""Models: a checkpoint's model and tokenizer, what of it is tuned, what a start holds beside its base."""

from mezo_cli.models.heads import untie
from mezo_cli.models.loading import Loaded, at, load, load_tokenizer, pick_device, save
from mezo_cli.models.starts import check_fingerprint, fingerprint, keep, restore

__all__ = [
    "Loaded",
    "at",
    "check_fingerprint",
    "fingerprint",
    "keep",
    "load",
    "load_tokenizer",
    "pick_device",
    "restore",
    "save",
    "untie",
]
