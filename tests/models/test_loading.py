"""Loading: what a checkpoint must contain, the error lines, and the supported model families."""

import json
import logging
import os
import pickle
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from transformers import AutoModelForMaskedLM

from mezo_cli import models
from mezo_cli.config.compose import build_config
from mezo_cli.config.registry import ENCODER_FAMILIES
from mezo_cli.config.schema import ModelConfig
from mezo_cli.errors import UserError
from mezo_cli.models.loading import SEQUENTIAL
from mezo_cli.objectives import OBJECTIVES, plain_check
from mezo_cli.perturb.noise import Direction
from mezo_cli.process.memory import peak_memory, reset_peak_memory
from mezo_cli.session.opening import opened
from tests import tiny
from tests.optim.test_mezo import PAIRS, SENTENCES, full_logits, ready

LABELS = ["negative", "positive"]
WEIGHTS = "model.safetensors"


def load(folder: Path, objective: str = "mlm", labels: list[str] = LABELS, seed: int = 0) -> models.LoadedModel:
    return models.load(
        ModelConfig(name="tiny", path=str(folder), device="cpu"),
        OBJECTIVES.implementation(objective).model_kind,
        labels,
        seed,
    )


def error_line(folder: Path, words: str, objective: str = "mlm") -> str:
    """Return the error line for a folder, and check that it contains `words`."""
    with pytest.raises(UserError, match=re.escape(words)) as caught:
        load(folder, objective)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)
    return str(caught.value)


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> dict[str, torch.Tensor]:
    tensors = safetensors.torch.load_file(folder / WEIGHTS)
    change(tensors)
    safetensors.torch.save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    return tensors


def change_json(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def logits(folder: Path, rows: Any = SENTENCES) -> torch.Tensor:
    session = ready(folder, "model.device=cpu")
    with torch.no_grad():
        return session.objective.logits(session.objective.collate(session.encoder.encode_all(rows)))


# --- heads ---


def test_a_tied_checkpoint_without_its_decoder_is_tied_again(tmp_path: Path) -> None:
    folder = tiny.roberta(tmp_path)
    before = logits(folder)
    for drop in ("lm_head.decoder.weight", "lm_head.decoder.bias"):
        assert drop not in change_weights(folder, lambda t, drop=drop: t.pop(drop, None))
    loaded = load(folder)
    assert loaded.fresh == []
    assert loaded.model.lm_head.decoder.weight is loaded.model.roberta.embeddings.word_embeddings.weight
    assert torch.equal(logits(folder), before)


def test_an_untied_decoder_is_loaded(tmp_path: Path) -> None:
    folder = tiny.roberta(tmp_path, tied=False)
    before = logits(folder)
    change_weights(folder, lambda t: t["lm_head.decoder.weight"].neg_())
    assert (logits(folder) - before).abs().max() > 0.1
    change_weights(folder, lambda t: t.pop("lm_head.decoder.weight"))
    error_line(folder, "has no masked-LM head (lm_head.decoder.weight is missing)")


@pytest.mark.parametrize("head", ["none", "cls"])
def test_a_checkpoint_without_its_mlm_head_is_refused_for_mlm_only(tmp_path: Path, head: str) -> None:
    folder = tiny.roberta(tmp_path, head=head)
    said = error_line(folder, "has no masked-LM head (lm_head.")
    assert "objective=cls" in said
    assert load(folder, "cls").model.config.num_labels == 2


def test_a_new_classification_head_is_drawn_from_the_seed(roberta: Path) -> None:
    state = torch.random.get_rng_state()
    one, same, other = (load(roberta, "cls", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert {"classifier.dense.weight", "classifier.out_proj.weight"} <= set(one.fresh)
    assert all(name.startswith("classifier.") for name in one.fresh)
    first, second, third = (loaded.model.state_dict() for loaded in (one, same, other))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["classifier.dense.weight"], third["classifier.dense.weight"])
    body = [name for name in first if not name.startswith("classifier.")]
    assert all(torch.equal(first[name], third[name]) for name in body)


def test_a_head_of_another_size_is_replaced_with_a_warning(tmp_path: Path, caplog: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(logging.getLogger("mezo"), "propagate", True)
    folder = tiny.roberta(tmp_path, head="cls")
    assert load(folder, "cls").fresh == []
    assert "LABEL_0, LABEL_1) are taken as negative, positive" in caplog.text
    three = load(folder, "cls", ["a", "b", "c"])
    assert three.fresh == ["classifier.out_proj.bias", "classifier.out_proj.weight"]
    assert three.model.config.num_labels == 3
    assert "classifier.out_proj.weight: [2, 32] in the checkpoint, [3, 32] here" in three.new_head


def test_classes_in_another_order_are_matched_by_name(tmp_path: Path, caplog: Any, monkeypatch: Any) -> None:
    """By the task's names or its other spellings of them; case does not count."""
    monkeypatch.setattr(logging.getLogger("mezo"), "propagate", True)
    folder, name = tiny.roberta(tmp_path, head="cls"), "classifier.out_proj.weight"
    change_json(folder / "config.json", id2label={"0": "Negative", "1": "Positive"})
    rows = load(folder, "cls").model.get_parameter(name)
    for spelled in (["Positive", "NEGATIVE"], ["1", "0"]):
        change_json(folder / "config.json", id2label=dict(enumerate(spelled)))
        spellings = [["0", "1"]] if spelled == ["1", "0"] else []
        loaded = models.load(
            ModelConfig(name="tiny", path=str(folder), device="cpu"), models.SEQUENCE_CLASSIFIER, LABELS, 0, *spellings
        )
        assert torch.equal(loaded.model.get_parameter(name), rows.flip(0))
        assert loaded.model.config.id2label == {0: "negative", 1: "positive"}
        assert f"({', '.join(spelled)}) are matched by name with negative, positive" in caplog.text


# --- pickles and code ---


class Bomb:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def test_pickled_weights_are_refused_unread(tmp_path: Path) -> None:
    folder, mark = tiny.roberta(tmp_path / "model"), tmp_path / "mark"
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(mark)))
    error_line(folder, "there is no model.safetensors (only pytorch_model.bin)")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "pytorch_model.bin"}}')
    error_line(folder, "names pytorch_model.bin; weights are read from safetensors alone")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../out.safetensors"}}')
    error_line(folder, "names ../out.safetensors")
    assert not mark.exists()


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("objective", ["mlm", "cls"])
def test_code_of_a_checkpoint_is_never_run(tmp_path: Path, file: str, objective: str) -> None:
    folder, mark = tiny.roberta(tmp_path / "model"), tmp_path / "mark"
    (folder / "own.py").write_text(f"import pathlib; pathlib.Path({str(mark)!r}).touch()\n")
    own = {"AutoConfig": "own.C", "AutoModelForMaskedLM": "own.M", "AutoTokenizer": ["own.T", None]}
    change_json(folder / file, auto_map=own)
    error_line(folder, f"its {file} asks for code that comes with the checkpoint (auto_map)", objective)
    assert not mark.exists()


def test_shards_load_and_a_missing_one_is_named(tmp_path: Path) -> None:
    whole = tiny.roberta(tmp_path / "whole")
    folder = tiny.roberta(tmp_path / "shards")
    AutoModelForMaskedLM.from_pretrained(whole).save_pretrained(folder, max_shard_size="50KB")
    (folder / WEIGHTS).unlink(missing_ok=True)
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 1
    assert torch.equal(logits(folder), logits(whole))
    shards[-1].unlink()
    error_line(folder, f"{shards[-1]} is damaged or missing")


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    folder = tiny.roberta(tmp_path)
    change_weights(folder, lambda t: t["roberta.embeddings.LayerNorm.bias"].fill_(float("nan")))
    with pytest.raises(UserError, match="scores are not finite: the weights are damaged"):
        ready(folder)


def test_paths_that_hold_no_model(tmp_path: Path, roberta: Path, monkeypatch: Any) -> None:
    (tmp_path / "empty").mkdir()
    error_line(tmp_path / "empty", "the folder holds no config.json")
    error_line(tmp_path / "none", "no such folder; give a folder with config.json or a hub id like org/name")
    error_line(roberta / WEIGHTS, "this is a file; give the folder that holds it")
    error_line(Path("~no-such-user/model"), "no such folder")
    monkeypatch.chdir(roberta.parent)
    assert load(Path(roberta.name)).fresh == []


def test_rows_are_no_longer_than_the_position_table(tmp_path: Path, bert: Path) -> None:
    folder = tiny.roberta(tmp_path)
    assert load(folder).tokenizer.model_max_length == 64  # its own
    for where, positions in ((folder, 78), (bert, 80)):  # RoBERTa's 80 rows begin behind the padding index, 1
        tokenizer = transformers.AutoTokenizer.from_pretrained(where)
        tokenizer.model_max_length = 10**30
        tokenizer.save_pretrained(tmp_path / where.name)
        for file in where.glob("[cm]*"):  # config and weights
            (tmp_path / where.name / file.name).write_bytes(file.read_bytes())
        loaded = load(tmp_path / where.name)
        assert loaded.tokenizer.model_max_length == positions
        with torch.no_grad():
            loaded.model(torch.full((1, positions), 5))
            with pytest.raises((IndexError, RuntimeError)):
                loaded.model(torch.full((1, positions + 1), 5))


# --- tensors of the files ---


def made(folder: Path, kind: str) -> Path:
    """Write a tiny checkpoint with all the tensors that well-known ones have beside those of their model."""
    body, old = {"roberta": "roberta", "bert": "bert", "gpt2": ""}[kind], {"weight": "gamma", "bias": "beta"}
    added = {
        f"{body}.pooler.dense.weight": torch.zeros(32, 32),
        f"{body}.embeddings.position_ids": torch.arange(80)[None],
    }
    if kind == "gpt2":
        mask, value = torch.ones(1, 1, 300, 300, dtype=torch.uint8).tril(), torch.tensor(-1e4)
        added = {f"h.{i}.attn.{n}": t for i in range(2) for n, t in (("bias", mask), ("masked_bias", value))}

    def as_of_old(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            module, _, key = name.rpartition(".")
            renamed = f"{module}.{old[key]}" if kind == "bert" and "LayerNorm" in name else name
            tensors[renamed.removeprefix("transformer.")] = tensors.pop(name)
        tensors |= {name: tensor.clone() for name, tensor in added.items()}
        if kind == "bert":
            tensors["cls.seq_relationship.weight"] = torch.zeros(2, 32)

    _ = tiny.decoder(folder, "gpt2") if kind == "gpt2" else getattr(tiny, kind)(folder)
    change_weights(folder, as_of_old)
    return folder


@pytest.mark.parametrize(
    ("kind", "objective", "unused"),
    [
        ("roberta", "mlm", "roberta.pooler.dense.weight"),
        ("roberta", "cls", "lm_head."),
        ("bert", "mlm", "cls.seq_relationship.weight"),
        ("gpt2", "lm", "h.*.attn.masked_bias"),
    ],
)
def test_known_ones_load(kind: str, objective: str, unused: str, tmp_path: Path, caplog: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(logging.getLogger("mezo"), "propagate", True)
    with caplog.at_level(logging.INFO, logger="mezo"):
        loaded = load(made(tmp_path, kind), objective)
    assert all(name.startswith("classifier.") for name in loaded.fresh)
    (said,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("not used of the checkpoint")]
    assert unused in said


# --- what transformers and tokenizers raise ---


LAYER, NORM = "roberta.encoder.layer.", "roberta.embeddings.LayerNorm.bias"


def with_tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], Any]:
    return lambda folder: change_weights(folder, change)


def without_tokenizer(folder: Path) -> None:
    for file in folder.glob("*token*"):
        file.unlink()


def with_another_token(folder: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["one-more"])
    tokenizer.save_pretrained(folder)


REFUSED_FOLDERS: list[tuple[Callable[[Path], Any], str]] = [
    (lambda folder: (folder / WEIGHTS).write_bytes(b""), f"{WEIGHTS} is damaged or missing"),
    (lambda folder: os.truncate(folder / WEIGHTS, 300), f"{WEIGHTS} is damaged or missing"),
    (with_tensors(lambda t: t.pop(f"{LAYER}1.output.dense.weight")), f"lacks 1 tensors, first {LAYER}1.output.dense"),
    (with_tensors(lambda t: t.update({NORM: t[NORM][:-1].contiguous()})), "[31] in the checkpoint, [32] here"),
    (with_tensors(lambda t: t.update({f"{LAYER}0.a.b": torch.zeros(3)})), "no place for the checkpoint's tensor "),
    (with_tensors(lambda t: t.update({NORM: t[NORM].to(torch.int8)})), f"{NORM} as I8; allowed are F64, F32, F16"),
    (without_tokenizer, "there is no tokenizer (tokenizer.json, or a vocabulary's files)"),
    (with_another_token, "tokens but the model embeds "),
]


@pytest.mark.parametrize("number", range(len(REFUSED_FOLDERS)))
@pytest.mark.parametrize("objective", ["mlm", "cls"])
def test_an_unsound_checkpoint_is_refused(number: int, objective: str, tmp_path: Path) -> None:
    damage, words = REFUSED_FOLDERS[number]
    damage(tiny.roberta(tmp_path))
    error_line(tmp_path, words, objective)


@pytest.mark.parametrize(
    ("file", "content", "words"),  # a dict changes the JSON of the file
    [
        ("config.json", "{", "config.json is damaged"),
        ("config.json", "[]", "config.json is damaged: it holds no JSON object"),
        ("config.json", '{"model_type": "nothing"}', "could not be loaded: "),
        ("config.json", '{"model_type": "gpt2", "vocab_size": 400}', "transformers has no masked-LM model of its kind"),
        ("config.json", {"hidden_act": "foo"}, "foo"),
        ("config.json", {"hidden_size": "x"}, "hidden_size"),
        ("config.json", {"num_hidden_layers": 1}, "no place for the checkpoint's tensor roberta.encoder.layer.1."),
        ("config.json", {"transformers_weights": "pytorch_model.bin"}, "names weights of its own (pytorch_model.bin)"),
        ("config.json", {"quantization_config": {}}, "quantised already"),
        ("tokenizer.json", "{}", "tokenizer.json is damaged"),
        ("tokenizer_config.json", {"pad_token": None}, "its tokenizer has no padding token"),
        ("tokenizer_config.json", {"model_max_length": "x"}, "model_max_length is 'x': expected a number of tokens"),
    ],
)
def test_what_cannot_be_used_is_one_line(file: str, content: Any, words: str, tmp_path: Path) -> None:
    path = tiny.roberta(tmp_path) / file
    path.write_text(content) if isinstance(content, str) else change_json(path, **content)
    error_line(tmp_path, words)


def test_a_model_too_large_for_the_memory_is_not_called_damaged(tmp_path: Path) -> None:
    folder = tiny.roberta(tmp_path)
    change_json(folder / "config.json", hidden_size=10**9)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        load(folder)


@pytest.mark.parametrize("found", [True, False])
def test_devices_by_what_the_machine_has(found: bool, monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: found)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2 * found)
    assert models.pick_device("auto").type == ("cuda" if found else "cpu")
    for name, said in (("cuda:2", f"this machine has {2 * found} CUDA"), ("mps", "no MPS"), ("meta", "not a device")):
        with pytest.raises(UserError, match=f"model.device={name}: .*{said}"):
            models.pick_device(name)


# --- families ---

SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 80,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
DISTILBERT = {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64, "max_position_embeddings": 80}
SERVED: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", SHAPE),
    "distilbert": ("DistilBert", DISTILBERT | {"pad_token_id": 1}),
    "albert": ("Albert", SHAPE | {"embedding_size": 16}),
    "xlm-roberta": ("XLMRoberta", SHAPE | {"type_vocab_size": 1}),
    "modernbert": ("ModernBert", SHAPE | {"cls_token_id": 0, "sep_token_id": 2}),
    "electra": ("Electra", SHAPE | {"embedding_size": 16}),
    "deberta-v2": ("DebertaV2", SHAPE),
    "mpnet": ("MPNet", SHAPE),
    "roformer": ("RoFormer", SHAPE | {"embedding_size": 32}),  # sinusoidal positions: an embedding with its own forward
}
BART = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": 80, "pad_token_id": 1}
HEADS = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "mobilebert": ("MobileBert", SHAPE | {"embedding_size": 16, "intra_bottleneck_size": 32}),  # joins its decoder
    "bart": ("Bart", BART | HEADS),  # a sequence-to-sequence model
}


def family(folder: Path, kind: tuple[str, dict[str, Any]]) -> Path:
    """Save a random model of a family with a byte-level tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tiny.bpe(folder)
    config = getattr(transformers, f"{kind[0]}Config")(vocab_size=len(tokenizer), **kind[1])
    torch.manual_seed(3)
    model = AutoModelForMaskedLM.from_config(config)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", SERVED)
def test_a_family_gives_its_own_scores_also_with_perturbed_weights(name: str, tmp_path: Path) -> None:
    folder = family(tmp_path, SERVED[name])
    ours = ready(folder, "task=rte", "model.device=cpu")
    stock = AutoModelForMaskedLM.from_pretrained(folder).eval()
    batch = ours.objective.collate(ours.encoder.encode_all(PAIRS))
    z = Direction(3, 11)
    dead = ours.forward.select_reachable(lambda: ours.objective.logits(batch))
    assert dead == (["roformer.encoder.embed_positions.weight"] if name == "roformer" else [])  # fixed sines
    with torch.no_grad():
        want = full_logits(stock, batch, ours.encoder.label_ids)
        torch.testing.assert_close(ours.objective.logits(batch), want, rtol=1e-4, atol=1e-5)
        for p_name, p in stock.named_parameters():
            if p_name not in dead:
                p += 0.05 * ours.params.noise.z(z, p_name, p.shape, "cpu").view(p.shape)
        moved = full_logits(stock, batch, ours.encoder.label_ids)
        with ours.forward.perturbed(z, 0.05, signs=(1,)):
            torch.testing.assert_close(ours.objective.logits(batch), moved, rtol=1e-4, atol=1e-5)
    assert (moved - want).abs().max() > 1e-2


@pytest.mark.parametrize("name", REFUSED)
def test_an_unsupported_family_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{REFUSED[name][0]}.* is a model family that .*not support") as caught:
        ready(family(tmp_path, REFUSED[name]))
    assert "\n" not in str(caught.value)


def test_a_family_with_wrong_scores_is_refused(roberta: Path, monkeypatch: Any) -> None:
    wrong = "mezo_cli.objectives.packing:BERT"  # position ids that are two too small
    monkeypatch.setitem(ENCODER_FAMILIES.targets, "roberta", wrong)
    with pytest.raises(
        UserError, match=r"RobertaForMaskedLM is a model family that is not supported: its scores are wrong"
    ):
        ready(roberta)


# --- the memory of a model that is loaded in another dtype than its file's ---


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 113 MB in float32, no tensor of which is large."""
    shape = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 4}
    return tiny.roberta(tmp_path_factory.mktemp("model"), **shape)


@pytest.mark.usefixtures("released_pages")
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_no_file_stays_in_memory_beside_a_converted_model(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file and the model together are 1.5 times the file."""
    monkeypatch.delenv(SEQUENTIAL, raising=False)
    file = checkpoint / "model.safetensors"
    config = ModelConfig(name="tiny", path=str(checkpoint), device="cpu", dtype="bfloat16")
    models.load(ModelConfig(name="demo", path="demo", device="cpu"), models.MASKED_LM, ["a", "b"], 0)  # imports
    reset_peak_memory()
    before = peak_memory(torch.device("cpu"))
    loaded = models.load(config, models.MASKED_LM, ["a", "b"], 0)
    assert peak_memory(torch.device("cpu")) - before < 0.65 * file.stat().st_size
    assert SEQUENTIAL not in os.environ
    for name, value in safetensors.torch.load_file(file).items():
        assert torch.equal(loaded.model.get_parameter(name), value.to(torch.bfloat16)), name


def test_the_check_in_half_precision_is_in_float32(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A linear layer by parts, with a remainder."""
    monkeypatch.setattr(plain_check, "COPIED", 100 * 768)
    config = ModelConfig(name="tiny", path=str(checkpoint), device="cpu", dtype="bfloat16")
    model = models.load(config, models.MASKED_LM, ["a", "b"], 0).model
    ids = torch.arange(5, 17).view(2, 6)
    with torch.no_grad():
        with plain_check.computing_in_float32(model):
            found = model(input_ids=ids).logits
        torch.testing.assert_close(found, model.float()(input_ids=ids).logits)


@pytest.mark.usefixtures("released_pages", "eager_kernels")
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_nor_beside_frozen_weights_that_are_converted(checkpoint: Path) -> None:
    """The embeddings stay mapped, and with them what was read of the file."""
    words = [f"model.path={checkpoint}", "model.device=cpu", "data=demo", "peft=bias", "model.compute_dtype=bfloat16"]
    session = opened(build_config(words))
    weight = session.loaded.model.get_parameter("roberta.encoder.layer.0.output.dense.weight")
    assert weight.dtype == torch.bfloat16
    maps = Path("/proc/self/smaps").read_text(encoding="utf-8").split(str(checkpoint / "model.safetensors"))[1:]
    resident = sum(1024 * int(re.search(r"^Rss: +(\d+)", part, re.M)[1]) for part in maps)  # type: ignore[index]
    assert resident < 0.2 * (checkpoint / "model.safetensors").stat().st_size
