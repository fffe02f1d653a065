"""The reward of JSON and no more: `{"number": 357, "minutes": 9}` for `Bus 357 leaves in 09 minutes.`."""

import json


def bus(completions, rows):
    """Return the mean of four rules and of the share of the text that is JSON; `right` where all are 1."""
    parts = [rules(text.strip(), row) for text, row in zip(completions, rows)]
    return [{"reward": sum(part) / 5, "right": float(sum(part) == 5)} for part in parts]


def rules(text, row):
    """Return whether an object comes first, its keys and both values are right, and its share of the text."""
    right = {"number": "".join(map(str, row["numbers"])), "minutes": str(int(row["target"]))}
    try:
        found, end = json.JSONDecoder().raw_decode(text)
    except ValueError:
        return [0]
    if not isinstance(found, dict):
        return [0]
    values = [(str(found.get(key)).lstrip("0") or "0") == value for key, value in right.items()]
    return [1, found.keys() == right.keys(), *values, end / len(text)]
