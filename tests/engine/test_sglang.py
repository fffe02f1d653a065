"""SGLang's own request classes take what mezo sends. Run where sglang can be imported (PYTHONPATH)."""

import json
import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from mezo_cli.engine.server import TOKENS, SGLang
from tests.command_line import ok
from tests.ranks import free_port

ROOT = Path(__file__).parents[2]


@pytest.fixture
def io_struct() -> Any:
    """The module of its request classes."""
    pytest.importorskip("msgspec", reason="needs sglang")
    return pytest.importorskip("sglang.srt.managers.io_struct", reason="needs sglang", exc_type=ImportError)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The address of its server on this CPU, with the embedded decoder."""
    python = os.environ.get("MEZO_SGLANG_PYTHON")
    if python is None:
        pytest.skip("needs sglang: MEZO_SGLANG_PYTHON, the Python of an environment with it")
    port = free_port()
    words = [python, Path(__file__).with_name("sglang_on_a_cpu.py"), "--port", str(port)]
    with open(tmp_path / "server.log", "wb") as log:
        process = subprocess.Popen([*words, "--model-path", ROOT / "mezo_cli/demo/decoder"], stdout=log, stderr=log)
    try:
        while process.poll() is None:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/model_info").close()
                break
            except OSError:
                time.sleep(1)
        assert process.poll() is None, (tmp_path / "server.log").read_text()[-2000:]
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()


@pytest.mark.slow
def test_its_server_completes_the_prompts_of_members(server: str, tmp_path: Path, eager_kernels: None) -> None:
    """mezo's check at the start compares its log-probabilities with the model's own; then two steps of es."""
    (tmp_path / "adapters").mkdir()
    words = ["task=demo-arithmetic", "data=demo", "model=demo-decoder", "objective=generate", "peft=lora"]
    words += ["objective.reward=countdown", "objective.max_new_tokens=8", "optimizer=es", "optimizer.members=4"]
    words += ["optimizer.eps=1e-2", "batch_size=8", "steps=2", "eval_every=2", "data.eval_limit=8"]
    words += ["engine=openai", "engine.server=sglang", f"engine.url={server}", "engine.max_loras=4"]
    words += [f"engine.adapter_dir={tmp_path / 'adapters'}", f"hydra.run.dir={tmp_path / 'run'}"]
    ok("train", *words)
    assert "server at 127.0.0.1" in json.loads((tmp_path / "run" / "run.json").read_text())["engine"]["version"]
    assert not any((tmp_path / "adapters").iterdir())


@pytest.mark.parametrize(
    "settings",
    [
        {"max_tokens": 3, "seed": 4, "temperature": 0.7},
        {"max_tokens": 1, "temperature": 0.0, TOKENS: [5, 9]},
        {"max_tokens": 3, "temperature": 0.0, "stop_token_ids": [2]},
    ],
)
def test_a_request_is_one_of_sglang(settings: dict[str, Any], io_struct: Any) -> None:
    """Every field arrives, and the sampling parameters are its own, of values that it verifies."""
    from sglang.srt.sampling.sampling_params import SamplingParams

    body = SGLang().request("member", [1, 2], settings)
    request = TypeAdapter(io_struct.GenerateReqInput).validate_python(body)
    request.normalize_batch_and_arguments()
    sampling = SamplingParams(**request.sampling_params)
    sampling.verify(1000)
    assert (request.input_ids, request.lora_path) == ([1, 2], "member")
    assert (request.return_logprob, request.token_ids_logprob) == (TOKENS in settings, settings.get(TOKENS))
    assert (sampling.max_new_tokens, sampling.sampling_seed) == (settings["max_tokens"], settings.get("seed"))
    assert {*body} <= {*io_struct.GenerateReqInput.__dataclass_fields__}


def test_its_answer_is_read_as_its_own_code_writes_it(io_struct: Any) -> None:
    """`detokenize_logprob_tokens` makes (log-probability, token, text or None) of each."""
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    pairs = TokenizerManager.detokenize_logprob_tokens(None, [-1.5, -0.25], [5, 9], False)
    answer = {"output_ids": [7], "meta_info": {"output_token_ids_logprobs": [pairs]}}
    assert SGLang().read(answer, is_scored=True) == {5: -1.5, 9: -0.25}
    assert SGLang().read(answer, is_scored=False) == [7]
