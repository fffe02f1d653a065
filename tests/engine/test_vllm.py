"""vLLM itself, on a CPU: `make test-engine` runs these; elsewhere they are skipped with a message."""

import json
import os
from pathlib import Path

import pytest

from tests import tiny
from tests.command_line import mezo, small

pytestmark = [
    pytest.mark.usefixtures("eager"),
    pytest.mark.skipif("MEZO_TEST_ENGINE" not in os.environ, reason="needs an environment with vLLM: make test-engine"),
]
# vLLM's attention on a CPU takes heads of 32 elements or more
SHAPES: dict[str, dict[str, int]] = {
    "llama": {"hidden_size": 128, "intermediate_size": 256},
    "opt": {"hidden_size": 128, "ffn_dim": 256, "word_embed_proj_dim": 128},
}


@pytest.mark.parametrize(
    ("kind", "peft", "parts"), [("llama", "none", 1), ("llama", "lora", 2), ("opt", "none", 2), ("opt", "lora", 1)]
)
def test_independent_runs_agree(kind: str, peft: str, parts: int, tmp_path: Path) -> None:
    """All parameters: the digests of the server's weights are compared with mezo's own at the end of the run, too."""
    model, data = tiny.decoder(tmp_path / "model", kind, **SHAPES[kind]), tiny.movie_folder(tmp_path / "data")
    engine = ["engine=vllm", f"engine.python={os.environ['MEZO_TEST_ENGINE']}", "engine.memory=200000000"]
    runs: dict[str, list[str]] = {"own": [], "run": [*engine, f"engine.tensor_parallel={parts}"]}
    lr = "1e-4" if peft == "lora" else "1e-5"  # with a larger one the model would amplify differences of the last bits
    grads = {}
    for name, by in runs.items():
        more = ("steps=50", "eval_every=25", "log_every=1", "objective=lm", "model=gpt2", f"peft={peft}")
        result = mezo("train", *small(model, data, tmp_path / name, *more, f"optimizer.lr={lr}"), *by)
        assert result.code == 0, result.err
        lines = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        grads[name] = [line["projected_grad"] for line in lines if line["kind"] == "train"]
    mean = sum(map(abs, grads["own"])) / len(grads["own"])
    assert max(abs(a - b) for a, b in zip(grads["own"], grads["run"], strict=True)) / mean <= 1e-3
