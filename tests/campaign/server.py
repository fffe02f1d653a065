"""Run commands of `mezo` in forked children of a process that has torch loaded: a fork takes 20 ms, a start 4 s.

    python -m tests.campaign.server        reads one JSON request per line, answers one JSON line each

Each child has an own working directory, standard output and error (of C libraries too), and dies alone.
"""

import ctypes
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.command_line import Result, environment, mezo

HUNG = 124  # the exit status given to a command that did not end in time
# Signals that a child gets only while a command runs: before and after, `mezo` is not there to answer them.
HELD_BACK = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class ForkServer:
    """A server process, and requests to it."""

    def __init__(self) -> None:
        root = Path(__file__).resolve().parents[2]
        extra = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        env = environment(**extra)
        env["PYTHONPATH"] = os.pathsep.join([env["PYTHONPATH"], str(root)])
        command = [sys.executable, "-m", "tests.campaign.server"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, cwd=root, env=env, stdin=pipe, stdout=pipe, text=True)

    def run(self, *commands: list[str], cwd: Path, **how: Any) -> list[Result]:
        """Run commands one after another in one child. It may die: the results are those of the commands that began.

        Args:
            commands: the words of each, without `mezo`.
            cwd: the working directory.
            how: `watch`, the arguments of `file_operations.Watch`; `after`, a signal's number and the seconds from the
                start at which it comes (at the earliest when the command begins); `ignore`, the numbers of ignored
                signals; `copies`, how many children run the commands at once; `powerless`, True to run without root's
                rights; `env`, environment variables; `timeout` in seconds.

        Returns:
            Exit status (minus the signal's number when one ended it), output and errors of each; of each child in turn.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {"commands": [[str(word) for word in words] for words in commands], "cwd": str(cwd), **how}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError("the server of the campaign died")
        return [Result(*result) for result in json.loads(answer)]

    def close(self) -> None:
        """End the server."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)


def serve() -> None:
    """Answer requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 1)
    requests = os.fdopen(os.dup(0))
    os.dup2(nowhere, 0)
    with tempfile.TemporaryDirectory() as folder:
        warm = WarmUp(Path(folder))
        signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)
        for line in requests:
            request = json.loads(line)
            warm.up(request["commands"])
            print(json.dumps(_answer(request)), file=answers, flush=True)


class WarmUp:
    """Import what commands import late, by running each once before its first fork."""

    def __init__(self, folder: Path) -> None:
        run = f"{folder}/r"
        self._commands = {
            "runs": ["runs", str(folder)],
            "compare": ["compare", str(folder)],
            "show": ["show", run],
            "report": ["report", run, "--out", f"{folder}/page.html"],
            "eval": ["eval", run],
            "predict": ["predict", run, "--text", "a film"],
            "export": ["export", run, "--out", f"{folder}/out"],
        }
        words = ["model=demo", "data=demo", "steps=1", "batch_size=2"]
        self._run("train", *words, "data.train_size=8", "data.eval_limit=2", f"hydra.run.dir={run}")

    def up(self, commands: list[list[str]]) -> None:
        """Prepare for commands."""
        words = [word for command in commands for word in command]
        if any(word.startswith("peft=") for word in words):
            import peft

            assert peft
        if any("probe" in word for word in words):
            import sklearn.linear_model

            assert sklearn
        for command in commands:
            if command and command[0] in self._commands:
                self._run(*self._commands.pop(command[0]))

    def _run(self, *command: str) -> None:
        result = mezo(*command)
        assert result.code == 0, result
        gc.collect()
        gc.freeze()  # or each child would look through all of torch again


def _answer(request: dict[str, Any]) -> list[tuple[int, str, str]]:
    folders = [Path(tempfile.mkdtemp(prefix="campaign")) for _ in range(request.get("copies", 1))]
    children = [(_fork(request, folder), folder) for folder in folders]
    return [result for pid, folder in children for result in _results(pid, folder, request)]


def _fork(request: dict[str, Any], folder: Path) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            _child(request, folder)
        except BaseException:
            import traceback

            (folder / "broken").write_text(traceback.format_exc())
        os._exit(70)
    return pid


def _results(pid: int, folder: Path, request: dict[str, Any]) -> list[tuple[int, str, str]]:
    status = _wait(pid, request, time.monotonic())
    if (folder / "broken").exists():
        sys.exit((folder / "broken").read_text())
    results = []
    for number in range(len(request["commands"])):
        out, err, code = (folder / f"{number}.{what}" for what in ("out", "err", "code"))
        if out.exists():
            ended = int(code.read_text()) if code.exists() else status
            results.append((ended, *(path.read_text(errors="replace") for path in (out, err))))
    shutil.rmtree(folder)
    return results


def _wait(pid: int, request: dict[str, Any], began: float) -> int:
    """Wait for a child, send it the signal that was asked for, and return its status."""
    after, limit, hung = request.get("after"), request.get("timeout", 120), False
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        now = time.monotonic() - began
        if ended:
            return HUNG if hung else os.waitstatus_to_exitcode(status)
        if after and now >= after[1]:
            os.kill(pid, after[0])
            after = None
        if now > limit:
            os.kill(pid, signal.SIGKILL)
            hung = True
        time.sleep(0.002)


def _child(request: dict[str, Any], folder: Path) -> None:
    from tests.campaign.file_operations import Watch

    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):  # which the campaign's own process may ignore, under nohup
        signal.signal(number, signal.SIG_DFL)
    for number in request.get("ignore", ()):
        signal.signal(number, signal.SIG_IGN)
    os.chdir(request["cwd"])
    os.environ.update(request.get("env", {}))
    watch = Watch(**request["watch"]) if request.get("watch") else None
    if request.get("powerless"):
        _drop_rights()
    if watch is not None:
        watch.install()
    for number, words in enumerate(request["commands"]):
        for fd, what in ((1, "out"), (2, "err")):
            file = os.open(folder / f"{number}.{what}", os.O_CREAT | os.O_WRONLY)
            os.dup2(file, fd)
            os.close(file)
        code = _command(words)
        (folder / f"{number}.code.new").write_text(str(code))
        os.rename(folder / f"{number}.code.new", folder / f"{number}.code")
    if watch is not None:
        watch.save()
    os._exit(0)


def _command(words: list[str]) -> int:
    """Run one command as `python -m mezo_cli` does."""
    import traceback

    from mezo_cli import cli

    sys.argv = ["mezo", *words]
    code: object = 0

    def answer_signals(**given: Any) -> Any:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_BACK)  # one that has come is acted on here
        try:
            return cli.app(**given)
        finally:
            signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)

    try:
        cli.main(answer_signals)
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return code if isinstance(code, int) else int(code is not None)


def _drop_rights() -> None:
    """Give up root's capabilities, so that the modes of files hold for this process too."""
    if os.geteuid() == 0:
        header, nothing = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
        if ctypes.CDLL(None, use_errno=True).capset(header, nothing) != 0:
            raise OSError(ctypes.get_errno(), "capset")


if __name__ == "__main__":
    serve()
