"""An export of SmolLM2 through llama.cpp's own converter to GGUF, and back by transformers: the same logits."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.command_line import mezo

MODEL, CONVERTER = os.environ.get("SMOLLM2"), os.environ.get("LLAMA_CPP_CONVERTER")
pytestmark = pytest.mark.skipif(not (MODEL and CONVERTER), reason="needs SmolLM2 and llama.cpp: make test-outside")
TEXTS = ["The capital of France is Paris, and", "It was great.", "def add(a, b):\n    return"]


def logits(folder: Path, half: bool = False, **named: str) -> list[torch.Tensor]:
    """Return the logits of some texts; with `half` those of matrices rounded to float16, as the file stores them."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **named).eval()
    with torch.inference_mode():
        for p in model.parameters():
            p.copy_(p.half() if half and p.dim() > 1 else p)
        return [model(**tokenizer(text, return_tensors="pt")).logits for text in TEXTS]


def test_an_export_becomes_gguf_and_comes_back(tmp_path: Path) -> None:
    run, folder = tmp_path / "run", tmp_path / "model"
    words = ["task=sst2", "objective=lm", "model=smollm2-135m", f"model.path={MODEL}", "data=demo", "data.eval_limit=8"]
    sizes = ["steps=2", "eval_every=2", "batch_size=2", "log_every=1", "peft=lora", "optimizer.lr=1e-3"]
    assert mezo("train", *words, *sizes, f"hydra.run.dir={run}").code == 0
    assert mezo("export", run, "--out", folder).code == 0
    ours, rounded = logits(folder), logits(folder, half=True)
    for kind in ("f16", "q8_0"):
        command = [sys.executable, str(CONVERTER), str(folder), "--outtype", kind, "--outfile", f"{folder}/{kind}.gguf"]
        subprocess.run(command, check=True)
        theirs = logits(folder, gguf_file=f"{kind}.gguf")
        differences = torch.cat([(one - other).abs().flatten() for one, other in zip(ours, theirs, strict=True)])
        print(f"\n{kind}: logits differ by {differences.mean():.4f} in the mean, {differences.max():.4f} at most")
        if kind == "f16":
            assert differences.mean() < 1e-2
            torch.testing.assert_close(theirs, rounded, rtol=0, atol=1e-3)
