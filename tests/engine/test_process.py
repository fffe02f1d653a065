"""The process of an engine and the protocol: starts, errors in one line, and its end with the parent."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mezo_cli.engine import protocol
from mezo_cli.engine.placement import cpu_groups
from mezo_cli.engine.process import EngineFailed, EngineProcess
from tests.command_line import environment
from tests.engine.fakes import fake_python


def failure(python: Path, method: str = "", **params: Any) -> str:
    """The one line with which a start, or a call, fails."""
    with pytest.raises(EngineFailed) as error, EngineProcess(python) as engine:
        engine.call(method, **params)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_an_engine_raises_arrives_as_one_line(tmp_path: Path) -> None:
    assert failure(fake_python(tmp_path, "fails"), "start") == "RuntimeError: no memory for the weights"
    assert "has no attribute 'nosuch'" in failure(fake_python(tmp_path), "nosuch")


def test_an_engine_that_ends_says_with_which_status_and_last_line(tmp_path: Path) -> None:
    assert failure(fake_python(tmp_path, "ends")) == "its process ended with status 1: no module named vllm"


def test_what_is_not_a_program_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "python"
    path.write_text("#!/nowhere/at/all\n")
    path.chmod(0o755)
    assert failure(path) == f"{path} cannot be run: No such file or directory"


def test_close_ends_the_process(tmp_path: Path) -> None:
    with EngineProcess(fake_python(tmp_path)) as engine:
        os.kill(engine.pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(engine.pid, 0)


PARENT = """
import sys, time
from pathlib import Path
from mezo_cli.engine.process import EngineProcess
print(EngineProcess(Path(sys.argv[1])).pid, flush=True)
time.sleep(60)
"""


def test_an_engine_dies_with_its_parent(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(fake_python(tmp_path))]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        engine = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
    for _ in range(200):
        state = Path(f"/proc/{engine}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    pytest.fail("the engine outlives its parent")


def test_messages_keep_their_bits_and_a_broken_line_is_the_end() -> None:
    here, there = socket.socketpair()
    with here, there, here.makefile("rwb") as one, there.makefile("rwb") as other:
        values = [0.1, 1e-300, -0.0, 3.4028234663852886e38, float("inf")]
        protocol.send(one, {"result": values})
        assert protocol.receive(other) == {"result": values}
        one.write(b"[1]\n")
        one.flush()
        with pytest.raises(ValueError, match="JSON object"):
            protocol.receive(other)
        one.write(b'{"result"')
        one.flush()
        here.shutdown(socket.SHUT_WR)
        assert protocol.receive(other) is None


def test_processes_get_cpus_of_their_own() -> None:
    assert cpu_groups([0, 1, 2, 3], 2) == ["0,1", "2,3"]
    assert cpu_groups([4, 7], 2) == ["4", "7"]
    assert cpu_groups([5], 2) == ["5", "5"]
