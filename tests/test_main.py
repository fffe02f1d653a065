"""The process from its first line to its last: signals at any moment, a lost terminal, a deleted working directory."""

import os
import pty
import signal
import sys
import time
from pathlib import Path

import pytest

from mezo_cli.errors import UserError
from mezo_cli.runs import Run
from tests.command_line import HANGS, environment, mezo, process, small

# Python runs a `sitecustomize` that it finds before anything else.
INTERRUPT = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["INTERRUPT_AT"]:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
"""
EARLY = [("mezo_cli.cli", "--help"), ("typer.main", "--help"), ("torch._C", "env")]
LATER = [(name, "train") for name in ("hydra", "numpy", "torch", "torch.nn", "transformers")]


@pytest.mark.parametrize(
    ("module", "command"), [*EARLY, *(pytest.param(*one, marks=pytest.mark.slow) for one in LATER)]
)
def test_ctrl_c_while_a_module_is_imported_is_one_line(module: str, command: str, tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(INTERRUPT)
    path = os.pathsep.join([str(tmp_path / "site"), environment()["PYTHONPATH"]])
    words = ["train", "experiment=demo", "steps=0", "hydra.run.dir=run"] if command == "train" else [command]
    result = process(*words, cwd=tmp_path, PYTHONPATH=path, INTERRUPT_AT=module)
    assert (result.code, result.err) == (130, "error: interrupted\n")
    if (tmp_path / "run").exists():
        assert Run(tmp_path / "run").info()["status"] == "interrupted"


def test_ctrl_c_in_a_callback_of_the_import_system_is_not_lost(tmp_path: Path) -> None:
    """Python prints what is raised there, and goes on."""
    (tmp_path / "sitecustomize.py").write_text(
        INTERRUPT.replace("os.kill(os.getpid(), signal.SIGINT)", "self.later = Later(); del self.later")
        + "class Later:\n    def __del__(self): os.kill(os.getpid(), signal.SIGINT); sum(range(1000))\n"
    )
    path = os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])
    result = process("--help", cwd=tmp_path, PYTHONPATH=path, INTERRUPT_AT="typer.main")
    assert (result.code, result.out, result.err) == (130, "", "error: interrupted\n")


def test_ctrl_c_that_a_library_turns_into_another_error_is_one_line() -> None:
    """OmegaConf's clean-up fails when it is interrupted."""

    def run(**_: object) -> None:
        try:
            raise KeyboardInterrupt
        finally:
            try:
                raise AttributeError("_invalidate_flags_cache")
            except AttributeError as error:
                raise UserError(str(error)) from error

    result = mezo(run=run)
    assert (result.code, result.err) == (130, "error: interrupted\n")


@pytest.mark.slow
def test_a_run_whose_terminal_is_gone_can_be_resumed(roberta: Path, movies: Path, tmp_path: Path) -> None:
    """What a lost ssh session does: SIGHUP, and every write to the terminal fails."""
    run = tmp_path / "run"
    words = ["train", *small(roberta, movies, run, "steps=100000", "optimizer.lr=1e-6")]
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup a child would ignore it
        os.chdir(tmp_path)
        os.execve(sys.executable, [sys.executable, "-m", "mezo_cli", *words], environment(TERM="xterm"))
    wait_for_step(run)
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 130
    assert Run(run).info()["status"] == "interrupted"
    assert "interrupted; resume with: mezo resume" in (run / "train.log").read_text()
    assert "Traceback" not in (run / "train.log").read_text()


def wait_for_step(run: Path) -> None:
    deadline = time.monotonic() + HANGS
    while not (run / "metrics.jsonl").exists() or '"train"' not in (run / "metrics.jsonl").read_text():
        assert time.monotonic() < deadline, "the run did not start"
        time.sleep(0.05)
