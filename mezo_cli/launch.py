"""Behind the doors: compose a config, give it a run directory, hand both to the loop."""

import gc
import logging
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig

from mezo_cli import config as configs
from mezo_cli import terminal
from mezo_cli.errors import UserError, did_you_mean
from mezo_cli.overrides import quoted
from mezo_cli.runs import Run, checkpoints
from mezo_cli.schema import Config

log = logging.getLogger("mezo")
console = terminal.make_console()

SPLITS = ("test", "dev", "train")


def show(overrides: Sequence[str], config_dir: str | None, what: str) -> None:
    """Print the composed config."""
    configs.check(overrides, config_dir)
    _hydra(overrides, config_dir, ["--cfg", what], lambda node: None)


def single(overrides: Sequence[str], config_dir: str | None) -> None:
    """Run one job."""
    configs.check(overrides, config_dir)
    raised: list[BaseException] = []
    argv = list(sys.argv)

    def job(node: DictConfig) -> None:
        try:
            _job(node, argv)
        except BaseException as error:  # taken past Hydra, which would print its own lines about it
            raised.append(error)

    with terminal.telling(console):
        _hydra(overrides, config_dir, [], job)
    for error in raised:
        raise error


def sweep(overrides: Sequence[str], config_dir: str | None) -> int:
    """Run every job of a sweep, each in its own directory; return 1 when any failed.

    An experiment file may name a grid (`hydra.sweeper.params`): the command line's own keys win over it.
    The whole sweep is checked before the first job starts; a job's failure is that job's alone.
    """
    words = configs.with_grid(overrides, config_dir)
    total = configs.check(words, config_dir, multirun=True)
    varied = configs.varied(words, config_dir)
    failed: list[str] = []
    argv = list(sys.argv)

    def job(node: DictConfig) -> None:
        number = HydraConfig.get().job.num
        what = " ".join(text for text in HydraConfig.get().overrides.task if text.split("=")[0] in varied)
        log.info("job %d of %d  %s", number + 1, total, what)
        try:
            _job(node, argv)
        except Exception as error:  # whatever a job died of, the others run; its own log has the traceback
            failed.append(f"job {number + 1} ({what}): {error}")
            log.error("job %d failed: %s", number + 1, error)
        gc.collect()  # a model and its hooks hold one another; the next job needs the memory
        log.info("")

    with terminal.telling(console):
        _hydra(["hydra.sweeper.params=null", *words], config_dir, ["--multirun"], job)  # the words hold the grid
        log.info("%d of %d jobs finished", total - len(failed), total)
    for line in failed:
        print(f"failed: {' '.join(line.split())}", file=sys.stderr)
    return 1 if failed else 0


def resume(path: Path) -> None:
    """Go on with an interrupted run; a finished one is left as it is."""
    run = Run.open(path)
    if run.status() == "finished":
        print(f"{path} is finished: there is nothing to resume")
        return
    config = configs.read(path / "config.yaml")
    run.claim()
    with terminal.telling(console):
        start(config, run)


def start(config: Config, run: Run, before: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Train in a run directory that this process has claimed, then print how it ended.

    `before` is done first, when a failure is already the run's own.
    """
    with run.recording():
        before()
        from mezo_cli import loop  # imports torch

        summary = loop.train(config, run, console)
        _conclude(run, summary)
    return summary


def evaluate(path: Path, overrides: Sequence[str], checkpoint: str, split: str, config_dir: str | None) -> None:
    """Evaluate a run, a checkpoint folder, or a plain Hugging Face folder, and print what it says."""
    if split not in SPLITS:
        raise UserError(f"--split {split}: allowed are {', '.join(SPLITS)}{did_you_mean(split, SPLITS)}")
    if not path.is_dir():
        raise UserError(f"{path}: no such folder")
    is_run = (path / "config.yaml").is_file() and not (path / "config.json").is_file()
    home = path if is_run else checkpoints.run_of(path)
    if home is None and not any(text.startswith("task=") for text in overrides):
        raise UserError(f"{path} is no run: give task=... and data=... to evaluate a plain model folder")
    if home is not None and overrides:
        raise UserError(f"'{overrides[0]}': settings go with a plain model folder; a run has its own")
    from mezo_cli import loop, session, weights
    from mezo_cli.evaluation import evaluate

    with terminal.telling(console):
        if home is None:
            words = [*overrides, f"model.path={quoted(path.resolve())}"]
            configs.check(words, config_dir)
            run, config, what = None, configs.build(words, config_dir), str(path)
        else:
            name = checkpoint if is_run else path.name
            run, config, what = Run.open(home), configs.read(home / "config.yaml"), f"{home} {name}"
        splits = loop.load_data(config)
        rows = getattr(splits, split)
        if rows is None:
            raise UserError(f"{what}: there is no {split} split (data={config.data.name})")
        if run is not None and run.info().get("data_fingerprint") not in (None, splits.fingerprint):
            log.warning("warning: the data have changed since the run")
        ready = session.prepare(config) if run is None else weights.named(config, run, name)
        seen = evaluate(ready, ready.inputs.encode_all(rows))
    if not seen.finite:
        raise UserError(f"{what}: its loss on {split} is not finite: the weights have diverged or are damaged")
    print(f"{what}, {split}: {len(rows)} rows")
    table = terminal.table("", *seen.scores(), *(f"predicted {label}" for label in seen.predicted))
    table.add_row("", *(f"{value:.4f}" for value in seen.scores().values()), *map(str, seen.predicted.values()))
    console.print(table)


def replay(path: Path, step: int, out: Path) -> None:
    """Write the weights of a step as a Hugging Face folder."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {out}: it exists and is not an empty folder")
    run = Run.open(path)
    config = configs.read(path / "config.yaml")
    from mezo_cli import models, weights

    ready = weights.from_start(config, run, step)
    try:
        models.save(ready.loaded, out)
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written: {error.strerror}") from error
    print(f"step {step} of {path} written to {out}")


def _hydra(overrides: Sequence[str], config_dir: str | None, flags: Sequence[str], job: Any) -> None:
    """Run `job` under Hydra with a rebuilt argv: Typer has read the options, Hydra gets its own spelling of them."""
    configs.register()
    before = sys.argv
    sys.argv = [before[0], *flags, *configs.search_path(config_dir), *overrides]
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # what goes wrong comes here as it is, to be told in one line
    try:
        main = hydra.main(config_path=str(configs.conf_dir()), config_name="config", version_base=configs.VERSION_BASE)
        main(job)()
    except (HydraException, OSError) as error:  # of Hydra's own: a directory that cannot be made
        raise UserError(str(error)) from error
    finally:
        sys.argv = before


def _job(node: DictConfig, argv: list[str]) -> None:
    config = configs.typed(node)
    run = Run.create(Path(HydraConfig.get().runtime.output_dir), configs.to_yaml(config), argv)
    log.info("run    %s", _relative(run.path))
    start(config, run)


def _conclude(run: Run, summary: dict[str, Any]) -> None:
    first = run.evaluations("dev")[0]
    best, test = summary["best"]["step"], summary["test"]
    log.info("%-19s  accuracy    loss  at step", "")
    rows = [("dev before training", first, 0), ("dev best", summary["dev"], best), ("test at best", test, best)]
    for name, scores, step in rows:
        if scores is not None:
            log.info("%-19s  %7.1f%%  %6.4f  %7d", name, 100 * scores["accuracy"], scores["loss"], step)
    log.info(
        "%d steps, %d forwards in %s; peak memory %.2f GB",
        summary["steps"],
        summary["forwards"],
        terminal.duration(summary["seconds"]),
        summary["peak_memory_bytes"] / 1e9,
    )
    log.info("evaluate again: mezo eval %s", shlex.quote(_relative(run.path)))


def _relative(path: Path) -> str:
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
