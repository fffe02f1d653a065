"""Run a `mezo` command on a CPU with products of float16 as a GPU computes them: of rounded numbers, in float32.

    python scripts/bench/half_products.py doctor experiment=demo peft=none model.compute_dtype=float16

The result is rounded to float16 once. On a CPU without instructions for it torch's own products take 200 times as long.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from mezo_cli.cli import main

NAMES = ("mm", "addmm", "bmm", "baddbmm", "_scaled_dot_product_flash_attention_for_cpu")
PRODUCTS = {getattr(torch.ops.aten, name) for name in NAMES}


class ProductsInFloat32(TorchDispatchMode):
    """Computes products of float16 in float32, and rounds what they give."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket not in PRODUCTS or not any(
            isinstance(a, Tensor) and a.dtype == torch.half for a in args
        ):
            return func(*args, **kwargs)
        out, rest = kwargs.get("out"), {key: value for key, value in kwargs.items() if key != "out"}
        wide = tree_map(lambda x: x.float() if isinstance(x, Tensor) else x, (args, rest))
        plain = func if out is None else func.overloadpacket.default
        found = tree_map(lambda x: x.half() if isinstance(x, Tensor) else x, plain(*wide[0], **wide[1]))
        return found if out is None else out.copy_(found)


if __name__ == "__main__":
    with ProductsInFloat32():
        main()
