"""`mezo export`: hand a run on, as a Hugging Face folder or as the trajectory that its weights are rebuilt from."""

from pathlib import Path

from mezo_cli.commands.open_run import open_run
from mezo_cli.console import console_logging, make_error_console, print_line
from mezo_cli.errors import UserError
from mezo_cli.runs.files import write_folder
from mezo_cli.system import import_torch


def export(path: Path, out: Path, checkpoint: str | None, repo: str | None, private: bool) -> None:
    """Write the weights of a run to a new folder, in Hugging Face layout with a model card, and upload it if asked to.

    Args:
        path: a run directory, or a checkpoint folder in one.
        out: the new folder.
        checkpoint: `best` (if None), `last` or a step number.
        repo: the hub's repository to upload to.
        private: whether a repository that is created can be read by its owner alone.

    Raises:
        UserError: when `out` is in use, the run cannot be read, or the upload fails.
        RunFailed: when the disk is full; nothing is left at `out`.
    """
    if private and repo is None:
        raise UserError("--private goes with --push")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {out}: it exists and is not an empty folder")
    opened = open_run(path, checkpoint)
    token = ""
    if repo is not None:
        from mezo_cli.sharing import push

        token = push.check_push(repo)
    import_torch()
    from mezo_cli.sharing.model_folder import make_card, write_model_folder
    from mezo_cli.training import restore

    with console_logging(make_error_console()):
        step = restore.find_step(opened.config, opened.run, opened.checkpoint)
        session = restore.load_checkpoint(opened.config, opened.run, opened.checkpoint)
        card = make_card(opened.run, session, step, repo)
        write_folder(out, lambda folder: write_model_folder(folder, session, card, repo))
    print_line(f"step {step} of {opened.run.path} written to {out}")
    if repo is not None:
        print_line(f"uploaded to {push.push(out, repo, token, private)}")
