"""vLLM itself, on a CPU: `make test-engine` runs these; elsewhere they are skipped with a message."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mezo_cli.engine import environment
from mezo_cli.engine.layout import Block, as_matrix, check_whole, digest
from mezo_cli.engine.process import EngineProcess
from mezo_cli.perturb.noise import Direction, make_noise
from tests import tiny
from tests.command_line import environment as process_environment
from tests.command_line import mezo, small
from tests.engine.step_checks import compare_scores, losses_and_metrics
from tests.ranks import free_port, run_ranks

pytestmark = [
    pytest.mark.usefixtures("eager"),
    pytest.mark.skipif(
        "MEZO_TEST_ENGINE" not in os.environ, reason="needs vLLM in an environment of its own: make test-engine"
    ),
]

# vLLM's attention on a CPU takes heads of 32 elements or more
SHAPES: dict[str, dict[str, int]] = {
    "llama": {"hidden_size": 128, "intermediate_size": 256},
    "opt": {"hidden_size": 128, "ffn_dim": 256, "word_embed_proj_dim": 128},
}
MEMORY = 200_000_000


@pytest.fixture(scope="module", autouse=True)
def python() -> Path:
    """The python of the engine's environment; MEZO_TEST_ENGINE may name another."""
    given = os.environ["MEZO_TEST_ENGINE"]
    return environment.find_python(given if "/" in given else None)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {kind: tiny.decoder(folder / kind, kind, **shape) for kind, shape in SHAPES.items()}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.movie_folder(tmp_path_factory.mktemp("data"))


def grads(run: Path) -> list[float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["projected_grad"] for line in lines if line["kind"] == "train"]


def words(model: Path, data: Path, run: Path, peft: str, steps: int = 50, objective: str = "lm") -> list[str]:
    """Train with two evaluations. With a larger lr the model would amplify differences of the last bits."""
    lr = "1e-4" if peft == "lora" else "1e-5"
    more = (f"steps={steps}", f"eval_every={steps // 2}", f"peft={peft}", f"optimizer.lr={lr}", "log_every=1")
    return small(model, data, run, f"objective={objective}", "model=gpt2", *more)


@pytest.mark.parametrize(
    ("kind", "peft", "parts"), [("llama", "none", 1), ("llama", "lora", 2), ("opt", "none", 2), ("opt", "lora", 1)]
)
def test_independent_runs_agree_and_replay_without_the_engine(
    kind: str, peft: str, parts: int, models: dict[str, Path], data: Path, python: Path, tmp_path: Path
) -> None:
    run, own = tmp_path / "run", tmp_path / "own"
    assert mezo("train", *words(models[kind], data, own, peft)).code == 0
    result = mezo("train", *words(models[kind], data, run, peft), *by_vllm(python), f"engine.tensor_parallel={parts}")
    assert result.code == 0, result.err
    assert largest_difference(grads(own), grads(run)) <= 1e-3
    check_replay(run, 50, peft)


@pytest.mark.parametrize(
    ("peft", "more"), [("none", ["objective.loss=lm"]), ("lora", ["optimizer=es", "optimizer.members=3"])]
)
def test_candidates_are_scored_as_the_model_scores_them(
    peft: str, more: list[str], models: dict[str, Path], data: Path, python: Path, tmp_path: Path
) -> None:
    runs = [tmp_path / "run", tmp_path / "own"]
    for run, engine in zip(runs, (by_vllm(python), []), strict=True):
        own = [*words(models["llama"], data, run, peft, 10, "choice"), *more, "optimizer.eps=1e-2"]
        result = mezo("train", *own, "task.choice.candidates=[' bad okay film', ' good']", *engine)
        assert result.code == 0, result.err
    by_engine, own_lines = map(losses_and_metrics, runs)
    assert by_engine == [pytest.approx(line, abs=1e-4) for line in own_lines]
    check_replay(runs[0], 10, peft)


def test_bfloat16_keeps_most_of_a_larger_perturbation(
    models: dict[str, Path], data: Path, python: Path, tmp_path: Path
) -> None:
    own, run, eps = tmp_path / "own", tmp_path / "run", "optimizer.eps=1e-2"
    assert mezo("train", *words(models["llama"], data, own, "none", steps=20), eps).code == 0
    engine = [*by_vllm(python), "engine.dtype=bfloat16"]
    result = mezo("train", *words(models["llama"], data, run, "none", steps=20), eps, *engine)
    assert result.code == 0, result.err
    assert 1e-3 < largest_difference(grads(own), grads(run)) < 0.5  # more than none: it is not float32
    check_replay(run, 20, "none")


def test_a_model_whose_weights_the_engine_stores_transposed_is_refused(
    data: Path, python: Path, tmp_path: Path
) -> None:
    model = tiny.decoder(tmp_path / "gpt2", "gpt2", n_embd=128)
    result = mezo("train", *words(model, data, tmp_path / "run", "none"), *by_vllm(python))
    assert result.code == 2
    line = result.err.splitlines()[-1]
    assert line.startswith("error: engine=vllm does not support GPT2LMHeadModel: the engine holds 0 of the ")
    assert not (tmp_path / "run" / "trajectory.bin").exists()


def by_vllm(python: Path) -> list[str]:
    """The words that let vLLM compute a run's forwards."""
    return ["engine=vllm", f"engine.python={python}", f"engine.memory={MEMORY}"]


def largest_difference(wanted: list[float], found: list[float]) -> float:
    """The largest difference of two runs' projected gradients, as a fraction of the mean size of the first's."""
    mean = sum(map(abs, wanted)) / len(wanted)
    return max(abs(a - b) for a, b in zip(wanted, found, strict=True)) / mean


def check_replay(run: Path, steps: int, peft: str) -> None:
    """Check that a replay, without the engine, is bitwise identical to the last checkpoint."""
    out = run.with_name("replayed")
    assert mezo("replay", run, "--step", str(steps), "--out", out).code == 0
    name = "adapter_model.safetensors" if peft == "lora" else "model.safetensors"
    replayed, last = load_file(out / name), load_file(run / "checkpoints" / "last" / name)
    assert replayed.keys() == last.keys()
    assert all(torch.equal(replayed[key], last[key]) for key in last)


def start(engine: EngineProcess, model: Path, tensors: list[Any], parts: int = 1) -> list[Block]:
    """Start the engine for a run of all parameters; return the blocks that its workers hold."""
    described = engine.call(
        "start",
        folder=str(model),
        tensor_parallel=parts,
        dtype="float32",
        memory=MEMORY,
        max_length=290,
        raw_logits=True,
        prefix_cache=True,
        stops=False,
        adapters=4,
        rank=None,
        tensors=tensors,
        noise="gaussian",
    )
    return [Block(*block) for block in described["blocks"]]


def test_the_prefix_cache_holds_for_one_sign_and_never_longer(models: dict[str, Path], python: Path) -> None:
    """Prompts of 200 tokens, of which all but the last are common: with a stale cache these scores would be wrong."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(models["llama"]).eval()
    tensors = [(name, list(p.shape)) for name, p in model.named_parameters()]
    beginning = [3 + i % 250 for i in range(199)]
    prompts, tokens, seed, c = [[*beginning, last] for last in (10, 11, 12)], [[20, 21, 22]] * 3, 7, 0.05
    directions = [Direction(seed, 0), Direction(seed, 1)]
    weights = [{}, *({"direction": list(z), "c": sign * c} for z in directions for sign in (1, -1))]
    terms, decays = [[list(directions[0]), -0.01], [list(directions[1]), 0.02]], [0.999, 1.0]
    with EngineProcess(python) as engine:
        assert check_whole(tensors, start(engine, models["llama"], tensors)) == model.num_parameters()
        found = torch.tensor(engine.call("score", prompts=prompts, tokens=tokens, weights=weights))
        assert engine.call("counts")["cached"] >= len(weights) * 2 * 192  # two rows of each sign share whole blocks
        engine.call("update", terms=terms, decays=decays, decay_in_float64=True)
        after = torch.tensor(engine.call("score", prompts=prompts, tokens=tokens, weights=[{}]))
        digests = {Block(*block): sha256 for block, sha256 in engine.call("digests")}
    theta = {name: p.detach().clone() for name, p in model.named_parameters()}
    noise = make_noise("gaussian")

    def scores(z: Direction | None, coefficient: float) -> torch.Tensor:
        with torch.no_grad():
            for name, p in model.named_parameters():
                drawn = 0.0 if z is None else noise.z(z, name, p.shape, "cpu").view(p.shape) * coefficient
                p.copy_(theta[name] + drawn)
            return model(torch.tensor(prompts)).logits[:, -1, tokens[0]]

    wanted = [scores(None, 0.0), *(scores(z, sign * c) for z in directions for sign in (1, -1))]
    assert (wanted[1] - wanted[2]).abs().min() > 1e-3  # so that one for the other would be seen
    torch.testing.assert_close(found, torch.stack(wanted), rtol=0, atol=1e-4)
    for (z, coefficient), decay in zip(terms, decays, strict=True):
        for name, value in theta.items():
            cz = noise.z(Direction(*z), name, value.shape, "cpu").view(value.shape) * coefficient
            d = float(torch.tensor(1 - decay, dtype=torch.float32))
            theta[name] = (value.double() - value.double() * d + cz.double()).float()
    torch.testing.assert_close(after[0], scores(None, 0.0), rtol=0, atol=1e-4)
    values = list(theta.values())
    for block, sha256 in digests.items():
        whole = values[block.tensor].view(as_matrix(values[block.tensor].shape))
        assert digest(whole[block.row :, block.column :][: block.rows, : block.columns].numpy()) == sha256


PARENT = """
import json, sys, time
from pathlib import Path
from mezo_cli.engine.process import EngineFailed, EngineProcess
from tests.engine import test_vllm
engine = EngineProcess(Path(sys.argv[1]))
test_vllm.start(engine, Path(sys.argv[2]), json.loads(sys.argv[3]), parts=2)
print(engine.pid, flush=True)
sys.stdin.readline()
try:
    engine.call("score", prompts=[[3, 4, 5]], tokens=[[6]], weights=[{"direction": [1, 0, 0], "c": 0.1}])
    print("a score", flush=True)
except EngineFailed as failure:
    print(repr(str(failure)), flush=True)
time.sleep(600)
"""


def test_a_worker_that_dies_is_reported_and_all_processes_die_with_mezo(models: dict[str, Path], python: Path) -> None:
    tensors = json.dumps(_shapes(models["opt"]))
    command = [sys.executable, "-c", PARENT, str(python), str(models["opt"]), tensors]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=process_environment(), stdin=pipe, stdout=pipe, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdin is not None
        group = int(parent.stdout.readline())  # the engine's process leads a session of its own
        processes = _processes(group)
        assert len(processes) >= 3
        os.kill(max(processes), signal.SIGKILL)  # the worker that was started last
        print("go on", file=parent.stdin, flush=True)
        line = parent.stdout.readline()
        assert line == "'its process ended with status 1: a worker of vLLM has ended'\n"
        parent.send_signal(signal.SIGKILL)
    for _ in range(600):
        if not _processes(group):
            return
        time.sleep(0.1)
    pytest.fail(f"these outlive mezo: {_processes(group)}")


def _shapes(model: Path) -> list[Any]:
    from transformers import AutoModelForCausalLM

    made = AutoModelForCausalLM.from_pretrained(model)
    return [(name, list(p.shape)) for name, p in made.named_parameters()]


def _processes(session: int) -> list[int]:
    """Return the processes of a session that have not ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found


SAY = ["objective=generate", "objective.max_new_tokens=8", "task=demo-arithmetic", "data=demo", "model=gpt2"]
SAY += ["data.eval_limit=4", "data.train_size=8", "batch_size=4", "steps=4", "eval_every=0", "log_every=1"]
SAY += ["test_at_start=false", "optimizer=es", "optimizer.members=5", "optimizer.lr=1e-2", "model.device=cpu"]
REWARD = "def score(completions, rows):\n    return [sum(map(ord, text)) / 1000 for text in completions]\n"


def say(model: Path, run: Path, peft: str, *more: str) -> Any:
    """Train a run of generation."""
    (run.parent / "mine.py").write_text(REWARD)
    eps = "0.3" if peft == "lora" else "0.02"
    own = [f"peft={peft}", f"optimizer.eps={eps}", f"objective.reward={run.parent / 'mine.py'}:score"]
    return mezo("train", *SAY, *own, f"model.path={model}", f"hydra.run.dir={run}", *more)


def train_lines(run: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == "train"]


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("peft", ["none", "lora"])
def test_members_complete_as_the_model_does(
    peft: str, parts: int, models: dict[str, Path], python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy texts, by their rewards, and scores after every update."""
    errors = compare_scores(monkeypatch)
    run, own = tmp_path / "run", tmp_path / "own"
    engine = [*by_vllm(python), "engine.max_loras=2", f"engine.tensor_parallel={parts}"]
    result = say(models["llama"], run, peft, *engine)
    assert result.code == 0, result.err
    assert len(errors) == 4
    assert max(errors) <= 1e-4
    assert say(models["llama"], own, peft).code == 0
    for line, wanted in zip(train_lines(run), train_lines(own), strict=True):
        assert line["loss"] == pytest.approx(wanted["loss"], rel=1e-2)
        assert line["reward_std"] > 0
    check_replay(run, 4, peft)


def test_drawn_completions_repeat_and_stop_at_texts(models: dict[str, Path], python: Path, tmp_path: Path) -> None:
    """The start draws twice with the same seeds; completions end with a stop text, not at the limit."""
    drawn = ["objective.temperature=1", "objective.samples=2", "task.generate.stop=[a, e]"]
    result = say(models["llama"], tmp_path / "run", "lora", *drawn, *by_vllm(python))
    assert result.code == 0, result.err
    assert json.loads((tmp_path / "run" / "run.json").read_text())["engine"]["texts_repeat"]
    assert any(line["truncated"] < 1 for line in train_lines(tmp_path / "run"))


def test_ranks_have_engines_of_their_own(models: dict[str, Path], python: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (tmp_path / "mine.py").write_text(REWARD)
    words = ["train", *SAY, "peft=lora", "optimizer.eps=0.3", f"objective.reward={tmp_path / 'mine.py'}:score"]
    words += [f"model.path={models['llama']}", f"hydra.run.dir={run}", "distributed.timeout=600", *by_vllm(python)]
    for result in run_ranks(words, words):
        assert result.code == 0, result
    alone = tmp_path / "alone"
    assert say(models["llama"], alone, "lora").code == 0
    for line, wanted in zip(train_lines(run), train_lines(alone), strict=True):
        assert line["loss"] == pytest.approx(wanted["loss"], rel=1e-2)
    check_replay(run, 4, "lora")


@pytest.fixture
def server(models: dict[str, Path], python: Path, tmp_path: Path) -> Iterator[str]:
    """The address of vLLM's own server, with a LoRA of rank 8 or less."""
    port = free_port()
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(models["llama"])]
    command += ["--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--dtype", "float32", "--enforce-eager"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "200"]
    variables = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    variables |= {"VLLM_CPU_KVCACHE_SPACE": "1", "PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    with open(tmp_path / "server.log", "wb") as log:
        process = subprocess.Popen(command, env=variables, stdout=log, stderr=log, start_new_session=True)
    try:
        for _ in range(600):
            if "startup complete" in (tmp_path / "server.log").read_text(errors="replace"):
                break
            assert process.poll() is None, (tmp_path / "server.log").read_text(errors="replace")[-2000:]
            time.sleep(1)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_server_that_the_user_started_computes_a_run(
    models: dict[str, Path], server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = compare_scores(monkeypatch)
    run, own, folder = tmp_path / "run", tmp_path / "own", tmp_path / "adapters"
    folder.mkdir()
    engine = ["engine=openai", f"engine.url={server}", f"engine.adapter_dir={folder}", "engine.max_loras=2"]
    result = say(models["llama"], run, "lora", *engine)
    assert result.code == 0, result.err
    assert len(errors) == 4
    assert max(errors) <= 1e-4
    assert say(models["llama"], own, "lora").code == 0
    for line, wanted in zip(train_lines(run), train_lines(own), strict=True):
        assert line["loss"] == pytest.approx(wanted["loss"], rel=1e-2)
    check_replay(run, 4, "lora")
    refused = say(models["llama"], tmp_path / "refused", "lora", *engine, "peft.r=16")
    assert refused.code == 2
    assert "LoRA rank 16 is greater than max_lora_rank 8" in refused.err.splitlines()[-1]
    assert not (tmp_path / "refused" / "trajectory.bin").exists()
    assert list(folder.iterdir()) == []
