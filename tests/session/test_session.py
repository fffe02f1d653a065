"""A session: what it is checked for at its start, and that a process holds one model at a time, a closed one none."""

from pathlib import Path

import pytest
import torch
from transformers.models.roberta.modeling_roberta import RobertaLMHead

from mezo_cli import api
from mezo_cli.config.compose import build_config
from mezo_cli.config.stored import read_config
from mezo_cli.errors import UserError
from mezo_cli.models import fingerprint
from mezo_cli.objectives.plain_check import PlainCheck
from mezo_cli.runs import Run
from mezo_cli.session.opening import opened
from tests.command_line import Train, mezo, ok, small
from tests.live_models import count_live
from tests.training.test_forgetting import WORDS

pytestmark = pytest.mark.usefixtures("eager_kernels")


def test_the_precision_of_products_is_the_runs_but_in_the_check(roberta: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    compare = PlainCheck.compare
    monkeypatch.setattr(
        PlainCheck, "compare", lambda *args: (seen.append(torch.get_float32_matmul_precision()), compare(*args))
    )
    for wanted in ("high", "highest"):
        opened(build_config([f"model.path={roberta}", "data=demo", f"model.matmul_precision={wanted}"]))
        assert torch.get_float32_matmul_precision() == wanted
    assert seen == ["highest", "highest"]


def test_a_weight_used_outside_its_module_is_refused(roberta: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a perturbation the scores are right; a step would see theta there instead of theta + eps z."""
    own = RobertaLMHead.forward

    def with_embedding(self: RobertaLMHead, features: torch.Tensor, **kwargs: object) -> torch.Tensor:
        table = self.decoder.weight  # tied to the input embeddings, which their own module reads
        return own(self, features + torch.nn.functional.linear(features, table[:32]), **kwargs)

    monkeypatch.setattr(RobertaLMHead, "forward", with_embedding)
    config = build_config([f"model.path={roberta}", "data=demo", "model.device=cpu"])
    opened(config)  # for an evaluation it will do
    with pytest.raises(UserError, match="RobertaForMaskedLM is a model family that is not supported: with perturbed"):
        opened(config, trains=True)


@pytest.mark.parametrize(
    "words",
    [[], ["objective=cls"], ["peft=lora"], ["peft=bias", "model.compute_dtype=bfloat16"], ["init=linear_probe"]],
)
def test_the_check_at_the_start_restores_every_bit(roberta: Path, words: list[str]) -> None:
    config = build_config([f"model.path={roberta}", "data=demo", "model.device=cpu", *words])
    checked, plain = opened(config, trains=True), opened(config)
    assert fingerprint(checked.loaded.model) == fingerprint(plain.loaded.model)
    assert list(checked.params.tensors) == list(plain.params.tensors)
    assert type(checked.params.noise) is type(plain.params.noise)


SHORT = ["steps=4", "batch_size=4", "eval_every=2", "log_every=1"]
KINDS = {
    "mlm": ["objective=mlm"],
    "lora": ["objective=mlm", "peft=lora"],
    "int8": ["objective=mlm", "peft=lora", "model.quantize=int8"],
    "adamw": ["objective=mlm", "optimizer=adamw"],
    "anchor": ["objective=mlm", "optimizer=es", "optimizer.members=4", "optimizer.anchor={l1: 1e-3}"],
    "generate": ["checkpoint=trajectory", "optimizer=es", "optimizer.members=4", "optimizer.anchor={l1: 1e-3}"],
}


@pytest.mark.parametrize(
    "kind", [name if name == "mlm" else pytest.param(name, marks=pytest.mark.slow) for name in KINDS]
)
def test_every_command_holds_one_model_at_a_time(
    kind: str, roberta: Path, movies: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weak references to all models before are dead whenever one is loaded, with the garbage collector as it is."""
    alive = count_live(monkeypatch)
    run = tmp_path / "run"
    # A generation run compares each evaluation with the start.
    words = [*WORDS, *SHORT] if kind == "generate" else small(roberta, movies, run, *SHORT)
    words = [*words, *KINDS[kind], f"hydra.run.dir={run}"]
    replays = kind != "adamw"
    if replays and kind not in ("generate", "anchor"):  # es has no table of rates
        auto = tmp_path / "auto"
        ok("train", *words, "optimizer.lr=auto", "steps=1", f"hydra.run.dir={auto}")
        assert len(alive) >= 5  # four rates and the run
    assert mezo("train", *words, "max_seconds=0.001", "at_limit=stop").code == 130
    commands: list[list[object]] = [["resume", run, "max_seconds=null"], ["eval", run]]
    commands += [["eval", run, "--checkpoint", "last"], ["verify", run]]
    if replays:
        commands += [["replay", run, "--step", "3", "--out", tmp_path / "replayed"]]
        commands += [["export", run, "--out", tmp_path / "shared", "--trajectory"], ["eval", run, "--checkpoint", "1"]]
    commands += [["export", run, "--out", tmp_path / "model"]]
    if kind == "mlm":
        commands += [["prune", run], ["doctor", *[word for word in words if "run.dir" not in word], "--seconds", "1"]]
    for command in commands:
        ok(*command)
    assert set(alive) == {0}


def test_a_closed_session_has_no_model(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two models that a user of the library opens are his; `with` and close() drop them."""
    run = tmp_path / "run"
    assert train(run, *SHORT).code == 0
    alive = count_live(monkeypatch)
    with api.load(run) as first, api.load(run, 1) as second:
        assert first.predict(["good"])
        assert second.predict(["good"])
    assert alive[0] == 0 < alive[1]
    with opened(read_config(run / "config.yaml"), Run.open(run), "last") as session:
        assert session.at == 4
    assert alive[2] == 0
    with pytest.raises(RuntimeError, match="the session is closed"):
        first.predict(["good"])
    with pytest.raises(RuntimeError, match="has no 'loaded' any more"):
        session.loaded  # noqa: B018
