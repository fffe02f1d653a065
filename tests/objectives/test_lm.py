"""Objective lm: scores compared with log-probabilities by plain transformers; loading, runs, probing, adapters."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from mezo_cli import models
from mezo_cli.config.compose import build_config
from mezo_cli.config.schema import Example
from mezo_cli.errors import UserError
from mezo_cli.objectives.base import BatchLoss
from mezo_cli.perturb.noise import Direction
from mezo_cli.session.opening import opened
from mezo_cli.session.session import Session
from mezo_cli.training import linear_probe as probing
from tests import tiny
from tests.command_line import mezo, small
from tests.objectives.plain_decoder import PlainDecoder
from tests.optim.test_mezo import PAIRS, SENTENCES

WORDS = {
    "single": ["terrible", "great"],
    "several": ["rather bad", "rather very good"],  # with a shared prefix
    "inside": ["good", "good grief"],  # one word is a prefix of the other
    "mixed": ["bad", "utterly dull"],
}

# Every family with words of each kind, prompts of both tasks and each adapter in turn.
PAIRS_OF_ALL = [
    (kind, list(WORDS)[i % 4], ("sst2", "rte")[i % 3 % 2], ("lora", "prefix", "head", "bias")[(i + i // 4) % 4])
    for i, kind in enumerate([*tiny.DECODERS, "gpt2", "opt", "llama"])
]


def ready(model: Path, *words: str) -> Session:
    given = [f"model.path={model}", "model.name=tiny", "model.device=cpu", "objective=lm", "data=demo", *words]
    return opened(build_config(given))


def label_words(words: list[str]) -> str:
    return f"task.lm.label_words=[{','.join(words)}]"


def by_hand(folder: Path, prompts: list[str], follows: list[str]) -> torch.Tensor:
    """Return full log-probabilities by plain transformers: one row and one label at a time."""
    plain = PlainDecoder(folder)
    return torch.tensor([[plain.log_probs(prompt, text).sum() for text in follows] for prompt in prompts])


def scores(ours: Session, rows: list[Example]) -> torch.Tensor:
    with torch.no_grad():
        return ours.objective.logits(ours.objective.collate(ours.encoder.encode_all(rows)))


def same(ours: torch.Tensor, full: torch.Tensor, **close: float) -> None:
    """Compare scores up to one number per row: the normalizer at the end of the prompt is left out."""
    torch.testing.assert_close(ours.log_softmax(-1), full.log_softmax(-1), **(close or {"rtol": 1e-5, "atol": 1e-4}))


@pytest.mark.parametrize(("kind", "words", "task", "peft"), PAIRS_OF_ALL)
def test_scores_are_the_log_probabilities_by_hand(kind: str, words: str, task: str, peft: str, tmp_path: Path) -> None:
    family = tiny.decoder(tmp_path, kind)
    ours = ready(family, f"task={task}", label_words(WORDS[words]))
    if task == "sst2":
        rows, space = SENTENCES, " "
        prompts = [f"{row.texts[0].strip()} It was" for row in rows]
    else:
        rows, space = PAIRS, ""
        asks = 'Does this mean that "{}" is true? Yes or No?'
        prompts = ["\n".join([row.texts[0], asks.format(row.texts[1]), ""]) for row in rows]
    with torch.no_grad():
        full = by_hand(family, prompts, [space + word for word in WORDS[words]])
    same(scores(ours, rows), full)
    assert (full[:, 0] - full[:, 1]).std() > 1e-3  # rows do differ


def test_a_sliding_window_is_not_packed_and_its_scores_are_right(tmp_path: Path) -> None:
    folder = tiny.decoder(tmp_path, "mistral", sliding_window=4)
    ours = ready(folder)
    assert not ours.objective.scorer.is_packed
    prompts = [f"{row.texts[0].strip()} It was" for row in SENTENCES]
    with torch.no_grad():
        same(scores(ours, SENTENCES), by_hand(folder, prompts, [" terrible", " great"]))


def test_an_encoder_is_refused(roberta: Path, gpt2: Path) -> None:
    with pytest.raises(UserError, match=r"a masked-LM model \(roberta\) where a decoder is needed.*=mlm"):
        ready(roberta)
    with pytest.raises(UserError, match=r"no padding token \(for a decoder use objective=lm"):
        ready(gpt2, "objective=mlm")


def test_a_decoder_without_its_head_is_refused(tmp_path: Path) -> None:
    folder = tiny.decoder(tmp_path, tied=False)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.transformer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    with pytest.raises(UserError, match=r"no causal-LM head \(lm_head.weight is missing\), and a random one would"):
        ready(folder)


def test_no_padding_token_is_needed_or_added(gpt2: Path, tmp_path: Path) -> None:
    ours = ready(gpt2)
    assert ours.loaded.tokenizer.pad_token_id is None
    rows = len(ours.loaded.model.get_input_embeddings().weight)
    assert rows == len(ours.loaded.tokenizer)
    models.save(ours.loaded, tmp_path / "saved")
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").pad_token is None


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["opt", "gpt2", "llama"])
def test_a_run_from_end_to_end(kind: str, movies: Path, tmp_path: Path) -> None:
    folder, run = tiny.decoder(tmp_path / "model", kind), tmp_path / "run"
    words = ["objective=lm", "model.device=cpu", "optimizer.lr=1e-3", label_words(WORDS["mixed"])]
    assert mezo("train", *small(folder, movies, run, *words)).code == 0
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all(line["projected_grad"] != 0 for line in lines if line["kind"] == "train")
    moved = AutoModelForCausalLM.from_pretrained(run / "checkpoints/last").eval()
    start = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    changed = [name for name, p in moved.named_parameters() if not torch.equal(p, start[name])]
    assert len(changed) == len(list(moved.named_parameters()))
    # Plain transformers reads off the checkpoint what the run's own last evaluation saw.
    rows = [json.loads(line) for line in (movies / "dev.jsonl").read_text().splitlines()]
    with torch.no_grad():
        prompts = [f"{row['sentence'].strip()} It was" for row in rows]
        full = by_hand(run / "checkpoints/last", prompts, [" bad", " utterly dull"])
    labels = torch.tensor([int(row["label"] == "positive") for row in rows])
    last = [line for line in lines if line["kind"] == "eval" and line["split"] == "dev"][-1]
    assert last["loss"] == pytest.approx(float(F.cross_entropy(full, labels)), rel=1e-4)
    # Replay is bitwise identical, and so is a run that was interrupted and resumed.
    assert mezo("replay", run, "--step", 6, "--out", tmp_path / "again").code == 0
    weights = [load_file(f / "model.safetensors") for f in (run / "checkpoints/last", tmp_path / "again")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert mezo("eval", run / "checkpoints/last", "--split", "dev").code == 0
    said = mezo("data", f"model.path={folder}", "objective=lm", "data=files", f"data.dir={movies}")
    assert "It was   [negative -> 'terrible';" in said.out


def test_a_linear_probe_of_the_last_position(movies: Path, tmp_path: Path) -> None:
    folder, run = tiny.decoder(tmp_path / "model", "opt"), tmp_path / "run"
    words = ["objective=lm", "model.device=cpu", "init=linear_probe", "steps=0"]
    assert mezo("train", *small(folder, movies, run, *words)).code == 0
    rows = [json.loads(line) for line in (movies / "train.jsonl").read_text().splitlines()]
    stock, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    asked = [tokenizer(f"{row['sentence'].strip()} It was", return_tensors="pt") for row in rows]
    with torch.no_grad():
        x = torch.stack([stock.model(**ids).last_hidden_state[0, -1] for ids in asked]).double()
    ours = ready(folder, "init=linear_probe")
    seen = probing.compute_features(
        ours,
        ours.objective.output_layer()[0],
        ours.encoder.encode_all([Example((row["sentence"],), int(row["label"] == "positive")) for row in rows]),
    )
    torch.testing.assert_close(torch.from_numpy(seen), x, rtol=1e-4, atol=1e-5)
    with pytest.raises(UserError, match="needs label words of one token each"):
        ready(folder, "init=linear_probe", label_words(WORDS["mixed"])).objective.output_layer()


@pytest.mark.parametrize(("kind", "words", "task", "peft"), PAIRS_OF_ALL)
def test_adapters_on_every_family(kind: str, words: str, task: str, peft: str, tmp_path: Path) -> None:
    family = tiny.decoder(tmp_path, kind)
    if peft == "bias" and kind in ("llama", "mistral", "qwen3"):
        with pytest.raises(UserError, match="has no bias terms"):
            ready(family, "peft=bias")
        return
    ours = ready(family, f"peft={peft}", "optimizer.eps=0.1", "optimizer.lr=0.1", "task=sst2")
    batch = ours.objective.collate(ours.encoder.encode_all(SENTENCES))
    assert ours.forward.select_reachable(lambda: ours.objective.logits(batch)) == []
    before = {name: p.detach().clone() for name, p in ours.loaded.model.named_parameters()}
    with torch.no_grad(), ours.forward.perturbed(Direction(5, 3), 0.1):
        both = ours.forward.forward_per_sign(lambda: ours.objective.logits(batch))
        assert (both[0] - both[1]).abs().max() > 1e-3
        if ours.objective.fits_paired_forward(batch):
            torch.testing.assert_close(ours.objective.logits(batch), both, rtol=1e-4, atol=1e-5)
    ours.optimizer.step(ours.forward, BatchLoss(ours.objective, [batch]), 0)
    moved = {name for name, p in ours.loaded.model.named_parameters() if not torch.equal(before[name], p)}
    assert moved == set(ours.params.tensors)
