"""Report what the device raises (out of memory, a CUDA error) as one line that names the settings to lower."""

from collections.abc import Iterator
from contextlib import contextmanager

from mezo_cli.adapters.base import find_method
from mezo_cli.config.schema import Config
from mezo_cli.errors import RunFailed, UserError
from mezo_cli.system import describe_device_error, is_device_error, is_out_of_memory


@contextmanager
def explain_device_errors(what: str, advice: str, raises: type[UserError | RunFailed] = UserError) -> Iterator[None]:
    """Turn an error of the device inside the block into one line; any other error stays as it is.

    Args:
        what: was done: "loading model.path=demo". Left out of the line when empty.
        advice: what to do when memory ran out, after "try".
        raises: `UserError` before training begins, `RunFailed` after.
    """
    try:
        yield
    except Exception as error:
        if not is_device_error(error):
            raise
        text = (f"{what}: " if what else "") + describe_device_error(error)
        raise raises(f"{text}; try {advice}" if is_out_of_memory(error) else text) from error


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
