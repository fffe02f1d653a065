"""One module per command; each is imported when it is used, so that `mezo --help` answers at once."""

from types import ModuleType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from mezo_cli.commands import compare as compare
    from mezo_cli.commands import data as data
    from mezo_cli.commands import doctor as doctor
    from mezo_cli.commands import env as env
    from mezo_cli.commands import evaluate as evaluate
    from mezo_cli.commands import export as export
    from mezo_cli.commands import predict as predict
    from mezo_cli.commands import prune as prune
    from mezo_cli.commands import report as report
    from mezo_cli.commands import resume as resume
    from mezo_cli.commands import runs as runs
    from mezo_cli.commands import show as show
    from mezo_cli.commands import sweep as sweep
    from mezo_cli.commands import train as train
    from mezo_cli.commands import tune as tune
    from mezo_cli.commands import verify as verify


def __getattr__(name: str) -> ModuleType:
    from importlib import import_module

    return import_module(f"mezo_cli.commands.{name}")
