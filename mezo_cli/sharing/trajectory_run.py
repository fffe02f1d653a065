"""Write a run directory without checkpoints, from which others rebuild a run's weights: its trajectory is enough.

It differs from the run in three things: config.yaml and run.json say nothing of the machine (host, process, paths,
command line), rows of the data are left out, and run.json has the sha256 of the weights of `best` and `last` (over the
names, shapes and bytes of all parameters: models/stored_tensors.py), which a replay checks.
"""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from mezo_cli import models
from mezo_cli.adapters.methods import find_method
from mezo_cli.config.base import without_folder
from mezo_cli.config.optimizers import zeroth_order
from mezo_cli.config.schema import Config, LoggerConfig
from mezo_cli.config.stored import to_yaml
from mezo_cli.errors import UserError
from mezo_cli.runs.atomic import write_atomically
from mezo_cli.runs.contents import without_texts
from mezo_cli.runs.jsonl import write_object
from mezo_cli.runs.run import ALWAYS_READ, ENDS, Run
from mezo_cli.session import restore
from mezo_cli.session.session import Session
from mezo_cli.sharing.model_folder import CARD, base_name, code, hub_id, write_card

# Of run.json: what is about the machine and its user, and what shows rows of the data.
PRIVATE = ("argv", "pid", "host", "cuda_visible_devices", "prompt", "logged_as", "changes", "pruned", "engine", "error")

REPLAYED = (
    "This is not a model but a run without its checkpoints: the scalars from which, with the base model, the",
    "weights of every step follow bit for bit.",
)
ADAPTER = ("This is a run without its checkpoints but for the adapter of its best step: it has no trajectory.",)


def check_rebuildable(config: Config, name: str) -> None:
    """Refuse a run whose weights do not follow from its trajectory on every machine, and are no adapter."""
    why = ""
    if config.optimizer.replayable and zeroth_order(config.optimizer).noise == "torch":
        why = "optimizer.noise=torch takes z from torch's generator, which differs between versions, so its weights"
        why += " cannot be rebuilt elsewhere"
    elif not config.optimizer.replayable and not find_method(config.peft).stands_alone:
        why = f"optimizer={config.optimizer.name} writes no trajectory, so its weights cannot be rebuilt, and"
        why += f" peft={config.peft.name} has no adapter to be written in its place"
    if why:
        raise UserError(f"{name}: {why}; export them without --trajectory")


def rebuild_weights(run: Run, session: Session) -> dict[str, dict[str, Any]]:
    """Return step and sha256 of the weights of best and last, which a session at the run's start is replayed to.

    Of a run without a trajectory: of its best, at which the session is.
    """
    if not session.config.optimizer.replayable:
        return {"best": {"step": session.at, "sha256": models.fingerprint(session.loaded.model)}}
    steps, sums = {name: restore.find_step(session.config, run, name) for name in ("best", "last")}, {}
    for step in restore.replayed(session, run, steps.values()):
        restore.check_weights(session, run)
        sums[step] = models.fingerprint(session.loaded.model)
    return {name: {"step": step, "sha256": sums[step]} for name, step in steps.items()}


def write_trajectory_run(
    folder: Path, run: Run, session: Session, weights: dict[str, dict[str, Any]], repo: str | None
) -> None:
    """Fill an empty folder from a finished run; `weights` are those of `rebuild_weights`, `repo` its hub id, if any."""
    config, made = session.config, Run(folder)
    portable = to_yaml(_portable(config, run, session.loaded.revision))
    write_atomically(folder / "config.yaml", portable)
    info = {key: value for key, value in run.info().items() if key not in PRIVATE}
    start = (run.initial_state_file.name,) * config.optimizer.replayable  # a replay begins there
    copied = [name for name in (*ALWAYS_READ, *start) if (run.path / name).exists()]
    info |= {"weights": weights, "config_sha256": hashlib.sha256(portable.encode()).hexdigest()}
    if "reward" in info:  # without the folder of a file of the user's own
        info["reward"] = {**info["reward"], "name": without_folder(info["reward"]["name"])}

    def copy_adapter(to: Path) -> None:
        for file in (run.checkpoints / "best").glob("adapter_*"):
            shutil.copyfile(file, to / file.name)
        for file in to.glob("*.json"):  # it names a path of this machine as its base
            adapter = json.loads(file.read_text()) | {"base_model_name_or_path": base_name(config)}
            file.write_text(json.dumps(adapter, indent=2))

    if config.optimizer.replayable:
        run.read_trajectory()
    for name in copied:
        shutil.copyfile(run.path / name, folder / name)
    if not config.optimizer.replayable:
        made.save_checkpoint("best", weights["best"]["step"], copy_adapter)
    if rows := run.predictions():
        made.write_predictions(map(without_texts, rows))
    write_object(folder / "run.json", {**info, "ends": made.ends(dict.fromkeys((*ENDS, *copied)))})
    step, use = int(weights["best"]["step"]), _use(config, repo, weights)
    write_atomically(folder / CARD, write_card(run, session, step, repo, use, "mezo"))


def _portable(config: Config, run: Run, revision: str | None) -> Config:
    """Return the config without paths, loggers and the device, and with the commits of model and data."""
    task, base_id = config.task, hub_id(config)
    path = base_id or base_name(config)
    if base_id is None and not config.model.is_embedded:
        path = f"./{path}"  # never the name of another model on the hub
    if config.data.name == "hub":
        task = task.replace(hub=task.hub.replace(revision=run.info().get("data_revision") or task.hub.revision))
    places = dict.fromkeys({"dir", "keep"} & type(config.data).model_fields.keys())  # of files, here
    return config.replace(
        task=task,
        model=config.model.replace(path=path, revision=revision if base_id else None, device="auto"),
        data=config.data.replace(**places),
        logger=LoggerConfig(),
    )


def _use(config: Config, repo: str | None, weights: dict[str, dict[str, Any]]) -> str:
    columns = config.task.columns
    text = '--text "..."' if len(columns) == 1 else " ".join(f'--text {column}="..."' for column in columns)
    base = " --base DIR" if hub_id(config) is None and not config.model.is_embedded else ""
    needed = f" The base model {code(base_name(config))} is not on the hub: DIR is its folder." if base else ""
    download = [f"hf download {repo} --local-dir run"] if repo else []
    where = "run" if repo else "."
    return "\n".join(
        [
            *(REPLAYED if config.optimizer.replayable else ADAPTER),
            f"The program mezo checks them.{needed}",
            "",
            "```sh",
            *download,
            f"mezo predict {where}{base} {text}",
            f"mezo eval {where}{base}{' data.dir=DIR' if config.data.name == 'files' else ''}",
            f"mezo export {where}{base} --out model    # for plain transformers or peft",
            "```",
            "",
            "| weights | step | sha256 |",
            "| --- | --- | --- |",
            *(f"| {name} | {one['step']} | `{one['sha256']}` |" for name, one in weights.items()),
        ]
    )
