"""Process and machine: what is freed goes back to the system, signals, versions."""

import inspect
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mezo_cli.process import memory, versions
from tests.command_line import environment

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
