"""Scores are products in float32, and losses sums in float64, whatever the compute dtype is."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from mezo_cli.config.compose import build_config
from mezo_cli.config.schema import Example
from mezo_cli.objectives.scoring import accuracy_loss, cross_entropy, f1_loss
from mezo_cli.perturb.noise import Direction
from mezo_cli.session.opening import opened

ROWS = [Example((text,), i % 2) for i, text in enumerate(("good", "a bad one", "okay okay"))]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("peft", ["none", "head"])
def test_the_layer_over_the_labels_is_computed_in_float32(
    peft: str, dtype: torch.dtype, roberta: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEZO_EAGER", "1")
    words = [f"model.path={roberta}", "model.name=tiny", "objective=cls", f"peft={peft}"]
    session = opened(build_config([*words, f"model.compute_dtype={str(dtype)[6:]}", "data=demo", "steps=3"]))
    batch = session.objective.collate(session.encoder.encode_all(ROWS))
    layer, _ = session.objective.output_layer()
    seen: list[Any] = []
    layer.register_forward_pre_hook(lambda module, args: seen.append(args[0].clone()))
    with torch.no_grad():
        logits = session.objective.logits(batch)
        assert seen[0].dtype == dtype
        expected = seen[0].float() @ layer.weight.T + layer.bias
        torch.testing.assert_close(logits, expected.view(len(ROWS), 2), rtol=1e-6, atol=1e-7)
        assert not torch.equal(logits, logits.to(dtype).float())
        with session.forward.perturbed(Direction(3, 0), 0.1):
            both = session.objective.logits(batch)
        assert both.shape == (2, len(ROWS), 2)
        assert (both[0] != both[1]).all()


def test_losses_are_those_of_float64() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(3001, 3, generator=generator), torch.randint(3, (3001,), generator=generator)
    assert cross_entropy(logits, labels).item() == F.cross_entropy(logits.double(), labels).item()
    right = int((logits.argmax(-1) == labels).sum())
    assert accuracy_loss(logits, labels).item() == 1 - right / 3001
    binary, truth = logits[:, :2], labels.clamp(max=1)
    predicted = binary.argmax(-1)
    hits, both = int((predicted & truth).sum()), int(predicted.sum() + truth.sum())
    assert f1_loss(binary, truth).item() == 1 - 2 * hits / both
