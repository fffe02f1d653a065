"""Layers that are read from disk as they run: the bits of the resident run, each layer once per step."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from mezo_cli.config.compose import build_config
from mezo_cli.config.schema import Example
from mezo_cli.models.streaming import StreamedLayers, streamed_layers
from mezo_cli.runs import Run
from mezo_cli.session.opening import opened, prepare
from mezo_cli.session.session import Session
from mezo_cli.training import precision
from tests import tiny
from tests.command_line import mezo, small

pytestmark = pytest.mark.usefixtures("eager_kernels")

NEEDS_LIBRARY = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes (extra quantized)")
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
    done = mezo("train", *given)
    assert done.code == 0, done
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
        done = mezo(*words)
        assert done.code == 0, done
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
