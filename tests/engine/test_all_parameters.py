"""An engine that mezo starts: it follows all parameters, each rank has its own, and it ends with mezo."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from mezo_cli.config.compose import build_config
from mezo_cli.engine import process
from mezo_cli.models.download import fetch
from tests.command_line import HANGS, environment, mezo
from tests.engine.fake_server import program
from tests.engine.step_checks import losses_and_metrics
from tests.ranks import run_ranks

WORDS = ["task=demo-arithmetic", "data=demo", "model=demo-decoder", "objective=generate", "objective.loss=lm"]
WORDS += ["model.device=cpu", "data.eval_limit=4", "data.train_size=8", "batch_size=4", "steps=3", "log_every=1"]
WORDS += ["eval_every=0", "test_at_start=false", "optimizer.lr=1e-3", "optimizer.weight_decay=0.1"]


@pytest.mark.usefixtures("eager", "in_tmp_path")
@pytest.mark.parametrize("peft", ["none", pytest.param("lora", marks=pytest.mark.slow)])
def test_a_server_that_mezo_starts_follows_every_update(peft: str, tmp_path: Path) -> None:
    own, words = tmp_path / "own", [*WORDS, f"peft={peft}", *(["optimizer.lr=1e-4"] if peft == "lora" else [])]
    engine = ["engine=vllm", f"engine.python={program(tmp_path)}"]
    result = mezo("train", *words, *engine, f"hydra.run.dir={tmp_path / 'run'}")
    assert result.code == 0, result.err
    assert mezo("train", *words, f"hydra.run.dir={own}").code == 0
    by_engine, wanted = map(losses_and_metrics, (tmp_path / "run", own))
    assert by_engine == [pytest.approx(line, rel=1e-4, abs=1e-4) for line in wanted]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["engine"]["version"] == "0"


@pytest.mark.slow
@pytest.mark.usefixtures("eager", "in_tmp_path")
def test_each_rank_starts_a_server_of_its_own(tmp_path: Path) -> None:
    words = [*WORDS, "optimizer=es", "optimizer.members=4", "engine=vllm", f"engine.python={program(tmp_path)}"]
    results = run_ranks(*[["train", *words, f"hydra.run.dir={tmp_path / 'ranks'}"]] * 2)
    assert [result.code for result in results] == [0, 0], results
    result = mezo("train", *words, f"hydra.run.dir={tmp_path / 'alone'}")
    assert result.code == 0, result.err
    ranks, alone = (losses_and_metrics(tmp_path / name) for name in ("ranks", "alone"))
    assert ranks == [pytest.approx(line, rel=1e-3, abs=1e-5) for line in alone]


@pytest.mark.usefixtures("eager", "in_tmp_path")
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
