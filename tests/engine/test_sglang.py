"""SGLang's own request classes take what mezo sends. Run where sglang can be imported (PYTHONPATH)."""

from typing import Any

import pytest
from pydantic import TypeAdapter

from mezo_cli.engine.server import TOKENS, SGLang

pytest.importorskip("msgspec", reason="needs sglang")
io_struct = pytest.importorskip("sglang.srt.managers.io_struct", reason="needs sglang", exc_type=ImportError)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_tokens": 3, "seed": 4, "temperature": 0.7},
        {"max_tokens": 1, "temperature": 0.0, TOKENS: [5, 9]},
        {"max_tokens": 3, "temperature": 0.0, "stop_token_ids": [2]},
    ],
)
def test_a_request_is_one_of_sglang(settings: dict[str, Any]) -> None:
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


def test_adapters_come_and_go_by_its_requests() -> None:
    named = {"lora_name": "a", "lora_path": "/x"}
    loaded = TypeAdapter(io_struct.LoadLoRAAdapterReqInput).validate_python(named)
    assert (loaded.lora_name, loaded.lora_path) == ("a", "/x")
    assert TypeAdapter(io_struct.UnloadLoRAAdapterReqInput).validate_python({"lora_name": "a"}).lora_name == "a"


def test_its_answer_is_read_as_its_own_code_writes_it() -> None:
    """`detokenize_logprob_tokens` makes (log-probability, token, text or None) of each."""
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    pairs = TokenizerManager.detokenize_logprob_tokens(None, [-1.5, -0.25], [5, 9], False)
    answer = {"output_ids": [7], "meta_info": {"output_token_ids_logprobs": [pairs]}}
    assert SGLang().read(answer, is_scored=True) == {5: -1.5, 9: -0.25}
    assert SGLang().read(answer, is_scored=False) == [7]
