"""Adapters: each method trains its own tensors only, saves them alone, resumes, replays, and loads in plain `peft`."""

import json
import shutil
import zlib
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    DistilBertConfig,
    DistilBertForMaskedLM,
)

from mezo_cli import models
from mezo_cli.adapters.adapter import attach
from mezo_cli.config.compose import build_config
from mezo_cli.config.stored import read_config
from mezo_cli.errors import UserError
from mezo_cli.models import CAUSAL_LM
from mezo_cli.models.quantized import quantized_layers
from mezo_cli.objectives.base import BatchLoss
from mezo_cli.optim.mezo import Mezo
from mezo_cli.perturb.noise import Direction
from mezo_cli.runs import Run, trajectory
from mezo_cli.session.opening import opened
from mezo_cli.session.session import Session
from tests import tiny
from tests.command_line import error_line, finished_runs, mezo, small
from tests.interruption import interrupted_at, replay_from_base
from tests.optim.test_mezo import SENTENCES, outputs_of, ready

pytestmark = pytest.mark.usefixtures("eager_kernels")

Z = Direction(5, 3)
# Each method with both objectives, and with the families, noises and dtypes in turn.
CASES = [
    ("lora", "mlm", "roberta", "gaussian", "float32"),
    ("lora", "cls", "bert", "torch", "bfloat16"),
    ("lora peft.head=true", "mlm", "roberta", "gaussian", "float32"),
    ("prefix", "mlm", "bert", "rademacher", "float32"),
    ("prefix", "cls", "roberta", "gaussian", "bfloat16"),
    ("head", "mlm", "bert", "torch", "float32"),
    ("head", "cls", "roberta", "rademacher", "float32"),
    ("bias", "mlm", "roberta", "gaussian", "bfloat16"),
    ("bias", "cls", "untied", "rademacher", "float32"),
]
RUNS = {"lora": "mlm", "prefix": "mlm", "head": "cls", "bias": "cls"}
SCALES = ["peft=scales", "model.quantize=int8"]
# A large lr, so that factors reach 0.
TO_ZERO = [*SCALES, "optimizer.eps=0.1", "optimizer.lr=100", "optimizer.clip_g=1", "checkpoint_every=4"]


def scores(session: Session) -> torch.Tensor:
    return session.objective.logits(session.objective.collate(session.encoder.encode_all(SENTENCES)))


def perturb_in_place(session: Session, c: float) -> None:
    """Add c z to the trainable tensors."""
    with torch.no_grad():
        for name, p in session.params.tensors.items():
            p += c * session.params.noise.z(Z, name, p.shape, "cpu").view(p.shape)


@pytest.mark.parametrize(("kind", "objective", "family", "noise", "dtype"), CASES)
def test_only_the_adapter_moves(kind: str, objective: str, family: str, noise: str, dtype: str, request: Any) -> None:
    words = [*f"peft={kind}".split(), f"objective={objective}", f"optimizer.noise={noise}", "task=sst2"]
    words += [f"model.compute_dtype={dtype}", "optimizer.lr=1e-2", "optimizer.weight_decay=0.1", "optimizer.eps=0.1"]
    ours, moved = (ready(request.getfixturevalue(family), *words) for _ in range(2))
    batch = ours.objective.collate(ours.encoder.encode_all(SENTENCES))
    assert ours.forward.select_reachable(lambda: ours.objective.logits(batch)) == []
    with torch.no_grad():
        here = scores(ours)
        with ours.forward.perturbed(Z, 0.5, signs=(1,)):
            there = scores(ours)
        perturb_in_place(moved, 0.5)
        way = float((here - there).abs().max())
        assert way > 1e-3
        torch.testing.assert_close(there, scores(moved), rtol=0, atol=way * (1e-3 if dtype == "float32" else 0.3))
        assert torch.equal(here, scores(ours))
        with ours.forward.perturbed(Z, 0.1):
            both = ours.objective.logits(batch)
            apart = ours.forward.forward_per_sign(lambda: ours.objective.logits(batch))
        torch.testing.assert_close(both, apart, rtol=1e-4, atol=1e-5 if dtype == "float32" else 0.05)
        before = {name: p.detach().clone() for name, p in ours.loaded.model.named_parameters()}
        for step in range(3):
            ours.optimizer.step(ours.forward, BatchLoss(ours.objective, [batch]), step)
    changed = {name for name, p in ours.loaded.model.named_parameters() if not torch.equal(before[name], p)}
    assert changed == set(ours.params.tensors)
    assert 0 < len(changed) < len(before)


@torch.no_grad()
def test_the_initial_model_is_the_base_model(roberta: Path) -> None:
    """B of a LoRA is zero. A prefix does change the model, like tokens before the text."""
    base = scores(ready(roberta))
    changed = [kind for kind in RUNS if not torch.equal(scores(ready(roberta, f"peft={kind}")), base)]
    assert changed == ["prefix"]


def test_a_lora_may_train_the_head_over_the_vocabulary_beside_it(roberta: Path) -> None:
    """As the released code does; with objective=cls the classifier is trained in any case."""
    alone, beside = (ready(roberta, "peft=lora", f"peft.head={head}") for head in ("false", "true"))
    names = {name for name in beside.params.tensors if name not in alone.params.tensors}
    head = dict(alone.loaded.model.lm_head.named_parameters())
    assert names == {f"lm_head.modules_to_save.default.{name}" for name in {*head, "decoder.weight"}}
    own, classifier = (ready(roberta, "peft=lora", *words, "objective=cls") for words in ((), ["peft.head=true"]))
    assert [*own.params.tensors] == [*classifier.params.tensors]


@pytest.mark.parametrize("targets", ["query_value", "attention_feed_forward"])
def test_the_settings_of_lora(targets: str, roberta: Path) -> None:
    ours = ready(roberta, "peft=lora", "peft.r=3", "peft.alpha=6", f"peft.targets={targets}")
    shapes = {tuple(p.shape) for p in ours.params.tensors.values()}
    wide = {(3, 64), (64, 3)} if targets == "attention_feed_forward" else set()
    assert shapes == {(3, 32), (32, 3)} | wide
    assert len(ours.params.tensors) == 2 * 2 * (6 if wide else 2)
    layer = ours.loaded.model.roberta.encoder.layer[0].attention.self.query
    assert layer.scaling == {"default": 2.0}
    assert (layer.merged, layer.training) == (False, False)


@pytest.mark.parametrize("kind", ["lora", "prefix"])
def test_the_seed_draws_the_initial_adapter(kind: str, roberta: Path) -> None:
    one, same, other = (ready(roberta, f"peft={kind}", f"seed={seed}").params.tensors for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not all(torch.equal(one[name], other[name]) for name in one)


def at(run: Path, step: str) -> Session:
    return opened(read_config(run / "config.yaml"), Run.open(run), step)


def same(one: Session, other: Session) -> bool:
    a, b = (dict(s.loaded.model.named_parameters()) for s in (one, other))
    return set(a) == set(b) and all(torch.equal(a[name], b[name]) for name in a)


def plain(base: Path, objective: str, folder: Path) -> Any:
    """Load the base model with the adapter by transformers and peft alone."""
    transformers.logging.set_verbosity_error()
    if objective == "mlm":
        stock = AutoModelForMaskedLM.from_pretrained(base)
    else:
        stock = AutoModelForSequenceClassification.from_pretrained(base, num_labels=2)
    return peft.PeftModel.from_pretrained(stock, folder).eval()


@pytest.fixture(scope="module")
def runs(roberta: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of one finished run per method, and of one that trains scales."""
    livelier = ["optimizer.eps=0.1", "optimizer.lr=0.1"]
    cases = {"scales": TO_ZERO} | {
        kind: [f"peft={kind}", f"objective={objective}", *livelier] for kind, objective in RUNS.items()
    }
    home = tmp_path_factory.mktemp("runs")
    return finished_runs(home, roberta, tiny.movie_folder(home / "movies"), cases)


@pytest.mark.parametrize("kind", RUNS)
def test_a_run_stores_the_adapter_alone_and_says_what_it_trains(kind: str, runs: Path, roberta: Path) -> None:
    run = runs / kind
    files = {path.name: path.stat().st_size for path in (run / "checkpoints" / "last").iterdir()}
    assert set(files) == {"adapter_config.json", "adapter_model.safetensors", "mezo.json"}
    trainable = json.loads((run / "run.json").read_text())["trainable"]
    assert files["adapter_model.safetensors"] < 4 * trainable["count"] * 1.3 + 4000  # tied tensors are stored twice
    stored = peft.PeftConfig.from_pretrained(run / "checkpoints" / "last")
    assert stored.base_model_name_or_path == str(roberta)
    ours = at(run, "last")
    assert trainable["names"] == list(ours.params.tensors)
    assert trainable["count"] == sum(p.numel() for p in ours.params.tensors.values())
    assert 0 < trainable["share"] < 0.2
    assert f"peft   {kind}: " in (run / "train.log").read_text()


@pytest.mark.parametrize("kind", RUNS)
def test_a_run_is_replayed_and_evaluated(kind: str, runs: Path, tmp_path: Path) -> None:
    run, name = runs / kind, "adapter_model.safetensors"
    settings, opened = read_config(run / "config.yaml"), Run.open(run)
    assert not same(replay_from_base(settings, opened, 5), at(run, "last"))
    assert mezo("replay", run, "--step", "6", "--out", tmp_path / "out").code == 0
    assert (tmp_path / "out" / name).read_bytes() == (run / "checkpoints" / "last" / name).read_bytes()
    by_run, by_folder = mezo("eval", run, "--checkpoint", "last"), mezo("eval", run / "checkpoints" / "last")
    assert by_run.code == by_folder.code == 0
    assert by_run.out.splitlines()[1:] == by_folder.out.splitlines()[1:]


@pytest.mark.parametrize(("kind", "objective", "family"), [case[:3] for case in CASES])
def test_plain_peft_loads_an_adapter(kind: str, objective: str, family: str, tmp_path: Path, request: Any) -> None:
    base = request.getfixturevalue(family)
    ours = ready(base, *f"peft={kind}".split(), f"objective={objective}")
    batch = ours.objective.collate(ours.encoder.encode_all(SENTENCES))
    with torch.no_grad():
        before = scores(ours)
        perturb_in_place(ours, 0.3)
        models.save(ours.loaded, tmp_path)
        stock = plain(base, objective, tmp_path)
        theirs = outputs_of(stock, ours, batch)
        assert (theirs - before).abs().max() > 1e-3
        torch.testing.assert_close(scores(ours), theirs, rtol=1e-4, atol=1e-5)


def test_an_adapter_is_refused_as_a_model(runs: Path, roberta: Path, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    for part in (runs / "lora" / "checkpoints" / "last", roberta):  # transformers would load the base that it names
        shutil.copytree(part, folder, dirs_exist_ok=True)
        refused = error_line(mezo("eval", folder, "task=sst2", "data=demo"))
        assert "this is an adapter (adapter_config.json), not a model" in refused


def test_another_base_model_is_refused(roberta: Path, movies: Path, tmp_path: Path) -> None:
    base, run = tmp_path / "base", tmp_path / "run"
    shutil.copytree(roberta, base)
    assert mezo("train", *small(base, movies, run, "peft=lora")).code == 0
    tiny.roberta(base, seed=1)
    assert "was trained on other base weights than these" in error_line(mezo("eval", run))


def test_an_unsupported_family_is_refused_in_one_line(movies: Path, tmp_path: Path, roberta: Path) -> None:
    folder = tmp_path / "distilbert"
    shutil.copytree(roberta, folder)
    size = len(transformers.AutoTokenizer.from_pretrained(roberta))
    DistilBertForMaskedLM(
        DistilBertConfig(vocab_size=size, dim=32, n_layers=2, n_heads=2, hidden_dim=64, max_position_embeddings=80)
    ).save_pretrained(folder)
    said = error_line(mezo("train", *small(folder, movies, tmp_path / "run", "peft=prefix")))
    assert "DistilBertForMaskedLM is a model family that peft=prefix does not support" in said
    assert mezo("train", *small(folder, movies, tmp_path / "lora", "peft=lora", "steps=1")).code == 0


def test_a_family_of_other_matrices_is_told_of_the_targets_that_it_has(roberta: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("mezo_cli.adapters.methods.QUERY_VALUE", ())
    with pytest.raises(UserError, match=r"query_value does not support; use peft\.targets=attention_feed_forward$"):
        ready(roberta, "peft=lora")
    assert ready(roberta, "peft=lora", "peft.targets=attention_feed_forward").params.tensors


def test_a_prefix_that_leaves_no_tokens_for_the_text_is_refused(roberta: Path) -> None:
    most = ready(roberta).loaded.tokenizer.model_max_length
    with pytest.raises(UserError, match=rf"peft.length={most}: .* takes {most} tokens"):
        ready(roberta, "peft=prefix", f"peft.length={most}")


IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])


def decoder(folder: Path, *words: str) -> models.LoadedModel:
    config = build_config([f"model.path={folder}", "model.device=cpu", *words])
    loaded = models.load(config.model, CAUSAL_LM, [], 0)
    attach(loaded, config.peft, config.model, seed=1)
    return loaded


@pytest.mark.parametrize("family", ["gpt2", "opt", "llama"])
def test_the_initial_prefix_equals_tokens_before_the_text(family: str, tmp_path: Path) -> None:
    """In a decoder this is exact: the logits are those of the text after the tokens themselves."""
    stock, ours = (decoder(tiny.decoder(tmp_path, family), *words) for words in ((), ("peft=prefix",)))
    words = sorted(set(stock.tokenizer.get_vocab().values()) - set(stock.tokenizer.all_special_ids))
    torch.manual_seed(zlib.crc32(b"fresh adapter 1"))
    tokens = torch.tensor(words)[torch.randint(len(words), (5,))]
    with torch.no_grad():
        want = stock.model(torch.cat((tokens.expand(2, -1), IDS), dim=1)).logits[:, 5:]
        seen = ours.model(IDS, attention_mask=torch.ones_like(IDS)).logits
    torch.testing.assert_close(seen, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "kind"),
    [("gpt2", "lora"), ("opt", "lora"), ("llama", "lora"), ("llama", "prefix"), ("gpt2", "head"), ("opt", "bias")],
)
def test_plain_peft_loads_the_adapter_of_a_decoder(family: str, kind: str, tmp_path: Path) -> None:
    base, saved = tiny.decoder(tmp_path / "base", family), tmp_path / "adapter"
    ours = decoder(base, f"peft={kind}")
    with torch.no_grad():
        for p in ours.model.parameters():
            if p.requires_grad:
                p += 0.3 * torch.randn_like(p)
    models.save(ours, saved)
    if kind == "lora":
        targets = set(json.loads((saved / "adapter_config.json").read_text())["target_modules"])
        assert targets == ({"c_attn"} if family == "gpt2" else {"q_proj", "v_proj"})
    stock = decoder(base).model
    with torch.no_grad():
        before = stock(IDS).logits
        theirs = peft.PeftModel.from_pretrained(stock, saved).eval()(IDS, attention_mask=torch.ones_like(IDS)).logits
        torch.testing.assert_close(ours.model(IDS, attention_mask=torch.ones_like(IDS)).logits, theirs)
        assert (before - theirs).abs().max() > 1e-2


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("lora", ["objective=cls"]),
        ("lora peft.head=true", ["objective=mlm"]),
        ("prefix", ["objective=cls", "checkpoint=trajectory"]),
        ("head", ["objective=cls", "model.compute_dtype=bfloat16"]),
        ("bias", ["objective=cls", "checkpoint=trajectory"]),
    ],
)
def test_an_interrupted_run_ends_bitwise_identical(
    kind: str, words: list[str], roberta: Path, movies: Path, tmp_path: Path
) -> None:
    run, whole, words = tmp_path / "cut", tmp_path / "whole", [*f"peft={kind}".split(), *words]
    assert mezo("train", *small(roberta, movies, whole, *words)).code == 0
    with interrupted_at(Mezo, "step", 5):
        assert mezo("train", *small(roberta, movies, run, *words)).code == 130
    assert mezo("resume", run).code == 0
    assert all(same(at(run, step), at(whole, step)) for step in ("last", "best"))


# --- the scales of a quantised base ---


@pytest.mark.parametrize("absolute", [False, True])
def test_a_step_changes_the_scales_alone_and_none_is_negative(absolute: bool, roberta: Path) -> None:
    base = ready(roberta, "peft=lora", "model.quantize=int8")
    size = "1" if absolute else "300"
    ours = ready(roberta, *SCALES, f"peft.absolute={absolute}", f"optimizer.lr={size}", "optimizer.eps=1e-4")
    batch, z = ours.objective.collate(ours.encoder.encode_all(SENTENCES)), Direction(5, 3)
    assert ours.forward.select_reachable(lambda: ours.objective.logits(batch)) == []
    layers = quantized_layers(ours.loaded.model)
    assert list(ours.params.tensors) == [f"{path}.rows.factor" for path in layers]
    with torch.no_grad():
        torch.testing.assert_close(scores(ours), scores(base))
        with ours.forward.perturbed(z, 0.1):
            both = ours.objective.logits(batch)
            apart = ours.forward.forward_per_sign(lambda: ours.objective.logits(batch))
        torch.testing.assert_close(both, apart, rtol=1e-4, atol=1e-5)
        before = {name: p.clone() for name, p in ours.params.tensors.items()}
        result = ours.optimizer.step(ours.forward, BatchLoss(ours.objective, [batch]), 0)
        (g,), noise = result.recorded, ours.params.noise
        for name, p in ours.params.tensors.items():
            drawn = noise.z(Direction(ours.config.seed, 0), name, p.shape, "cpu").view(p.shape)
            torch.testing.assert_close(p.data, (before[name] - result.lr * g * drawn).clamp_min(0.0))
    assert any(bool((p == 0).any()) for p in ours.params.tensors.values())


def test_a_head_beside_the_scales_may_be_negative(roberta: Path) -> None:
    ours = ready(roberta, *SCALES, "objective=cls")
    others = [name for name in ours.params.tensors if not name.endswith(".rows.factor")]
    assert others
    assert set(ours.params.nonnegative).isdisjoint(others)


def test_a_run_is_resumed_and_replayed_with_its_zeros(runs: Path, roberta: Path, tmp_path: Path) -> None:
    run = runs / "scales"
    name = Path("checkpoints") / "last" / "adapter_model.safetensors"
    header = trajectory.read(run / "trajectory.bin").header
    assert header.nonnegative == [tensor for tensor, _ in header.tensors]
    ours = at(run, "last")
    assert any(bool((p == 0).any()) for p in ours.params.tensors.values())
    assert mezo("replay", run, "--step", "6", "--out", tmp_path / "out").code == 0
    assert (tmp_path / "out" / name.name).read_bytes() == (run / name).read_bytes()
    with interrupted_at(Mezo, "step", 5):
        assert mezo("train", *small(roberta, runs / "movies", tmp_path / "cut", *TO_ZERO)).code == 130
    assert mezo("resume", tmp_path / "cut").code == 0
    assert (tmp_path / "cut" / name).read_bytes() == (run / name).read_bytes()


def test_the_export_has_the_scales_in_its_weights(runs: Path, tmp_path: Path) -> None:
    run = runs / "scales"
    ours = at(run, "last")
    assert "peft=scales has no adapter" in error_line(mezo("export", run, "--adapter", "--out", tmp_path / "out"))
    assert mezo("export", run, "--checkpoint", "last", "--out", tmp_path / "out").code == 0
    plain = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        batch = ours.objective.collate(ours.encoder.encode_all(SENTENCES))
        theirs = outputs_of(plain, ours, batch)
        torch.testing.assert_close(scores(ours), theirs, rtol=1e-4, atol=1e-5)
