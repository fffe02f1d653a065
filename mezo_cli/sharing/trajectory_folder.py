"""Write the folder from which others rebuild a run's weights: its trajectory instead of the weights.

It is a run directory without checkpoints and logs, with three differences: config.yaml and run.json say nothing of the
machine (host, process, paths, command line), README.md is a card, and export.json says what the weights must be:

    {"format": 2, "base": {"kind": hub | demo | folder, "path", "revision"},
     "weights": {"best": {"step", "sha256"}, "last": {"step", "sha256"}}, "sha256": {file: checksum}, "crc"}

Format 1, of before, differs in metrics.jsonl, which was not compressed.

The sha256 of weights is that over the names, shapes and bytes of all parameters (models/initial_state.py).
"""

import dataclasses
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from mezo_cli import models
from mezo_cli.config.schema import Config, LoggerConfig, without_dir
from mezo_cli.config.stored import to_yaml
from mezo_cli.errors import UserError
from mezo_cli.optim import optimizer_class
from mezo_cli.optim.settings import zeroth_order
from mezo_cli.runs import Run, trajectory
from mezo_cli.runs.checksums import add_checksum
from mezo_cli.runs.files import file_sha256, write_atomically
from mezo_cli.runs.metrics_log import compress
from mezo_cli.sharing.card import code, write_card
from mezo_cli.sharing.model_folder import CARD, base_name, hub_id, make_card
from mezo_cli.training import restore

FORMAT = 2
MANIFEST = "export.json"
START = "start.safetensors"
METRICS = {1: "metrics.jsonl", 2: "metrics.jsonl.gz"}  # by format
FILES = ("config.yaml", "run.json", "trajectory.bin", "summary.json")
# What run.json tells others; the rest is about the machine and its user, or can be read elsewhere.
RUN_FIELDS = (
    "start",
    "end",
    "versions",
    "git_commit",
    "git_dirty",
    "device",
    "matmul_precision",
    "task_version",
    "trainable",
    "weights_fingerprint",
    "noise_kernels",
    "model_revision",
    "data_revision",
    "data_fingerprint",
    "rows",
    "probe",
    "stopped",
    "stop_on_divergence",
)


def check_rebuildable(config: Config, name: str) -> None:
    """Refuse a run whose weights do not follow from its trajectory on every machine."""
    if not optimizer_class(config.optimizer).replayable:
        raise UserError(
            f"{name}: optimizer={config.optimizer.name} writes no trajectory, so its weights cannot be rebuilt; export "
            "them without --trajectory"
        )
    if zeroth_order(config.optimizer).noise == "torch":
        raise UserError(
            f"{name}: optimizer.noise=torch takes z from torch's generator, which differs between versions, so its "
            "weights cannot be rebuilt elsewhere; export them without --trajectory"
        )


def write_trajectory_folder(folder: Path, run: Run, config: Config, repo: str | None) -> None:
    """Rebuild the weights of best and last from the base model, and make the folder.

    Args:
        folder: an empty one.
        run: a finished run.
        config: its config.
        repo: the hub id that the folder will have; None if it will not be uploaded.
    """
    steps = {name: restore.find_step(config, run, name) for name in ("best", "last")}
    sums, sessions = {}, restore.replay_to_each(config, run, steps.values())
    for step, session in sessions:
        sums[step] = models.fingerprint(session.loaded.model)
        last = session
    weights = {name: {"step": step, "sha256": sums[step]} for name, step in steps.items()}
    revision = last.loaded.revision
    portable = to_yaml(_portable(config, run, revision))
    write_atomically(folder / "config.yaml", portable)
    info = {"status": "finished", **{key: run.info()[key] for key in RUN_FIELDS if key in run.info()}}
    info["config_sha256"] = hashlib.sha256(portable.encode()).hexdigest()
    write_atomically(folder / "run.json", json.dumps(info, indent=2) + "\n")
    for read_and_check in (run.metrics, run.read_summary, lambda: trajectory.read(run.trajectory)):
        read_and_check()
    for name in ("trajectory.bin", "summary.json"):
        shutil.copyfile(run.path / name, folder / name)
    compress(run.path / METRICS[1], folder)
    if run.initial_state_file.exists():
        shutil.copyfile(run.initial_state_file, folder / START)
    base = {"kind": "hub", "path": hub_id(config), "revision": revision}
    if base["path"] is None:
        base = {"kind": "demo" if config.model.is_embedded else "folder", "path": base_name(config), "revision": None}
    manifest = {
        "format": FORMAT,
        "base": base,
        "weights": weights,
        "sha256": {path.name: file_sha256(path) for path in sorted(folder.iterdir())},
    }
    write_atomically(folder / MANIFEST, json.dumps(add_checksum(manifest), indent=2) + "\n")
    card = dataclasses.replace(make_card(run, last, steps["best"], repo), adapter=False, library="mezo", pipeline=None)
    write_atomically(folder / CARD, write_card(card, _use(config, repo, weights)))


def _portable(config: Config, run: Run, revision: str | None) -> Config:
    """Return the config without paths, loggers and the device, and with the commits of model and data."""
    task, base_id = config.task, hub_id(config)
    path = base_id or base_name(config)
    if config.data.name == "hub":
        task = dataclasses.replace(
            task, hub=dataclasses.replace(task.hub, revision=run.info().get("data_revision") or task.hub.revision)
        )
    return dataclasses.replace(
        config,
        task=task,
        model=dataclasses.replace(config.model, path=path, revision=revision if base_id else None, device="auto"),
        data=without_dir(config.data),
        logger=LoggerConfig(),
    )


def _use(config: Config, repo: str | None, weights: dict[str, dict[str, Any]]) -> str:
    where = f"hub:{repo}" if repo else "."
    columns = list(config.task.columns)
    text = '--text "..."' if len(columns) == 1 else " ".join(f'--text {column}="..."' for column in columns)
    base = " --base DIR" if hub_id(config) is None and not config.model.is_embedded else ""
    needed = f" The base model {code(base_name(config))} is not on the hub: DIR is its folder." if base else ""
    lines = [f"| {name} | {one['step']} | `{one['sha256']}` |" for name, one in weights.items()]
    return "\n".join(
        [
            "This is not a model but the trajectory of its training: the scalars from which, with the base model, its",
            f"weights follow bit for bit. The program mezo rebuilds and checks them.{needed}",
            "",
            "```sh",
            f"mezo predict {where}{base} {text}",
            f"mezo eval {where}{base}{' data.dir=DIR' if config.data.name == 'files' else ''}",
            f"mezo export {where}{base} --out model    # for plain transformers or peft",
            "```",
            "",
            "| weights | step | sha256 |",
            "| --- | --- | --- |",
            *lines,
        ]
    )
