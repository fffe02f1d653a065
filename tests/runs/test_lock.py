"""The lock of a run: one writer, which readers do not hinder; earlier versions locked another file."""

import fcntl
import threading
from pathlib import Path

import pytest

from mezo_cli.errors import UserError
from mezo_cli.runs import Run
from mezo_cli.runs.lock import RunLock
from tests.runs.test_run import new_run


def lock_in(folder: Path) -> RunLock:
    return RunLock(folder / ".lock", earlier=folder / "train.log")


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    first, second = lock_in(tmp_path), lock_in(tmp_path)
    assert second.is_held() is False
    assert first.acquire()
    assert not second.acquire()
    assert second.is_held()
    first.release()
    assert second.is_held() is False
    assert second.acquire()


def test_readers_do_not_keep_a_writer_from_it(tmp_path: Path) -> None:
    """Two threads ask without pause whether it is held; each question takes the lock, shared, for a moment."""
    lock, stop = lock_in(tmp_path), threading.Event()
    lock.path.touch()

    def ask() -> None:
        while not stop.is_set():
            lock_in(tmp_path).is_held()

    readers = [threading.Thread(target=ask) for _ in range(2)]
    for reader in readers:
        reader.start()
    try:
        for _ in range(200):
            assert lock.acquire()
            lock.release()
    finally:
        stop.set()
        for reader in readers:
            reader.join()


def test_a_log_that_is_moved_away_does_not_free_a_running_run(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    run.update(status="running")
    (run.path / "train.log").touch()
    (run.path / "train.log").rename(tmp_path / "train.log.1")
    assert Run(run.path).status() == "running"
    with pytest.raises(UserError, match="is running"):
        Run.open(run.path).claim()


def test_a_running_process_of_an_earlier_version_is_recognised(tmp_path: Path) -> None:
    """It locked train.log."""
    with pytest.raises(KeyboardInterrupt), new_run(tmp_path).tracked():
        raise KeyboardInterrupt
    Run(tmp_path).update(status="running")
    (tmp_path / ".lock").unlink()
    with open(tmp_path / "train.log", "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert Run(tmp_path).status() == "running"
        with pytest.raises(UserError, match="is running"):
            Run.open(tmp_path).claim()
    assert Run(tmp_path).status() == "interrupted"
    Run.open(tmp_path).claim()
