"""Open a trajectory folder that somebody else has made: a local folder, or `hub:USER/REPO[@REVISION]`.

It is not trusted. Its paths, loggers, engine and device are ignored. The base model comes from the hub at the commit
that the folder names, from the embedded demo, or from a folder that the user names, never from a path in the folder.
Every file is checked before it is used, and the rebuilt weights are compared with their sha256.
"""

import dataclasses
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mezo_cli.config.schema import (
    EMBEDDED_MODELS,
    Config,
    EngineConfig,
    LoggerConfig,
    data_dir,
    to_dict,
    without_dir,
)
from mezo_cli.config.stored import read_config
from mezo_cli.config.validation import build
from mezo_cli.errors import UserError, did_you_mean, first_line, join
from mezo_cli.hub import hub_url, is_offline, is_reachable, progress_bars
from mezo_cli.models.download import describe_download
from mezo_cli.runs import Run, trajectory
from mezo_cli.runs.checksums import verify_checksum
from mezo_cli.runs.files import file_sha256, read_json
from mezo_cli.sharing.trajectory_folder import FILES, MANIFEST, METRICS, START, check_rebuildable

log = logging.getLogger("mezo")

PREFIX = "hub:"
_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
EVAL_KEYS = ("data", "data.dir", "data.eval_limit", "eval_batch_size", "model.device")


@dataclasses.dataclass(frozen=True)
class SharedRun:
    """A checked trajectory folder.

    Attributes:
        run: the folder, as a run.
        config: its settings, with the base model that will be loaded and nothing of the other machine.
        weights: best and last -> their step and the sha256 of their weights.
        name: the folder or repository, for messages.
    """

    run: Run
    config: Config
    weights: dict[str, dict[str, Any]]
    name: str


def open_shared(path: Path, base: Path | None) -> SharedRun:
    """Open and check a trajectory folder; it is downloaded to the local cache if it is on the hub.

    Args:
        path: `hub:USER/REPO`, `hub:USER/REPO@REVISION`, or a folder.
        base: the folder of the base model; None: as the trajectory folder says.
    """
    name = str(path)
    folder = _download(name) if name.startswith(PREFIX) else path
    try:
        manifest = _read_manifest(folder)
        run = Run.open(folder)
        config = read_config(folder / "config.yaml")
        trajectory.read(run.trajectory)
        weights = {
            key: {"step": int(one["step"]), "sha256": str(one["sha256"])} for key, one in manifest["weights"].items()
        }
        if not {"best", "last"} <= set(weights):
            raise UserError(f"{folder / MANIFEST} is damaged: it lacks the weights of best or last")
        check_rebuildable(config, name)
        return SharedRun(run, _untrusted(config, manifest["base"], base, name), weights, name)
    except UserError:
        raise
    except Exception as error:  # whatever sealed files of another content make the readers raise
        raise UserError(f"{name}: its files do not fit together ({type(error).__name__}: {error})") from error


def with_own_data(config: Config, overrides: Sequence[str]) -> Config:
    """Return the config with the user's own data and sizes for an evaluation."""
    values = to_dict(config)
    for text in overrides:
        key, equals, value = text.partition("=")
        if key not in EVAL_KEYS or not equals:
            near = did_you_mean(key, EVAL_KEYS)
            raise UserError(f"'{text}': of a trajectory folder only these can be given: {join(EVAL_KEYS)}{near}")
        group, _, name = ("data.name" if key == "data" else key).partition(".")
        if name:
            values[group][name] = value
        else:
            values[group] = value
    new = build(values)
    if values["data"].get("dir") is not None and data_dir(new.data) is None:
        raise UserError(f"data.dir={values['data']['dir']}: data={new.data.name} does not read it, only data=files")
    if data_dir(new.data) is None and new.data.name == "files":
        raise UserError("its data were files, which a trajectory folder does not contain: give data.dir=DIR")
    if new.data.name == "hub":
        hub = new.task.hub
        log.info("data   %s at commit %s, from %s or the local cache", hub.path, hub.revision or "main", hub_url())
    return new


def check_weights(shared: SharedRun, step: int, sha256: str) -> None:
    """Compare rebuilt weights with the sha256 that the folder names for this step, if it names one."""
    for name, one in shared.weights.items():
        if one["step"] == step and one["sha256"] != sha256:
            raise UserError(
                f"{shared.name}: the rebuilt weights of step {step} ({name}) are not those of the run: sha256 "
                f"{sha256[:12]}..., expected {one['sha256'][:12]}..."
            )


# --- what is not trusted ---


def _read_manifest(folder: Path) -> dict[str, Any]:
    """Return export.json; every file that it lists, and no other, is what it was."""
    path = folder / MANIFEST
    manifest = read_json(path)
    if verify_checksum(manifest) is None:
        raise UserError(f"{path} is damaged: it does not match its own checksum")
    if (version := manifest.get("format")) not in METRICS:
        raise UserError(f"{path}: format {version}; this program reads formats {join(map(str, METRICS))}")
    sums = manifest["sha256"]
    for name in (*FILES, METRICS[version], START):
        file = folder / name
        if name not in sums:
            if name != START or file.exists():
                raise UserError(f"{path} does not list {name}")
        elif not file.is_file():
            raise UserError(f"{file} is missing")
        elif file_sha256(file) != sums[name]:
            raise UserError(f"{file} is damaged: it does not match its checksum in {MANIFEST}")
    return manifest


def _untrusted(config: Config, base: dict[str, Any], base_folder: Path | None, name: str) -> Config:
    """Return the config with a base model that may be loaded, and without what is the other machine's."""
    files, hub = config.task.files, config.task.hub
    for key, value in (("files.folder", files.folder), ("files.dev", files.dev), ("files.test", files.test)):
        if value is not None and not re.fullmatch(r"[\w-][\w.-]*", value):
            raise UserError(f"{name}: task.{key}={value} is a path; such a folder may only name a file")
    if config.data.name == "hub" and hub.path is not None:
        _check_hub_name(hub.path, f"{name}: task.hub.path={hub.path}")
    path, revision = config.model.path, None
    if base_folder is not None:
        if not base_folder.is_dir():
            raise UserError(f"--base {base_folder}: no such folder")
        path = str(base_folder.resolve())
    elif base["kind"] == "hub":
        path, revision = str(base["path"]), str(base["revision"])
        _check_hub_name(path, f"{name}: its base model {path}")
        if not re.fullmatch(r"[0-9a-f]{40}", revision):
            raise UserError(f"{name}: its base model {path} is not pinned to a commit")
        log.info("base   %s at commit %s, %s", path, revision, describe_download(path, revision))
    elif base["kind"] == "demo":
        path = str(base["path"])
        if path not in EMBEDDED_MODELS:
            raise UserError(f"{name}: its base model '{path}' is not part of mezo; there are {join(EMBEDDED_MODELS)}")
    else:
        raise UserError(f"{name}: its base model '{base['path']}' is not on the hub: give its folder as --base DIR")
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, path=path, revision=revision, device="auto"),
        data=without_dir(config.data),
        logger=LoggerConfig(),
        engine=EngineConfig(),
    )


def _check_hub_name(path: str, what: str) -> None:
    """Refuse what is no name on the hub, or is also that of a folder here, which would be read instead."""
    if not _NAME.fullmatch(path) or path in EMBEDDED_MODELS:
        raise UserError(f"{what} is not a name on the hub")
    if Path(path).exists():
        raise UserError(
            f"{what} is also the name of a folder here, which would be read instead: change to another folder"
        )


# --- the hub ---


def _download(name: str) -> Path:
    """Download the files of `hub:USER/REPO[@REVISION]` to the local cache; return the folder of their commit."""
    import huggingface_hub

    repo, _, revision = name.removeprefix(PREFIX).partition("@")
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", repo):
        raise UserError(f"{name}: give hub:USER/REPO, or hub:USER/REPO@REVISION")
    cached_only = is_offline() or not is_reachable()
    where: dict[str, Any] = {"revision": revision or None, "local_files_only": cached_only, "endpoint": hub_url()}
    try:
        folder = Path(huggingface_hub.hf_hub_download(repo, MANIFEST, **where)).parent
        if not cached_only:
            where["revision"] = folder.name
            with progress_bars(huggingface_hub.utils, shown=False):
                huggingface_hub.snapshot_download(repo, allow_patterns=[*FILES, *METRICS.values(), START], **where)
    except Exception as error:  # huggingface_hub's and its HTTP library's; OSError from the disk
        raise UserError(f"{name}: {_reason(error, cached_only)}") from error
    log.info("files  %s at commit %s, from %s or the local cache", repo, folder.name, hub_url())
    return folder


def _reason(error: Exception, cached_only: bool) -> str:
    """Return what an error of the hub's library means."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return f"it is gated: accept its terms at {hub_url()}, then hf auth login"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{hub_url()} has no such repository, or it is private (hf auth login)"
    if isinstance(error, errors.RevisionNotFoundError):
        return "there is no such revision"
    if cached_only:
        why = "HF_HUB_OFFLINE is set" if is_offline() else f"{hub_url()} does not answer"
        return f"{why}, and it is not in the local cache"
    if isinstance(error, errors.EntryNotFoundError) and not isinstance(error, errors.LocalEntryNotFoundError):
        return "it is no trajectory folder, made by `mezo export --trajectory`"
    return f"cannot be downloaded from {hub_url()}: {first_line(error)}"
