"""Where the engine of a rank runs: the ranks of a machine share its GPUs, or its CPUs."""

import os
from collections.abc import Sequence

# What torchrun and the like set for a rank: vLLM would take them for its own.
OF_RANKS = [f"{of}{what}" for of in ("", "LOCAL_", "GROUP_", "ROLE_") for what in ("RANK", "WORLD_SIZE")]
OF_RANKS += ["MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID"]


def variables_of_rank(tensor_parallel: int) -> dict[str, str | None]:
    """Return the variables for the engine of this rank, or of a process without ranks.

    Of the GPUs that it may see a rank gets the next `tensor_parallel` after those of the ranks before it on this
    machine, and so many groups of CPUs. Without ranks vLLM chooses, but for CPUs: it wants a NUMA node per process.
    """
    bind = "VLLM_CPU_OMP_THREADS_BIND"
    if "RANK" not in os.environ:
        groups = cpu_groups(sorted(os.sched_getaffinity(0)), tensor_parallel)
        return {} if tensor_parallel == 1 or bind in os.environ else {bind: "|".join(groups)}
    rank = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    size = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    own = slice(rank * tensor_parallel, (rank + 1) * tensor_parallel)
    groups = cpu_groups(sorted(os.sched_getaffinity(0)), size * tensor_parallel)
    numbers = [str(number) for number in range(size * tensor_parallel)]
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = numbers if seen is None else [name for name in seen.split(",") if name]
    placed: dict[str, str | None] = {bind: "|".join(groups[own])}
    return dict.fromkeys(OF_RANKS) | placed | {"CUDA_VISIBLE_DEVICES": ",".join(gpus[own])}


def cpu_groups(cpus: Sequence[int], count: int) -> list[str]:
    """Share CPUs among processes: one text per process, `0,1`. With fewer CPUs than processes some are shared."""
    size = max(1, len(cpus) // count)
    return [",".join(map(str, cpus[i * size % len(cpus) :][:size])) for i in range(count)]
