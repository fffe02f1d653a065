"""A step launches at most 1.3 times the operations of two plain forwards; the update of RoBERTa-large at most 30."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.utils.backend_registration
from transformers import RobertaConfig, RobertaForMaskedLM

from mezo_cli.optim import make_config, optimizer_class
from mezo_cli.perturb.noise import make_noise
from mezo_cli.perturb.noise.compiled import Kernel
from mezo_cli.perturb.params import Params
from tests.large import LARGE

ROOT = Path(__file__).resolve().parents[2]
MOST, MOST_OF_UPDATE = 1.3, 30
PLAIN, STEP, UPDATE, HALF = "two plain forwards", "a step", "its update", "its update in half precision"

if not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"):
    pytest.skip("this torch cannot register a device that is written in Python", allow_module_level=True)


def counts(*layers: int) -> dict[tuple[int, int], Any]:
    """Return (layers, rows) -> work -> what is counted."""
    command = [sys.executable, "-m", "tests.launches", *map(str, layers)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "MEZO_EAGER": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {(one["layers"], one["rows"]): one["works"] for one in json.loads(done.stdout)}


def check(works: dict[str, Any]) -> None:
    for what in ("operations", "launches"):
        assert works[STEP][what] <= MOST * works[PLAIN][what], (what, works)
    for update in (UPDATE, HALF):
        assert 0 < works[update]["kernels"] <= works[update]["launches"] <= MOST_OF_UPDATE
    assert works[HALF]["kernels"] == works[UPDATE]["kernels"]
    assert 0 < works[STEP]["kernels"] < works[STEP]["launches"]


@pytest.mark.slow
def test_a_step_of_the_whole_shape() -> None:
    for works in counts(24).values():
        check(works)


@pytest.mark.parametrize("noise", ["gaussian", "rademacher"])
@pytest.mark.parametrize("optimizer", ["mezo", "mezo in half precision", "mezo_momentum", "mezo_adam"])
def test_the_update_of_roberta_large_goes_over_few_spans(optimizer: str, noise: str) -> None:
    """Counted on the device `meta`, where tensors have no memory: only on a CPU are there more spans."""
    with torch.device("meta"):
        model = RobertaForMaskedLM(RobertaConfig(**LARGE))
    if "half precision" in optimizer:
        model.bfloat16()
    params, config = Params(model, make_noise(noise)), make_config(optimizer.split()[0], noise=noise)
    method = optimizer_class(config)(config, 0, 9)
    with mock.patch.object(Kernel, "__call__") as kernel, torch.no_grad():
        method.apply_updates(params, [(0, [1.0], 1e-6)])
    assert 10 <= kernel.call_count <= MOST_OF_UPDATE
