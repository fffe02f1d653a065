"""The process from its first line to its last: signals at any moment, a lost terminal, memory, versions."""

import inspect
import os
import platform
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from mezo_cli.errors import UserError
from mezo_cli.process import memory, versions
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


# Free a small block between two that stay, often: glibc keeps such blocks, and malloc_trim(0) returns their pages.
FRAGMENTS = """
import ctypes
from mezo_cli.process.memory import trim_malloc

def resident():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS"))

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
blocks = [libc.malloc(100_000) for _ in range(2000)]  # 200 MB, below the size that malloc maps by itself
for block in blocks:
    ctypes.memset(block, 1, 100_000)
for block in blocks[:-1]:  # the last one keeps the heap from shrinking
    libc.free(block)
freed = resident()
trim_malloc()
print(freed - resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc")
def test_freed_memory_goes_back_to_the_system() -> None:
    """Half of the 200 MB at least, whatever else the process does meanwhile: without the call it is none of them."""
    env = environment(MALLOC_TRIM_THRESHOLD_=str(1 << 30), MALLOC_MMAP_THRESHOLD_=str(1 << 20), MALLOC_ARENA_MAX="1")
    command = [sys.executable, "-c", FRAGMENTS]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    assert int(done.stdout) > 100_000  # KB


PEAK = """
import torch
from mezo_cli.process.memory import peak_memory, reset_peak_memory

cpu = torch.device("cpu")
block = bytearray(b"1" * 200_000_000)
del block
before = peak_memory(cpu)
reset_peak_memory()
print(before - peak_memory(cpu))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/clear_refs")
def test_the_peak_memory_of_a_job_is_its_own() -> None:
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True, env=environment())
    assert int(done.stdout) > 150_000_000


def test_a_checkout_with_changed_files_is_dirty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "mezo_cli"
    package.mkdir()
    (package / "code.py").write_text("1\n")
    monkeypatch.setattr(versions, "PACKAGE", package)
    git_state = inspect.unwrap(versions.git_state)  # the session asks once
    assert git_state() == (None, None)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *words], check=True)
    (tmp_path / "untracked").touch()
    assert git_state() == (subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip(), False)
    (package / "code.py").write_text("2\n")
    assert git_state()[1] is True


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, 8000),
        ({"a/b/memory.max": "max", "a/memory.max": "5000", "a/memory.current": "2000"}, 3000),
        ({"a/b/memory.max": "9000", "a/b/memory.current": "8500", "a/b/memory.stat": "anon 1\ninactive_file 200"}, 700),
        ({"memory/memory.limit_in_bytes": "100", "memory/memory.usage_in_bytes": "150"}, 0),
    ],
)
def test_free_memory_is_the_least_of_the_machine_and_the_cgroups(
    files: dict[str, str], free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proc = {"proc/self/cgroup": "4:memory:/x\n0::/a/b\n"}
    stats = {f"{name.rpartition('/')[0]}/memory.stat": "" for name in files}
    for name, text in {**proc, **{f"cgroup/{name}": text for name, text in {**stats, **files}.items()}}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(memory, "PROC", tmp_path / "proc")
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=8000))
    monkeypatch.setattr(memory, "CGROUPS", tmp_path / "cgroup")
    assert memory.free_memory() == free
    monkeypatch.setattr(memory, "PROC", tmp_path)
    assert memory.free_memory() == 8000
