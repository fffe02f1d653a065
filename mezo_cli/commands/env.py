"""`mezo env`: versions, device and cores, for a bug report."""

import os
import platform

from mezo_cli.console import print_line
from mezo_cli.errors import without_credentials
from mezo_cli.process import versions
from mezo_cli.process.signals import import_torch


def env() -> None:
    """Print what a bug report needs."""
    import_torch()
    import torch

    lines = {
        **versions.installed(),
        "platform": platform.platform(),
        "cores": f"{os.cpu_count()}, torch threads {torch.get_num_threads()}",
        "cuda": ", ".join(map(torch.cuda.get_device_name, range(torch.cuda.device_count()))) or "none",
        "HF_ENDPOINT": os.environ.get("HF_ENDPOINT", "not set"),
        "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "not set"),
        "commit": versions.git_state()[0] or "not a checkout",
    }
    for name, value in lines.items():
        print_line(f"{name:14} {without_credentials(value)}")
