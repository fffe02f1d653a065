"""Run a server as long as mezo runs: `python supervisor.py PID COMMAND...`, in its folder, where PID is that of mezo.

The server and all that it starts are one group of processes, which ends with mezo, also when that is killed.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time

WAIT = 5.0  # seconds for the server to end by itself


def main() -> None:
    """End with the server's status."""
    parent, asked = int(sys.argv[1]), []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    server = subprocess.Popen(sys.argv[2:], start_new_session=True)
    while server.poll() is None and os.getppid() == parent and not asked:
        time.sleep(0.1)
    server.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(WAIT)
    with contextlib.suppress(ProcessLookupError):  # what is left of its group
        os.killpg(server.pid, signal.SIGKILL)
    status = server.wait()
    if os.getppid() != parent:  # else mezo removes the folder, when it has read the log there
        shutil.rmtree(os.getcwd(), ignore_errors=True)
    sys.exit(status if status >= 0 else 128 - status)


if __name__ == "__main__":
    main()
