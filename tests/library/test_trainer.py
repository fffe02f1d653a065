"""MezoTrainer: the Trainer's own loop with the step, saved, resumed and shared by processes, to the same bits."""

import os
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, RobertaConfig, RobertaForSequenceClassification, TrainingArguments

import mezo_cli
from mezo_cli import MezoOptimizer, MezoTrainer, replay
from mezo_cli.errors import UserError
from tests.ranks import call_in_ranks

pytestmark = pytest.mark.usefixtures("eager_kernels")

ROWS = [{"input_ids": [0, 3 + i, 20 - i, 7, 2], "attention_mask": [1] * 5, "labels": int(i > 3)} for i in range(8)]
SIZE: dict[str, Any] = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SIZE |= {"intermediate_size": 32, "max_position_embeddings": 12, "pad_token_id": 1}


def classifier(dtype: torch.dtype = torch.float32) -> RobertaForSequenceClassification:
    """Return a small RoBERTa with dropout."""
    torch.manual_seed(0)
    return RobertaForSequenceClassification(RobertaConfig(**SIZE)).to(dtype)


def decoder() -> GPT2LMHeadModel:
    """Return a small GPT-2 with dropout, whose embedding is its output layer."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=12, n_embd=16, n_layer=1, n_head=2))


def with_lora() -> nn.Module:
    model = peft.get_peft_model(classifier(), peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"]))
    assert isinstance(model, nn.Module)
    return model


def make(model: nn.Module, out: Path, mezo: dict[str, Any] | None = None, **values: Any) -> MezoTrainer:
    """Return a trainer on 8 rows that reports nothing."""
    arguments: dict[str, Any] = {"per_device_train_batch_size": 4, "max_steps": 6, "learning_rate": 1e-2}
    arguments |= {"save_strategy": "no", "logging_steps": 1, "report_to": [], "use_cpu": True, "disable_tqdm": True}
    more = {name: values.pop(name) for name in ("callbacks", "eval_dataset", "compute_metrics") if name in values}
    rows = values.pop("rows", ROWS)
    args = TrainingArguments(str(out), **{**arguments, **values})
    return MezoTrainer(model, args, train_dataset=rows, mezo={"eps": 1e-2, **(mezo or {})}, **more)


def losses(trainer: MezoTrainer) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def bits(model: nn.Module) -> dict[str, bytes]:
    return {name: p.detach().view(torch.uint8).numpy().tobytes() for name, p in model.named_parameters()}


def test_its_step_is_the_optimizers(tmp_path: Path) -> None:
    model, reference = classifier(), classifier()
    trainer = make(
        model, tmp_path, per_device_train_batch_size=8, weight_decay=0.1, warmup_steps=2, seed=5, max_grad_norm=1.0
    )
    trainer.train()
    batch = {key: torch.tensor([row[key] for row in ROWS]) for key in ROWS[0]}
    plain = [name for name, _ in reference.named_parameters() if "bias" in name or "LayerNorm" in name]
    groups = [{"params": lambda name: name not in plain}, {"params": plain, "weight_decay": 0.0}]
    optimizer = MezoOptimizer(reference, groups, lr=1e-2, eps=1e-2, weight_decay=0.1, seed=5)
    scheduler = transformers.get_linear_schedule_with_warmup(optimizer, 2, 6)
    expected = []
    for _ in range(6):
        expected.append(optimizer.step(lambda: reference(**batch).loss))
        scheduler.step()
    assert losses(trainer) == pytest.approx(expected, abs=1e-4)
    for p, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, wanted, rtol=1e-4, atol=1e-4)
    assert not any("grad_norm" in line for line in trainer.state.log_history)


@pytest.mark.parametrize("make_model", [classifier, decoder], ids=["mean of rows", "mean of tokens"])
def test_accumulated_micro_batches_are_one_batch(make_model: Any, tmp_path: Path) -> None:
    """Of a decoder also when the micro-batches have different numbers of tokens."""
    rows = ROWS
    if make_model is decoder:
        cut = [-100, -100, 5, 6, 7]
        rows = [{**row, "labels": row["input_ids"] if i % 3 else cut} for i, row in enumerate(ROWS)]
    whole, parts = make_model(), make_model()
    first = make(whole, tmp_path, rows=rows, per_device_train_batch_size=8, max_steps=3)
    second = make(parts, tmp_path, rows=rows, per_device_train_batch_size=2, gradient_accumulation_steps=4, max_steps=3)
    first.train()
    second.train()
    assert losses(second) == pytest.approx(losses(first), abs=1e-4)
    assert second.state.global_step == 3
    for p, wanted in zip(parts.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(p, wanted, rtol=1e-3, atol=1e-3)


RESUMED: dict[str, tuple[Any, dict[str, Any]]] = {
    "mezo": (classifier, {}),
    "adam": (classifier, {"betas": (0.9, 0.99), "samples": 2}),
    "bfloat16": (lambda: classifier(torch.bfloat16), {"momentum": 0.9}),
    "tied": (decoder, {"momentum": 0.5}),
    "lora": (with_lora, {"momentum": 0.9}),
}


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_training_ends_in_the_same_bits(name: str, tmp_path: Path) -> None:
    make_model, mezo = RESUMED[name]
    rows = [{**row, "labels": row["input_ids"]} for row in ROWS] if make_model is decoder else ROWS
    values = {"rows": rows, "save_strategy": "steps", "save_steps": 3, "weight_decay": 0.1}
    whole = make(make_model(), tmp_path / "run", mezo, **values)
    whole.train()
    resumed = make(make_model(), tmp_path / "resumed", mezo, **values)
    before = bits(resumed.model)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    assert bits(resumed.model) == bits(whole.model) != before
    assert losses(resumed)[-3:] == losses(whole)[-3:]


def test_callbacks_evaluation_and_the_best_model(tmp_path: Path) -> None:
    """A callback before the update sees the weights before it; the weights of the best evaluation are loaded."""
    seen: list[tuple[str, bytes]] = []

    class Watch(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(("before", bits(kwargs["model"])["classifier.dense.bias"]))

        def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(("after", bits(kwargs["model"])["classifier.dense.bias"]))

    trainer = make(
        classifier(), tmp_path / "run", {"trajectory": tmp_path / "run.bin"}, callbacks=[Watch()], eval_dataset=ROWS,
        compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(1) == p.label_ids).mean())},
        eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2, load_best_model_at_end=True,
        metric_for_best_model="loss",
    )  # fmt: skip
    trainer.train()
    assert [kind for kind, _ in seen] == ["before", "after"] * 6
    assert all(before != after for (_, before), (_, after) in zip(seen[::2], seen[1::2], strict=True))
    assert [after for _, after in seen[1:-1:2]] == [before for _, before in seen[2::2]]
    evaluated = {line["step"]: line for line in trainer.state.log_history if "eval_loss" in line}
    assert sorted(evaluated) == [2, 4, 6]
    assert {"eval_accuracy"} <= evaluated[2].keys()
    best = min(evaluated, key=lambda step: evaluated[step]["eval_loss"])
    again = classifier()
    replay(again, tmp_path / "run.bin", best)
    assert bits(again) == bits(trainer.model)
    saved = RobertaForSequenceClassification.from_pretrained(trainer.state.best_model_checkpoint)
    assert bits(saved) == bits(again)


def train_in_rank(out: str, name: str) -> tuple[dict[str, bytes], list[float], str]:
    """Train in one of several processes; the weights before differ, as those of a new head would."""
    make_model, mezo = RESUMED[name]
    model = make_model()
    rank = torch.tensor(int(__import__("os").environ["RANK"]))
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p += 0.01 * rank
    trainer = make(model, Path(out), {**mezo, "trajectory": Path(out) / "run.bin"}, max_steps=3)
    trainer.train()
    return bits(model), losses(trainer), type(trainer.model_wrapped).__name__


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mezo", "lora"])
def test_two_processes_share_the_rows_of_a_step(name: str, tmp_path: Path) -> None:
    (tmp_path / "ranks").mkdir()
    first, second = call_in_ranks(2, train_in_rank, str(tmp_path / "ranks"), name)
    assert first[0] == second[0]
    assert "DistributedDataParallel" not in first[2]
    model, fresh = RESUMED[name][0](), RESUMED[name][0]()
    alone = make(model, tmp_path / "alone", RESUMED[name][1], per_device_train_batch_size=8, max_steps=3)
    alone.train()
    assert first[1] == pytest.approx(losses(alone), abs=1e-4)
    replay(fresh, tmp_path / "ranks" / "run.bin")
    assert bits(fresh) == first[0]
    for p, wanted in zip(fresh.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p, wanted, rtol=1e-3, atol=1e-3)


def test_a_mistake_is_one_line(tmp_path: Path) -> None:
    model = classifier()
    with pytest.raises(UserError, match=r"mezo: lr is that of TrainingArguments\(learning_rate=\.\.\.\)"):
        make(model, tmp_path, {"lr": 1e-3})
    with pytest.raises(UserError, match=r"mezo: MezoOptimizer has no argument 'epss' \(did you mean 'eps'\?\)"):
        make(model, tmp_path, {"epss": 1e-3})
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    with pytest.raises(UserError, match="makes its optimizer itself: give its settings as mezo"):
        MezoTrainer(model, args, optimizers=(MezoOptimizer(classifier()), None))
    trainer = transformers.Trainer(model, args, train_dataset=ROWS, optimizers=(MezoOptimizer(model), None))
    with pytest.raises(UserError, match=r"use mezo_cli\.MezoTrainer"):
        trainer.train()


def test_threads_that_spin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for policy, threads, count in (("PASSIVE", 2, 0), ("", 1, 0), ("", 2, 1)):
        monkeypatch.setenv("OMP_WAIT_POLICY", policy)
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        make(classifier(), tmp_path, {})
        assert sum("OMP_WAIT_POLICY=PASSIVE" in line for line in caplog.messages) == count


def test_the_package_sets_the_environment_of_torch_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "")
    monkeypatch.delenv("OMP_WAIT_POLICY")
    monkeypatch.delitem(sys.modules, "torch")
    assert mezo_cli.load is not None
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
