"""Kill a random rank of a training under `torchrun`, again and again: the run must end in the bits of one process.

    python scripts/kill_ranks.py --kills 10

It trains the demo once by one process and once by two ranks that share the directions of each step, under the torchrun
flags of docs/scaling.md. While that runs it kills one of the ranks (SIGKILL) after a random time, as often as it is
told; torchrun starts both again, and they go on with the run. At the end the trajectories and weights are compared.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RANKS = 2
SETTINGS = [
    "experiment=demo",
    "peft=none",
    "batch_size=8",
    "steps=600",
    "eval_every=100",
    "data.eval_limit=64",
    "optimizer.samples=2",
]
MEZO = ["-m", "mezo_cli", "train", "-q"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]


def ranks_of(torchrun: int) -> list[int]:
    """Return the process ids of the ranks that a torchrun has started, in their order."""
    found = []
    for path in Path("/proc").iterdir():
        try:
            parent = path.name.isdecimal() and int((path / "stat").read_text().rpartition(")")[2].split()[1])
            words = (path / "cmdline").read_bytes().split(b"\0") if parent == torchrun else []
        except OSError:  # it has ended
            continue
        found += [int(path.name)] if b"mezo_cli" in words else []
    return sorted(found)


def steps_of(run: Path) -> int:
    """Return about how many steps a run has done, by the size of its trajectory."""
    path = run / "trajectory.bin"
    return path.stat().st_size // 20 if path.exists() else 0


def wait_for_steps(run: Path, before: int, torchrun: "subprocess.Popen[bytes]", seconds: float) -> bool:
    """Wait until the run goes on; return whether it does."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and torchrun.poll() is None:
        if steps_of(run) > before:
            return True
        time.sleep(0.2)
    return False


def content(run: Path) -> list[bytes]:
    """Return what must have the same bits."""
    names = ("trajectory.bin", "checkpoints/last/model.safetensors", "checkpoints/best/model.safetensors")
    return [(run / name).read_bytes() for name in names]


def main() -> int:
    """Train, kill, compare; exit with 1 if the bits differ, or the run does not go on."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE", help="further settings of the run")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--wait", type=float, default=300.0, help="seconds that the run may take to go on")
    parser.add_argument("--seed", type=int, default=0, help="of what is killed, and when")
    args = parser.parse_args()
    draw, words = random.Random(args.seed), [*SETTINGS, *args.words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="kill_ranks") as folder:
        one, two = Path(folder) / "one", Path(folder) / "two"
        subprocess.run([sys.executable, *MEZO, *words, f"hydra.run.dir={one}"], check=True, env=environment)
        command = [sys.executable, *TORCHRUN, f"--max-restarts={args.kills}", *MEZO, *words, f"hydra.run.dir={two}"]
        with open(Path(folder) / "log", "wb") as log:
            torchrun = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            killed = 0
            while killed < args.kills and wait_for_steps(two, steps_of(two), torchrun, args.wait):
                time.sleep(draw.uniform(0, 2))
                ranks = ranks_of(torchrun.pid)
                if len(ranks) == RANKS:
                    rank = draw.randrange(RANKS)
                    os.kill(ranks[rank], signal.SIGKILL)
                    killed += 1
                    print(f"{killed}: killed rank {rank} at about step {steps_of(two)}", flush=True)
                    began = time.monotonic()
                    while ranks_of(torchrun.pid) == ranks and time.monotonic() - began < args.wait:
                        time.sleep(0.1)
            status = torchrun.wait()
        same = status == 0 and content(one) == content(two)
        print(f"{killed} kills; torchrun's exit status {status}; the same bits as one process: {same}")
        if not same:
            print((Path(folder) / "log").read_text(errors="replace")[-3000:])
        return 0 if same and killed == args.kills else 1


if __name__ == "__main__":
    sys.exit(main())
