"""The reward of JSON with the right keys and values: `{"minutes": 9, "bus": 357}` for `Bus 357 leaves in 09 ...`."""

import json


def bus(completions, rows):
    """Return the share of five rules that hold: an object, its keys, each value, nothing after it."""
    held = [rules(text.strip(), row) for text, row in zip(completions, rows)]
    return [{"reward": sum(rule) / 5, "right": float(all(rule))} for rule in held]


def rules(text, row):
    right = {"minutes": str(int(row["target"])), "bus": "".join(map(str, row["numbers"]))}
    try:
        found, end = json.JSONDecoder().raw_decode(text)
    except ValueError:
        return [False]
    if not isinstance(found, dict):
        return [False]
    values = [(str(found.get(key)).lstrip("0") or "0") == value for key, value in right.items()]
    return [True, found.keys() == right.keys(), *values, end == len(text)]
