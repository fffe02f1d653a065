"""Parts of an engine that perturbs all parameters itself, which no command starts in this version."""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mezo_cli import data
from mezo_cli.config.compose import build_config
from mezo_cli.config.schema import VllmConfig
from mezo_cli.engine import adapter_files
from mezo_cli.engine import engine as engine_module
from mezo_cli.engine.placement import cpu_groups, variables_of_rank
from mezo_cli.errors import RunFailed
from mezo_cli.training.load import attach_engine, load_session
from tests.engine.fake_server import FakeModel

WORDS = ["task=demo-arithmetic", "data=demo", "model=demo-decoder", "objective=generate", "objective.loss=lm"]
WORDS += ["model.device=cpu", "data.eval_limit=4", "data.train_size=8", "batch_size=4", "optimizer.lr=1e-3"]


class Held:
    """The calls of an engine that holds all parameters, answered in this process."""

    def submit(self, method: str, **params: Any) -> Callable[[], Any]:
        result = getattr(self, method, None) or getattr(self.model, method)
        answer = result(**params)
        return lambda: answer

    def start(self, folder: str, tensors: Any, **_: Any) -> Any:
        self.model = FakeModel(Path(folder), tensors)
        return {"version": "0", "blocks": self.model.blocks()}

    def score(self, prompts: Any, tokens: Any, weights: Any) -> Any:
        scores = []
        for own in weights:
            self.model.apply(own)
            scores.append([self.model.scores(prompt, of) for prompt, of in zip(prompts, tokens, strict=True)])
        return scores

    def close(self) -> None:
        pass


@pytest.mark.usefixtures("eager")
def test_an_engine_follows_every_update_and_a_missed_one_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "_open", lambda settings: Held())
    config = build_config([*WORDS, "optimizer.weight_decay=0.1"]).replace(engine=VllmConfig(name="vllm"))
    session = load_session(config)
    rows = session.encoder.encode_all(data.load(config.data_task, config.data, config.data_seed).train)
    engine = engine_module.Engine(config, 200)
    with torch.no_grad():
        attach_engine(engine, session, rows)
        for step in range(2):
            engine.update(session.optimizer, step, session.step(rows[:4], step))
        engine.check_weights(session.params)
        session.step(rows[:4], 2)
    with pytest.raises(RunFailed, match="the engine's weights are not those of the trajectory"):
        engine.check_weights(session.params)
    engine.close()


def test_processes_share_the_gpus_and_cpus_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cpu_groups([0, 1, 2, 3], 2) == ["0,1", "2,3"]
    assert cpu_groups([5], 2) == ["5", "5"]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    for name, value in {"RANK": 5, "LOCAL_RANK": 1, "WORLD_SIZE": 6, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    placed = variables_of_rank(2)
    assert (placed["CUDA_VISIBLE_DEVICES"], placed["VLLM_CPU_OMP_THREADS_BIND"], placed["RANK"]) == ("6,7", "2|3", None)
    monkeypatch.delenv("RANK")
    assert variables_of_rank(2) == {}


def test_what_does_not_fit_in_memory_is_written_to_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_files, "MEMORY", tmp_path)
    free = shutil.disk_usage(tmp_path).free
    with adapter_files.scratch_folder("small-", free // 4) as folder:
        assert Path(folder).parent == tmp_path
    with adapter_files.scratch_folder("large-", free) as folder:
        assert Path(folder).parent == Path(tempfile.gettempdir())
    monkeypatch.setattr(adapter_files, "MEMORY", tmp_path / "nothing")
    with adapter_files.scratch_folder("none-", 1) as folder:
        assert Path(folder).parent == Path(tempfile.gettempdir())
