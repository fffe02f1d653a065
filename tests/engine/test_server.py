"""A server that the user has started: what is asked of it, each mistake in one line, and runs by it."""

import json
from pathlib import Path
from typing import Any

import pytest

from mezo_cli.config.compose import build_config
from mezo_cli.config.schema import OpenAiConfig
from mezo_cli.config.stored import from_yaml, to_yaml
from mezo_cli.engine.server import Server, SGLang, server_at
from mezo_cli.errors import UserError
from mezo_cli.runs import Run
from tests.command_line import HANGS, error_line, mezo
from tests.engine.fake_server import FakeServer, serving
from tests.engine.test_run import DEMO

pytestmark = [pytest.mark.usefixtures("eager"), pytest.mark.usefixtures("in_tmp_path")]
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
