"""What this process has around it: variables, standard streams, what libraries log; torch's precision, GPUs."""

import contextlib
import io
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from typing import IO, Any

from mezo_cli.errors import without_credentials

LIBRARY_DEFAULTS = {
    # Threads that wait by spinning take the cores from each other when a machine is shared.
    "OMP_WAIT_POLICY": "PASSIVE",
    # Large blocks in huge pages: activations are allocated and freed at every layer (docs/measurements/step.md).
    "THP_MEM_ALLOC_ENABLE": "1",
}
IN_SWEEP = "MEZO_IN_SWEEP"  # set for the processes of jobs: the process of the sweep says how to go on


def set_library_defaults() -> None:
    """Set what torch's native libraries read from the environment when it is imported; what the user has set stays."""
    if "torch" not in sys.modules:
        for name, value in LIBRARY_DEFAULTS.items():
            os.environ.setdefault(name, value)


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside the block, for this process and those that it starts."""
    before = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)
        os.environ.update(before)


@contextlib.contextmanager
def keeping_matmul_precision(inside: str | None = None) -> Iterator[None]:
    """Let torch's precision of float32 matrix products be `inside` (None: as it is) in the block, then as before."""
    torch = sys.modules.get("torch")
    before = "highest" if torch is None else torch.get_float32_matmul_precision()  # it may be imported inside
    if torch is not None and inside is not None:
        torch.set_float32_matmul_precision(inside)
    try:
        yield
    finally:
        torch = sys.modules.get("torch")
        if torch is not None:
            torch.set_float32_matmul_precision(before)


def visible_gpus() -> list[str]:
    """Return the GPUs that this process may use: those of CUDA_VISIBLE_DEVICES, or else all that torch finds."""
    setting = os.environ.get("CUDA_VISIBLE_DEVICES")
    if setting is None:
        import torch

        return [str(index) for index in range(torch.cuda.device_count())]
    names = [name.strip() for name in setting.split(",")]
    invalid = [not name or name.startswith("-") for name in names]
    return names[: invalid.index(True)] if True in invalid else names  # CUDA ignores what follows one that is not valid


def prepare_standard_streams() -> None:
    """Open the standard streams that the process was started without, and let every character be printed.

    Else the next file to be opened would get the descriptor of a closed stream, and what C libraries print. A
    character that the encoding of the output lacks (the locale C) becomes an escape: `\\xe9`.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # each opens the lowest free descriptor
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115 (it stays open)
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def discard_output(stream: IO[str]) -> None:
    """Discard what is written to a stream from now on, and what it has buffered: its reader or its terminal is gone."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


@contextlib.contextmanager
def logs_without_credentials() -> Iterator[None]:
    """Cut credentials from every log record made inside the block: libraries log the addresses that they ask."""
    before = logging.getLogRecordFactory()

    def make(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = before(*args, **kwargs)
        with contextlib.suppress(Exception):  # a record that cannot be formatted is its handler's to report
            record.msg, record.args = without_credentials(record.getMessage()), ()
        return record

    logging.setLogRecordFactory(make)
    try:
        yield
    finally:
        logging.setLogRecordFactory(before)
