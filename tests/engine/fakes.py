"""Stand-ins for the python of an engine's environment."""

import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("fake_engine.py")


def fake_python(folder: Path, mode: str = "") -> Path:
    """Write a program that, called as `python -m mezo_cli.engine.worker SOCKET PARENT`, runs the fake engine."""
    path = folder / f"python-{mode.replace(' ', '-').replace('=', '-') or 'plain'}"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/sh\nMEZO_EAGER=1 exec "{sys.executable}" "{PROGRAM}" "{mode}" "$3" "$4"\n')
    path.chmod(0o755)
    return path
