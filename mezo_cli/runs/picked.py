"""Mark the scores of runs whose training did not help: those of step 0, which is the model before training."""

from collections.abc import Mapping
from typing import Any

MARK = "@0"  # beside a score
NOTE = f"{MARK}: step 0 was picked, the model before training: none was better on dev"


def picked_start(summary: Mapping[str, Any]) -> bool:
    """Return whether a run took steps and its best evaluation is nevertheless that of step 0.

    Args:
        summary: summary.json, of any version; empty for a run that has not finished.
    """
    return bool(summary.get("steps")) and (summary.get("best") or {}).get("step") == 0
