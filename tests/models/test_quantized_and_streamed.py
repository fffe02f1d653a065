"""A base that takes less memory, in eight or four bits or read from disk as it runs: its bits, runs and refusals."""

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from mezo_cli import models
from mezo_cli.config.compose import build_config
from mezo_cli.config.schema import Example
from mezo_cli.config.stored import read_config
from mezo_cli.errors import UserError
from mezo_cli.models import quantized
from mezo_cli.models.quantized import QuantizedLinear, quantized_layers
from mezo_cli.models.streaming import StreamedLayers, streamed_layers
from mezo_cli.runs import Run
from mezo_cli.session.opening import opened, prepare
from mezo_cli.session.session import Session
from mezo_cli.training import precision
from tests import tiny
from tests.command_line import error_line, finished_runs, mezo, ok, small
from tests.config.test_overrides import error_of
from tests.optim.test_mezo import SENTENCES, outputs_of, ready

pytestmark = pytest.mark.usefixtures("eager_kernels")

HAS_LIBRARY = importlib.util.find_spec("bitsandbytes") is not None
NEEDS_LIBRARY = pytest.mark.skipif(not HAS_LIBRARY, reason="needs bitsandbytes (extra quantized)")
NF4 = pytest.param("nf4", marks=NEEDS_LIBRARY)


def scores(session: Any) -> torch.Tensor:
    return session.objective.logits(session.objective.collate(session.encoder.encode_all(SENTENCES)))


def layer_of(how: str, weight: torch.Tensor, bias: torch.nn.Parameter | None = None) -> QuantizedLinear:
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0])
    linear.bias = bias  # type: ignore[assignment]
    return QuantizedLinear(how, linear, *quantized.quantize(how, weight))


def test_int8_is_within_half_a_scale_of_each_weight() -> None:
    weight = torch.randn(70, 30, generator=torch.Generator().manual_seed(0))
    weight[3] = 0.0
    layer = layer_of("int8", weight)
    assert torch.equal(layer.dequantized(), layer.bits.float() * layer.scale)
    assert ((layer.dequantized() - weight).abs() <= layer.scale / 2 * 1.0001).all()
    assert int(layer.bits.abs().amax()) == 127
    assert not layer.dequantized()[3].any()


@NEEDS_LIBRARY
@pytest.mark.parametrize("shape", [(70, 30), (3, 5), (130, 64), (700, 1000)])
def test_nf4_has_the_bytes_of_the_library(shape: tuple[int, int]) -> None:
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    layer = layer_of("nf4", weight)
    codes, state = quantize_4bit(weight, quant_type="nf4")
    assert torch.equal(layer.bits, codes)
    assert torch.equal(layer.scale, state.absmax)
    assert torch.equal(layer.dequantized(), dequantize_4bit(codes, state))


@pytest.mark.parametrize("how", ["int8", NF4])
def test_products_and_gradients_are_those_of_the_dequantised_weight(how: str, monkeypatch: Any) -> None:
    monkeypatch.setitem(quantized.ELEMENTS, "cpu", 64 * 30)
    weight, bias = torch.randn(150, 30), torch.nn.Parameter(torch.randn(150))
    layer, x = layer_of(how, weight, bias), torch.randn(4, 5, 30, requires_grad=True)
    same = torch.nn.functional.linear(x, layer.dequantized(), bias)
    torch.testing.assert_close(layer(x), same)
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        layer(x).square().sum().backward()
    grad, x.grad = x.grad, None
    same.square().sum().backward()
    torch.testing.assert_close(grad, x.grad, rtol=1e-5, atol=1e-3)
    assert max(saved) <= 20 * 150  # a graph keeps activations, no weights


@pytest.mark.sample(2)
@pytest.mark.parametrize("how", ["int8", NF4])
@pytest.mark.parametrize("family", ["opt", "llama", "qwen3", "gpt_neox"])
def test_the_layers_of_a_decoder_are_quantised_and_nothing_else(family: str, how: str, tmp_path: Path) -> None:
    folder = tiny.decoder(tmp_path, family)
    words = ["objective=lm", "peft=lora", "task=sst2"]
    exact, quantised = ready(folder, *words), ready(folder, *words, f"model.quantize={how}")
    layers = quantized_layers(quantised.loaded.model)
    assert {path.split(".")[-2] for path in layers if "base_layer" not in path}.isdisjoint({"lm_head", "embed_out"})
    stock = {name: p for name, p in exact.loaded.model.named_parameters() if name.removesuffix(".weight") not in layers}
    own = dict(quantised.loaded.model.named_parameters())
    assert set(own) == set(stock)
    assert all(torch.equal(own[name], p) and p.dtype == torch.float32 for name, p in stock.items())
    assert not [name for name, p in own.items() if p.dim() > 1 and ".layers." in name and "lora_" not in name]
    with torch.no_grad():
        error = (scores(quantised) - scores(exact)).abs().max()
    assert 0 < error < (0.02 if how == "int8" else 0.3)
    assert quantised.trainable()["share"] == exact.trainable()["share"]


def test_a_file_in_half_precision_gives_the_bits_of_the_same_values_in_float32(roberta: Path, tmp_path: Path) -> None:
    """It is read in its own dtype, so that no float32 copy of the whole model is made."""
    narrow, wide = tmp_path / "narrow", tmp_path / "wide"
    for folder, dtype in ((narrow, torch.bfloat16), (wide, torch.float32)):
        shutil.copytree(roberta, folder)
        tensors = {name: t.bfloat16().to(dtype) for name, t in load_file(roberta / "model.safetensors").items()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    sums = [
        models.fingerprint(ready(folder, "peft=bias", "model.quantize=int8").loaded.model) for folder in (narrow, wide)
    ]
    assert sums[0] == sums[1]


LIVELIER = ["optimizer.eps=0.1", "optimizer.lr=0.1", "checkpoint_every=2"]


@pytest.fixture(scope="module")
def runs(roberta: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of one finished run per kind of base."""
    kinds = ["int8", *(["nf4"] if HAS_LIBRARY else [])]
    home = tmp_path_factory.mktemp("runs")
    cases = {how: ["peft=lora", f"model.quantize={how}", *LIVELIER] for how in kinds}
    return finished_runs(home, roberta, tiny.movie_folder(home / "movies"), cases)


@pytest.mark.parametrize("how", ["int8", NF4])
def test_plain_peft_loads_the_export_on_the_same_base(how: str, runs: Path, tmp_path: Path) -> None:
    run = runs / how
    ours = opened(read_config(run / "config.yaml"), Run.open(run), "last")
    assert mezo("export", run, "--checkpoint", "last", "--adapter", "--out", tmp_path / "out").code == 0
    base = peft.PeftConfig.from_pretrained(tmp_path / "out").base_model_name_or_path
    stock = transformers.AutoModelForMaskedLM.from_pretrained(base)
    with torch.no_grad():
        for path, layer in quantized_layers(ours.loaded.model).items():
            stock.get_submodule(path.replace(".base_layer", "")).weight.copy_(layer.dequantized())
    plain = peft.PeftModel.from_pretrained(stock, tmp_path / "out").eval()
    batch = ours.objective.collate(ours.encoder.encode_all(SENTENCES))
    with torch.no_grad():
        theirs = outputs_of(plain, ours, batch)
        torch.testing.assert_close(scores(ours), theirs, rtol=1e-4, atol=1e-5)


def test_a_checkpoint_of_another_quantisation_is_refused(runs: Path, roberta: Path, tmp_path: Path) -> None:
    run = runs / "int8"
    assert "a resumed run keeps its settings" in error_line(mezo("resume", run, "model.quantize=none"))
    words = ["peft=lora", "task=sst2"]
    for theirs, own in (("none", "int8"), ("int8", "none")):
        models.save(ready(roberta, *words, f"model.quantize={theirs}").loaded, tmp_path / theirs)
        ours = ready(roberta, *words, f"model.quantize={own}")
        with pytest.raises(UserError, match=rf"was trained with model.quantize={theirs}, and here it is {own}"):
            ours.loaded.adapter.load(tmp_path / theirs)


def test_a_missing_library_is_named_with_its_extra(monkeypatch: Any) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    line = error_of("model=demo", "data=demo", "model.quantize=nf4", "peft=lora")
    assert line == 'model.quantize=nf4 needs bitsandbytes: pip install -e ".[quantized]" -c constraints/tested.txt'


def test_other_layers_than_linear_ones_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model.quantize=int8 quantises layers of nn.Linear, and .* is a Conv1D"):
        ready(tiny.decoder(tmp_path, "gpt2"), "objective=lm", "peft=lora", "model.quantize=int8")


LM = ["objective=lm", "task.lm.label_words=[bad,rather good]"]
CASES = {
    "mlm": ("roberta", ["objective=mlm", "peft=lora"]),
    "cls": ("bert", ["objective=cls", "peft=bias"]),
    "lm": ("llama", [*LM, "peft=lora"]),
    "head": ("roberta", ["objective=mlm", "peft=head"]),
    "int8": ("roberta", ["objective=mlm", "peft=lora", "model.quantize=int8"]),
    "nf4": ("roberta", ["objective=mlm", "peft=lora", "model.quantize=nf4"]),
    "scales": ("llama", [*LM, "peft=scales", "peft.absolute=true", "model.quantize=int8"]),
    "top": ("opt", [*LM, "peft=lora", "peft.layers=1"]),
}
MORE = {
    "float32": [],
    "bfloat16": ["model.compute_dtype=bfloat16"],
    "samples": ["optimizer.samples=4", "micro_batch_size=3"],
    "unpaired": ["model.paired_tokens=0", "micro_batch_size=3"],
}
LAYERS = 3


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("models")
    for family in ("roberta", "bert"):
        getattr(tiny, family)(home / family, num_hidden_layers=LAYERS)
    for family in ("llama", "opt"):
        tiny.decoder(home / family, family, num_hidden_layers=LAYERS)
    return {family: home / family for family in ("roberta", "bert", "llama", "opt")}


def train(folders: dict[str, Path], movies: Path, run: Path, case: str, *more: str) -> Run:
    family, words = CASES[case]
    given = small(folders[family], movies, run, *words, "data.shots=8", *more)
    ok("train", *given)
    return Run(run)


def facts(run: Run) -> list[Any]:
    """What a run has computed, without names of files and times."""
    left_out = ("time", "seconds", "peak")
    lines = [{key: value for key, value in line.items() if not key.startswith(left_out)} for line in run.metrics()]
    trajectory = run.read_trajectory()
    return [lines, trajectory.grads.tolist(), trajectory.lrs.tolist(), (run.path / "predictions.jsonl").read_text()]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("case", "more"),
    [
        ("mlm", "float32"),
        ("mlm", "unpaired"),
        ("cls", "bfloat16"),
        ("lm", "bfloat16"),
        ("int8", "samples"),
        ("lm", "samples"),
        ("head", "unpaired"),
        ("scales", "bfloat16"),
        ("top", "unpaired"),
        pytest.param("nf4", "samples", marks=NEEDS_LIBRARY),
    ],
)
def test_it_has_the_bits_of_the_resident_run(
    case: str, more: str, folders: dict[str, Path], movies: Path, tmp_path: Path
) -> None:
    resident = train(folders, movies, tmp_path / "resident", case, *MORE[more])
    streamed = train(folders, movies, tmp_path / "streamed", case, *MORE[more], "model.stream=true")
    assert facts(streamed) == facts(resident)


def session_of(folders: dict[str, Path], case: str, *words: str) -> tuple[Session, list[Any], StreamedLayers]:
    family, named = CASES[case]
    more = ["data=demo", "steps=3", "model.stream=true", *words]
    session = opened(build_config([f"model.path={folders[family]}", *named, *more]), trains=True)
    rows = session.encoder.encode_all([Example((text,), 0) for text in ("a", "good film", "bad", "film", "it", "was")])
    session.exclude_unreachable(rows[0])
    streamed = streamed_layers(session.loaded.model)
    assert streamed is not None
    return session, rows, streamed


@pytest.mark.parametrize("optimizer", ["mezo optimizer.samples=4", "es optimizer.members=5"])
def test_a_step_reads_each_layer_once(optimizer: str, folders: dict[str, Path]) -> None:
    words = [f"optimizer={optimizer.split()[0]}", optimizer.split()[1], "micro_batch_size=2"]
    session, rows, streamed = session_of(folders, "mlm", *words)
    for step in range(2):
        before = streamed.bytes_read
        session.step(rows, step)
        assert streamed.bytes_read - before == sum(streamed.sizes)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_begins_within_six_passes(dtype: str, folders: dict[str, Path], movies: Path, tmp_path: Path) -> None:
    family, words = CASES["mlm"]
    more = [*words, "data.shots=8", "model.stream=true", f"model.compute_dtype={dtype}"]
    prepared = prepare(build_config(small(folders[family], movies, tmp_path, *more)), trains=True)
    session = prepared.session
    precision.check(session, session.loss_of(prepared.rows["train"]))
    streamed = streamed_layers(session.loaded.model)
    assert streamed is not None
    assert 1 + streamed.bytes_read / sum(streamed.sizes) <= 6  # one for the sha256


def test_an_evaluation_reads_each_layer_once(folders: dict[str, Path]) -> None:
    session, rows, streamed = session_of(folders, "lm", "eval_batch_size=2")
    before = streamed.bytes_read
    session.objective.evaluate(rows)
    assert streamed.bytes_read - before == sum(streamed.sizes)


def test_every_command_reads_a_streamed_run(folders: dict[str, Path], movies: Path, tmp_path: Path) -> None:
    words = ["model.stream=true", "checkpoint=trajectory"]
    run = train(folders, movies, tmp_path / "run", "mlm", *words)
    family, case = CASES["mlm"]
    more = [*case, "data.shots=8", *words, "max_seconds=1e-9"]
    assert mezo("train", *small(folders[family], movies, tmp_path / "part", *more)).code == 130
    part = Run(tmp_path / "part")
    assert mezo("resume", part.path, "max_seconds=null").code == 0
    assert facts(part) == facts(run)
    for words in (["verify", run.path], ["eval", run.path], ["predict", run.path, "--text", "a good film"]):
        ok(*words)
    assert mezo("replay", run.path, "--step", 3, "--out", tmp_path / "step").code == 0


def test_a_quantised_base_is_made_once(folders: dict[str, Path], cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session_of(folders, "int8")
    files = sorted((cache / "mezo").rglob("*.safetensors"))
    assert len(files) == LAYERS
    monkeypatch.setattr("mezo_cli.models.loading.quantize", lambda how, weight: 1 / 0)
    session_of(folders, "int8")
    files[1].unlink()
    with pytest.raises(ZeroDivisionError):
        session_of(folders, "int8")
