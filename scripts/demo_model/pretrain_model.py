"""The model of pretrain_demo_model.py: make a random one or load one, its optimizers, and save it."""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from pretrain_text import BOS, EOS, PAD, SPECIALS, fail
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import AutoModelForMaskedLM, RobertaConfig, RobertaForMaskedLM

TIED = {"lm_head.decoder.weight", "lm_head.decoder.bias"}


def fresh_model(vocab: int, args: argparse.Namespace) -> Any:
    """Return a random RobertaForMaskedLM whose positions start as sinusoids.

    From random positions the loss sits three times as long on the plateau of token frequencies.
    """
    torch.manual_seed(args.seed)
    model = RobertaForMaskedLM(
        RobertaConfig(
            vocab_size=vocab,
            num_hidden_layers=args.layers,
            hidden_size=args.width,
            num_attention_heads=args.heads,
            intermediate_size=args.ffn or 4 * args.width,
            max_position_embeddings=args.positions,
            type_vocab_size=1,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            bos_token_id=BOS,
            pad_token_id=PAD,
            eos_token_id=EOS,
            dtype="float32",  # to compute in; on disk the weights are halves
        )
    )
    model.set_attn_implementation("eager")  # on a CPU the backward pass of torch's own attention is twice as slow
    half = args.width // 2
    angle = torch.arange(args.positions)[:, None] * 10_000.0 ** (-torch.arange(half) / half)
    with torch.no_grad():
        model.roberta.embeddings.position_embeddings.weight.copy_(0.02 * torch.cat([angle.sin(), angle.cos()], dim=1))
    return model


def started_model(folder: Path, args: argparse.Namespace) -> tuple[Any, Tokenizer]:
    """Load a model of this script and its tokenizer."""
    if not folder.is_dir():
        fail(f"--start {folder} is not a folder")
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        if not (folder / name).is_file():
            fail(f"--start {folder} holds no {name}")
    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        model = AutoModelForMaskedLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
        )
    except Exception as error:  # each library has its own kinds
        fail(f"--start {folder} cannot be loaded: {str(error).splitlines()[0]}")
    if not isinstance(model, RobertaForMaskedLM) or [tokenizer.token_to_id(s) for s in SPECIALS] != list(range(5)):
        fail(f"--start {folder} is not a model of this script: a RoBERTa whose first tokens are {' '.join(SPECIALS)}")
    longest = model.config.max_position_embeddings - 2
    if max([args.length] + ([args.long_length] if args.long_every else [])) > longest:
        fail(f"--start {folder} takes rows of at most {longest} tokens: lower --length, --long-length")
    return model, tokenizer


def optimizers(model: Any, args: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """Return Muon for the encoder's matrices (none at rate 0), and AdamW for all other parameters."""
    matrices = [p for p in model.roberta.encoder.parameters() if p.ndim == 2] if args.muon_lr else []
    chosen = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    adam = torch.optim.AdamW(rest, lr=args.adam_lr, betas=(0.9, 0.98), weight_decay=args.weight_decay, fused=True)
    return [torch.optim.Muon(matrices, lr=args.muon_lr, weight_decay=0.0), adam] if matrices else [adam]


def multiplies_bf16(device: torch.device) -> bool:
    """Tell whether the device has instructions for bfloat16 products; elsewhere autocast only costs time."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported()
    flags = Path("/proc/cpuinfo")
    return flags.exists() and any(name in flags.read_text() for name in ("avx512_bf16", "amx_bf16"))


def save(model: Any, tokenizer: Tokenizer, out: Path) -> None:
    """Write weights (float16, the tied decoder once), config and tokenizer as the Auto classes expect them."""
    weights = {k: v.half().cpu().contiguous() for k, v in model.state_dict().items() if k not in TIED}
    model.config.architectures = ["RobertaForMaskedLM"]
    model.config.save_pretrained(out)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(out / "tokenizer.json"))
    settings: dict[str, Any] = {"tokenizer_class": "RobertaTokenizer", "add_prefix_space": False}
    settings |= {"bos_token": "<s>", "cls_token": "<s>", "eos_token": "</s>", "sep_token": "</s>"}
    settings |= {"pad_token": "<pad>", "unk_token": "<unk>", "mask_token": "<mask>"}
    settings["model_max_length"] = model.config.max_position_embeddings - 2
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
