"""Runs of which a device takes steps in the tests, the fake one or a real one; where the host waits and copies."""

import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mezo_cli.config.compose import build_config
from mezo_cli.config.schema import Config, Example
from mezo_cli.optim import OPTIMIZERS
from mezo_cli.session.opening import opened
from mezo_cli.training.linear_probe import fit_output_layer
from tests import tiny

ROOT = Path(__file__).resolve().parents[1]
# Operations whose result's size depends on values, and those that return a value to Python: the host waits for each.
WAITING = {
    "aten::_local_scalar_dense",
    "aten::_unique2",
    "aten::equal",
    "aten::masked_select",
    "aten::nonzero",
    "aten::repeat_interleave",
    "aten::unique_consecutive",
    "aten::unique_dim",
}
INDEXING = {"aten::index", "aten::index_put", "aten::index_put_"}
MOVING = INDEXING | {"aten::where"}  # these copy an argument that is on the CPU to the device, and wait for the copy


class HostWaits(TorchDispatchMode):
    """Inside, `waits` and `copies` grow by one line of text per wait for the device and per copy to it.

    Args:
        read: stands in for reading values, (shape) -> nested lists of floats, on a device that has none. None: read.
    """

    def __init__(self, read: Callable[[torch.Size], Any] | None = None) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.copies: list[str] = []
        self._read = read
        self._tolist = [mock.patch.object(kind, "tolist", lambda x: self.tolist(x)) for kind in (Tensor, FakeTensor)]
        self._plain_tolist = Tensor.tolist

    def __enter__(self) -> "HostWaits":
        super().__enter__()
        for patch in self._tolist:
            patch.start()  # torch would read the elements one by one where a mode is active
        return self

    def __exit__(self, *error: Any) -> None:
        for patch in self._tolist:
            patch.stop()
        super().__exit__(*error)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, function._schema.name
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        on_device = any(x.device.type != "cpu" for x in given)
        if on_device and not name.startswith("prim::"):
            indices = [x for x in tree_leaves(args[1]) if isinstance(x, Tensor)] if name in INDEXING else []
            if name in WAITING or any(x.dtype in (torch.bool, torch.uint8) for x in indices):
                self.waits.append(f"{name} {calling_line()}")
            if name in MOVING:
                self.copies += [f"blocking {name} {calling_line()}" for x in given if x.device.type == "cpu"]
        if name == "aten::_local_scalar_dense" and self._read is not None:
            return self._read(torch.Size())
        out = function(*args, **kwargs)
        if name in ("aten::_to_copy", "aten::copy_"):
            source, target = args[1] if name == "aten::copy_" else args[0], out
            if source.device.type != "cpu" and target.device.type == "cpu":
                self.waits.append(f"{name} {calling_line()}")
            elif source.device.type == "cpu" and target.device.type != "cpu" and source.numel():
                blocks = not (kwargs.get("non_blocking") or (name == "aten::copy_" and args[2:] == (True,)))
                self.copies.append(f"{'blocking ' if blocks else ''}{name} {calling_line()}")
        return out

    def tolist(self, tensor: Tensor) -> Any:
        """Read a tensor; one of the device is one wait, whatever its size."""
        if tensor.device.type == "cpu":
            fake = isinstance(tensor, FakeTensor) and self._read is not None  # copied from the device before
            if fake and not tensor.dtype.is_floating_point:  # an index, perhaps
                return np.zeros(tensor.shape, int).tolist()
            return self._read(tensor.shape) if fake else self._plain_tolist(tensor)  # type: ignore[misc]
        self.waits.append(f"tolist {calling_line()}")
        if self._read is not None:
            return self._read(tensor.shape)
        with torch.utils._python_dispatch._disable_current_modes():
            return self._plain_tolist(tensor)


def calling_line() -> str:
    """Return the innermost line of this repository and of any package but torch: `path:line function`."""
    frames = [f for f in traceback.extract_stack() if f.filename not in (__file__, "<string>")]
    frames = [f for f in frames if "/torch/" not in f.filename]
    ours = [f for f in frames if f.filename.startswith(str(ROOT / "mezo_cli"))]
    places = []
    for f in [*ours[-1:], *frames[-1:]]:
        path = f.filename.removeprefix(f"{ROOT}/").partition("site-packages/")
        places.append(f"{path[2] or path[0]}:{f.lineno} {f.name}")
    return " < ".join(dict.fromkeys(places))


ROWS = [Example((text,), i % 2) for i, text in enumerate(("good", "a bad one", "okay okay", "It was a great film"))]

# Every value of objective, optimizer, peft and both dtypes; pairs, not all products.
CASES = {
    "mlm-mezo": "model=roberta optimizer=mezo optimizer.weight_decay=0.1",
    "mlm-adam": "model=roberta optimizer=mezo_adam peft=bias optimizer.samples=2 model.dtype=float16",
    "mlm-sgd": "model=bert optimizer=sgd peft=prefix",
    "cls-mezo": "model=bert optimizer=mezo peft=prefix objective.loss=f1 optimizer.samples=3",
    "cls-momentum": "model=roberta optimizer=mezo_momentum optimizer.noise=rademacher",
    "cls-adamw": "model=bert optimizer=adamw peft=lora",
    "lm-mezo": "model=opt optimizer=mezo model.dtype=bfloat16 model.compute_dtype=bfloat16",
    "lm-adam": "model=llama optimizer=mezo_adam task.lm.label_words=[bad,good]",
    "lm-padded": "model=bloom optimizer=mezo objective.loss=accuracy optimizer.samples=3",
    # A forward per sign and micro-batch; frozen layers are computed once per micro-batch.
    "mlm-unpaired": "model=roberta optimizer=mezo peft=head model.dtype=float16 model.paired_tokens=0 "
    "model.cache_bytes=0 micro_batch_size=2",
    "choice-mezo": "model=llama optimizer=mezo task.choice.prompt='{sentence|strip}' "
    "task.choice.candidates=['-bad','-rather-good']",
    "lm-es": "model=opt optimizer=es optimizer.members=2",
    "lm-es-f1": "model=opt optimizer=es optimizer.members=6 objective.loss=f1",
    "mlm-fzoo": "model=bert optimizer=fzoo optimizer.members=3 objective.loss=accuracy",
    "cls-fzoo": "model=bert optimizer=fzoo optimizer.members=2",
    "mlm-lozo": "model=roberta optimizer=lozo",
    "lm-lozo-momentum": "model=opt optimizer=lozo_m",
    "mlm-hizoo": "model=bert optimizer=hizoo",
    "lm-hizoo-scalar": "model=llama optimizer=hizoo_scalar",
    "cls-adamezo": "model=roberta optimizer=adamezo",
    "mlm-scales": "model=roberta optimizer=mezo peft=scales model.quantize=int8",
    "mlm-null": "model=roberta optimizer=null_signs",
    "lm-probe": "model=gpt2 optimizer=linear_probe",
}
MAKERS: dict[str, Callable[[Path], Path]] = {"roberta": partial(tiny.roberta, num_hidden_layers=1), "bert": tiny.bert}


def case_config(name: str, folder: Path, device: str) -> Config:
    """Return the config of a case; its tiny model is made in `folder`, once per kind."""
    model, *words = CASES[name].split()
    kind = model.removeprefix("model=")
    path = folder / kind
    if not path.exists():
        MAKERS.get(kind, lambda path: tiny.decoder(path, kind))(path)
    words.append(f"objective={name.partition('-')[0]}")
    words += [] if "optimizer=linear_probe" in words else ["steps=20"]
    given = [f"model.path={path}", f"model.name={kind}", f"model.device={device}", "data=demo", "eval_batch_size=2"]
    return build_config([*given, *words])


def take_steps(config: Config, read: Callable[[torch.Size], Any] | None = None) -> dict[str, HostWaits]:
    """Build the run, take two steps, replay them, and evaluate; fit a linear probe instead, if that is the optimizer.

    Args:
        config: of a case.
        read: see `HostWaits`.

    Returns:
        What the host did in each of these: first, step, replay, evaluation; or probe, evaluation.
    """
    session, results = opened(config, trains=True), []
    hosts: dict[str, HostWaits] = {}
    rows = session.encoder.encode_all(ROWS)
    session.exclude_unreachable(rows[0])
    session.keep_states(rows)
    with torch.no_grad():
        for step, name in enumerate(("first", "step") if config.steps else ()):
            with hosts.setdefault(name, HostWaits(read)):
                results.append(session.step(rows, step))
        if config.steps:
            with hosts.setdefault("replay", HostWaits(read)):
                if session.optimizer.replayable:
                    records = [(step, result.recorded, result.lr) for step, result in enumerate(results)]
                    again: Any = OPTIMIZERS.implementation(config.optimizer.name)(
                        config.optimizer, config.seed, config.steps
                    )
                    again.rebuild_state(session.params, records[:1])
                    again.apply_updates(session.params, records[1:])
        else:
            with hosts.setdefault("probe", HostWaits(read)):
                fit_output_layer(session, rows)
        with hosts.setdefault("evaluation", HostWaits(read)):
            session.objective.evaluate(rows)
    return hosts


def check_case(name: str, hosts: dict[str, dict[str, list[str]]]) -> None:
    """Assert that the host waited and copied as often as it has to: for the losses, the scores, and the batches."""
    if "step" in hosts:
        check_host(hosts["step"], waits=1, copies=2 if "micro_batch_size=2" in CASES[name] else 1)
        check_host(hosts["replay"], waits=0, copies=0)
    check_host(hosts["evaluation"], waits=2, copies=2)  # of two batches


def check_host(host: dict[str, list[str]], waits: int, copies: int) -> None:
    """Assert that the host waited and copied so often, and that it waited for no copy."""
    assert len(host["waits"]) == waits, host["waits"]
    assert len(host["copies"]) == copies, host["copies"]
    assert not any(line.startswith("blocking") for line in host["copies"]), host["copies"]
