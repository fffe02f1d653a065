"""What a session is checked for at its start, and that every name of the schema has its row and its YAML."""

from pathlib import Path

import pytest
import torch
from transformers.models.roberta.modeling_roberta import RobertaLMHead

from mezo_cli.config.compose import build_config
from mezo_cli.errors import UserError
from mezo_cli.models import fingerprint
from mezo_cli.objectives.plain_check import PlainCheck
from mezo_cli.session.opening import opened


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
