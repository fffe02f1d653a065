"""MeZO fine-tuning with forward passes only: `mezo` on the command line; from Python `finetune`, `load`, and the
step for a loop of one's own, `MezoOptimizer`, and in the Trainer of transformers, `MezoTrainer`."""

TYPE_CHECKING = False  # mypy knows the name; the import of typing would delay the handling of Ctrl-C
if TYPE_CHECKING:
    from mezo_cli.api import Finetuned, LoadedRun, finetune, load
    from mezo_cli.library.optimizer import MezoOptimizer
    from mezo_cli.library.trainer import MezoTrainer
    from mezo_cli.library.trajectory import replay

__all__ = ["Finetuned", "LoadedRun", "MezoOptimizer", "MezoTrainer", "finetune", "load", "replay"]


_MODULES = {"MezoOptimizer": "library.optimizer", "MezoTrainer": "library.trainer", "replay": "library.trajectory"}


def __getattr__(name: str) -> object:
    """Import what is asked for only then: `mezo --help` has to answer at once."""
    if name in __all__:
        from importlib import import_module

        from mezo_cli.process.environment import set_library_defaults

        set_library_defaults()
        return getattr(import_module(f"mezo_cli.{_MODULES.get(name, 'api')}"), name)
    raise AttributeError(f"module 'mezo_cli' has no attribute '{name}'")
