"""The run directory: one process each, a status that is right, files that are whole or told to be damaged."""

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from mezo_cli import config, runs
from mezo_cli.errors import RunFailed, UserError
from mezo_cli.runs import Run, checkpoints, sealed
from tests.door import environment, mezo, refused

CONFIG = config.to_yaml(config.build(["steps=3"]))


def born(path: Path) -> Run:
    return Run.create(path, CONFIG, ["mezo", "train"])


def status(path: Path) -> str:
    return str(json.loads((path / "run.json").read_text())["status"])


def test_a_new_run_says_what_it_is(tmp_path: Path) -> None:
    run = born(tmp_path / "a" / "b")
    info = run.info()
    assert (run.path / "config.yaml").read_text() == CONFIG
    assert (info["status"], info["argv"], info["end"], info["error"]) == ("running", ["mezo", "train"], None, None)
    assert info["pid"] == os.getpid()
    assert {"python", "torch", "transformers", "numpy"} <= set(info["versions"])
    assert "git_commit" in info
    assert info["start"].endswith("+00:00")


# --- one directory, one run ---


def test_a_directory_with_a_run_is_refused_and_resume_is_named(tmp_path: Path) -> None:
    with born(tmp_path).recording():
        pass
    with pytest.raises(UserError, match=rf"already holds a run: go on with it by `mezo resume {tmp_path}`"):
        born(tmp_path)
    assert status(tmp_path) == "finished"


def test_a_directory_without_a_config_is_free(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    born(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_config_yaml_of_something_else_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("theirs: 1\n")
    with pytest.raises(UserError, match="already holds a run"):
        born(tmp_path)
    assert (tmp_path / "config.yaml").read_text() == "theirs: 1\n"


def test_a_run_that_failed_before_its_first_step_leaves_the_directory_free(tmp_path: Path) -> None:
    with pytest.raises(UserError), born(tmp_path).recording():
        raise UserError("no such model")
    with born(tmp_path).recording():
        logging.getLogger("mezo").error("second")
    assert "no such model" not in (tmp_path / "train.log").read_text()
    assert status(tmp_path) == "finished"


def test_a_run_that_failed_later_does_not(tmp_path: Path) -> None:
    run = born(tmp_path)
    run.metric("train", 1, loss=1.0)
    with pytest.raises(RunFailed), run.recording():
        raise RunFailed("nan")
    with pytest.raises(UserError, match="already holds a run"):
        born(tmp_path)


def test_of_many_started_at_once_one_gets_the_directory(tmp_path: Path) -> None:
    for attempt in range(20):
        path, got, barrier = tmp_path / str(attempt), [], threading.Barrier(8)

        def claim(name: int, path: Path = path, got: list[int] = got, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            with contextlib.suppress(UserError):
                got.append(name if Run.create(path, f"name: {name}\n", [str(name)]) else -1)

        threads = [threading.Thread(target=claim, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(got) == 1
        assert (path / "config.yaml").read_text() == f"name: {got[0]}\n"
        assert Run(path).info()["argv"] == [str(got[0])]


def test_of_processes_started_at_once_one_gets_the_directory_of_a_failed_run(tmp_path: Path) -> None:
    """The harder race: all find a run that never began, and may use its directory again."""
    with pytest.raises(UserError), born(tmp_path / "run").recording():
        raise UserError("no such model")
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom mezo_cli.runs import Run\n"
        "from mezo_cli.errors import UserError\nname = sys.argv[1]\n"
        "while not Path('go').exists(): time.sleep(0.001)\n"
        "try:\n    run = Run.create(Path('run'), f'name: {name}', [name])\n    print('got'); time.sleep(1)\n"
        "except UserError as error:\n    print(error)\n"
    )
    command = [sys.executable, "-c", code]
    started = [
        subprocess.Popen([*command, str(i)], cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True)
        for i in range(5)
    ]
    time.sleep(1)
    (tmp_path / "go").touch()
    said = [process.communicate()[0] for process in started]
    assert [line for line in said if line == "got\n"] == ["got\n"]
    assert (tmp_path / "run" / "config.yaml").read_text() == f"name: {said.index('got' + chr(10))}"


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written: Not a directory"):
        born(tmp_path / "file" / "run")


# --- status ---


def test_an_exception_is_a_failure_with_its_traceback_in_the_log(tmp_path: Path) -> None:
    with pytest.raises(KeyError), born(tmp_path).recording():
        raise KeyError("lost")
    info = Run(tmp_path).info()
    assert (info["status"], info["error"]) == ("failed", "KeyError: 'lost'")
    assert info["end"] is not None
    log = (tmp_path / "train.log").read_text()
    assert "Traceback" in log
    assert "KeyError: 'lost'" in log


@pytest.mark.parametrize("error", [UserError("bad data"), RunFailed("nan")])
def test_a_failure_that_is_understood_is_told_without_one(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(type(error)), born(tmp_path).recording():
        raise error
    assert Run(tmp_path).info()["error"] == str(error)
    log = (tmp_path / "train.log").read_text()
    assert str(error) in log
    assert "Traceback" not in log


def test_ctrl_c_is_an_interruption(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), born(tmp_path).recording():
        raise KeyboardInterrupt
    assert status(tmp_path) == "interrupted"
    assert "mezo resume" in (tmp_path / "train.log").read_text()


def test_a_polite_kill_is_one_too_and_the_handler_is_put_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), born(tmp_path).recording():
        signal.raise_signal(signal.SIGTERM)
    assert status(tmp_path) == "interrupted"
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_run_in_another_thread_is_recorded_too(tmp_path: Path) -> None:
    run = born(tmp_path)

    def work() -> None:
        with run.recording():
            pass

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert status(tmp_path) == "finished"


def test_a_full_disk_is_a_failure_in_one_line(tmp_path: Path) -> None:
    run = born(tmp_path)
    run.metric("train", 1, loss=1.0)
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(RunFailed, match="No space left on device"), run.recording():
        run.metric("train", 2, loss=1.0)
    assert "No space left" in run.info()["error"]
    assert status(tmp_path) == "failed"


def test_a_run_whose_process_is_gone_counts_as_interrupted(tmp_path: Path) -> None:
    code = (
        "import os, signal\nfrom pathlib import Path\nfrom mezo_cli.runs import Run\n"
        "run = Run.create(Path('run'), 'steps: 3', [])\n"
        "with run.recording():\n    print(Run(run.path).status(), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "running\n")
    assert status(tmp_path / "run") == "running"
    assert Run(tmp_path / "run").status() == "interrupted"


def test_another_process_under_the_same_number_does_not_keep_it_running(tmp_path: Path) -> None:
    run = born(tmp_path)
    run._drop_lock()
    assert run.info()["pid"] == os.getpid()
    assert run.status() == "interrupted"


def test_without_locks_the_process_number_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("mezo_cli.runs.run.fcntl.flock", no_locks)
    run = born(tmp_path)
    assert run.status() == "running"
    with pytest.raises(UserError, match="already holds a run"):
        born(tmp_path)
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    run.update(pid=int(gone.stdout))
    assert run.status() == "interrupted"
    run.update(host="elsewhere")
    assert run.status() == "running"


def test_a_running_run_is_not_taken_over(tmp_path: Path) -> None:
    run = born(tmp_path)
    with pytest.raises(UserError, match=rf"is running \(process {os.getpid()} on "):
        Run.open(tmp_path).claim()
    with pytest.raises(KeyboardInterrupt), run.recording():
        raise KeyboardInterrupt
    first, second = Run.open(tmp_path), Run.open(tmp_path)
    first.claim()
    assert status(tmp_path) == "running"
    with pytest.raises(UserError, match="is running"):
        second.claim()


# --- damage ---


def test_an_edited_config_is_told(tmp_path: Path) -> None:
    with born(tmp_path).recording():
        pass
    Run.open(tmp_path)
    for text in ("steps: 4\n", ""):
        (tmp_path / "config.yaml").write_text(text)
        with pytest.raises(UserError, match=r"config\.yaml is damaged or was edited"):
            Run.open(tmp_path)
    (tmp_path / "config.yaml").unlink()
    with pytest.raises(UserError, match="holds no run"):
        Run.open(tmp_path)


def test_every_flipped_bit_of_run_json_is_told_or_changes_nothing_that_is_run(tmp_path: Path) -> None:
    with born(tmp_path).recording():
        pass
    path = tmp_path / "run.json"
    whole = path.read_bytes()
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 0x04
        path.write_bytes(bytes(damaged))
        with contextlib.suppress(UserError):
            assert Run.open(tmp_path).status() == "finished"
    path.unlink()
    with pytest.raises(UserError, match=r"run\.json: no such file"):
        Run.open(tmp_path)


# --- checkpoints ---


def write(content: str) -> object:
    def files(folder: Path) -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_text(content)
        (folder / "config.json").write_text("{}")

    return files


def test_a_checkpoint_replaces_the_one_before(tmp_path: Path) -> None:
    run = born(tmp_path)
    assert run.saved_step("best") is None
    for step in (0, 5):
        run.save("best", step, write(f"step {step}"))  # type: ignore[arg-type]
        assert run.saved_step("best") == step
        assert (run.checkpoints / "best" / "model.safetensors").read_text() == f"step {step}"
        checkpoints.verify(run.checkpoints / "best")
    assert [p.name for p in run.checkpoints.iterdir()] == ["best"]


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(tmp_path: Path) -> None:
    run = born(tmp_path)
    run.save("best", 0, write("step 0"))  # type: ignore[arg-type]

    def full(folder: Path) -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(RunFailed, match=r"step 5: checkpoint .*best could not be written: .*No space left"):
        run.save("best", 5, full)
    assert run.saved_step("best") == 0
    checkpoints.verify(run.checkpoints / "best")
    assert [p.name for p in run.checkpoints.iterdir()] == ["best"]


@pytest.mark.parametrize("cut", ["before", "between", "after"])
def test_a_crash_within_the_swap_is_mended(tmp_path: Path, cut: str) -> None:
    with born(tmp_path).recording():
        run = Run(tmp_path)
        run.save("best", 0, write("step 0"))  # type: ignore[arg-type]
    folder = tmp_path / "checkpoints"
    if cut == "before":
        write("half")(folder / ".best.new")  # type: ignore[operator]
    elif cut == "between":
        (folder / "best").rename(folder / ".best.old")
    else:
        write("older")(folder / ".best.old")  # type: ignore[operator]
    run = Run.open(tmp_path)
    assert run.saved_step("best") == 0
    checkpoints.verify(folder / "best")
    run.save("best", 5, write("step 5"))  # type: ignore[arg-type]
    assert [p.name for p in folder.iterdir()] == ["best"]


def test_a_reader_does_not_mend_under_the_hands_of_a_running_run(tmp_path: Path) -> None:
    run = born(tmp_path)
    run.save("best", 0, write("step 0"))  # type: ignore[arg-type]
    (run.checkpoints / "best").rename(run.checkpoints / ".best.old")
    Run.open(tmp_path)
    assert (run.checkpoints / ".best.old").exists()


def test_every_flipped_bit_of_a_checkpoint_is_told(tmp_path: Path) -> None:
    run = born(tmp_path)
    run.save("best", 5, write("the weights"))  # type: ignore[arg-type]
    folder = run.checkpoints / "best"
    for name in ("model.safetensors", "config.json", "mezo.json"):
        whole = (folder / name).read_bytes()
        for place in range(len(whole)):
            damaged = bytearray(whole)
            damaged[place] ^= 0x10
            (folder / name).write_bytes(bytes(damaged))
            with contextlib.suppress(UserError):
                checkpoints.verify(folder)
                assert json.loads(damaged) == json.loads(whole)  # white space in mezo.json
        (folder / name).unlink()
        with pytest.raises(UserError, match=r"missing|no such file"):
            checkpoints.verify(folder)
        (folder / name).write_bytes(whole)
    checkpoints.verify(folder)


def test_half_a_file_is_never_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.json"
    sealed.write_whole(path, "old")

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sealed.os, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        sealed.write_whole(path, "new")
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]
    assert path.read_text() == "old"


# --- the list ---


def test_the_list_of_nothing(tmp_path: Path) -> None:
    said = mezo("runs", tmp_path)
    assert (said.code, said.out) == (0, f"no runs under {tmp_path}\n")
    assert "no such folder" in refused(mezo("runs", tmp_path / "none"))
    (tmp_path / "file").write_text("")
    assert "no such folder" in refused(mezo("runs", tmp_path / "file"))


def test_odd_folders_are_no_runs_and_damaged_ones_are_shown(tmp_path: Path) -> None:
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.yaml").write_text("a: 1\n")
    with born(tmp_path / "sound").recording():
        pass
    with born(tmp_path / "torn").recording():
        pass
    (tmp_path / "torn" / "run.json").write_text('{"status": "fin')
    (tmp_path / "only-steps").mkdir()
    (tmp_path / "only-steps" / "trajectory.bin").write_bytes(b"MEZO")
    said = mezo("runs", tmp_path)
    assert said.code == 0, said
    rows = [line.split() for line in said.out.splitlines()]
    assert rows[0][:2] == ["run", "status"]
    assert [row[:2] for row in rows[1:4]] == [["only-steps", "damaged"], ["torn", "damaged"], ["sound", "finished"]]
    assert rows[3][2:] == ["sst2", "mlm", "mezo", "roberta-large", "42", "0/3", "-", "-"]
    assert "torn: " in said.out
    assert "run.json is damaged" in said.out
    assert "odd" not in {row[0] for row in rows[1:]}


# --- the summary ---


def test_a_changed_summary_is_told(tmp_path: Path) -> None:
    run = born(tmp_path)
    with pytest.raises(UserError, match=r"summary\.json: no such file"):
        run.results()
    run.summary({"steps": 3, "seconds": 1.5})
    assert run.results() == {"steps": 3, "seconds": 1.5}
    file = tmp_path / "summary.json"
    file.write_text(file.read_text().replace('"steps": 3', '"steps": 8'))
    with pytest.raises(UserError, match=r"summary\.json is damaged"):
        run.results()


def test_a_folder_that_is_not_there_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "outputs").mkdir()
    with pytest.raises(UserError, match=r"no such folder \(did you mean 'outputs'\?\)"):
        runs.find(tmp_path / "output")
