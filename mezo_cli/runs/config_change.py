"""Change the config of a stored run, so that a crash at any moment leaves a run that can be opened.

Only settings that decide when a run ends are changed (`mezo resume RUN steps=N`). run.json lists the changes.
"""

import dataclasses
import hashlib
import os
from typing import Any

from mezo_cli.runs import trajectory
from mezo_cli.runs.files import TEMPORARY, open_own, remove, sync, write_atomically
from mezo_cli.runs.run import Run
from mezo_cli.runs.run_json import utc_now


def change_config(run: Run, config_yaml: str, before: dict[str, Any], after: dict[str, Any]) -> None:
    """Replace config.yaml, and record the change in run.json. The caller has claimed the run.

    The summary and predictions of a finished run are kept as `summary-STEPS.json` and `predictions-STEPS.jsonl`. The
    header of the trajectory gets the new `steps`, so that the file is that of a run that had them from the start.

    Args:
        run: the run.
        config_yaml: the new text of config.yaml.
        before, after: the old and new values of the settings that change.
    """
    checksum = hashlib.sha256(config_yaml.encode()).hexdigest()
    run.set_results_aside()
    if "steps" in after and run.trajectory.exists() and run.trajectory.stat().st_size:
        _rewrite_header(run, int(after["steps"]))
    # `Run.open` takes the checksum of the last change, too: config.yaml and run.json cannot be replaced at once.
    change = {"time": utc_now(), "before": before, "after": after, "config_sha256": checksum}
    run.update(changes=[*run.info().get("changes", []), change])
    write_atomically(run.path / "config.yaml", config_yaml)
    run.update(config_sha256=checksum)


def _rewrite_header(run: Run, steps: int) -> None:
    past = trajectory.read(run.trajectory)
    header = dataclasses.replace(past.header, settings={**past.header.settings, "steps": steps})
    temporary = run.trajectory.with_name(TEMPORARY.format(run.trajectory.name))
    remove(temporary)
    with open_own(temporary, "xb") as file:
        writer = trajectory.Writer(file, header)
        for step, grads, lr in past.records(0, len(past)):
            writer.append(step, grads, lr)
        writer.sync()
    os.replace(temporary, run.trajectory)
    sync(run.path)
