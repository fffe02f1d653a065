"""The run directory: one process at a time, the right status, damage is reported."""

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mezo_cli.config.compose import build_config
from mezo_cli.config.stored import to_yaml
from mezo_cli.errors import RunFailed, UserError
from mezo_cli.process.environment import IN_SWEEP
from mezo_cli.process.environment import environment as variables
from mezo_cli.runs import Run
from tests.command_line import environment, error_line, mezo, ok

CONFIG = to_yaml(build_config(["steps=3"]))


def new_run(path: Path) -> Run:
    return Run.create(path, CONFIG, ["mezo", "train"])


def status(path: Path) -> str:
    return str(json.loads((path / "run.json").read_text())["status"])


def test_a_config_yaml_of_something_else_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("theirs: 1\n")
    with pytest.raises(UserError, match=r"a config\.yaml without run\.json is no run"):
        new_run(tmp_path)
    assert (tmp_path / "config.yaml").read_text() == "theirs: 1\n"
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


@pytest.mark.parametrize("had", [None, [], ["notes.txt", "data"]])
def test_a_mistake_before_the_first_step_leaves_the_disk_as_it_was(tmp_path: Path, had: list[str] | None) -> None:
    folder = tmp_path / "a" / "b" if had is None else tmp_path
    for name in had or ():
        (tmp_path / name).write_text("mine")
    run = new_run(folder)
    with contextlib.suppress(UserError), run.tracked():
        run.log_metrics("eval", 0, split="dev", loss=1.0)
        run.save_checkpoint("best", 0, lambda folder: None)
        raise UserError("no such model")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(had or ())
    with new_run(folder).tracked():
        pass


def test_a_sweeps_job_keeps_its_mistake_and_leaves_the_directory_free(tmp_path: Path) -> None:
    with pytest.raises(UserError), variables({IN_SWEEP: "1"}), new_run(tmp_path).tracked():
        raise UserError("no such model")
    assert (status(tmp_path), Run(tmp_path).info()["error"]) == ("failed", "no such model")
    with new_run(tmp_path).tracked():
        logging.getLogger("mezo").error("second")
    assert "no such model" not in (tmp_path / "train.log").read_text()
    assert status(tmp_path) == "finished"


def test_a_run_that_failed_later_does_not(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.log_metrics("train", 1, loss=1.0)
    with pytest.raises(RunFailed), run.tracked():
        raise RunFailed("nan")
    with pytest.raises(UserError, match="already holds a run"):
        new_run(tmp_path)


def test_a_run_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match=r"file: the run directory cannot be written: this is a file"):
        new_run(tmp_path / "file")
    with pytest.raises(UserError, match="cannot be written: Not a directory"):
        new_run(tmp_path / "file" / "run")


@pytest.mark.parametrize("file", [".config.yaml.tmp", ".run.json.tmp", "."])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_what_ends_a_start_leaves_the_directory_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, error: BaseException
) -> None:
    """A signal, or a full disk, when a file or its folder is synced: also when run.json has its name already."""
    plain, wanted = os.fsync, tmp_path / "run" / file

    def failing(number: int) -> None:
        plain(number)
        if Path(os.readlink(f"/proc/self/fd/{number}")) == wanted and (file != "." or (wanted / "run.json").exists()):
            raise error

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing)
        with pytest.raises((KeyboardInterrupt, RunFailed), match=r"^$|run: cannot be written: No space left"):
            new_run(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []
    with new_run(tmp_path / "run").tracked():
        assert status(tmp_path / "run") == "running"


def test_a_directory_that_another_process_is_making_a_run_in_is_refused(tmp_path: Path) -> None:
    first = new_run(tmp_path)
    (tmp_path / "config.yaml").unlink()  # which it writes last
    with pytest.raises(UserError, match=rf"is running \(process {os.getpid()} on "):
        new_run(tmp_path)
    assert first.info()["status"] == "interrupted"


@pytest.mark.parametrize(
    ("error", "stored"),
    [(KeyError("lost"), "KeyError: 'lost'"), (UserError("bad data"), "bad data"), (RunFailed("nan"), "nan")],
)
def test_a_failure_is_recorded_an_unknown_one_with_its_traceback(tmp_path: Path, error: Exception, stored: str) -> None:
    with pytest.raises(type(error)), variables({IN_SWEEP: "1"}), new_run(tmp_path).tracked():
        raise error
    info, log = Run(tmp_path).info(), (tmp_path / "train.log").read_text()
    assert (info["status"], info["error"]) == ("failed", stored)
    assert info["end"] is not None
    assert stored in log
    assert ("Traceback" in log) == isinstance(error, KeyError)


def test_ctrl_c_is_an_interruption_and_a_claim_keeps_the_status(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    assert status(tmp_path) == "interrupted"
    with pytest.raises(KeyboardInterrupt), run.tracked():
        raise KeyboardInterrupt
    assert status(tmp_path) == "interrupted"
    assert "mezo resume" in (tmp_path / "train.log").read_text()
    Run.open(tmp_path).claim()
    assert status(tmp_path) == "interrupted"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("outside", [signal.SIG_DFL, signal.SIG_IGN])
def test_other_signals_are_one_too_unless_they_are_ignored_and_the_handler_is_restored(
    number: signal.Signals, outside: signal.Handlers, tmp_path: Path
) -> None:
    before = signal.signal(number, outside)
    try:
        ignored = outside == signal.SIG_IGN
        with contextlib.nullcontext() if ignored else pytest.raises(KeyboardInterrupt), new_run(tmp_path).tracked():
            signal.raise_signal(number)
        assert status(tmp_path) == ("finished" if ignored else "interrupted")
        assert signal.getsignal(number) is outside
    finally:
        signal.signal(number, before)


def test_a_run_whose_process_is_gone_counts_as_interrupted(tmp_path: Path) -> None:
    code = (
        "import os, signal\nfrom pathlib import Path\nfrom mezo_cli.runs import Run\n"
        "run = Run.create(Path('run'), 'steps: 3', [])\n"
        "with run.tracked():\n    print(Run(run.path).status(), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "running\n")
    assert status(tmp_path / "run") == "running"
    assert Run(tmp_path / "run").status() == "interrupted"


def test_a_running_run_cannot_be_claimed(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    with pytest.raises(UserError, match=rf"is running \(process {os.getpid()} on "):
        Run.open(tmp_path).claim()
    with pytest.raises(KeyboardInterrupt), run.tracked():
        raise KeyboardInterrupt
    first, second = Run.open(tmp_path), Run.open(tmp_path)
    first.claim()
    assert status(tmp_path) == "interrupted"  # until it runs
    with pytest.raises(UserError, match="is running"):
        second.claim()


def test_a_run_that_another_process_has_just_finished_is_not_resumed(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    with run.tracked():
        run.update(status="finished")
    before = run.info()
    with pytest.raises(UserError, match="was just finished by another process"):
        Run.open(tmp_path).claim(finished=False)
    assert run.info() == before
    Run.open(tmp_path).claim(finished=True)


def test_the_list_of_nothing(tmp_path: Path) -> None:
    said = mezo("runs", tmp_path)
    assert (said.code, said.out) == (0, f"no runs under {tmp_path}\n")
    (tmp_path / "outputs").mkdir()
    assert "no such folder (did you mean 'outputs'?)" in error_line(mezo("runs", tmp_path / "output"))


def test_odd_folders_are_no_runs_and_damaged_ones_are_shown(tmp_path: Path) -> None:
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.yaml").write_text("a: 1\n")
    with pytest.raises(KeyboardInterrupt), new_run(tmp_path / "sound").tracked():
        raise KeyboardInterrupt
    with new_run(tmp_path / "torn").tracked():
        pass
    (tmp_path / "torn" / "run.json").write_text('{"status": "fin')
    (tmp_path / "only-steps").mkdir()
    (tmp_path / "only-steps" / "trajectory.bin").write_bytes(b"MEZO")
    said = ok("runs", tmp_path)
    rows = [line.split() for line in said.out.splitlines()]
    assert rows[0][:2] == ["run", "status"]
    assert [row[:2] for row in rows[1:4]] == [["only-steps", "damaged"], ["torn", "damaged"], ["sound", "interrupted"]]
    assert rows[3][2:] == ["sst2", "mlm", "mezo", "roberta-large", "accuracy", "42", "0/3", *"----"]
    assert "torn: " in said.out
    assert "run.json is damaged" in said.out
    assert "odd" not in {row[0] for row in rows[1:]}
