"""Settings that meet: their values, what is refused, and rows of values in which every other pair stands."""

import importlib.util
import random
from collections.abc import Mapping
from itertools import combinations, product

from mezo_cli.config.registry import OBJECTIVES, OPTIMIZERS, PEFT

Row = dict[str, str]  # key -> value
Setting = tuple[str, str]  # a key and its value

LEFT_OUT = "-"  # the key is not given
QUANTIZERS = ["int8", "nf4"] if importlib.util.find_spec("bitsandbytes") else ["int8"]
VALUES = {
    "objective": list(OBJECTIVES.built_in),
    "objective.loss": ["cross_entropy", "accuracy", "f1", "lm", "reward"],
    "metric": [LEFT_OUT, "accuracy", "f1", "loss", "reward"],
    "optimizer": list(OPTIMIZERS.built_in),
    "peft": list(PEFT.built_in),
    "data.batches": ["shuffled", "balanced", "replacement"],
    "test_at_start": ["true", "false"],
    "checkpoint": ["full", "trajectory"],
    "model.dtype": ["float32", "bfloat16", "float16"],
    "model.compute_dtype": [LEFT_OUT, "bfloat16", "float16"],
    "model.quantize": ["none", *QUANTIZERS],
    "optimizer.noise": [LEFT_OUT, "gaussian", "rademacher", "torch"],
    "optimizer.weight_decay": [LEFT_OUT, "0.1"],
    "eval_every": ["1", "2"],
    "max_seconds": [LEFT_OUT, "1e-9"],
}

LABELS, GRADIENTS, HALF = "mlm cls lm", "adamw sgd", "bfloat16 float16"
SUCCESSORS = "lozo lozo_m hizoo hizoo_scalar adamezo"
NOT_SCALES = f"mezo_momentum mezo_adam {SUCCESSORS} linear_probe {GRADIENTS}"
# What may not meet, and why: words of the error line.
REFUSED: list[tuple[Mapping[str, str], str]] = [
    ({"objective": LABELS, "objective.loss": "lm reward"}, "not one of cross_entropy, accuracy, f1"),
    ({"objective": "choice", "objective.loss": "f1 reward"}, "not one of cross_entropy, lm, accuracy"),
    ({"objective": "generate", "objective.loss": "cross_entropy accuracy f1"}, "not one of reward, lm"),
    ({"objective": LABELS, "metric": "reward"}, "not one of accuracy, f1, matthews, loss"),
    ({"objective": "choice", "metric": "f1 reward"}, "not one of accuracy, loss"),
    ({"objective": "generate", "metric": "accuracy f1"}, "not one of"),
    ({"objective": "choice generate", "data.batches": "balanced"}, "no fixed set of labels"),
    ({"objective": "choice generate", "optimizer": "linear_probe"}, "scores no labels"),
    ({"objective": "mlm lm", "optimizer": "linear_probe", "peft": "lora prefix bias"}, "neither trains nor saves"),
    ({"objective.loss": "accuracy f1 reward", "optimizer": GRADIENTS}, "no gradient"),
    ({"optimizer": GRADIENTS, "checkpoint": "trajectory"}, "leaves no trajectory"),
    ({"optimizer": GRADIENTS, "model.dtype": HALF}, "most would be lost"),
    ({"optimizer": f"{GRADIENTS} linear_probe", "optimizer.noise": "gaussian rademacher torch"}, "does not read it"),
    ({"optimizer": "linear_probe", "optimizer.weight_decay": "0.1"}, "does not read it"),
    ({"model.dtype": HALF, "optimizer.noise": "torch"}, "in float32"),
    ({"model.dtype": HALF, "model.quantize": "int8 nf4"}, "of a base that is not quantised"),
    ({"peft": "none", "model.quantize": "int8 nf4"}, "a quantised base is frozen"),
    ({"peft": "scales", "model.quantize": "none"}, "the scales of a quantised base"),
    ({"peft": "scales", "optimizer": NOT_SCALES}, "becomes 0"),
    ({"peft": "bias", "optimizer": "lozo lozo_m"}, "no matrix is trained"),
    ({"peft": "scales", "model.quantize": "nf4", "peft.absolute": "true"}, "has no scale per row"),
    ({"objective": "lm", "peft": "lora", "model.quantize": "int8", "engine": "vllm"}, "engine=vllm"),
    ({"objective": "lm", "peft": "lora", "optimizer": SUCCESSORS, "engine": "vllm"}, "has not computed its forwards"),
    ({"model.stream": "true", "peft": "none"}, "the base is only read"),
    ({"model.stream": "true", "peft": "lora", "optimizer": GRADIENTS}, "keeps the layers for its gradient"),
    ({"model.stream": "true", "peft": "lora", "model.dtype": HALF}, "stays as its file has it"),
    ({"model.checkpoint_activations": "true", "optimizer": "mezo es"}, "takes no gradient, so it keeps no activations"),
    ({"model.checkpoint_activations": "true", "optimizer": GRADIENTS, "peft": "prefix"}, "keys and values"),
    ({"optimizer": "linear_probe", "steps": "6"}, "optimizer=linear_probe takes no step"),
    ({"optimizer": "linear_probe", "init": "none"}, "needs init=linear_probe"),
]


def clashes() -> dict[Setting, list[list[set[Setting]]]]:
    """Map each setting to what it may not meet: for each line of the table the settings of its other keys."""
    found: dict[Setting, list[list[set[Setting]]]] = {(key, value): [] for key in VALUES for value in VALUES[key]}
    for values, _ in REFUSED:
        sides = [{(key, value) for value in named.split()} for key, named in values.items()]
        for side in sides:
            for setting in side & found.keys():
                found[setting].append([other for other in sides if other is not side])
    return found


def covering_rows(seed: int = 0, tries: int = 3) -> list[Row]:
    """Return rows in which every pair stands that may stand in a row at all; greedy, the fullest rows first."""
    draw, refused = random.Random(seed), clashes()
    missing: dict[Setting, set[Setting]] = {setting: set() for setting in refused}  # setting -> what it has yet to meet

    def complete(row: set[Setting], left: list[str]) -> set[Setting] | None:
        """Return a whole row with these settings, others that have yet to meet them first; None if there is none."""
        if not left:
            return row
        options = [(left[0], value) for value in VALUES[left[0]]]
        draw.shuffle(options)
        for setting in sorted(options, key=lambda setting: -len(missing[setting] & row)):
            if not any(all(side & row for side in sides) for sides in refused[setting]):
                found = complete(row | {setting}, left[1:])
                if found is not None:
                    return found
        return None

    def row_with(pair: tuple[Setting, Setting]) -> set[Setting] | None:
        first, second = pair
        if any(all(second in side for side in sides) for sides in refused[first]):
            return None
        left = [key for key in VALUES if key not in dict(pair)]
        draw.shuffle(left)
        return complete(set(pair), left)

    pairs = [((a, x), (b, y)) for a, b in combinations(VALUES, 2) for x, y in product(VALUES[a], VALUES[b])]
    pairs = [pair for pair in pairs if row_with(pair) is not None]
    for first, second in pairs:
        missing[first].add(second)
        missing[second].add(first)
    rows = []
    while pairs:
        tried = [row for row in (row_with(draw.choice(pairs)) for _ in range(tries)) if row is not None]
        best = max(tried, key=lambda row: sum(len(missing[setting] & row) for setting in row))
        rows.append({key: dict(best)[key] for key in VALUES})
        for setting in best:
            missing[setting] -= best
        pairs = [(first, second) for first, second in pairs if second in missing[first]]
    return rows
