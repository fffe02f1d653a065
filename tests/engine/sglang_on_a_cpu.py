"""Start SGLang on a CPU: `python sglang_on_a_cpu.py --model-path DIR --port N`. Its LoRA would pin memory for a GPU."""

import runpy
import sys
from collections.abc import Callable
from typing import Any

import torch

TORCH_ALONE = ["--device", "cpu", "--attention-backend", "torch_native", "--lora-backend", "torch_native"]
LORA = ["--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "q_proj", "v_proj"]
OTHER = ["--dtype", "float32", "--disable-cuda-graph", "--skip-server-warmup"]


def unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a function of torch without `pin_memory`."""

    def made(*args: Any, **options: Any) -> torch.Tensor:
        return make(*args, **{key: value for key, value in options.items() if key != "pin_memory"})

    return made


for name in ("tensor", "empty", "zeros", "full", "ones"):  # in the processes that the server starts, too
    setattr(torch, name, unpinned(getattr(torch, name)))
torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[assignment, method-assign]

if __name__ == "__main__":
    sys.argv += [*TORCH_ALONE, *LORA, *OTHER]
    runpy.run_module("sglang.launch_server", run_name="__main__")
