"""A Slurm cluster of one node in a folder: munged, slurmctld and slurmd of Debian's slurm-wlm and munge, run as root.

python -m tests.slurm FOLDER     # start it, print how to use it, and stop it at Ctrl-C
"""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel", "sinfo")
CONF = """\
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
KillWait=30
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str | None:
    """Why no cluster can be started here; None if one can."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"needs {', '.join(missing)}: apt-get install slurm-wlm munge"
    return None if os.getuid() == 0 else "needs root: slurmd starts jobs as their user"


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Start the daemons; yield the environment in which `sbatch` and `srun` find them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("state", "spool"):
        (folder / name).mkdir(exist_ok=True)
    conf = folder / "slurm.conf"
    conf.write_text(CONF.format(folder=folder, host=socket.gethostname(), ports=_free_ports(2), cpus=os.cpu_count()))
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    env = {**os.environ, "SLURM_CONF": str(conf)}
    munge = {"key": "key", "socket": "socket", "pid": "pid", "log": "log", "seed": "seed"}
    options = [f"--{name}{'' if name == 'socket' else '-file'}={folder}/munge.{end}" for name, end in munge.items()]
    commands = [
        ["munged", "--foreground", "--force", *options],
        ["slurmctld", "-D", "-c"],
        ["slurmd", "-D", "-c"],
    ]
    running = []
    try:
        for command in commands:
            log = open(folder / f"{command[0]}.out", "ab")  # noqa: SIM115 (the daemon writes to it)
            running.append(subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True))
            log.close()
            if command[0] == "munged":
                _wait(lambda: (folder / "munge.socket").exists(), running[-1], folder)
        _wait(lambda: "idle" in _output(["sinfo", "-h", "-o", "%T"], env), running[-1], folder)
        yield {"SLURM_CONF": str(conf)}
    finally:
        subprocess.run(["scancel", "-u", "root"], env=env, capture_output=True, timeout=60, check=False)
        for daemon in reversed(running):
            daemon.terminate()
        for daemon in reversed(running):
            try:
                daemon.wait(timeout=20)
            except subprocess.TimeoutExpired:
                daemon.kill()


def _output(command: list[str], env: dict[str, str]) -> str:
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False).stdout


def _wait(is_ready, daemon, folder: Path, seconds: float = 90.0) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + seconds
    while not is_ready():
        if daemon.poll() is not None or time.monotonic() > deadline:
            logs = "\n".join(path.read_text(errors="replace")[-2000:] for path in folder.glob("*.out"))
            raise RuntimeError(f"Slurm did not start:\n{logs}")
        time.sleep(0.2)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


if __name__ == "__main__":
    with cluster(Path(sys.argv[1]).absolute()) as found:
        print(*(f"export {name}={value}" for name, value in found.items()), sep="\n", flush=True)
        signal.sigwait({signal.SIGINT, signal.SIGTERM})
