"""What a forward spares: padding, and the lowest layers if they are not trained, with the same scores."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from mezo_cli.config.compose import build_config
from mezo_cli.config.registry import ENCODER_FAMILIES
from mezo_cli.config.schema import Example
from mezo_cli.errors import UserError
from mezo_cli.objectives.base import BatchLoss
from mezo_cli.perturb.noise import Direction
from mezo_cli.session.opening import opened
from mezo_cli.session.session import Session
from tests import tiny
from tests.models.test_loading import SERVED, SHAPE, family
from tests.optim.test_mezo import SENTENCES, outputs_of, ready, stock_of

pytestmark = pytest.mark.usefixtures("eager_kernels")

EVEN = [Example(("same length here",), 0), Example(("same length here",), 1)]
OBJECTIVES = ["mlm", "cls"]
BUILT = {"roberta": ("Roberta", SHAPE), "camembert": ("Camembert", SHAPE), **SERVED}  # a tokenizer without segments


@pytest.mark.parametrize(("name", "objective"), zip(ENCODER_FAMILIES.names, OBJECTIVES * 2, strict=True))
def test_packed_families_give_their_scores_also_in_paired_forwards(name: str, objective: str, tmp_path: Path) -> None:
    folder = family(tmp_path, BUILT[name])
    ours = ready(folder, f"objective={objective}")
    batch = ours.objective.collate(ours.encoder.encode_all(SENTENCES))
    ours.forward.select_reachable(lambda: ours.objective.logits(batch))
    assert ours.objective.fits_paired_forward(batch)
    stock, z = stock_of(ours, folder), Direction(3, 11)
    for rows in (SENTENCES[:1], EVEN):
        with torch.no_grad():
            other = ours.objective.collate(ours.encoder.encode_all(rows))
            expected = outputs_of(stock, ours, other)
            torch.testing.assert_close(ours.objective.logits(other), expected, rtol=1e-4, atol=1e-5)
    noise = {n: ours.params.noise.z(z, n, p.shape, "cpu").view(p.shape) for n, p in ours.params.tensors.items()}
    want = []
    with torch.no_grad():
        for way in (0.0, 0.05, -0.1):  # to theta, to theta + 0.05 z, from there to theta - 0.05 z
            for p_name, p in stock.named_parameters():
                p += way * noise.get(p_name, 0)
            want.append(outputs_of(stock, ours, batch))
        torch.testing.assert_close(ours.objective.logits(batch), want[0], rtol=1e-4, atol=1e-5)
        with ours.forward.perturbed(z, 0.05):
            both = ours.objective.logits(batch)
    torch.testing.assert_close(both, torch.stack(want[1:]), rtol=1e-4, atol=2e-5)
    assert (both[0] - both[1]).abs().max() > 1e-3


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("kind", ["roberta", "bert"])
def test_only_real_tokens_are_computed(objective: str, kind: str, request: Any) -> None:
    ours = ready(request.getfixturevalue(kind), f"objective={objective}")
    batch = ours.objective.collate(ours.encoder.encode_all(SENTENCES))
    seen: list[tuple[str, int]] = []
    layers = ours.loaded.model.base_model.encoder.layer
    for name, module in (("first", layers[0].intermediate.dense), ("last", layers[-1].intermediate.dense)):
        module.register_forward_pre_hook(lambda m, args, name=name: seen.append((name, args[0].shape[:-1].numel())))
    with torch.no_grad():
        ours.objective.logits(batch)
    lengths = [len(row.input_ids) for row in batch.rows]
    assert seen == [("first", sum(lengths)), ("last", len(SENTENCES))]
    assert len({*lengths}) > 1


def test_a_classification_head_of_another_family_takes_padded_batches(tmp_path: Path) -> None:
    folder = family(tmp_path, SERVED["distilbert"])
    ours = ready(folder, "objective=cls")
    batch = ours.objective.collate(ours.encoder.encode_all(SENTENCES))
    assert ours.objective.frozen is None
    assert not ours.objective.fits_paired_forward(batch)
    with torch.no_grad():
        want = stock_of(ours, folder)(**batch.layout).logits
        torch.testing.assert_close(ours.objective.logits(batch), want, rtol=1e-4, atol=1e-6)
        with ours.forward.perturbed(Direction(3, 11), 0.05):
            assert BatchLoss(ours.objective, [batch])().shape == (2,)


TEXTS = ["good", "a bad one okay", "okay okay", "It was a great film", "No", "Maybe it was good, maybe not"]
ROWS = [Example((text,), i % 2) for i, text in enumerate(TEXTS)]
LAYERS = 3
CASES = {  # -> how many layers are below the first trained tensor
    ("roberta", "mlm", "peft=head"): 3,
    ("roberta", "cls", "peft=head"): 3,
    ("roberta", "mlm", "peft=lora peft.layers=1"): 2,
    ("bert", "cls", "peft=bias peft.layers=2"): 1,
    ("llama", "lm", "peft=lora peft.layers=2"): 1,
    ("roberta", "mlm", "peft=bias"): 0,
    ("gpt2", "lm", "peft=head"): 3,
    ("opt", "lm", "peft=bias peft.layers=1"): 2,
}

LORA = ("roberta", "mlm", "peft=lora peft.layers=2")


class Folders:
    """Saved tiny models by family, each made when it is first asked for."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def __getitem__(self, family: str) -> Path:
        folder = self.home / family
        if not folder.exists():
            if family in ("roberta", "bert"):
                getattr(tiny, family)(folder, num_hidden_layers=LAYERS)
            else:
                tiny.decoder(folder, family, **{"n_layer" if family == "gpt2" else "num_hidden_layers": LAYERS})
        return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("models"))


def session_of(folders: Folders, case: tuple[str, str, str], *words: str) -> tuple[Session, list[Any]]:
    family, objective, peft = case
    named = [f"model.path={folders[family]}", f"model.name={family}", f"objective={objective}", *peft.split()]
    if objective == "lm":
        named.append("task.lm.label_words=[bad,rather good]")
    config = build_config([*named, "data=demo", "steps=3", "eval_batch_size=4", *words])
    session = opened(config, trains=True)
    rows = session.encoder.encode_all(ROWS)
    session.exclude_unreachable(rows[0])
    return session, rows


@contextmanager
def counted(session: Session) -> Iterator[list[int]]:
    """Count the forwards of the first layer, and the tokens in them, by the first of its modules with weights."""
    layers = next(m for m in session.loaded.model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == LAYERS)
    tokens: list[int] = []
    first = next(module for module in layers[0].modules() if any(True for _ in module.parameters(recurse=False)))
    hook = first.register_forward_hook(lambda module, args, output: tokens.append(args[0].shape[:-1].numel()))
    try:
        yield tokens
    finally:
        hook.remove()


@torch.no_grad()
def losses_of(session: Session, rows: list[Any], steps: int = 3) -> torch.Tensor:
    results = []
    for step in range(steps):
        batch = session.objective.collate([rows[i] for i in (step, step + 2, step + 3)])
        with session.forward.perturbed(Direction(7, step), 1e-2):
            results.append(BatchLoss(session.objective, [batch])())
    return torch.stack(results)


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_frozen_layers_run_once_per_batch_with_the_same_losses(case: tuple[str, str, str], folders: Folders) -> None:
    session, rows = session_of(folders, case, "model.cache_bytes=0")
    plain, _ = session_of(folders, case, "model.cache_frozen=off")
    assert session.objective.frozen is not None
    assert session.objective.frozen.count == CASES[case]
    assert plain.objective.frozen is not None
    assert plain.objective.frozen.count == 0
    with counted(session) as ours, counted(plain) as all_of_it:
        found, expected = losses_of(session, rows), losses_of(plain, rows)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert (found[:, 0] != found[:, 1]).all()
    assert sum(all_of_it) == (2 if CASES[case] else 1) * sum(ours)
    with torch.no_grad():
        torch.testing.assert_close(
            session.objective.evaluate(rows).values, plain.objective.evaluate(rows).values, rtol=1e-5, atol=1e-6
        )


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", [case for case, count in CASES.items() if count], ids=" ".join)
def test_kept_rows_are_computed_once_whatever_came_before(case: tuple[str, str, str], folders: Folders) -> None:
    session, rows = session_of(folders, case)
    resumed, same_rows = session_of(folders, case)
    plain, _ = session_of(folders, case, "model.cache_frozen=off")
    size = session.keep_states(rows)
    assert size == resumed.keep_states(same_rows) > 0
    with counted(session) as tokens:
        first = losses_of(session, rows)
        assert len(tokens) == 2  # groups of four rows and of two
        with torch.no_grad():
            scores = session.objective.evaluate(rows).values
        again = losses_of(session, rows)
        assert len(tokens) == 2
    torch.testing.assert_close(first, losses_of(plain, rows), rtol=1e-6, atol=0)
    assert torch.equal(first, again)
    with torch.no_grad():
        BatchLoss(resumed.objective, [resumed.objective.collate(same_rows[2:4])])()  # another batch comes first
        assert torch.equal(resumed.objective.evaluate(same_rows).values, scores)
    assert torch.equal(losses_of(resumed, same_rows), first)


@pytest.mark.parametrize(("less", "forwards"), [(1, 4), (0, 2)])
def test_a_split_that_does_not_fit_is_not_kept(less: int, forwards: int, folders: Folders) -> None:
    whole, rows = session_of(folders, LORA)
    size = whole.keep_states(rows)
    session, rows = session_of(folders, LORA, f"model.cache_bytes={size - less}")
    assert session.keep_states(rows, rows) == (0 if less else size)
    with counted(session) as tokens:
        losses_of(session, rows, steps=2)
        losses_of(session, rows, steps=2)
    assert len(tokens) == forwards


@pytest.mark.parametrize("peft", ["lora", "bias"])
def test_only_the_top_layers_are_trained(peft: str, folders: Folders) -> None:
    session, _ = session_of(folders, ("roberta", "mlm", f"peft={peft} peft.layers=2"))
    names = list(session.params.tensors)
    numbers = {int(found[1]) for name in names if (found := re.search(r"layer\.(\d+)\.", name))}
    assert numbers == {1, 2}
    assert not any("embed" in name for name in names)
    assert any(name.startswith("lm_head") for name in names) == (peft == "bias")


def test_more_layers_than_the_model_has_are_refused(folders: Folders) -> None:
    with pytest.raises(UserError, match=r"peft\.layers=4: model\.path=.* has 3 layers"):
        session_of(folders, ("roberta", "mlm", "peft=lora peft.layers=4"))
