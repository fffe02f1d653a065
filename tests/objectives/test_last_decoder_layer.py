"""The last layer of a decoder: only the read positions are computed, with the scores of all positions."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mezo_cli.config.compose import build_config
from mezo_cli.config.registry import DECODER_FAMILIES
from mezo_cli.objectives import packed_decoder
from mezo_cli.objectives.batch_loss import BatchLoss
from mezo_cli.objectives.collate import Batch
from mezo_cli.perturb.noise import Direction
from mezo_cli.training.load import load_session
from mezo_cli.training.session import Session
from tests import tiny
from tests.optim.test_mezo import SENTENCES

CASES = dict.fromkeys(DECODER_FAMILIES.names, ("none", "rather bad,rather very good")) | {
    "opt post-norm": ("lora", "bad,good"),
    "llama prefix": ("prefix", "bad,utterly dull"),
    "gpt_neox prefix": ("prefix", "bad,good"),
}


def session_of(folder: Path, family: str, peft: str, words: str, **shape: Any) -> Session:
    tiny.decoder(folder, family, **shape)
    given = [f"model.path={folder}", "model.name=tiny", "model.device=cpu", "objective=lm", "data=demo"]
    return load_session(build_config([*given, f"task.lm.label_words=[{words}]", f"peft={peft}"]), trains=True)


def losses_of(session: Session, batch: Batch) -> torch.Tensor:
    with torch.no_grad(), session.forward.perturbed(Direction(3, 11), 1e-2):
        return BatchLoss(session.objective, [batch])()


def mlp_tokens(session: Session) -> list[int]:
    """Return a list that gets the rows of each product in the last layer's MLP."""
    frozen = session.objective.frozen
    assert frozen is not None
    names = ("mlp.down_proj", "mlp.c_proj", "mlp.dense_4h_to_h", "fc2")
    found = [m for name, m in frozen.last_layer.named_modules() if name in names]
    assert len(found) == 1
    tokens: list[int] = []
    found[0].register_forward_hook(lambda module, args, output: tokens.append(output.shape[:-1].numel()))
    return tokens


@pytest.mark.sample(4)
@pytest.mark.parametrize("case", CASES)
def test_only_read_positions_are_computed_with_the_same_losses(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEZO_EAGER", "1")
    family, peft, words = case.split()[0], *CASES[case]
    shape = {"do_layer_norm_before": False} if case == "opt post-norm" else {}
    session = session_of(tmp_path, family, peft, words, **shape)
    rows = session.encoder.encode_all(SENTENCES)
    session.exclude_unreachable(rows[0])
    batch, tokens = session.objective.collate(rows), mlp_tokens(session)
    found = losses_of(session, batch)
    assert tokens == [2 * batch.layout["scored_positions"].numel()]
    inputs = packed_decoder.packed_inputs

    def reading_all(*args: Any) -> dict[str, Any]:
        made = inputs(*args)
        return {**made, "packed_layout": replace(made["packed_layout"], read=None)}

    monkeypatch.setattr(packed_decoder, "packed_inputs", reading_all)
    other = session.objective.collate(rows)
    expected = losses_of(session, other)
    assert tokens[1:] == [2 * len(batch.layout["rows"])]
    assert found[0] != found[1]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
