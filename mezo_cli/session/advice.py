"""What to lower when memory runs out."""

from mezo_cli.adapters.base import find_method
from mezo_cli.config.schema import Config


def smaller_model(config: Config) -> str:
    """Return the advice for a model that does not fit."""
    setting = find_method(config.peft).size_setting
    size = f"a lower peft.{setting} (now {getattr(config.peft, setting)}), " if setting else ""
    return f"{size}a smaller model or a device with more memory (model.device)"


def smaller_batches(config: Config) -> str:
    """Return the advice for batches that do not fit."""
    advice = f"a lower batch_size (now {config.batch_size}) or eval_batch_size (now {config.eval_batch_size})"
    if config.optimizer.needs_backward and not config.model.checkpoint_activations:
        advice += ", model.checkpoint_activations=true"
    now = "null" if config.micro_batch_size is None else config.micro_batch_size
    return f"{advice}, or a lower micro_batch_size (now {now}), which leaves the loss as it is"
