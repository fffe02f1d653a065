"""What bench_step.py times: a step of this project, the published step and plain forwards, on random models.

`reference` is the published step, written from its description: torch.normal for each tensor from a reseeded global
generator, out of place, four passes over the weights, the original forward with the vocabulary head at the mask.
`floor` is two plain forwards: body and head at the mask, in inference mode. In bfloat16 it runs under autocast from
float32 weights, as MeZO stores them; `floor bf16 weights` runs from bfloat16 weights. With `lora` the model has
adapters in its queries and values. `replay` is one step of `mezo replay`, timed in calls of sixteen steps.
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import RobertaConfig, RobertaForMaskedLM

from mezo_cli.adapters.adapter import attach
from mezo_cli.adapters.settings import LoraConfig
from mezo_cli.config.schema import Config, ModelConfig, ObjectiveConfig, TokenizedExample
from mezo_cli.models import MASKED_LM, LoadedModel
from mezo_cli.objectives.collate import Batch, collate
from mezo_cli.objectives.encoders import Mlm
from mezo_cli.optim import make_config
from mezo_cli.optim.mezo import Mezo
from mezo_cli.perturb.forward import PerturbedForward
from mezo_cli.perturb.noise import make_noise
from mezo_cli.perturb.params import Params
from mezo_cli.process.memory import trim_malloc

SHAPES: dict[str, dict[str, Any]] = {
    "thin": {"hidden_size": 16, "num_hidden_layers": 24, "num_attention_heads": 2, "intermediate_size": 32},
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128},
    "base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
    "large": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
}
LABELS = [6587, 372]  # " terrible", " great"
MASK_ID = 50264
TOKENIZER = SimpleNamespace(model_input_names=[], pad_token_id=1)  # what a batch is padded by
REPLAYED_STEPS = 16
NOISES = ("gaussian", "rademacher")
COMPUTE = {"fp32": torch.float32, "bf16": torch.bfloat16}


def model_of(shape: str) -> Any:
    """Return a random RoBERTa of that shape, in eval mode."""
    torch.manual_seed(0)
    config = RobertaConfig(vocab_size=50265, max_position_embeddings=514, type_vocab_size=1, **SHAPES[shape])
    return RobertaForMaskedLM(config).eval()


def rows_of(spec: str) -> list[TokenizedExample]:
    """Return random rows: `16x32` is 16 rows of 32 tokens; `16xsst2` and `16xrte` have lengths like those tasks'."""
    count, kind = spec.split("x")
    rng = np.random.RandomState(0)
    if kind.isdecimal():
        lengths = np.full(int(count), int(kind))
    else:  # median and spread of SST-2's dev rows and of RTE's train rows with their templates, in tokens
        median, spread, most = {"sst2": (29, 0.40, 70), "rte": (70, 0.60, 256)}[kind]
        lengths = np.clip(rng.lognormal(np.log(median), spread, int(count)), 8, most).astype(int)
    rows = []
    for i, length in enumerate(lengths):
        ids = rng.randint(10, 50000, length)
        ids[-3] = MASK_ID
        rows.append(TokenizedExample(ids.tolist(), [0] * int(length), int(length) - 3, i % 2))
    return rows


def padded(spec: str, device: torch.device) -> Batch:
    """Return the rows of `rows_of`, padded."""
    return collate(rows_of(spec), LoadedModel(None, TOKENIZER, MASKED_LM, device, torch.float32))


class Reference:
    """The step of the paper's code, written from its description."""

    def __init__(self, model: Any, batch: Batch) -> None:
        self.model, self.batch, self.eps, self.lr, self.seed = model, batch, 1e-3, 0.0, 0

    def perturb(self, scale: float) -> None:
        """Add scale * eps * z to every tensor; z is drawn again."""
        torch.manual_seed(self.seed)
        for _, p in self.model.named_parameters():
            z = torch.normal(mean=0, std=1, size=p.data.size(), device=p.data.device, dtype=p.data.dtype)
            p.data = p.data + scale * z * self.eps

    def loss(self) -> float:
        """Run the body, then the head over the vocabulary at the mask."""
        hidden = self.model.roberta(**self.batch.layout).last_hidden_state
        at_mask = hidden[torch.arange(len(hidden), device=hidden.device), self.batch.positions]
        return float(F.cross_entropy(self.model.lm_head(at_mask)[:, LABELS], self.batch.labels))

    @torch.no_grad()
    def step(self) -> None:
        """Do one step."""
        self.seed += 1
        self.perturb(1)
        plus = self.loss()
        self.perturb(-2)
        minus = self.loss()
        g = (plus - minus) / (2 * self.eps)
        self.perturb(1)
        torch.manual_seed(self.seed)
        for _, p in self.model.named_parameters():
            z = torch.normal(mean=0, std=1, size=p.data.size(), device=p.data.device, dtype=p.data.dtype)
            p.data = p.data - self.lr * (g * z)


def with_lora(model: Any) -> Any:
    """Add the paper's LoRA (r 8, alpha 16, queries and values) to a model."""
    loaded = LoadedModel(model, None, MASKED_LM, model.device, torch.float32)
    settings = LoraConfig(name="lora", r=8, alpha=16, targets="query_value")
    attach(loaded, settings, ModelConfig(name="bench", path="demo"), seed=0)
    return loaded.model


class Ours:
    """This project's step, with its own model."""

    def __init__(self, model: Any, batch: Batch, noise: str, dtype: torch.dtype) -> None:
        self.count = 0
        self.forward = PerturbedForward(model, Params(model, make_noise(noise)))
        self.forward.compute_dtype = dtype
        loaded = LoadedModel(model, TOKENIZER, MASKED_LM, model.device, dtype)
        config, encoder = Config(objective=ObjectiveConfig(name="mlm")), SimpleNamespace(label_ids=LABELS)
        self.objective = Mlm(config, loaded, self.forward, cast("Any", encoder))
        self.batch, one_row = map(self.objective.collate, (batch.rows, batch.rows[:1]))
        self.forward.select_reachable(lambda: self.objective.logits(one_row))
        self.optimizer = Mezo(make_config("mezo", lr=1e-9, noise=noise), seed=0, steps=1)

    def loss(self) -> Tensor:
        """Return the losses of both signs, [2]."""
        if self.objective.fits_paired_forward(self.batch):
            logits = self.objective.logits(self.batch)
        else:
            logits = self.forward.forward_per_sign(lambda: self.objective.logits(self.batch))
        return torch.stack([F.cross_entropy(scores, self.batch.labels) for scores in logits])

    @torch.no_grad()
    def step(self) -> None:
        """Do one step, as `mezo train` does."""
        self.optimizer.step(self.forward, self.loss, self.count)
        trim_malloc()
        self.count += 1

    @torch.no_grad()
    def replay(self, steps: int) -> None:
        """Do the updates of that many steps, as `mezo replay` does."""
        self.optimizer.apply_updates(self.forward.params, [(step, [1.0], 1e-9) for step in range(steps)])


@torch.inference_mode()
def plain_forwards(model: Any, batch: Batch, dtype: torch.dtype, forwards: int = 2) -> None:
    """Run plain forwards: the body, and the head at the mask for the label words."""
    kind = batch.labels.device.type
    for _ in range(forwards):
        with torch.autocast(kind, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            hidden = model.roberta(**batch.layout).last_hidden_state
            at_mask = hidden[torch.arange(len(hidden), device=hidden.device), batch.positions]
            head = model.lm_head
            x = head.layer_norm(F.gelu(head.dense(at_mask)))
            F.linear(x, head.decoder.weight[LABELS], head.decoder.bias[LABELS])


Work = Callable[[], None]
STEPS = [f"ours {dtype} {noise}" for dtype in COMPUTE for noise in (*NOISES, "gaussian lora")]
FLOORS = [f"floor {dtype}{lora}" for dtype in COMPUTE for lora in ("", " lora")]
NAMES = ["reference", *FLOORS, "floor bf16 weights", *STEPS, *(f"replay {noise}" for noise in NOISES)]


def make_works(shape: str, batch: Batch, names: list[str]) -> dict[str, Work]:
    """Return name -> what is timed, for some of `NAMES`. Works share a model where none of them changes it.

    Args:
        shape: of `SHAPES`.
        batch: the batch, on the device of the models.
        names: of the works.
    """
    device = batch.labels.device
    made: dict[str, Any] = {}

    def shared(key: str, make: Callable[[], Any]) -> Any:
        if key not in made:
            made[key] = make()
        return made[key]

    def plain(lora: bool) -> Any:
        return shared(f"plain {lora}", lambda: new_model(shape, device, lora))

    def ours(dtype: str, noise: str, lora: bool) -> Ours:
        return shared(
            f"{dtype} {noise} {lora}", lambda: Ours(new_model(shape, device, lora), batch, noise, COMPUTE[dtype])
        )

    def work(name: str) -> Work:
        kind, *words = name.split()
        lora = words[-1:] == ["lora"]
        if kind == "reference":
            return Reference(new_model(shape, device), batch).step
        if kind == "replay":
            return partial(ours("fp32", words[0], False).replay, REPLAYED_STEPS)
        if kind == "ours":
            return ours(words[0], words[1], lora).step
        if words[-1] == "weights":
            return partial(plain_forwards, new_model(shape, device).to(torch.bfloat16), batch, torch.float32)
        return partial(plain_forwards, plain(lora), batch, COMPUTE[words[0]])

    return {name: work(name) for name in names}


def new_model(shape: str, device: torch.device, lora: bool = False) -> Any:
    """Return a random model on a device, with a LoRA if asked for."""
    model = model_of(shape).to(device)
    return with_lora(model) if lora else model


def floor_of(name: str) -> str:
    """Return the name of the plain forwards that a work is compared with: of the same compute dtype and adapter."""
    kind, *words = name.split()
    dtype = words[0] if kind in ("ours", "floor") else "fp32"
    return f"floor {dtype} lora" if words[-1:] == ["lora"] else f"floor {dtype}"


def steps_per_call(name: str) -> int:
    """Return how many steps one call of the work does."""
    return REPLAYED_STEPS if name.startswith("replay") else 1
