"""A run from end to end: its files, its counts, how it fails."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from mezo_cli.config.stored import read_config
from mezo_cli.perturb.noise import Direction
from mezo_cli.perturb.noise.by_tensor import TorchNoise
from mezo_cli.perturb.noise.compiled import Kernel
from mezo_cli.runs import Run, trajectory
from mezo_cli.training import loop
from tests import tiny
from tests.command_line import Train, error_line, mezo, ok, small

pytestmark = pytest.mark.usefixtures("eager_kernels")


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a saved model. Transformers 5.4 saves a LayerNorm by the names that BERT once had."""
    old = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
    named = load_file(folder / "model.safetensors")
    for before, after in old.items():
        named = {name.replace(before, after): tensor for name, tensor in named.items()}
    return named


def lines(run: Path, kind: str = "eval") -> list[dict[str, Any]]:
    return [line for line in Run(run).metrics() if line["kind"] == kind]


def summary(run: Path) -> dict[str, Any]:
    return Run(run).read_summary()


@pytest.fixture(scope="module")
def done(roberta: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("done")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEZO_EAGER", "1")
        said = mezo("train", *small(roberta, tiny.movie_folder(folder / "movies"), folder / "run"))
    assert said.code == 0, said
    (folder / "said").write_text(said.out)
    return folder / "run"


def test_the_predictions_are_those_of_the_test_evaluation(done: Path) -> None:
    rows, test = Run(done).predictions(), lines(done)[-1]
    assert rows is not None
    source = [json.loads(line) for line in (done.parent / "movies" / "test.jsonl").read_text().splitlines()]
    assert [(row["row"], row["columns"], row["label"]) for row in rows] == [
        (number, {"sentence": row["sentence"]}, row["label"]) for number, row in enumerate(source)
    ]
    assert {name: sum(row["predicted"] == name for row in rows) for name in test["predicted"]} == test["predicted"]
    assert np.mean([row["predicted"] == row["label"] for row in rows]) == pytest.approx(test["accuracy"])
    for row in rows:
        assert list(row["probabilities"]) == ["negative", "positive"]
        assert sum(row["probabilities"].values()) == pytest.approx(1)
        assert row["predicted"] == max(row["probabilities"], key=row["probabilities"].__getitem__)
    loss = -np.mean([math.log(row["probabilities"][row["label"]]) for row in rows])
    assert loss == pytest.approx(test["loss"], rel=1e-5)


def test_the_files_of_a_finished_run(done: Path) -> None:
    names = {p.name for p in done.iterdir()}
    stated = "config.yaml run.json metrics.jsonl trajectory.bin summary.json predictions.jsonl untrained.json train.log"
    assert names == {*stated.split(), "checkpoints", ".lock"}
    for name in ("best", "last"):
        files = {p.name for p in (done / "checkpoints" / name).iterdir()}
        assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= files
        assert not {f for f in files if f.endswith((".bin", ".pt", ".pkl"))}


def test_run_json(done: Path) -> None:
    info = Run(done).info()
    assert info["status"] == "finished"
    assert info["device"].startswith("cpu (")
    assert len(info["data_fingerprint"]) == 64
    assert info["task_version"] == 1
    assert info["weights_fingerprint"] == trajectory.read(done / "trajectory.bin").header.fingerprint
    assert info["model_revision"] is info["data_revision"] is None  # a folder and files, not the hub
    assert info["matmul_precision"] == "highest"
    assert info["start"] <= info["end"]


def test_uncompiled_noise_is_said(done: Path, roberta: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the later runs of a process in which the compiler failed in an earlier one."""
    assert Run(done).info()["noise_kernels"] == "eager"
    assert "10 to 30 times slower: MEZO_EAGER is set" in (done / "train.log").read_text()
    monkeypatch.setenv("MEZO_EAGER", "0")
    monkeypatch.setattr(Kernel, "compiler_error", "no compiler")
    ok("train", *small(roberta, done.parent / "movies", tmp_path / "run", "steps=1"))
    assert Run(tmp_path / "run").info()["noise_kernels"] == "eager"
    assert "10 to 30 times slower: no compiler" in (tmp_path / "run" / "train.log").read_text()


def test_metrics_lines(done: Path) -> None:
    train, evals = lines(done, "train"), lines(done)
    assert [line["step"] for line in train] == [2, 4, 6]
    for line in train:
        wanted = {"kind", "step", "loss", "loss_plus", "loss_minus", "projected_grad", "lr", "seconds"}
        assert wanted <= set(line)
        assert line["loss"] == pytest.approx((line["loss_plus"] + line["loss_minus"]) / 2)
        assert line["projected_grad"] == pytest.approx((line["loss_plus"] - line["loss_minus"]) / 2e-3, rel=1e-5)
        assert line["lr"] == float(np.float32(1e-2))
    assert [line["seconds"] for line in train] == sorted(line["seconds"] for line in train)
    best = summary(done)["best"]["step"]
    seen = [(line["split"], line["step"]) for line in evals]
    assert seen == [("dev", 0), ("test_before", 0), ("dev", 3), ("dev", 6), ("train", best), ("test", best)]
    for line in evals:
        assert {"kind", "step", "split", "loss", "accuracy", "predicted"} <= set(line)
        assert list(line["predicted"]) == ["negative", "positive"]
        assert sum(line["predicted"].values()) == (24 if line["split"] == "train" else 12)


def test_summary(done: Path) -> None:
    made, evals = summary(done), lines(done)
    assert {"seconds", "verdict", "verdict_reason", "difference", "baselines"} < set(made)
    assert (made["steps"], made["forwards"], made["backwards"]) == (6, 12, 0)
    dev = [line for line in evals if line["split"] == "dev"]
    best = min(dev, key=lambda line: (-line["accuracy"], line["loss"], line["step"]))
    assert made["best"] == {"step": best["step"], "accuracy": best["accuracy"]}
    for split, line in (("dev", best), ("test", evals[-1]), ("test_before", evals[1])):
        assert (made[split]["accuracy"], made[split]["loss"]) == (line["accuracy"], line["loss"])
    assert made["train"] == {"accuracy": evals[-2]["accuracy"], "loss": evals[-2]["loss"], "rows": 24}
    grads = np.abs(trajectory.read(done / "trajectory.bin").grads)
    facts = {"zero_fraction": 0.0, "mean_abs": grads.mean(), "min_abs": grads.min(), "max_abs": grads.max()}
    assert made["projected_grad"] == pytest.approx(facts)
    assert made["peak_memory_bytes"] > 10_000_000


def test_config_yaml_is_enough_to_run_again(done: Path, tmp_path: Path) -> None:
    config = read_config(done / "config.yaml")
    assert (config.steps, config.data.seed, config.task.name) == (6, 42, "sst2")
    run = Run.create(tmp_path / "again", (done / "config.yaml").read_text(), ["test"])
    with run.tracked():
        loop.train(config, run, Console(quiet=True))
    assert (run.path / "config.yaml").read_bytes() == (done / "config.yaml").read_bytes()
    assert run.trajectory.read_bytes() == (done / "trajectory.bin").read_bytes()
    for file in ("best/model.safetensors", "last/model.safetensors"):
        assert (run.checkpoints / file).read_bytes() == (done / "checkpoints" / file).read_bytes()
    first, again = (
        [{key: value for key, value in line.items() if key not in ("seconds", "crc")} for line in Run(folder).metrics()]
        for folder in (done, run.path)
    )
    assert again == first


def test_the_log_and_the_last_lines(done: Path) -> None:
    log, said = (done / "train.log").read_text(), (done.parent / "said").read_text()
    assert "step 3/6  dev accuracy" in log
    assert "step 3/6  loss" in log
    rows = {name.strip(): rest.split() for name, _, rest in (line.partition("   ") for line in said.splitlines())}
    made, first = summary(done), lines(done)[0]
    assert rows["dev before training"] == [f"{100 * first['accuracy']:.1f}%", f"{first['loss']:.4f}", "0"]
    assert rows["dev best"][0] == f"{100 * made['dev']['accuracy']:.1f}%"
    assert rows["test at best"][0] == f"{100 * made['test']['accuracy']:.1f}%"
    assert f"mezo eval {done}" in said
    assert said.splitlines()[-2].startswith(f"verdict  {made['verdict']}: ")
    assert said.splitlines()[-1].startswith("next     mezo ")


def test_training_changes_the_trained_tensors_alone(done: Path, roberta: Path) -> None:
    before = stored_tensors(roberta)
    after = stored_tensors(done / "checkpoints" / "last")
    assert set(before) == set(after)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name, _ in trajectory.read(done / "trajectory.bin").header.tensors}


def test_the_same_directory_again_is_refused_and_names_resume(done: Path) -> None:
    words = Run(done).info()["argv"][2:]
    before = {p: p.read_bytes() for p in done.rglob("*") if p.is_file()}
    assert f"mezo resume {done}" in error_line(mezo("train", *words))
    assert {p: p.read_bytes() for p in done.rglob("*") if p.is_file()} == before


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("more", "evals", "trains"),
    [
        (["steps=2", "eval_every=10"], [0, 2], [2]),
        (["steps=0"], [0], []),
        (["steps=4", "eval_every=0"], [0, 4], [2, 4]),
        (["steps=5", "eval_every=2", "log_every=100"], [0, 2, 4, 5], [5]),
        (["steps=3", "eval_every=1", "log_every=null"], [0, 1, 2, 3], [1, 2, 3]),
        (["steps=2", "batch_size=1000", "eval_batch_size=5"], [0, 2], [2]),
    ],
)
def test_odd_counts_work(more: list[str], evals: list[int], trains: list[int], train: Train, tmp_path: Path) -> None:
    run = tmp_path / "run"
    said = train(run, *more)
    assert said.code == 0, said
    assert [line["step"] for line in lines(run) if line["split"] == "dev"] == evals
    assert [line["step"] for line in lines(run, "train")] == trains
    made = summary(run)
    assert made["steps"] == evals[-1]
    assert made["forwards"] == 2 * evals[-1]
    assert {p.name for p in (run / "checkpoints").iterdir()} == {"best", "last"}
    assert Run(run).checkpoint_step("last") == evals[-1]
    assert Run(run).checkpoint_step("best") == made["best"]["step"]


def test_no_steps_is_zero_shot(roberta: Path, movies: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert mezo("train", *small(roberta, movies, run, "steps=0")).code == 0
    none = {"zero_fraction": None, "mean_abs": None, "min_abs": None, "max_abs": None}
    assert summary(run)["projected_grad"] == none
    assert summary(run)["best"]["step"] == 0
    assert set(summary(run)["baselines"]["label_shares"]["test"]) == {"accuracy", "intervals"}
    assert not {"test_before", "difference"} & set(summary(run))
    before, after = (stored_tensors(folder) for folder in (roberta, run / "checkpoints" / "best"))
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_checkpoint_every_saves(roberta: Path, movies: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[tuple[str, int]] = []
    save = Run.save_checkpoint
    monkeypatch.setattr(
        Run, "save_checkpoint", lambda run, name, step, w: (saved.append((name, step)), save(run, name, step, w))
    )
    words = small(roberta, movies, tmp_path / "run", "steps=7", "eval_every=4", "checkpoint_every=2", "log_every=100")
    assert mezo("train", *words).code == 0
    assert [step for name, step in saved if name == "last"] == [0, 2, 4, 6, 7]


def test_a_loss_that_has_not_moved_names_the_rate_of_the_table(train: Train, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert train(run, "optimizer.lr=1e-12", "steps=2").code == 0
    reason = Run(run).read_summary()["verdict_reason"]
    assert "has moved by less than its noise" in reason
    assert "optimizer.lr=1e-12 may be too small; runs of peft=none on models of this size begin with 0.0002" in reason
    assert "next     mezo d" in (run / "train.log").read_text()  # data --words, or doctor


@pytest.mark.parametrize(
    ("more", "part"),
    [
        (["optimizer.lr=1e30"], "(loss_plus is nan); try a lower optimizer.lr, 3e+29 (now 1e+30)"),
        (["optimizer.lr=1e30", "optimizer.eps=0.1", "objective.loss=accuracy"], "the loss is not finite"),
        (["optimizer.eps=1e30"], "optimizer.eps (now 1e+30)"),
        (["optimizer.lr=1e30", "model.compute_dtype=float16"], "model.compute_dtype=bfloat16 or float32 has the range"),
    ],
)
def test_a_loss_that_is_not_finite_stops_the_run(more: list[str], part: str, train: Train, tmp_path: Path) -> None:
    run = tmp_path / "run"
    said = train(run, "log_every=1", "batch_size=24", *more)
    assert said.code == 1, said
    assert said.err.count("\n") == 1
    assert part in said.err
    info = Run(run).info()
    assert info["status"] == "failed"
    assert part in info["error"]
    assert part in (run / "train.log").read_text()
    assert not (run / "summary.json").exists()
    text = (run / "metrics.jsonl").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    assert bool(np.isfinite(trajectory.read(run / "trajectory.bin").grads).all())
    assert "diverged" in mezo("runs", tmp_path).out


def test_train_checks_a_low_compute_dtype_before_the_first_step(train: Train, tmp_path: Path) -> None:
    more = ["steps=2", "model.compute_dtype=bfloat16", "optimizer.eps=1e-5"]
    result = train(tmp_path / "run", *more)
    assert result.code == 0, result
    log = (tmp_path / "run" / "train.log").read_text()
    assert "warning: bfloat16: projected gradients are off by" in log
    assert log.index("projected gradients are off by") < log.index("step 0/2  dev")


def test_noise_of_torch_warns_that_it_repeats(train: Train, tmp_path: Path) -> None:
    noise = TorchNoise()
    first, second = (noise.z(Direction(42, step), "w", (4,), "cpu") for step in (0, 1))
    assert first.tolist() == second.tolist()
    said = train(tmp_path / "run", "steps=1", "optimizer.noise=torch")
    assert said.code == 0, said
    assert "z is the same at every step" in (tmp_path / "run" / "train.log").read_text()
