"""Compare the label scores of a base in eight and four bits with those in float32, before any training.

    python scripts/measure/measure_quantized.py --rows 200 -- model=demo data=demo task=sst2
    python scripts/measure/measure_quantized.py --rows 200 -- model=smollm2-135m model.path=smollm2 objective=lm \\
        data=files data.dir=glue/SST-2 task=sst2

The score of a row is the difference of its two labels' scores. The time is that of the processor for scoring the rows,
over float32's: other work on the machine counts little in it. nf4 needs the extra `quantized`.
"""

import argparse
import importlib.util
import sys
import time

import torch

from mezo_cli import data
from mezo_cli.config.compose import build_config
from mezo_cli.training.prepare import load_session


@torch.no_grad()
def margins(words: list[str], how: str, count: int) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Return the difference of the two labels' scores, and the labels, of evenly spaced dev rows; and the seconds."""
    config = build_config([*words, "peft=lora", f"model.quantize={how}"])
    splits = data.load_splits(config)
    rows = [splits.dev[i * len(splits.dev) // count] for i in range(count)]
    session = load_session(config)
    encoded = session.encoder.encode_all(rows)
    session.objective.outputs(session.objective.collate(encoded[:16]))  # allocates
    start = time.process_time()
    parts = [session.objective.outputs(session.objective.collate(encoded[i : i + 16])) for i in range(0, count, 16)]
    seconds, scores = time.process_time() - start, torch.cat(parts)
    return scores[:, 1] - scores[:, 0], torch.tensor([row.label for row in rows]), seconds


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("words", nargs="+", help="settings, after --")
    args = parser.parse_args()
    first = exact, labels, reference = margins(args.words, "none", args.rows)
    print("| base | accuracy | same prediction | mean difference | / spread | largest | time |\n" + "|---" * 7 + "|")
    for how in ("none", "int8", "nf4"):
        if how == "nf4" and importlib.util.find_spec("bitsandbytes") is None:
            print("nf4 left out: needs bitsandbytes", file=sys.stderr)
            continue
        own, _, seconds = first if how == "none" else margins(args.words, how, args.rows)
        error, accuracy = (own - exact).abs(), ((own > 0) == (labels == 1)).float().mean()
        same = ((own > 0) == (exact > 0)).float().mean()
        cells = f"{100 * accuracy:.1f}% | {100 * same:.1f}% | {error.mean():.3g} | {error.mean() / exact.std():.2g}"
        cells += f" | {error.max():.3g} | {seconds / reference:.2f}"
        print(f"| {'float32' if how == 'none' else how} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
