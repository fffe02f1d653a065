"""`trajectory.bin`: the scalars from which, with the starting weights, every step's weights follow.

The paper notes that a fine-tune is its seeds and projected gradients (section 2.1, "storage efficiency"). The file is
a header (what is tuned, from which weights, with which noise) and one fixed-size record a step:

    step uint32 | lr float32 | projected_grad float32, one a sample | crc32 of the foregoing, seeded with the header's

little-endian, 16 bytes for one sample. A record that the machine lost in a crash fails its checksum: such a torn tail
is recognised and cut, and anything torn in the middle is an error.
"""

import json
import struct
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mezo_cli.errors import UserError

MAGIC = b"MEZOTRAJ"
VERSION = 1
_FIXED = struct.Struct("<8sHII")  # magic, version, length of the compressed header, its crc32

Record = tuple[int, list[float], float]  # step (from 0), projected_grads, lr


@dataclass(frozen=True)
class Header:
    """What the scalars mean. `tensors` lists (name, shape) of the trainable tensors, in order."""

    fingerprint: str  # sha256 over the starting weights
    optimizer: str
    noise: str
    seed: int
    samples: int
    weight_decay: float
    tensors: list[tuple[str, list[int]]]
    settings: dict[str, Any] = field(default_factory=dict)  # what else the method's updates depend on


def _record(samples: int) -> struct.Struct:
    return struct.Struct(f"<If{samples}f")


class Writer:
    """Append records to an open file, one a step; every record reaches the operating system before the next step.

    A file that already has a header goes on with the `crc` that `read` found: another zlib may pack it differently.
    """

    def __init__(self, file: BinaryIO, header: Header, crc: int | None = None) -> None:
        packed = zlib.compress(json.dumps(asdict(header), separators=(",", ":")).encode(), 9)
        self._crc = zlib.crc32(packed) if crc is None else crc
        self._file, self._record, self._samples = file, _record(header.samples), header.samples
        if file.tell() == 0:
            file.write(_FIXED.pack(MAGIC, VERSION, len(packed), self._crc) + packed)
            file.flush()

    def append(self, step: int, projected_grads: list[float], lr: float) -> None:
        """Write the record of step `step` (from 0); a step of fewer samples than the header's is filled up with 0."""
        body = self._record.pack(step, lr, *projected_grads, *[0.0] * (self._samples - len(projected_grads)))
        self._file.write(body + struct.pack("<I", zlib.crc32(body, self._crc)))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@dataclass(frozen=True)
class Trajectory:
    """A file read back: its header, its records in arrays, and how many bytes of it are sound."""

    header: Header
    grads: np.ndarray  # [steps, samples] float32
    lrs: np.ndarray  # [steps] float32
    sound: int
    crc: int  # of the header; it seeds those of the records

    def __len__(self) -> int:
        return len(self.lrs)

    def records(self, start: int, stop: int) -> list[Record]:
        """Return the records of steps start .. stop - 1."""
        return [(t, [float(g) for g in self.grads[t]], float(self.lrs[t])) for t in range(start, stop)]


def facts(grads: np.ndarray | None) -> dict[str, float | None]:
    """Say how projected gradients were distributed; null for a run of no steps, or of a method without them."""
    if grads is None or grads.size == 0:
        return {"zero_fraction": None, "mean_abs": None, "min_abs": None, "max_abs": None}
    size = np.abs(grads.astype(np.float64))
    known = {"zero_fraction": (size == 0).mean(), "mean_abs": size.mean(), "min_abs": size.min(), "max_abs": size.max()}
    return {key: float(value) for key, value in known.items()}


def read(path: Path) -> Trajectory:
    """Read a trajectory; a torn last record is left out.

    Raises:
        UserError: when the file is missing, its header is damaged, or a record before the last one is.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    header, start, crc = _read_header(path, data)
    record = _record(header.samples)
    size = record.size + 4
    grads: list[list[float]] = []
    lrs: list[float] = []
    sound = start
    while sound + size <= len(data):
        body = data[sound : sound + record.size]
        (stored,) = struct.unpack_from("<I", data, sound + record.size)
        step, lr, *g = record.unpack(body)
        if stored != zlib.crc32(body, crc) or step != len(lrs):
            if len(data) - sound >= 2 * size:
                raise UserError(f"{path} is damaged: the record of step {len(lrs)} (byte {sound}) fails its checksum")
            break
        lrs.append(lr)
        grads.append(g)
        sound += size
    shape = (len(lrs), header.samples)
    return Trajectory(header, np.array(grads, np.float32).reshape(shape), np.array(lrs, np.float32), sound, crc)


def _read_header(path: Path, data: bytes) -> tuple[Header, int, int]:
    if len(data) < _FIXED.size or data[:8] != MAGIC:
        raise UserError(f"{path} is damaged: it does not begin as a trajectory does")
    _, version, length, crc = _FIXED.unpack_from(data)
    if version != VERSION:
        raise UserError(f"{path}: format version {version}; this program reads version {VERSION}")
    packed = data[_FIXED.size : _FIXED.size + length]
    if len(packed) != length or zlib.crc32(packed) != crc:
        raise UserError(f"{path} is damaged: its header fails its checksum")
    fields = json.loads(zlib.decompress(packed))
    fields["tensors"] = [(name, list(shape)) for name, shape in fields["tensors"]]
    return Header(**fields), _FIXED.size + length, crc
