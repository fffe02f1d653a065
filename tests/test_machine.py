"""What a run takes of its machine."""

import platform
import subprocess
import sys

import pytest

from tests.door import environment

# Blocks of 12 MB, small ones that stay between them, twice: the second time malloc takes them from its heap.
CHURN = """
import sys
import torch
from mezo_cli import machine

def resident():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS")) // 1024

before, stay = resident(), []
for _ in range(2):
    blocks = []
    for _ in range(20):
        blocks.append(torch.ones(3_000_000))
        stay.append(torch.ones(30_000))
    del blocks
if sys.argv[1] == "ours":
    machine.give_back_freed_memory()
print(resident() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc")
def test_freed_blocks_are_given_back() -> None:
    kept = {}
    for whose in ("default", "ours"):
        command = [sys.executable, "-c", CHURN, whose]
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, env=environment(THP_MEM_ALLOC_ENABLE="0")
        )
        kept[whose] = int(done.stdout)
    assert kept["ours"] < 60 < kept["default"] - 60
