"""`trajectory.bin`: the scalars that determine, with the initial weights, the weights of every step.

A fine-tuned model is given by its seed and projected gradients (paper, section 2.1, "storage efficiency"). The file is
a header (which tensors are trained, from which weights, with which noise) and one fixed-size record per step:

    step uint32 | lr float32 | scalars float32, one per direction | crc32 of these bytes, seeded with the header's

little-endian, 16 bytes per step for one direction. The scalars are projected gradients, or what the header says (as
they were computed, before `clip`).

Records at the end that a crash or a power cut left incomplete fail their checksums and are left out
(`Trajectory.cut_bytes` counts their bytes); a bad record with a valid one behind it is an error.
"""

import json
import os
import struct
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, BinaryIO, ClassVar, Literal

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from mezo_cli.config.schema import StepRecord
from mezo_cli.errors import UserError, join
from mezo_cli.runs.atomic import name_in_errors, sync

MAGIC = b"MEZOSTEP"
VERSION = 1
ROUNDINGS = {"float32": "nearest", "bfloat16": "stochastic", "float16": "stochastic"}  # dtype of theta -> rounding
MAX_HEADER = 1 << 26  # bytes, uncompressed; 400 tensors take about 40,000
_FIXED = struct.Struct("<8sHII")  # magic, version, length of the compressed header, its crc32


@dataclass(frozen=True)
class Header:
    """What is needed to interpret the records."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid", strict=True)

    fingerprint: str  # sha256 of the initial weights
    optimizer: str
    noise: str
    seed: int
    samples: Annotated[int, Field(gt=0, le=1 << 24)]  # the number of scalars of a record
    weight_decay: float
    # (name, shape) of the trainable tensors, in order
    tensors: list[tuple[str, list[Annotated[int, Field(gt=0, lt=1 << 40)]]]]
    settings: dict[str, Any] = field(default_factory=dict)  # the optimizer's settings
    dtype: str = "float32"  # how theta is stored
    rounding: str = "nearest"  # how an update is rounded to it; `ROUNDINGS` has that of each dtype
    # `float64`, in which weight decay is computed (see perturb/params.py); None for a run without
    decay: Literal["float64"] | None = None
    scalars: str = "projected_grad"  # what the records hold, as the optimizer names it
    clip: dict[str, Any] | None = None  # `clip_g` and `clip_window` of the settings; None where g is not clipped
    # the tensors of which a step's update ends with max(theta, 0); None: there are none
    nonnegative: list[str] | None = None

    @property
    def record_bytes(self) -> int:
        """The size of a record."""
        return 12 + 4 * self.samples


HEADER = TypeAdapter(Header)


class Writer:
    """Append one record per step to an open file, flushing each; `sync` waits until they are on the disk.

    An empty file gets the header. `crc` is that of a file's header as `read` returned it: another zlib may compress
    differently.
    """

    def __init__(self, file: BinaryIO, header: Header, crc: int | None = None) -> None:
        packed = zlib.compress(json.dumps(asdict(header), separators=(",", ":")).encode(), 9)
        self._crc = zlib.crc32(packed) if crc is None else crc
        self._file, self._samples = file, header.samples
        self._record = struct.Struct(f"<If{header.samples}f")
        if file.tell() == 0:
            self._write(_FIXED.pack(MAGIC, VERSION, len(packed), self._crc) + packed)

    def append(self, step: int, scalars: list[float], lr: float) -> None:
        """Write the record of step `step` (from 0). If it drew fewer samples than the header's, the rest are 0."""
        body = self._record.pack(step, lr, *scalars, *[0.0] * (self._samples - len(scalars)))
        self._write(body + struct.pack("<I", zlib.crc32(body, self._crc)))

    def _write(self, data: bytes) -> None:
        with name_in_errors(Path(self._file.name)):
            self._file.write(data)
            self._file.flush()

    def sync(self) -> None:
        """Wait until the records are on the disk."""
        sync(Path(self._file.name))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@dataclass(frozen=True)
class Trajectory:
    """The content of a trajectory file."""

    header: Header
    grads: np.ndarray  # the scalars, float32 [steps, samples]; 0 for a sample that was not drawn
    lrs: np.ndarray  # learning rates, float32 [steps]
    valid_bytes: int  # the length of the file without incomplete last records
    crc: int  # checksum of the header, which seeds those of the records
    cut_bytes: int = 0  # how many bytes were left out at the end of the file

    def __len__(self) -> int:
        return len(self.lrs)

    def bytes_until(self, step: int) -> int:
        """Return the length of a file that ends with the record of step `step` - 1."""
        return self.valid_bytes - (len(self) - step) * self.header.record_bytes

    def check_end(self, path: Path, is_finished: bool = False) -> None:
        """Refuse damaged records at the end; if it `is_finished` also a part of one, which every kill can leave."""
        if self.cut_bytes >= self.header.record_bytes or (self.cut_bytes and is_finished):
            raise UserError(f"{path} is damaged: it is sound up to step {len(self)}")

    def records(self, start: int, stop: int) -> list[StepRecord]:
        """Return the records of steps start .. stop - 1."""
        return [(t, [float(g) for g in self.grads[t]], float(self.lrs[t])) for t in range(start, stop)]

    def drawn_grads(self, samples: Callable[[int], int]) -> np.ndarray:
        """Return the scalars that were computed, float32 [number drawn]; `samples(step)`: how many a step drew."""
        drawn = np.array([samples(step) for step in range(len(self))], int)
        grads: np.ndarray = self.grads[np.arange(self.header.samples) < drawn[:, None]]
        return grads


def scalar_stats(grads: np.ndarray | None) -> dict[str, float | None]:
    """Return the fraction of zeros and the mean, least and greatest size; all None if there are no scalars."""
    if grads is None or grads.size == 0:
        return {"zero_fraction": None, "mean_abs": None, "min_abs": None, "max_abs": None}
    size = np.abs(grads.astype(np.float64))
    stats = {"zero_fraction": (size == 0).mean(), "mean_abs": size.mean(), "min_abs": size.min(), "max_abs": size.max()}
    return {key: float(value) for key, value in stats.items()}


def read(path: Path) -> Trajectory:
    """Read a trajectory file without incomplete records at its end."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    header, start, crc = _read_header(path, data)
    layout = [("step", "<u4"), ("lr", "<f4"), ("grads", "<f4", (header.samples,)), ("crc", "<u4")]
    size = header.record_bytes
    records = np.frombuffer(data, layout, (len(data) - start) // size, start)
    ends = range(start + size - 4, len(data) - 3, size)
    is_intact = records["crc"] == np.array([zlib.crc32(data[end + 4 - size : end], crc) for end in ends], np.uint32)
    is_next = is_intact & (records["step"] == np.arange(len(records)))
    steps = len(records) if is_next.all() else int(is_next.argmin())
    valid = start + steps * size
    if is_intact[steps:].any():
        raise UserError(f"{path} is damaged: the record of step {steps} (byte {valid}) fails its checksum")
    grads, lrs = (records[name][:steps].astype(np.float32) for name in ("grads", "lr"))
    return Trajectory(header, grads, lrs, valid, crc, len(data) - valid)


def length(path: Path) -> tuple[int, int]:
    """Return the number of complete records, and of bytes behind them; (0, 0) for a file that is missing or empty.

    It is quick: only the header is read and checked.
    """
    if not path.exists() or not path.stat().st_size:
        return 0, 0
    try:
        with open(path, "rb") as file:
            data = file.read(_FIXED.size)
            if len(data) == _FIXED.size:
                data += file.read(_FIXED.unpack(data)[2])
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    header, start, _ = _read_header(path, data)
    return divmod(size - start, header.record_bytes)


def _read_header(path: Path, data: bytes) -> tuple[Header, int, int]:
    if len(data) < _FIXED.size or data[:8] != MAGIC:
        raise UserError(f"{path} is damaged, or of a version of mezo before 1.0: it does not begin as a trajectory")
    _, version, length, crc = _FIXED.unpack_from(data)
    if version != VERSION:
        raise UserError(f"{path}: format version {version}; this program reads version {VERSION}")
    packed = data[_FIXED.size : _FIXED.size + length]
    if len(packed) != length or zlib.crc32(packed) != crc:
        raise UserError(f"{path} is damaged: its header fails its checksum")
    unpacked = zlib.decompressobj().decompress(packed, MAX_HEADER)  # a stranger's file must not fill the memory
    try:
        header = HEADER.validate_json(unpacked)
    except ValidationError as error:
        first = error.errors()[0]
        what = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise UserError(f"{path}: this program does not know such a header: {what}") from error
    if ROUNDINGS.get(header.dtype) != header.rounding:
        allowed = join(f"{dtype} ({rounding})" for dtype, rounding in ROUNDINGS.items())
        raise UserError(f"{path}: theta is stored as {header.dtype} ({header.rounding}); this program knows {allowed}")
    return header, _FIXED.size + length, crc
