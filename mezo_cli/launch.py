"""Behind the doors: compose a config, give it a run directory, hand both to the loop."""

import logging
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from rich.console import Console
from rich.logging import RichHandler
from rich.table import Table

from mezo_cli import config as configs
from mezo_cli.errors import UserError
from mezo_cli.runs import Run, home_of

log = logging.getLogger("mezo")
console = Console(stderr=False)


def logging_on() -> None:
    """Send the log to the terminal: above the progress bar on one, as plain lines otherwise."""
    if log.handlers:
        return
    handler: logging.Handler = logging.StreamHandler(sys.stdout)
    if console.is_terminal:
        handler = RichHandler(console=console, show_path=False, show_level=False, show_time=False, highlighter=None)
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False


def _hydra(overrides: Sequence[str], config_dir: str | None, flags: Sequence[str], job: Any) -> None:
    """Run `job` under Hydra with a rebuilt argv: Typer has read the options, Hydra gets its own spelling of them."""
    configs.register()
    before = sys.argv
    sys.argv = [before[0], *flags, *configs.search_path(config_dir), *overrides]
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # what goes wrong comes here as it is, to be told in one line
    try:
        main = hydra.main(config_path=str(configs.conf_dir()), config_name="config", version_base=configs.VERSION_BASE)
        main(job)()
    finally:
        sys.argv = before


def show(overrides: Sequence[str], config_dir: str | None, what: str) -> None:
    """Print the composed config."""
    configs.check(overrides, config_dir)
    _hydra(overrides, config_dir, ["--cfg", what], lambda node: None)


def single(overrides: Sequence[str], config_dir: str | None) -> None:
    """Run one job."""
    configs.check(overrides, config_dir)
    logging_on()
    raised: list[BaseException] = []
    argv = list(sys.argv)

    def job(node: DictConfig) -> None:
        try:
            _job(node, argv)
        except BaseException as error:  # taken past Hydra, which would print its own lines about it
            raised.append(error)

    _hydra(overrides, config_dir, [], job)
    for error in raised:
        raise error


def sweep(overrides: Sequence[str], config_dir: str | None) -> int:
    """Run every job of a sweep, each in its own directory; return 1 when any failed.

    The whole sweep is checked before the first job starts; a job's failure is that job's alone.
    """
    total = configs.check(overrides, config_dir, multirun=True)
    logging_on()
    failed: list[str] = []
    argv = list(sys.argv)

    def job(node: DictConfig) -> None:
        number = HydraConfig.get().job.num
        what = " ".join(HydraConfig.get().overrides.task)
        log.info("job %d of %d: %s", number + 1, total, what)
        try:
            _job(node, argv)
        except Exception as error:  # whatever a job died of, the others run; its own log has the traceback
            failed.append(f"job {number + 1} ({what}): {error}")
            log.error("job %d failed: %s", number + 1, error)

    _hydra(overrides, config_dir, ["--multirun"], job)
    log.info("sweep done: %d of %d jobs finished", total - len(failed), total)
    for line in failed:
        print(f"failed: {line}", file=sys.stderr)
    return 1 if failed else 0


def _job(node: DictConfig, argv: list[str]) -> None:
    config = configs.typed(node)
    run = Run.create(Path(HydraConfig.get().runtime.output_dir), configs.to_yaml(config), argv)
    log.info("run directory %s", _relative(run.path))
    start(config, run)


def start(config: Any, run: Run, resume: bool = False) -> dict[str, Any]:
    """Train, then print how it ended."""
    from mezo_cli import loop  # imports torch

    summary = loop.train(config, run, console, resume)
    _conclude(config, run, summary)
    return summary


def resume(path: Path) -> None:
    """Go on with an interrupted run; a finished one is left as it is."""
    run = Run.open(path)
    status = run.status()
    logging_on()
    if status == "finished":
        log.info("%s is finished: there is nothing to resume", path)
        return
    if status == "running":
        raise UserError(f"{path} is running (process {run.info().get('pid')})")
    config = configs.read(path / "config.yaml")
    run.update(status="running", pid=os.getpid(), end=None, error=None)
    start(config, run, resume=True)


def evaluate(path: Path, overrides: Sequence[str], checkpoint: str, split: str, config_dir: str | None) -> None:
    """Evaluate a run, a checkpoint folder, or a plain Hugging Face folder, and print what it says."""
    from mezo_cli import loop, session

    logging_on()
    if split not in ("test", "dev", "train"):
        raise UserError(f"--split {split}: allowed are test, dev, train")
    home = path if (path / "config.yaml").is_file() else home_of(path)
    if not path.is_dir():
        raise UserError(f"{path}: no such folder")
    if home is None:
        if not any(text.startswith("task=") for text in overrides):
            raise UserError(f"{path} is no run: give task=... and data=... to evaluate a plain model folder")
        config = configs.build([*overrides, f"model.path={path.resolve()}"], config_dir)
        ready, what = session.prepare(config), str(path)
    else:
        if overrides:
            raise UserError(f"'{overrides[0]}': settings go with a model folder; a run has its own config")
        run = Run.open(home)
        config = configs.read(home / "config.yaml")
        name = checkpoint if path == home else path.name
        ready, what = _at(session, config, run, name), f"{home} checkpoint {name}"
    rows = getattr(loop.load_data(config), split)
    if rows is None:
        raise UserError(f"{what}: there is no {split} split (data={config.data.name})")
    seen = loop.evaluate(ready, ready.inputs.encode_all(rows))
    table = Table(title=f"{what}, {split}: {len(rows)} rows", title_justify="left")
    for name in ("accuracy", "loss", *([seen.metric] if seen.metric != "accuracy" else []), *config.task.labels):
        table.add_column(name, justify="right")
    extra = [f"{seen.score:.4f}"] if seen.metric != "accuracy" else []
    table.add_row(f"{seen.accuracy:.4f}", f"{seen.loss:.4f}", *extra, *(str(n) for n in seen.predicted.values()))
    console.print(table)


def _at(session: Any, config: Any, run: Run, name: str) -> Any:
    """Return the session at a checkpoint by name or step number."""
    if name.isdecimal():
        return session.weights_at(config, run, int(name))
    if name not in ("best", "last"):
        raise UserError(f"--checkpoint {name}: allowed are best, last or a step number")
    if (run.checkpoints / name).is_dir():
        return session.from_checkpoint(config, run, name)
    return session.weights_at(config, run, run.step_of(name, config.task.metric))


def replay(path: Path, step: int, out: Path) -> None:
    """Write the weights of a step as a Hugging Face folder."""
    from mezo_cli import models, session

    logging_on()
    if out.exists() and any(out.iterdir()):
        raise UserError(f"--out {out}: the folder is not empty")
    run = Run.open(path)
    ready = session.replayed(configs.read(path / "config.yaml"), run, step)
    models.save(ready.loaded, out)
    log.info("step %d of %s written to %s", step, path, out)


def _conclude(config: Any, run: Run, summary: dict[str, Any]) -> None:
    first = run.evaluations("dev")[0]
    table = Table(title=f"{config.task.name} {config.objective.name} {config.optimizer.name}", title_justify="left")
    for column in ("", "accuracy", "loss", "step"):
        table.add_column(column, justify="left" if not column else "right")
    best, test = summary["best"]["step"], summary["test"]
    table.add_row("dev before training", f"{100 * first['accuracy']:.1f}%", f"{first['loss']:.4f}", "0")
    table.add_row("dev best", f"{100 * summary['dev']['accuracy']:.1f}%", f"{summary['dev']['loss']:.4f}", str(best))
    if test is not None:
        table.add_row("test at best", f"{100 * test['accuracy']:.1f}%", f"{test['loss']:.4f}", str(best))
    console.print(table)
    log.info(
        "%d steps, %d forwards in %.0f s; peak memory %.2f GB",
        summary["steps"],
        summary["forwards"],
        summary["seconds"],
        summary["peak_memory_bytes"] / 1e9,
    )
    log.info("evaluate again: mezo eval %s", shlex.quote(_relative(run.path)))


def _relative(path: Path) -> str:
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
