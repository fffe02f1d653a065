"""The scales of a quantised base: what is trained, kept from 0 on, resumed and replayed, and loaded by plain `peft`."""

from pathlib import Path

import pytest
import torch
import transformers

from mezo_cli.config.stored import read_config
from mezo_cli.models.quantized import quantized_layers
from mezo_cli.objectives.base import BatchLoss
from mezo_cli.optim.mezo import Mezo
from mezo_cli.perturb.noise import Direction
from mezo_cli.runs import Run, trajectory
from mezo_cli.session.opening import opened
from tests import tiny
from tests.command_line import error_line, finished_runs, mezo, small
from tests.interruption import interrupt_at
from tests.models.test_quantized import scores
from tests.optim.test_mezo import SENTENCES, outputs_of, ready

pytestmark = pytest.mark.usefixtures("eager_kernels")
WORDS = ["peft=scales", "model.quantize=int8"]
# A large lr, so that factors reach 0.
SETTINGS = [*WORDS, "optimizer.eps=0.1", "optimizer.lr=100", "optimizer.clip_g=1", "checkpoint_every=4"]


@pytest.mark.parametrize("absolute", [False, True])
def test_a_step_changes_the_scales_alone_and_none_is_negative(absolute: bool, roberta: Path) -> None:
    base = ready(roberta, "peft=lora", "model.quantize=int8")
    size = "1" if absolute else "300"
    ours = ready(roberta, *WORDS, f"peft.absolute={absolute}", f"optimizer.lr={size}", "optimizer.eps=1e-4")
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
    ours = ready(roberta, *WORDS, "objective=cls")
    others = [name for name in ours.params.tensors if not name.endswith(".rows.factor")]
    assert others
    assert set(ours.params.nonnegative).isdisjoint(others)


@pytest.fixture(scope="module")
def run(roberta: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("runs")
    return finished_runs(home, roberta, tiny.movie_folder(home / "movies"), {"scales": SETTINGS}) / "scales"


def test_a_run_is_resumed_and_replayed_with_its_zeros(run: Path, roberta: Path, tmp_path: Path) -> None:
    name = Path("checkpoints") / "last" / "adapter_model.safetensors"
    header = trajectory.read(run / "trajectory.bin").header
    assert header.nonnegative == [tensor for tensor, _ in header.tensors]
    ours = opened(read_config(run / "config.yaml"), Run.open(run), "last")
    assert any(bool((p == 0).any()) for p in ours.params.tensors.values())
    assert mezo("replay", run, "--step", "6", "--out", tmp_path / "out").code == 0
    assert (tmp_path / "out" / name.name).read_bytes() == (run / name).read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        interrupt_at(patch, Mezo, "step", 5)
        assert mezo("train", *small(roberta, run.parent / "movies", tmp_path / "cut", *SETTINGS)).code == 130
    assert mezo("resume", tmp_path / "cut").code == 0
    assert (tmp_path / "cut" / name).read_bytes() == (run / name).read_bytes()


def test_the_export_has_the_scales_in_its_weights(run: Path, tmp_path: Path) -> None:
    ours = opened(read_config(run / "config.yaml"), Run.open(run), "last")
    assert "peft=scales has no adapter" in error_line(mezo("export", run, "--adapter", "--out", tmp_path / "out"))
    assert mezo("export", run, "--checkpoint", "last", "--out", tmp_path / "out").code == 0
    plain = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        batch = ours.objective.collate(ours.encoder.encode_all(SENTENCES))
        theirs = outputs_of(plain, ours, batch)
        torch.testing.assert_close(scores(ours), theirs, rtol=1e-4, atol=1e-5)
