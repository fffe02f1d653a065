"""Count the trainable parameters of each `peft`, and the bytes of its checkpoint, on the demo model and RoBERTa-large.

    python scripts/count_tuned.py

RoBERTa-large is a random model of its shape with the demo's tokenizer (1.4 GB in a temporary folder). Counted are the
parameters that a run trains: those that reach the loss of objective mlm with the label words of SST-2.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, RobertaConfig, RobertaForMaskedLM

import mezo_cli
from mezo_cli import models
from mezo_cli.config.compose import build_config
from mezo_cli.config.schema import Example
from mezo_cli.training.setup import prepare

DEMO = Path(mezo_cli.__file__).parent / "demo" / "model"
LARGE: dict[str, Any] = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
}
KINDS = {
    "none": ["peft=none"],
    "lora": ["peft=lora"],
    "lora, attention and feed-forward": ["peft=lora", "peft.targets=attention_feed_forward"],
    "prefix": ["peft=prefix"],
    "head": ["peft=head"],
    "bias": ["peft=bias"],
}


def large(folder: Path) -> Path:
    """Write a random model of RoBERTa-large's shape."""
    size: dict[str, Any] = {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1}
    torch.manual_seed(0)
    RobertaForMaskedLM(RobertaConfig(**size, **LARGE)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(DEMO).save_pretrained(folder)
    return folder


def count(words: list[str], folder: Path) -> str:
    """Return three table cells: trainable parameters, share of the model, size of a checkpoint."""
    session = prepare(build_config(["data=demo", "model.device=cpu", *words]))
    batch = session.batch(session.encoder.encode_all([Example(("a fine film",), 0)]))
    session.forward.select_reachable(lambda: session.objective.logits(batch))
    trained = session.trainable()
    models.save(session.loaded, folder)
    size = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
    return f"{trained['count']:,} | {100 * trained['share']:.3g}% | {size / 1e6:,.2f} MB"


def main() -> None:
    """Count and print a table."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        path = large(root / "large")
        print("| peft | demo: trained | share | checkpoint | roberta-large: trained | share | checkpoint |")
        print(f"|{'---|' * 7}")
        for peft, words in KINDS.items():
            cells = []
            for model in (["model=demo"], [f"model.path={path}"]):
                with tempfile.TemporaryDirectory(dir=root) as folder:
                    cells.append(count([*model, *words], Path(folder)))
            print(f"| {peft} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
