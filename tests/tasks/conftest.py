"""Tokenizers."""

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests import tiny
from tests.lm_bff import wordpiece


@pytest.fixture(scope="module", params=["opt", "gpt2", "llama"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(tiny.decoder(tmp_path_factory.mktemp(request.param), request.param))


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(tiny.decoder(tmp_path_factory.mktemp("gpt2")))


@pytest.fixture(scope="module")
def bert() -> PreTrainedTokenizerFast:
    return wordpiece()
