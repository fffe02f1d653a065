"""Keep the quantised matrices of a base in the cache, a file per layer, from which they are mapped as layers run.

The files are made at first use, layer by layer. Their folder is named by what they are made from: the base's files
(path, size, time of change), the kind, and the version of the library.
"""

import hashlib
import os
import re
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file

from mezo_cli.models.quantized import QuantizedLinear, library_of, matrices_of, quantize, widen
from mezo_cli.models.stored_tensors import read_tensors
from mezo_cli.process.memory import release_file_pages, trim_malloc
from mezo_cli.runs import atomic


def map_quantized(model: Any, how: str, files: Sequence[Path], name: str) -> list[Path]:
    """Replace the matrices of a loaded model by quantised ones that are mapped from files; return those files."""
    facts = [(os.path.realpath(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    key = hashlib.sha256(repr((facts, library_of(how))).encode()).hexdigest()[:32]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "mezo" / f"{key}-{how}"
    matrices, made = matrices_of(model, how, name), []
    for prefix, paths in groupby(matrices, lambda path: re.split(r"(\.\d+)\.", path, maxsplit=1)[0:2]):
        file, of_file = folder / f"{''.join(prefix)}.safetensors", list(paths)
        made.append(file)
        if not file.exists():
            tensors = {}
            for path in of_file:
                tensors[f"{path}.bits"], tensors[f"{path}.scale"] = quantize(how, matrices[path].weight.data)
                release_file_pages(matrices[path].weight.data)
            try:
                folder.mkdir(parents=True, exist_ok=True)
                atomic.replace(file, partial(save_file, tensors))
            except (OSError, SafetensorError) as error:
                raise atomic.write_error(file, error) from error
            del tensors
            trim_malloc()
        stored, _ = read_tensors(file)
        for path in of_file:
            layer = QuantizedLinear(how, matrices[path], stored[f"{path}.bits"], stored[f"{path}.scale"])
            model.set_submodule(path, layer)
    widen(model)
    return made
