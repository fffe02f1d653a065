"""Runs by a server that the user has started: as by the model itself, replay without it, faults, ranks, mistakes."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mezo_cli.config.compose import build_config
from mezo_cli.config.schema import OpenAiConfig
from mezo_cli.config.stored import from_yaml, to_yaml
from mezo_cli.engine import engine as engine_module
from mezo_cli.engine.objectives import with_last_tokens_scored
from mezo_cli.engine.server import Server, SGLang, server_at
from mezo_cli.errors import UserError
from mezo_cli.models.download import fetch
from mezo_cli.objectives.collate import Batch
from mezo_cli.objectives.generation import Generation
from mezo_cli.perturb.noise import Direction
from mezo_cli.runs import Run
from tests import tiny
from tests.command_line import HANGS, error_line, mezo, ok, small
from tests.engine.fake_server import FakeServer, serving
from tests.live_models import count_live
from tests.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("eager_kernels", "in_tmp_path")


def losses_and_metrics(run: Path) -> list[dict[str, float]]:
    """Return the losses and the accuracies of the lines of a run's metrics.jsonl."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{key: line[key] for key in line if key.startswith("loss") or key == "accuracy"} for line in lines]


def own_losses(objective: Generation, batch: Batch) -> torch.Tensor:
    """Return the losses of the answers by the model itself, float64 [rows]."""
    engine, objective.engine = objective.engine, None
    losses = objective.answer_losses(batch).cpu()
    objective.engine = engine
    return losses


def compare_scores(monkeypatch: pytest.MonkeyPatch, rows: Any = None) -> list[float]:
    """Return the list to which each step adds the largest difference of a score, at theta and along a direction."""
    errors: list[float] = []
    begin = Generation.begin_step

    def begin_step(self: Any, step: int) -> None:
        begin(self, step)
        engine = self.engine
        if engine is None:
            return
        row = with_last_tokens_scored(self.check_rows(self.encoder)[1])
        own, batch = [], self.collate([row])
        theirs = []
        with torch.no_grad():
            own.append(own_losses(self, batch))
            theirs.append(engine.losses([row]))
            for sign in (1, -1):
                with self.forward.perturbed(Direction(1, step), 0.1, (sign,)):
                    own.append(own_losses(self, batch))
                    theirs.append(engine.losses([row]))
        assert (own[1] - own[2]).abs().max() > 1e-3  # so that another adapter would be seen
        errors.append(float((torch.stack(own) - torch.stack(theirs)).abs().max()))

    monkeypatch.setattr(Generation, "begin_step", begin_step)
    return errors


def by_server(server: FakeServer) -> list[str]:
    """The words that let a server compute a run's forwards."""
    folder = Path("adapters").absolute()
    folder.mkdir(exist_ok=True)
    return ["engine=openai", f"engine.url={server.url}", f"engine.adapter_dir={folder}"]


@dataclass(frozen=True)
class Setting:
    model: Path
    data: Path

    def train(self, name: str, *more: str) -> Any:
        """Train a run of a LoRA."""
        objective = () if "objective=choice" in more else ("objective=lm",)
        common = ("model=gpt2", "peft=lora", "optimizer.lr=1e-4", "log_every=1")
        return mezo("train", *small(self.model, self.data, Path(name), *objective, *common, *more))

    @contextmanager
    def serving(self, **settings: Any) -> Iterator[list[str]]:
        with serving(self.model, **settings) as server:
            yield by_server(server)


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    folder = tmp_path_factory.mktemp("engine")
    movies = tiny.movie_folder(folder / "movies")
    with open(movies / "test.jsonl", "a", encoding="utf-8") as file:  # longer than every row of train
        file.write(json.dumps({"sentence": "what a long and winding film it was", "label": "negative"}) + "\n")
    return Setting(tiny.decoder(folder / "llama", "llama"), movies)


CHOICE = ("objective=choice", "task.choice.candidates=[' bad okay film', ' good']", "steps=2", "eval_every=1")
ES = ("optimizer=es", "optimizer.members=4", "optimizer.eps=0.1")


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("task.lm.label_words=[bad okay, bad good]", "optimizer.samples=2", "steps=3"),
        (*CHOICE, "objective.loss=lm"),
        (*CHOICE, "objective.loss=accuracy", "objective.normalize=sum", *ES),
    ],
    ids=["words", "choice lm", "choice accuracy"],
)
def test_labels_are_scored_as_the_model_scores_them(setting: Setting, words: tuple[str, ...]) -> None:
    with setting.serving() as engine:
        result = setting.train("by-server", *words, *engine)
        assert result.code == 0, result.err
    assert setting.train("own", *words).code == 0
    by_engine, own = map(losses_and_metrics, (Path("by-server"), Path("own")))
    assert len(own) > 4
    assert by_engine == [pytest.approx(line, rel=1e-4, abs=1e-4) for line in own]


@pytest.mark.slow
def test_the_best_weights_are_scored_and_the_last_are_gone(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of a run: the engine gets the weights that have the best score, and keeps no others in memory."""
    alive = count_live(monkeypatch)
    with setting.serving() as engine:
        result = setting.train("best", "optimizer.lr=1", "steps=4", "eval_every=2", *engine)
        assert result.code == 0, result.err
    assert alive == [0, 0]
    summary = json.loads(Path("best/summary.json").read_text())
    assert summary["best"]["step"] < 4
    best, last = (
        json.loads(mezo("eval", "best", "--checkpoint", which, "--json").out)["loss"] for which in ("best", "last")
    )
    assert summary["test"]["loss"] == pytest.approx(best, rel=1e-4)
    assert abs(last - best) > 1e-2


@pytest.mark.parametrize(
    ("mode", "dtype", "code"),
    [
        ("misses perturbations", "float32", 2),
        pytest.param("misses perturbations", "bfloat16", 2, marks=pytest.mark.slow),
        pytest.param("", "bfloat16", 0, marks=pytest.mark.slow),
    ],
)
def test_the_check_at_the_start_sees_more_than_rounding(setting: Setting, mode: str, dtype: str, code: int) -> None:
    """A LoRA begins with B = 0, so that a small perturbation of it is lost in bfloat16."""
    with setting.serving(mode=mode, dtype=dtype) as engine:
        result = setting.train("run", f"engine.dtype={dtype}", "steps=1", "eval_every=0", *engine)
    assert result.code == code, result.err
    assert ("computes other scores than the model" in result.err) == bool(code)
    assert Path("run/trajectory.bin").exists() != bool(code)


@pytest.mark.slow
def test_a_check_that_can_tell_nothing_says_so(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "CHECKED_C", (1e-9,))
    with setting.serving(mode="misses perturbations") as engine:
        result = setting.train("run", "steps=1", "eval_every=0", *engine)
    assert result.code == 0
    said = " ".join((result.out + result.err).split())
    assert "the check cannot tell whether the engine's weights are perturbed" in said


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["fails", "hangs"])
def test_a_server_that_fails_leaves_a_run_that_is_resumed_and_replayed(setting: Setting, fault: str) -> None:
    with setting.serving(mode=f"{fault}=190") as engine:
        failed = setting.train("failed", *engine, *(["engine.timeout=1"] if fault == "hangs" else []))
    assert failed.code == 1
    why = {"fails": "with status 500: out of luck", "hangs": "did not answer within engine.timeout=1 s"}[fault]
    assert "error: engine=openai failed: " in failed.err.splitlines()[-1]
    assert why in failed.err.splitlines()[-1]
    before = Path("failed/trajectory.bin").read_bytes()
    assert json.loads(Path("failed/run.json").read_text())["status"] == "failed"
    assert "engine=openai needs engine.url" in error_line(mezo("resume", "failed"))
    with setting.serving() as engine, pytest.MonkeyPatch.context() as patch:
        for word, name in zip(engine[1:], ("MEZO_ENGINE_URL", "MEZO_ENGINE_ADAPTER_DIR"), strict=True):
            patch.setenv(name, word.partition("=")[2])
        assert mezo("resume", "failed").code == 0
    assert Path("failed/trajectory.bin").read_bytes().startswith(before)
    check_replay("failed", 6)


DEMO = ["task=demo-arithmetic", "data=demo", "model=demo-decoder", "objective=generate", "objective.max_new_tokens=6"]
DEMO += ["model.device=cpu", "data.eval_limit=4", "data.train_size=8", "batch_size=4", "steps=3", "eval_every=0"]
DEMO += ["log_every=1", "test_at_start=false", "peft=lora"]
REWARD = "def score(completions, rows):\n    return [sum(map(ord, text)) / 1000 for text in completions]\n"
MEMBERS = ["optimizer=es", "optimizer.members=5", "optimizer.eps=0.3", "optimizer.lr=1e-2"]
PAIRS = ["optimizer.samples=2", "optimizer.lr=1e-4", "optimizer.eps=0.3"]
CASES = {
    "members": (MEMBERS, 2),
    "pairs": (PAIRS, 3),
    "answers": (["objective.loss=lm", "optimizer.lr=1e-4"], 8),
    "drawn": ([*MEMBERS, "objective.temperature=1", "objective.samples=2", "checkpoint_every=1"], 2),
}


def train(name: str, words: Sequence[str], *more: str) -> Any:
    """Train a run that completes prompts."""
    Path("mine.py").write_text(REWARD)
    return mezo("train", *DEMO, *words, "objective.reward=mine.py:score", *more, f"hydra.run.dir={name}")


def lines(name: str) -> list[dict[str, Any]]:
    """The numbers of metrics.jsonl, without times."""
    left_out = ("seconds", "crc", "completions")
    read = map(json.loads, Path(name, "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in line.items() if k not in left_out and not isinstance(v, str)} for line in read]


def check_same(name: str, other: str) -> None:
    """Check that two runs have the same rewards and lengths, and losses as close as forwards round."""
    for line, wanted in zip(lines(name), lines(other), strict=True):
        assert line == pytest.approx(wanted, rel=1e-3, abs=1e-4)


def check_replay(name: str, step: int = 3) -> None:
    assert mezo("replay", name, "--step", step, "--out", f"{name}-again").code == 0
    (file,) = Path(f"{name}-again").glob("*model.safetensors")
    last = load_file(Path(name, "checkpoints", "last", file.name))
    assert all(torch.equal(value, last[key]) for key, value in load_file(file).items())


@pytest.mark.parametrize("case", ["members", *(pytest.param(c, marks=pytest.mark.slow) for c in ("pairs", "answers"))])
def test_the_server_says_what_the_model_says(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = compare_scores(monkeypatch)
    monkeypatch.setenv("MEZO_ENGINE_KEY", "secret-key")
    words, at_once = CASES[case]
    with serving(fetch(build_config(DEMO).model), key="secret-key") as server:
        result = train("by-server", words, *by_server(server), f"engine.max_loras={at_once}")
        assert result.code == 0, result.err
        assert server.adapters == {}
        assert len(server.names) == len(set(server.names)) > 10
    assert list(Path("adapters").iterdir()) == []
    assert len(errors) == 3
    assert max(errors) <= 1e-4
    if case != "answers":
        assert len({line["reward"] for line in lines("by-server") if "reward_std" in line}) > 1
    record = json.loads(Path("by-server/run.json").read_text())["engine"]
    assert record["name"] == "openai"
    assert all("secret-key" not in path.read_text(errors="replace") for path in Path("by-server").glob("*.*"))
    assert train("own", words).code == 0
    check_same("by-server", "own")
    check_replay("by-server")


@pytest.mark.slow
def test_drawn_completions_are_those_of_their_seeds_and_a_resumed_run_goes_on() -> None:
    words, at_once = CASES["drawn"]
    model, loras = fetch(build_config(DEMO).model), f"engine.max_loras={at_once}"
    with serving(model, mode="fails=130") as server:
        failed = train("failed", words, *by_server(server), loras)
        assert failed.code == 1, failed
    with serving(model) as server:
        ok("resume", "failed", *by_server(server)[1:], "objective.reward=mine.py:score")
        assert train("whole", words, *by_server(server), loras).code == 0
    check_same("failed", "whole")
    check_replay("failed")


@pytest.mark.slow
def test_ranks_share_a_server_and_its_fault_ends_all_in_one_line() -> None:
    Path("mine.py").write_text(REWARD)
    model, words = fetch(build_config(DEMO).model), CASES["members"][0]
    with serving(model) as server, serving(model, mode="fails=100") as failing:
        for name, servers in {"ranks": (server, server), "failed": (server, failing)}.items():
            common = ["train", *DEMO, *words, "objective.reward=mine.py:score", f"hydra.run.dir={name}"]
            results = run_ranks(*([*common, *by_server(own), "engine.max_loras=2"] for own in servers))
            assert [result.code for result in results] == [int(name == "failed")] * 2, results
        assert results[0].err.splitlines()[-1].startswith("error: rank 1: engine=openai failed: ")
        assert train("alone", words, *by_server(server)).code == 0
        same = ("loss", "loss_std", "loss_min", "loss_max", "step")
        for line, wanted in zip(lines("ranks"), lines("alone"), strict=True):
            assert {k: v for k, v in line.items() if k in same} == {k: v for k, v in wanted.items() if k in same}
        check_replay("ranks")


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["engine=vllm"], "objective=mlm has no engine, only objective=lm, objective=choice, objective=generate"),
        (["engine=vllm", "objective=lm", "peft=prefix"], "peft=prefix has no engine, only peft=none and peft=lora"),
        (["engine=vllm", "objective=lm", "optimizer=adamw"], "computes no gradients; use optimizer=mezo"),
        (["engine=vllm", "objective=lm", "optimizer=mezo_adam"], "or use peft=lora"),
        (["engine=vllm", "objective=lm", "optimizer=es", "optimizer.anchor={l2: 0.1}"], "without an anchor"),
        (["engine=vllm", "objective=lm", "optimizer.noise=torch"], "use gaussian"),
        (["engine=vllm", "objective=lm", "micro_batch_size=4"], "makes its batches itself"),
        (["engine.tensor_parallel=2"], "engine=none does not read it, only engine=vllm"),
        (["engine=vllm", "objective=lm", "engine.dtype=float64"], "float32, bfloat16"),
        (["engine=vllm", "objective=lm", "model.compute_dtype=float16"], "which is float32 beside an engine"),
    ],
)
def test_what_an_engine_does_not_compute_is_refused(words: list[str], part: str) -> None:
    with pytest.raises(UserError, match=part):
        build_config([*words, "model=demo", "data=demo"])


OPENAI = "engine=openai"


def server_of(url: str, folder: Path, **settings: Any) -> Server:
    return server_at(OpenAiConfig(name="openai", timeout=HANGS, url=url, adapter_dir=str(folder), **settings))


def failure(url: str, folder: Path, rank: int = 8) -> str:
    """The line with which the start by a server fails, or the load of an adapter of this rank."""
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank}))
    with pytest.raises(UserError) as error:  # noqa: PT012
        server = server_of(url, folder)
        server.start(100)
        server.ask("POST", server.paths.load, {"lora_name": "a", "lora_path": str(folder)})
    assert "\n" not in str(error.value)
    return str(error.value)


def test_each_mistake_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEZO_ENGINE_KEY", raising=False)
    with serving() as server:
        url = server.url
        assert "LoRA rank 32 is greater than max_lora_rank 16" in failure(url, tmp_path, 32)
        answer = 404, {"error": {"message": "No adapter found"}}
        monkeypatch.setattr(FakeServer, "_load", lambda self, name, folder: answer)
        assert "engine.adapter_dir is a folder that both see" in failure(url, tmp_path)
    assert "cannot be reached" in failure(url, tmp_path)
    with serving(room=99) as server:
        assert "takes texts of 99 tokens, and this run has some of 100" in failure(server.url, tmp_path)
    with serving(loads=False) as server:
        line = failure(server.url, tmp_path)
        assert "start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True" in line
    with serving(key="secret") as server:
        assert "give it as MEZO_ENGINE_KEY" in failure(server.url, tmp_path)
        monkeypatch.setenv("MEZO_ENGINE_KEY", "secret")
        assert server_of(server.url, tmp_path).start(10).endswith(", tiny")
    assert "needs engine.allow_remote=true" in failure("http://192.0.2.1:8000", tmp_path)
    server_of("http://192.0.2.1:1", tmp_path, allow_remote=True)  # nothing is asked yet
    assert "without a name or a password" in failure("http://name:secret@127.0.0.1", tmp_path)
    assert "give http://HOST:PORT" in failure("127.0.0.1:8000", tmp_path)


def test_where_weights_and_prompts_go_is_stored_nowhere(tmp_path: Path) -> None:
    words = [*DEMO, OPENAI]
    config = build_config([*words, "engine.url=http://127.0.0.1:1", f"engine.adapter_dir={tmp_path}"])
    assert config.engine == OpenAiConfig(name="openai", url="http://127.0.0.1:1", adapter_dir=str(tmp_path))
    assert from_yaml(to_yaml(config)).engine == OpenAiConfig(name="openai")
    assert "127.0.0.1" not in to_yaml(config)
    with pytest.raises(UserError, match="engine=none does not read it, only engine=openai"):
        build_config([*DEMO, "engine.url=http://127.0.0.1:1"])
    with pytest.raises(UserError, match="a server takes adapters alone; use peft=lora"):
        build_config([*DEMO[:-1], "engine=openai"])


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEZO_ENGINE_URL", raising=False)
    words = [*DEMO, OPENAI, "objective.reward=contains", f"hydra.run.dir={tmp_path / 'run'}"]
    result = mezo("train", *words, f"engine.adapter_dir={tmp_path}")
    assert result.code == 2
    assert "engine=openai needs engine.url (or MEZO_ENGINE_URL)" in result.err.splitlines()[-1]
    assert not (tmp_path / "run").exists()
    config = build_config([*words[:-1], f"engine.adapter_dir={tmp_path}", "engine.url=http://127.0.0.1:1"])
    run = Run.create(tmp_path / "stopped", to_yaml(config), ["mezo"])
    before = {path.name: path.read_bytes() for path in run.path.iterdir()}
    resumed = error_line(mezo("resume", run.path, f"engine.adapter_dir={tmp_path}"))
    assert "engine=openai needs engine.url (or MEZO_ENGINE_URL)" in resumed
    assert {path.name: path.read_bytes() for path in run.path.iterdir()} == before


def test_sglang_gets_its_own_request() -> None:
    """It was never run: this is what its documentation says."""
    body = SGLang().request("a", [1, 2], {"max_tokens": 3, "seed": 4, "temperature": 0.0})
    sampling = {"max_new_tokens": 3, "sampling_seed": 4, "temperature": 0.0, "ignore_eos": True}
    assert body == {"input_ids": [1, 2], "lora_path": "a", "sampling_params": sampling}
