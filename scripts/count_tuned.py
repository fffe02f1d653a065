"""How much each kind of `peft` tunes, and how large its checkpoint is: on the embedded demo and on RoBERTa-large.

    python scripts/count_tuned.py

RoBERTa-large is a random model of its shape with the demo's tokenizer (1.4 GB in a temporary folder); what is counted
is what a run announces: the tensors that reach the loss, objective mlm, label words of SST-2.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, RobertaConfig, RobertaForMaskedLM

import mezo_cli
from mezo_cli import config as configs
from mezo_cli import models
from mezo_cli.schema import Example
from mezo_cli.session import prepare

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


def counted(words: list[str], folder: Path) -> str:
    """Return three cells: scalars, share of the model, bytes of a checkpoint."""
    session = prepare(configs.build(["data=demo", "model.device=cpu", *words]))
    batch = session.batch(session.inputs.encode_all([Example(("a fine film",), 0)]))
    session.params.keep_live(lambda: session.objective.logits(batch))
    tuned = session.tuned()
    models.save(session.loaded, folder)
    size = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
    return f"{tuned['count']:,} | {100 * tuned['share']:.3g}% | {size / 1e6:,.2f} MB"


def main() -> None:
    """Count and print a table."""
    with tempfile.TemporaryDirectory() as given:
        home = Path(given)
        path = large(home / "large")
        print("| peft | demo: tuned | share | checkpoint | roberta-large: tuned | share | checkpoint |")
        print(f"|{'---|' * 7}")
        for name, words in KINDS.items():
            cells = []
            for model in (["model=demo"], [f"model.path={path}"]):
                with tempfile.TemporaryDirectory(dir=home) as folder:
                    cells.append(counted([*model, *words], Path(folder)))
            print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
