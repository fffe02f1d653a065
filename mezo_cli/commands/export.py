"""`mezo export`: hand a run on, as a Hugging Face folder or as the trajectory that its weights are rebuilt from."""

import re
import sys
from pathlib import Path

from mezo_cli.commands.open_run import Opened, open_run
from mezo_cli.console import console_logging, make_error_console, print_line
from mezo_cli.errors import UserError, first_line, without_credentials
from mezo_cli.hub import hub_url, is_offline, is_reachable
from mezo_cli.process.signals import import_torch
from mezo_cli.runs.atomic import check_new_folder, write_folder


def export(
    path: Path,
    out: Path,
    checkpoint: str | None,
    as_adapter: bool,
    as_trajectory: bool,
    base: Path | None,
    repo: str | None,
    private: bool,
) -> None:
    """Write a new folder about a run, with a model card, and upload it if asked to.

    It has the weights in Hugging Face layout, or the trajectory that they are rebuilt from.

    Raises:
        UserError: when `out` is in use, the run cannot be read, or the upload fails.
        RunFailed: when the disk is full; nothing is left at `out`.
    """
    if private and repo is None:
        raise UserError("--private needs --push")
    check_new_folder(out)
    if (out.parent / "run.json").exists():
        raise UserError(f"--out {out}: {out.parent} is a run directory; choose another folder")
    if as_trajectory and as_adapter:
        raise UserError("--trajectory and --adapter: give one of them")
    if as_trajectory and checkpoint is not None:
        why = "with --trajectory every step can be rebuilt: leave one of them out"
        raise UserError(f"--checkpoint {checkpoint}: {why}")
    token = "" if repo is None else _check_push(repo)
    import_torch()
    with console_logging(make_error_console()):
        opened = open_run(path, checkpoint, base)
        if as_trajectory:
            _write_trajectory(opened, out, repo)
        else:
            _write_model(opened, out, as_adapter, repo)
    if repo is not None:
        print_line(f"uploaded to {_push(out, repo, token, private)}")


def _check_push(repo: str) -> str:
    """Check that a folder can be uploaded as `repo`, before it is made; return the token."""
    import huggingface_hub

    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", repo):
        raise UserError(f"--push {repo}: give USER/NAME, the name of a model repository at {hub_url()}")
    if is_offline():
        raise UserError(f"--push {repo}: HF_HUB_OFFLINE is set")
    if (token := huggingface_hub.get_token()) is None:
        raise UserError(f"--push {repo}: no token for {hub_url()}: log in by `hf auth login`, or set HF_TOKEN")
    if not is_reachable():
        raise UserError(f"--push {repo}: {hub_url()} does not answer")
    return token


def _push(folder: Path, repo: str, token: str, private: bool) -> str:
    """Create the repository if it is not there, upload the folder in one commit, and return its address."""
    import huggingface_hub
    from huggingface_hub.utils import HfHubHTTPError, disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    api = huggingface_hub.HfApi(endpoint=hub_url(), token=token)
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message="Upload by mezo export")
    except Exception as error:  # huggingface_hub's, its HTTP library's, hf_xet's
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
        reason = "the token may not write there" if status in (401, 403) else first_line(error)
        what = f"{reason}; {folder} is complete, only the upload failed"
        raise UserError(f"--push {repo}: {hub_url()}: {what}") from error
    return without_credentials(f"{hub_url()}/{repo}")


def _write_model(opened: Opened, out: Path, as_adapter: bool, repo: str | None) -> None:
    from mezo_cli.adapters.adapter import merge
    from mezo_cli.adapters.methods import find_method
    from mezo_cli.session import restore
    from mezo_cli.sharing.model_folder import write_model_folder

    config, method = opened.config, find_method(opened.config.peft)
    if as_adapter and not method.stands_alone:
        raise UserError(f"--adapter: peft={config.peft.name} has no adapter of its own: export the model without it")
    if config.model.stream and not as_adapter:
        raise UserError(f"{opened.run.path}: model.stream=true: the whole model would be in memory; give --adapter")
    step = restore.find_step(config, opened.run, opened.checkpoint)
    with opened.load() as session:
        if session.loaded.adapter is not None and not as_adapter and method.merges:
            merge(session.loaded, config.model.computes_in)
        where = str(out.resolve())
        write_folder(out, lambda folder: write_model_folder(folder, opened.run, session, step, where, repo))
    print_line(f"step {step} of {opened.run.path} written to {out}")


def _write_trajectory(opened: Opened, out: Path, repo: str | None) -> None:
    from mezo_cli.session.opening import opened as open_session
    from mezo_cli.sharing import trajectory_run

    run, config = opened.run, opened.config
    trajectory_run.check_rebuildable(config, str(run.path))
    if (status := run.status()) != "finished":
        raise UserError(f"{run.path} is {status}: only the trajectory of a finished run is exported")
    with opened.load() if not config.optimizer.replayable else open_session(config, run) as session:
        weights = trajectory_run.rebuild_weights(run, session)
        write_folder(out, lambda folder: trajectory_run.write_trajectory_run(folder, run, session, weights, repo))
    print_line(f"the trajectory of {run.path} written to {out}:")
    for file in sorted(out.iterdir()):
        print_line(f"{file.stat().st_size:>12,} bytes  {file.name}")
