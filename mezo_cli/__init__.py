"""MeZO fine-tuning with forward passes only: `mezo` on the command line, `finetune` and `load` from Python."""

TYPE_CHECKING = False  # mypy knows the name; the import of typing would delay the handling of Ctrl-C
if TYPE_CHECKING:
    from mezo_cli.api import Finetuned, LoadedRun, finetune, load

__all__ = ["Finetuned", "LoadedRun", "finetune", "load"]


def __getattr__(name: str) -> object:
    """Import the API only when asked for: `mezo --help` has to answer at once."""
    if name in __all__:
        from mezo_cli import api

        return getattr(api, name)
    raise AttributeError(f"module 'mezo_cli' has no attribute '{name}'")
