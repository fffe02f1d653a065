"""Launches of a step of RoBERTa-large: a kernel per layer for both signs, and at most 30 of the update."""

from unittest import mock

import pytest
import torch
from transformers import RobertaConfig, RobertaForMaskedLM

from mezo_cli.optim import OPTIMIZERS, make_config
from mezo_cli.perturb.forward import PerturbedForward
from mezo_cli.perturb.noise import Direction, make_noise
from mezo_cli.perturb.noise.compiled import Kernel
from mezo_cli.perturb.params import Params

LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
LARGE |= {"vocab_size": 50265, "max_position_embeddings": 514}


def test_a_layer_is_perturbed_by_one_launch_for_both_signs() -> None:
    with torch.device("meta"):
        model = RobertaForMaskedLM(RobertaConfig(**LARGE)).eval()
        states = torch.empty(2, 32, 1024)
    forward = PerturbedForward(model, Params(model, make_noise("gaussian")))
    counted = mock.patch.object(Kernel, "__call__")
    with counted as kernel, forward.perturbed(Direction(1, 0), 1e-3), forward.paired_forward():
        model.roberta.encoder(states)
    assert kernel.call_count == LARGE["num_hidden_layers"]


@pytest.mark.parametrize("noise", ["gaussian", "rademacher"])
@pytest.mark.parametrize("optimizer", ["mezo", "mezo in half precision", "mezo_momentum", "mezo_adam"])
def test_the_update_of_roberta_large_goes_over_few_spans(optimizer: str, noise: str) -> None:
    """Counted on the device `meta`, where tensors have no memory: only on a CPU are there more spans."""
    with torch.device("meta"):
        model = RobertaForMaskedLM(RobertaConfig(**LARGE))
    if "half precision" in optimizer:
        model.bfloat16()
    params, config = Params(model, make_noise(noise)), make_config(optimizer.split()[0], noise=noise)
    method = OPTIMIZERS.implementation(config.name)(config, 0, 9)
    with mock.patch.object(Kernel, "__call__") as kernel, torch.no_grad():
        method.apply_updates(params, [(0, [1.0], 1e-6)])
    assert 10 <= kernel.call_count <= 30
