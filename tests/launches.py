"""Count the operations that a step dispatches, against two plain forwards: `python -m tests.launches LAYERS ...`.

Nothing is computed: the tensors live on the fake device, and a model of RoBERTa-large's shape takes no memory. Printed
is a JSON list. `launches` are the operations that are not views: on a GPU each starts a kernel.
"""

import itertools
import json
import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import RobertaConfig, RobertaForMaskedLM

from mezo_cli.config.schema import Config, ObjectiveConfig, TokenizedExample
from mezo_cli.models import MASKED_LM, LoadedModel
from mezo_cli.objectives.encoders import Mlm
from mezo_cli.optim import make_config
from mezo_cli.optim.mezo import Mezo
from mezo_cli.perturb.forward import PerturbedForward
from mezo_cli.perturb.noise import make_noise
from mezo_cli.perturb.params import Params
from tests.fake_accelerator import DEVICE, fake_device, made_up, to_fake
from tests.host_waits import HostWaits
from tests.large import LARGE, ROWS

PAIRED_TOKENS = 1024


def count(work: Callable[[], Any]) -> dict[str, int]:
    """Count what `work` dispatches; a noise kernel is one operation."""
    with HostWaits(made_up) as host:
        work()
    return {"operations": host.operations, "launches": host.launches, "kernels": host.names["mezo::noise"]}


def model_of(layers: int, dtype: torch.dtype) -> Any:
    model = RobertaForMaskedLM(RobertaConfig(**LARGE | {"num_hidden_layers": layers}))
    to_fake(model.to(dtype).eval())
    return model


def measure(rows: int, layers: int) -> dict[str, dict[str, int]]:
    """Return the counts of two plain forwards, a step, its update alone, and the same of weights in half precision."""
    model, small = model_of(layers, torch.float32), model_of(layers, torch.bfloat16)
    forward = PerturbedForward(model, Params(model, make_noise("gaussian")))
    forward.paired_tokens = PAIRED_TOKENS
    loaded = LoadedModel(model, SimpleNamespace(model_input_names=[]), MASKED_LM, torch.device(DEVICE), torch.float32)
    config, encoder = Config(objective=ObjectiveConfig(name="mlm")), SimpleNamespace(label_ids=[6587, 372])
    objective = Mlm(config, loaded, forward, cast("Any", encoder))
    examples = [TokenizedExample([7] * 32, [0] * 32, 29, number % 2) for number in range(rows)]
    batch = objective.collate(examples)
    optimizer, in_half = Mezo(make_config("mezo"), seed=0, steps=9), Params(small, make_noise("gaussian"))

    def loss() -> Tensor:
        if objective.fits_paired_forward(batch):
            scores = objective.logits(batch)
        else:
            scores = forward.forward_per_sign(lambda: objective.logits(batch))
        return torch.stack([F.cross_entropy(of_sign, batch.labels) for of_sign in scores])

    works = {
        "two plain forwards": lambda: [objective.logits(batch) for _ in range(2)],
        "a step": lambda: optimizer.step(forward, loss, 1),
        "its update": lambda: optimizer.apply_updates(forward.params, [(2, [1.0], 1e-6)]),
        "its update in half precision": lambda: optimizer.apply_updates(in_half, [(2, [1.0], 1e-6)]),
    }
    count(partial(optimizer.step, forward, loss, 0))  # makes the keys of the tensors, once per run
    optimizer.apply_updates(in_half, [(1, [1.0], 1e-6)])
    return {name: count(work) for name, work in works.items()}


if __name__ == "__main__":
    found = []
    for layers, rows in itertools.product(map(int, sys.argv[1:]), ROWS):
        with fake_device(), torch.no_grad():
            found.append({"layers": layers, "rows": rows, "works": measure(rows, layers)})
    print(json.dumps(found))
