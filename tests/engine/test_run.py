"""A run whose forwards an engine computes: the trajectory of the model's own forwards, replay without it, its end."""

import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mezo_cli.config.compose import build_config
from mezo_cli.engine import engine as engine_module
from mezo_cli.errors import UserError
from mezo_cli.runs import sweep_record
from tests import tiny
from tests.command_line import error_line, mezo, small
from tests.engine.fakes import fake_python
from tests.engine.step_checks import losses_and_metrics
from tests.live_models import count_live

ENGINE = ("engine=vllm", "engine.memory=100000000")
ES = ("optimizer=es", "optimizer.members=4", "optimizer.eps=0.1")

pytestmark = pytest.mark.usefixtures("eager")


@dataclass(frozen=True)
class Setting:
    """A tiny decoder and its data."""

    folder: Path
    model: Path
    data: Path

    def train(self, name: str, *more: str, mode: str | None = None) -> Any:
        """Train a run, by the fake engine if a mode is given."""
        python = () if mode is None else (*ENGINE, f"engine.python={fake_python(self.folder / 'bin', mode)}")
        objective = () if "objective=choice" in more else ("objective=lm",)
        words = small(self.model, self.data, self.folder / name, *objective, "model=gpt2", "optimizer.lr=1e-4")
        return mezo("train", *words, "log_every=1", *python, *more)

    def grads(self, name: str) -> list[float]:
        """The projected gradients of a run."""
        lines = map(json.loads, (self.folder / name / "metrics.jsonl").read_text().splitlines())
        return [line["projected_grad"] for line in lines if line["kind"] == "train"]


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    folder = tmp_path_factory.mktemp("engine")
    movies = tiny.movie_folder(folder / "movies")
    with open(movies / "test.jsonl", "a", encoding="utf-8") as file:  # longer than every row of train
        file.write(json.dumps({"sentence": "what a long and winding film it was", "label": "negative"}) + "\n")
    return Setting(folder, tiny.decoder(folder / "llama", "llama"), movies)


def differ_little(grads: list[float], others: list[float]) -> bool:
    """Whether two runs agree as a run by an engine should with one without it."""
    mean = sum(map(abs, grads)) / len(grads)
    return len(grads) == len(others) and max(abs(a - b) for a, b in zip(grads, others, strict=True)) <= 1e-3 * mean


@pytest.mark.slow
def test_an_engine_that_dies_leaves_a_run_that_is_resumed_and_replayed(setting: Setting) -> None:
    """All parameters: the run ends as if the engine had not died, and as the model's own forwards end."""
    # 2 scores per step, and 2 in the check at the start
    died = setting.train("died", "optimizer.weight_decay=0.1", mode="dies=10")
    assert died.code == 1
    line = "error: engine=vllm failed: its process was ended by SIGKILL: out of luck\n"
    assert died.err.endswith(line)
    before = (setting.folder / "died" / "trajectory.bin").read_bytes()
    assert json.loads((setting.folder / "died" / "run.json").read_text())["status"] == "failed"
    fake_python(setting.folder / "bin", "dies=10").write_text(fake_python(setting.folder / "bin").read_text())
    assert "give it again, engine.python=PATH" in error_line(mezo("resume", setting.folder / "died"))
    python = fake_python(setting.folder / "bin", "dies=10")
    assert mezo("resume", setting.folder / "died", f"engine.python={python}").code == 0
    assert str(python) not in (setting.folder / "died" / "config.yaml").read_text()
    assert (setting.folder / "died" / "trajectory.bin").read_bytes().startswith(before)
    assert setting.train("own", "optimizer.weight_decay=0.1").code == 0
    assert differ_little(setting.grads("own"), setting.grads("died"))
    replayed = setting.folder / "replayed"
    assert mezo("replay", setting.folder / "died", "--step", "6", "--out", replayed).code == 0
    last = load_file(setting.folder / "died" / "checkpoints" / "last" / "model.safetensors")
    assert all(torch.equal(value, last[name]) for name, value in load_file(replayed / "model.safetensors").items())


@pytest.mark.slow
def test_a_lora_goes_to_the_engine_with_every_request(setting: Setting) -> None:
    words = ("peft=lora", "task.lm.label_words=[bad okay, bad good]", "optimizer.samples=2", "steps=3")
    assert setting.train("lora", *words, mode="").code == 0
    assert setting.train("own-lora", *words).code == 0
    assert differ_little(setting.grads("own-lora"), setting.grads("lora"))
    summaries = [json.loads((setting.folder / name / "summary.json").read_text()) for name in ("lora", "own-lora")]
    scores = [summary["test"]["loss"] for summary in summaries]
    assert scores[0] == pytest.approx(scores[1], rel=1e-4)


CHOICE = ("objective=choice", "task.choice.candidates=[' bad okay film', ' good']", "steps=2", "eval_every=1")


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("peft=lora",),
        ("objective.loss=lm",),
        ("objective.loss=accuracy", "objective.normalize=sum", *ES, "peft=lora"),
    ],
    ids=["cross_entropy", "lm", "accuracy"],
)
def test_candidates_are_scored_as_the_model_scores_them(
    setting: Setting, words: tuple[str, ...], tmp_path: Path
) -> None:
    runs = [tmp_path / "by-engine", tmp_path / "own"]
    for run, mode in zip(runs, ("", None), strict=True):
        result = setting.train(str(run), *CHOICE, *words, mode=mode)
        assert result.code == 0, result.err
    by_engine, own = map(losses_and_metrics, runs)
    assert len(own) > 6
    assert by_engine == [pytest.approx(line, abs=1e-4) for line in own]


@pytest.mark.slow
@pytest.mark.parametrize("peft", ["none", "lora"])
def test_the_best_weights_are_scored_and_the_last_are_gone_before(
    setting: Setting, peft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of a run: the engine gets the weights that have the best score, and keeps no others in memory."""
    alive = count_live(monkeypatch)
    name = f"best-{peft}"
    result = setting.train(name, f"peft={peft}", "optimizer.lr=3e-2", "steps=4", "eval_every=2", mode="")
    assert result.code == 0, result.err
    assert alive == [0, 0]
    summary = json.loads((setting.folder / name / "summary.json").read_text())
    assert summary["best"]["step"] < 4
    best, last = (
        json.loads(mezo("eval", setting.folder / name, "--checkpoint", which, "--json").out)["loss"]
        for which in ("best", "last")
    )
    assert summary["test"]["loss"] == pytest.approx(best, rel=1e-4)
    assert abs(last - best) > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "code", "words"),
    [
        ("misses perturbations", 2, ()),
        ("misses perturbations", 2, ("engine.dtype=bfloat16", "peft=lora")),
        ("", 0, ("engine.dtype=bfloat16", "peft=lora")),
    ],
    ids=["float32", "bfloat16", "right"],
)
def test_the_check_at_the_start_sees_more_than_the_rounding_of_the_dtype(
    setting: Setting, mode: str, code: int, words: tuple[str, ...], tmp_path: Path
) -> None:
    """A LoRA begins with B = 0, so that a small perturbation of it is lost in bfloat16."""
    result = setting.train(str(tmp_path), *words, "steps=1", "eval_every=0", mode=mode)
    assert result.code == code
    assert ("computes other scores than the model" in result.err) == bool(code)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["basic", "joblib"])
def test_the_jobs_of_a_sweep_get_the_program_from_its_process(setting: Setting, launcher: str, tmp_path: Path) -> None:
    """It is stored nowhere, so a sweep is gone on with by giving it again."""
    python, sweep = fake_python(setting.folder / "bin"), tmp_path / "sweep"
    more = ("objective=lm", "model=gpt2", "steps=1", "optimizer.lr=1e-4,2e-4", *ENGINE, f"engine.python={python}")
    launched = (f"hydra.sweep.dir={sweep}", f"hydra/launcher={launcher}")
    result = mezo("train", "-m", *small(setting.model, setting.data, tmp_path, *more), *launched)
    assert result.code == 0, result
    assert str(python) not in (sweep / "0" / "config.yaml").read_text() + str(sweep_record.read(sweep).overrides)
    shutil.rmtree(sweep / "1")
    assert "give it again, engine.python=PATH" in error_line(mezo("resume", sweep))
    assert mezo("resume", sweep, f"engine.python={python}").code == 0
    assert "MEZO_ENGINE_PYTHON" not in os.environ


@pytest.mark.slow
def test_a_check_that_can_tell_nothing_says_so(
    setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "CHECKED_C", (1e-9,))
    result = setting.train(str(tmp_path), "steps=1", "eval_every=0", mode="misses perturbations")
    assert result.code == 0
    assert "the check cannot tell whether the engine's weights are perturbed" in " ".join(
        (result.out + result.err).split()
    )


@pytest.mark.parametrize(
    ("mode", "words", "parts"),
    [
        ("fails", (), ["engine=vllm failed: RuntimeError: no memory for the weights"]),
        ("ends", (), ["engine=vllm cannot be started: its process ended with status 1"]),
        pytest.param("misses a tensor", (), ["does not support Llama", "holds 0 of the"], marks=pytest.mark.slow),
    ],
    ids=["fails", "ends", "tensor"],
)
def test_an_engine_that_is_not_right_is_refused_before_training(
    setting: Setting, mode: str, words: tuple[str, ...], parts: list[str], tmp_path: Path
) -> None:
    result = setting.train(str(tmp_path), *words, mode=mode)
    assert result.code == 2
    last = result.err.splitlines()[-1]
    assert all(part in last for part in parts), last
    assert not (tmp_path / "trajectory.bin").exists()


def test_without_an_installed_engine_the_line_names_the_command(
    setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    result = setting.train("nothing", "engine=vllm")
    assert result.code == 2
    assert "engine=vllm is not installed: run 'mezo engine install', or give engine.python=PATH" in result.err
    given = setting.train("nowhere", "engine=vllm", f"engine.python={tmp_path}/python")
    assert "there is no such program" in given.err.splitlines()[-1]


@pytest.mark.slow
def test_an_environment_without_vllm_is_refused_with_the_command(setting: Setting) -> None:
    result = setting.train("without", "engine=vllm", f"engine.python={sys.executable}")
    assert result.code == 2
    line = result.err.splitlines()[-1]
    assert "No module named 'vllm'" in line
    assert "'mezo engine install' makes an environment" in line


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (
            ["engine=vllm"],
            "objective=mlm has no engine, only objective=lm, objective=choice, objective=generate have one",
        ),
        (["engine=vllm", "objective=lm", "peft=prefix"], "peft=prefix has no engine, only peft=none and peft=lora"),
        (["engine=vllm", "objective=lm", "optimizer=adamw"], "computes no gradients; use optimizer=mezo"),
        (["engine=vllm", "objective=lm", "optimizer=mezo_adam"], "or use peft=lora"),
        (["engine=vllm", "objective=lm", "optimizer.noise=torch"], "use gaussian"),
        (["engine=vllm", "objective=lm", "micro_batch_size=4"], "makes its batches itself"),
        (["engine.tensor_parallel=2"], "engine=none does not read it, only engine=vllm"),
        (["engine=vllm", "objective=lm", "engine.dtype=float64"], "float32, bfloat16"),
    ],
)
def test_what_an_engine_does_not_compute_is_refused(words: list[str], part: str) -> None:
    with pytest.raises(UserError, match=part):
        build_config([*words, "model=demo", "data=demo"])


@pytest.mark.slow
def test_weights_that_are_not_the_trajectorys_are_noticed(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module.Engine, "update", lambda *_: None)
    result = setting.train("forgets", "steps=1", "eval_every=0", mode="")
    assert result.code == 1
    assert "the engine's weights are not those of the trajectory" in result.err.splitlines()[-1]
