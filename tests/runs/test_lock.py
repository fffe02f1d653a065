"""The lock of a run: one writer, which readers do not hinder."""

import threading
from pathlib import Path

from mezo_cli.runs.lock import RunLock


def lock_in(folder: Path) -> RunLock:
    return RunLock(folder / ".lock")


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
