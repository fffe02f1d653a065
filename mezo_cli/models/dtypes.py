"""The dtypes of weights and of forwards, and on which devices float16 is fast."""

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def has_fast_float16(device: torch.device) -> bool:
    """Return whether products in float16 are as fast as in bfloat16: on a GPU, and on the CPUs that have them.

    Elsewhere torch takes some 200 times as long.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (7, 0)
    return device.type != "cpu" or bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def worth_measuring(device: torch.device, of_run: str) -> list[str]:
    """Return the dtypes of forwards that are compared with a run's own: not a float16 that is slow."""
    return [name for name in DTYPES if name != "float16" or name == of_run or has_fast_float16(device)]
