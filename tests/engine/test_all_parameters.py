"""An engine that mezo starts: it follows all parameters, each rank has its own, it ends with mezo; vLLM itself."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from mezo_cli.config.compose import build_config
from mezo_cli.engine import process
from mezo_cli.engine.layout import Block, LayoutError, as_matrix, check_whole, find_blocks
from mezo_cli.models.download import fetch
from tests import tiny
from tests.command_line import HANGS, environment, mezo, ok, small
from tests.engine.fake_server import program
from tests.engine.test_run import losses_and_metrics
from tests.ranks import run_ranks

WORDS = ["task=demo-arithmetic", "data=demo", "model=demo-decoder", "objective=generate", "objective.loss=lm"]
WORDS += ["model.device=cpu", "data.eval_limit=4", "data.train_size=8", "batch_size=4", "steps=3", "log_every=1"]
WORDS += ["eval_every=0", "test_at_start=false", "optimizer.lr=1e-3", "optimizer.weight_decay=0.1"]


@pytest.mark.usefixtures("eager_kernels", "in_tmp_path")
@pytest.mark.parametrize("peft", ["none", pytest.param("lora", marks=pytest.mark.slow)])
def test_a_server_that_mezo_starts_follows_every_update(peft: str, tmp_path: Path) -> None:
    own, words = tmp_path / "own", [*WORDS, f"peft={peft}", *(["optimizer.lr=1e-4"] if peft == "lora" else [])]
    engine = ["engine=vllm", f"engine.python={program(tmp_path)}"]
    ok("train", *words, *engine, f"hydra.run.dir={tmp_path / 'run'}")
    assert mezo("train", *words, f"hydra.run.dir={own}").code == 0
    by_engine, wanted = map(losses_and_metrics, (tmp_path / "run", own))
    assert by_engine == [pytest.approx(line, rel=1e-4, abs=1e-4) for line in wanted]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["engine"]["version"] == "0"


@pytest.mark.slow
@pytest.mark.usefixtures("eager_kernels", "in_tmp_path")
def test_each_rank_starts_a_server_of_its_own(tmp_path: Path) -> None:
    words = [*WORDS, "optimizer=es", "optimizer.members=4", "engine=vllm", f"engine.python={program(tmp_path)}"]
    results = run_ranks(*[["train", *words, f"hydra.run.dir={tmp_path / 'ranks'}"]] * 2)
    assert [result.code for result in results] == [0, 0], results
    ok("train", *words, f"hydra.run.dir={tmp_path / 'alone'}")
    ranks, alone = (losses_and_metrics(tmp_path / name) for name in ("ranks", "alone"))
    assert ranks == [pytest.approx(line, rel=1e-3, abs=1e-5) for line in alone]


@pytest.mark.usefixtures("eager_kernels", "in_tmp_path")
def test_a_program_that_starts_no_server_is_one_line(tmp_path: Path) -> None:
    words = [*WORDS, "engine=vllm", f"hydra.run.dir={tmp_path / 'run'}"]
    assert "engine=vllm needs engine.python (or MEZO_ENGINE_PYTHON)" in mezo("train", *words).err
    line = mezo("train", *words, f"engine.python={sys.executable}").err.splitlines()[-1]
    assert line.startswith("error: engine=vllm failed: its process ended with status 1: ")
    assert "No module named 'vllm" in line


PARENT = """
import sys
from pathlib import Path
from mezo_cli.config.schema import VllmConfig
from mezo_cli.engine.process import VllmServer
server = VllmServer(VllmConfig(name="vllm", python=sys.argv[1]), Path(sys.argv[2]), 64, 8)
print(server.socket, flush=True)
sys.stdin.read()
"""


def test_nothing_of_the_server_outlives_mezo(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(program(tmp_path)), str(fetch(build_config(WORDS).model))]
    with subprocess.Popen(
        command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        socket = Path(parent.stdout.readline().strip())
        assert socket.is_socket()
        assert socket.parent.stat().st_mode & 0o777 == 0o700
        started = psutil.Process(parent.pid).children(recursive=True)
        assert len(started) >= 3  # the supervisor, the server, and what that has started
        assert not any(one.net_connections("inet") for one in started)
        parent.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(started, timeout=HANGS)
    assert not [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]
    assert not socket.parent.exists()


def test_processes_share_the_gpus_and_cpus_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert process.cpu_groups([0, 1, 2, 3], 2) == ["0,1", "2,3"]
    assert process.cpu_groups([5], 2) == ["5", "5"]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    for name, value in {"RANK": 5, "LOCAL_RANK": 1, "WORLD_SIZE": 6, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv(process.GPUS, "4,5,6,7")
    placed = process.environment(2)
    assert (placed[process.GPUS], placed[process.BIND]) == ("6,7", "2|3")
    assert not {"RANK", "LOCAL_RANK", "WORLD_SIZE"} & set(placed)
    monkeypatch.delenv("RANK")
    assert process.BIND not in process.environment(1)
    assert process.environment(2)[process.BIND] == "0,1|2,3"


SHAPES = {"q": (4, 6), "k": (2, 6), "out": (6, 4), "bias": (4,)}


def coordinates(name: str) -> np.ndarray:
    """Each element's tensor, row and column, counted from 1: int [3, rows, columns]."""
    rows, columns = as_matrix(SHAPES[name])
    row, column = np.mgrid[1 : rows + 1, 1 : columns + 1]
    return np.stack([np.full((rows, columns), list(SHAPES).index(name) + 1), row, column])


PADDED = np.concatenate([coordinates("q"), np.zeros((3, 4, 6), dtype=int)], axis=1)
FUSED = np.concatenate([coordinates("q")[:, 2:], coordinates("k")[:, 1:]], axis=1)  # the second of two shards
BIASES = np.concatenate([coordinates("bias")[:, :, 2:], coordinates("bias")[:, :, :1]], axis=2)


@pytest.mark.parametrize(
    ("local", "blocks"),
    [
        pytest.param(FUSED, [Block(0, 2, 0, 2, 6, 0, 0), Block(1, 1, 0, 1, 6, 2, 0)], id="rows of two tensors"),
        pytest.param(coordinates("out")[:, :, 2:], [Block(2, 0, 2, 6, 2, 0, 0)], id="columns"),
        pytest.param(PADDED, [Block(0, 0, 0, 4, 6, 0, 0)], id="padding, of no tensor"),
        pytest.param(BIASES, [Block(3, 0, 2, 1, 2, 0, 0), Block(3, 0, 0, 1, 1, 0, 2)], id="vectors"),
        pytest.param(
            coordinates("q")[:, [2, 3, 0, 1]], [Block(0, 2, 0, 2, 6, 0, 0), Block(0, 0, 0, 2, 6, 2, 0)], id="swapped"
        ),
    ],
)
def test_the_blocks_of_a_local_tensor(local: np.ndarray, blocks: list[Block]) -> None:
    assert find_blocks(*local) == blocks


def test_a_transposed_tensor_is_refused() -> None:
    row, column = np.mgrid[1:65, 1:65]
    with pytest.raises(LayoutError, match="not made of blocks"):
        find_blocks(np.ones((64, 64), dtype=int), column, row)


def test_every_element_must_be_held_by_some_shard() -> None:
    shapes = list(SHAPES.items())
    halves = [Block(2, 0, 0, 6, 2, 0, 0), Block(2, 0, 2, 6, 2, 0, 0)]
    others = [Block(0, 0, 0, 4, 6, 0, 0), Block(1, 0, 0, 2, 6, 4, 0), Block(3, 0, 0, 1, 4, 0, 0)]
    copied = others[2]._replace(local_column=4)  # the same elements in another shard count once
    check_whole(shapes, [*halves, *others, copied])
    with pytest.raises(LayoutError, match=r"holds 12 of the 24 elements of out"):
        check_whole(shapes, [halves[0], *others])


# vLLM's attention on a CPU takes heads of 32 elements or more
WIDE_ENOUGH: dict[str, dict[str, int]] = {
    "llama": {"hidden_size": 128, "intermediate_size": 256},
    "opt": {"hidden_size": 128, "ffn_dim": 256, "word_embed_proj_dim": 128},
}


@pytest.mark.usefixtures("eager_kernels")
@pytest.mark.skipif("MEZO_TEST_ENGINE" not in os.environ, reason="needs an environment with vLLM: make test-engine")
@pytest.mark.parametrize(
    ("kind", "peft", "parts"), [("llama", "none", 1), ("llama", "lora", 2), ("opt", "none", 2), ("opt", "lora", 1)]
)
def test_independent_runs_agree(kind: str, peft: str, parts: int, tmp_path: Path) -> None:
    """All parameters: the digests of the server's weights are compared with mezo's own at the end of the run, too."""
    model, data = tiny.decoder(tmp_path / "model", kind, **WIDE_ENOUGH[kind]), tiny.movie_folder(tmp_path / "data")
    engine = ["engine=vllm", f"engine.python={os.environ['MEZO_TEST_ENGINE']}", "engine.memory=200000000"]
    runs: dict[str, list[str]] = {"own": [], "run": [*engine, f"engine.tensor_parallel={parts}"]}
    lr = "1e-4" if peft == "lora" else "1e-5"  # with a larger one the model would amplify differences of the last bits
    grads = {}
    for name, by in runs.items():
        more = ("steps=50", "eval_every=25", "log_every=1", "objective=lm", "model=gpt2", f"peft={peft}")
        ok("train", *small(model, data, tmp_path / name, *more, f"optimizer.lr={lr}"), *by)
        lines = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        grads[name] = [line["projected_grad"] for line in lines if line["kind"] == "train"]
    mean = sum(map(abs, grads["own"])) / len(grads["own"])
    assert max(abs(a - b) for a, b in zip(grads["own"], grads["run"], strict=True)) / mean <= 1e-3
