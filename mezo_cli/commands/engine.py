"""`mezo engine install`: make the environment of the inference engine."""

import sys

from mezo_cli.console import print_line
from mezo_cli.engine import environment
from mezo_cli.errors import UserError


def engine(action: str) -> None:
    """Do what `action` says, and print the folder of the environment."""
    if action != "install":
        raise UserError(f"mezo engine {action}: allowed is mezo engine install")
    folder = environment.install(lambda now: print_line(f"engine vllm: {now}", sys.stderr))
    print_line(f"engine vllm is installed in {folder}")
