"""The memory that flat storage leaves behind."""

import mmap
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from mezo_cli.perturb.noise import make_noise
from mezo_cli.perturb.params import Params


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.usefixtures("released_pages")
def test_the_pages_of_a_mapped_checkpoint_are_released(tmp_path: Path) -> None:
    """One tensor that stays mapped would keep the memory of the whole file."""
    path, half = tmp_path / "weights.bin", 1 << 20
    path.write_bytes(bytes(8 * half))
    mapped = torch.from_file(str(path), shared=False, size=2 * half, dtype=torch.float32)
    mapped += torch.arange(2 * half)  # written pages belong to the process
    module = nn.ParameterDict({"a": nn.Parameter(mapped[:half]), "b": nn.Parameter(mapped[half:])})

    def resident() -> int:
        smaps = Path("/proc/self/smaps").read_text(encoding="utf-8").partition(str(path))[2]
        return 1024 * int(next(line for line in smaps.splitlines() if line.startswith("Rss:")).split()[1])

    assert resident() == 8 * half
    Params(module, make_noise("gaussian"))
    assert torch.equal(torch.cat(list(module.values())), torch.arange(2.0 * half))
    assert resident() <= 3 * mmap.PAGESIZE
    assert path.read_bytes() == bytes(8 * half)
