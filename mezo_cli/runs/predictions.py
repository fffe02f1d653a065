"""`predictions.jsonl`: the predictions for the test rows at the best checkpoint, one JSON object per line.

A line is `{"row", "columns", "label", "predicted", "probabilities", "crc"}`, with chained checksums (checksums.py). The
file is written once, whole. Lines lost at its end show beside the test evaluation in metrics.jsonl.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mezo_cli.errors import UserError
from mezo_cli.runs.checksums import add_checksum, verify_checksum
from mezo_cli.runs.files import read_bytes, write_atomically


def write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write the predictions in the order of the test rows, each with its row number as `row`, in one step."""
    lines, crc = [], 0
    for number, row in enumerate(rows):
        line = add_checksum({"row": number, **row}, crc)
        crc = int(line["crc"], 16)
        lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    write_atomically(path, "".join(lines))


def read(path: Path, predicted: Mapping[str, int], count: int | None = None) -> list[dict[str, Any]]:
    """Return the predictions without their checksums.

    Args:
        path: the file.
        predicted: label -> number of rows predicted as it, from the line of the test evaluation in metrics.jsonl; empty
            where rows have no label.
        count: the number of rows, where `predicted` does not tell; None: any.

    Raises:
        UserError: when the file is damaged; the line names it.
    """
    rows, crc = [], 0
    *lines, rest = read_bytes(path).split(b"\n")
    for number, raw in enumerate(lines, 1):
        try:
            line = json.loads(raw)
            next_crc = verify_checksum(line, crc)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}:{number} is damaged: {error}") from error
        if next_crc is None or line.get("row") != number - 1:
            raise UserError(f"{path}:{number} is damaged: it, or a line before it, was changed")
        rows.append({key: value for key, value in line.items() if key != "crc"})
        crc = next_crc
    counts = Counter(row["predicted"] for row in rows if "predicted" in row)
    is_short = count is not None and count != len(rows)
    if rest or is_short or any(counts[label] != predicted.get(label, 0) for label in {*counts, *predicted}):
        raise UserError(f"{path} is damaged: its rows are not those of the test evaluation in metrics.jsonl")
    return rows
