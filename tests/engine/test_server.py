"""A server that the user has started: what is asked of it, each mistake in one line, and runs by it."""

import json
from pathlib import Path

import pytest

from mezo_cli.config.compose import build_config
from mezo_cli.config.schema import OpenAiConfig
from mezo_cli.config.stored import from_yaml, to_yaml
from mezo_cli.engine.server import DIALECTS, EngineFailed, EngineServer
from mezo_cli.errors import UserError
from mezo_cli.runs import Run
from tests.command_line import error_line, mezo
from tests.engine.fake_server import FakeServer, serving
from tests.engine.test_run import DEMO

pytestmark = [pytest.mark.usefixtures("eager"), pytest.mark.usefixtures("in_tmp_path")]
OPENAI = "engine=openai"


def failure(url: str, folder: Path | None = None, rank: int = 8, **settings: object) -> str:
    """The line with which a start by a server fails, or its first adapter."""
    with pytest.raises(EngineFailed) as error:  # noqa: PT012
        server = EngineServer.at(OpenAiConfig(name="openai", timeout=5.0, **settings), url)  # type: ignore[arg-type]
        try:
            server.submit("start", max_length=100)()
            assert folder is not None
            folder.mkdir()
            (folder / "adapter_config.json").write_text(json.dumps({"r": rank}))
            server.submit("score", prompts=[], tokens=[], weights=[{"adapter": str(folder), "keep": True}])()
        finally:
            server.close()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_each_mistake_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEZO_ENGINE_KEY", raising=False)
    with serving() as server:
        url = server.url
        assert "LoRA rank 32 is greater than max_lora_rank 16" in failure(url, tmp_path / "large", 32)
        monkeypatch.setattr(
            FakeServer, "_load", lambda self, name, folder: (404, {"error": {"message": "No adapter found"}})
        )
        assert "engine.adapter_dir is a folder that both see" in failure(url, tmp_path / "unseen")
    assert "cannot be reached" in failure(url)
    with serving(room=99) as server:
        assert "takes texts of 99 tokens, and this run has some of 100" in failure(server.url)
    with serving(loads=False) as server:
        assert "start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True" in failure(
            server.url, tmp_path / "adapter"
        )
    with serving(key="secret") as server:
        assert "give it as MEZO_ENGINE_KEY" in failure(server.url)
        monkeypatch.setenv("MEZO_ENGINE_KEY", "secret")
        engine = EngineServer.at(OpenAiConfig(name="openai"), server.url)
        assert engine.submit("start", max_length=10)()["blocks"] == []
        engine.close()
    assert "needs engine.allow_remote=true" in failure("http://192.0.2.1:8000")
    assert "without a name or a password" in failure("http://name:secret@127.0.0.1")
    assert "give http://HOST:PORT" in failure("127.0.0.1:8000")


def test_another_machine_is_asked_only_where_that_is_allowed() -> None:
    config = OpenAiConfig(name="openai", allow_remote=True)
    EngineServer.at(config, "http://192.0.2.1:1").close()  # nothing is asked yet


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
    body = DIALECTS["sglang"].body("m", "a", [1, 2], {"max_tokens": 3, "seed": 4, "temperature": 0.0})
    sampling = {"max_new_tokens": 3, "sampling_seed": 4, "temperature": 0.0, "ignore_eos": True}
    assert body == {"input_ids": [1, 2], "lora_path": "a", "sampling_params": sampling}
