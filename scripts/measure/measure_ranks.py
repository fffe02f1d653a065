"""Measure what two ranks of one thread reach, against two processes that train by themselves at the same time.

    python scripts/measure/measure_ranks.py
    python scripts/measure/measure_ranks.py --rows 64x32 --rounds 4 --out docs/measurements/ranks.json

Both processes hold random weights of roberta-base's shape and take whole training steps, first each by itself, then
together, in turn, in one run: on a busy machine the ratio of the two still means something. `efficiency` is what the
two ranks reach together, steps per second, as a fraction of what the two processes reach by themselves.
`exchange` is the time of an exchange of the size of a step's, when no rank has anything else to do.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from measure_storage import make_folder

from mezo_cli.config.compose import build_config
from mezo_cli.config.schema import TokenizedExample
from mezo_cli.distributed.ranks import ALONE, Ranks
from mezo_cli.process import versions
from mezo_cli.training.prepare import load_session
from mezo_cli.training.session import Session

RANKS = 2
SAMPLES = {"rows": 1, "directions": RANKS}  # distributed.split -> optimizer.samples
EXCHANGES = 200


def take_step(session: Session, rows: Any, ranks: Ranks, split: str, number: int) -> float:
    """Take one training step, together or alone, and return its seconds."""
    session.ranks = ranks if split == "rows" else ALONE
    session.forward.ranks = ranks if split == "directions" else ALONE
    began = time.perf_counter()
    with torch.no_grad():
        session.step(rows, number)
    return time.perf_counter() - began


def random_rows(spec: str, vocabulary: int) -> list[TokenizedExample]:
    """Return random rows: `64x32` is 64 rows of 32 tokens, with the masked place third from the end."""
    count, length = map(int, spec.split("x"))
    texts = torch.randint(10, vocabulary, (count, length), generator=torch.Generator().manual_seed(0)).tolist()
    return [TokenizedExample(text, [0] * length, length - 3, number % 2) for number, text in enumerate(texts)]


def measure(rank: int, folder: str, model: str, spec: str, rounds: int) -> None:
    """Run one of the processes, and write its seconds to a file."""
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(f"{folder}/store", RANKS)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(minutes=5))
    seconds: dict[str, list[float]] = {"exchange": []}
    number = 0
    words = ["data=demo", "optimizer.lr=1e-9", f"model.path={model}", "model.device=cpu"]
    for split, samples in SAMPLES.items():
        config = build_config([*words, f"optimizer.samples={samples}", f"distributed.split={split}"])
        session = load_session(config)
        rows = random_rows(spec, session.loaded.model.config.vocab_size)
        session.exclude_unreachable(rows[0])
        ranks = Ranks(rank, RANKS, store)
        ranks.start(config)
        for turn in range(rounds + 1):
            for name, joined in ((f"{split} alone", ALONE), (f"{split} together", ranks)):
                ranks.first_says(True)  # both begin together
                taken = take_step(session, rows, joined, split, number)
                number += 1
                if turn:  # the first compiles
                    seconds.setdefault(name, []).append(taken)
    sizes = [16 * len(rows) // RANKS] * RANKS
    for _ in range(EXCHANGES):
        began = time.perf_counter()
        ranks.gather(bytes(sizes[rank]), sizes, "step")
        seconds["exchange"].append(time.perf_counter() - began)
    Path(f"{folder}/{rank}.json").write_text(json.dumps(seconds))
    # Neither process may end while the other needs it. An ordinary exit now and then aborts in gloo's threads
    # ("terminate called without an active exception"); everything is written, so no clean-up is needed.
    ranks.exchange("measured")
    os._exit(0)


def summarize(of_ranks: list[dict[str, list[float]]]) -> dict[str, Any]:
    """Return the medians, and the efficiency of each split.

    Args:
        of_ranks: of each process, what was timed -> seconds, in order.
    """
    found: dict[str, Any] = {}
    for split in SAMPLES:
        alone = [list(turn) for turn in zip(*(one[f"{split} alone"] for one in of_ranks), strict=True)]
        together = [max(turn) for turn in zip(*(one[f"{split} together"] for one in of_ranks), strict=True)]
        # Steps per second of both by themselves: 1 / a + 1 / b; of the two ranks: 1 / together. One ratio per round.
        ratios = [1 / (took * sum(1 / one for one in turn)) for turn, took in zip(alone, together, strict=True)]
        found[split] = {
            "alone": [one for turn in alone for one in turn],
            "together": together,
            "efficiency": statistics.median(ratios),
            "least": min(ratios),
            "greatest": max(ratios),
        }
    found["exchange"] = statistics.median(of_ranks[0]["exchange"])
    return found


def main() -> None:
    """Start both processes, and print and write what they took."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", default="64x32", help="rows of a step and tokens of a row")
    parser.add_argument("--rounds", type=int, default=4, help="after one that is not counted")
    parser.add_argument("--model", help="a folder with a model in place of random weights of roberta-base's shape")
    parser.add_argument("--out", type=Path, help="a JSON file for what was measured")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="measure_ranks") as folder:
        model = args.model or str(make_folder(Path(folder), "roberta-base", "float32"))
        mp.spawn(measure, (folder, model, args.rows, args.rounds), nprocs=RANKS)
        found = summarize([json.loads(Path(f"{folder}/{rank}.json").read_text()) for rank in range(RANKS)])
    found |= {"batch": args.rows, "versions": versions.installed()}
    for split in SAMPLES:
        result = found[split]
        alone, together = statistics.median(result["alone"]), statistics.median(result["together"])
        efficiency = f"{result['efficiency']:.2f} ({result['least']:.2f} to {result['greatest']:.2f})"
        print(f"{split:10}  alone {alone:6.2f} s  together {together:6.2f} s  efficiency {efficiency}")
    print(f"exchange    {1e6 * found['exchange']:.0f} us")
    if args.out:
        args.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
