"""The trajectory file: a round trip, incomplete records are cut, damage is reported."""

import dataclasses
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mezo_cli.errors import UserError
from mezo_cli.runs import trajectory


def header(samples: int = 1, tensors: int = 3) -> trajectory.Header:
    names = [(f"roberta.encoder.layer.{i}.attention.self.query.weight", [1024, 1024]) for i in range(tensors)]
    return trajectory.Header("ab" * 32, "mezo", "gaussian", 42, samples, 0.1, names)


def write(path: Path, grads: list[list[float]], head: trajectory.Header, lr: float = 0.5) -> trajectory.Trajectory:
    """Write a file, and return what is read."""
    with open(path, "wb") as file:
        writer = trajectory.Writer(file, head)
        for step, g in enumerate(grads):
            writer.append(step, g, lr)
    return trajectory.read(path)


@settings(max_examples=30)
@given(st.lists(st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=2), max_size=20))
def test_what_is_written_comes_back(tmp_path_factory: pytest.TempPathFactory, grads: list[list[float]]) -> None:
    path = tmp_path_factory.mktemp("t") / "trajectory.bin"
    past = write(path, grads, header(2))
    assert past.header == header(2)
    assert past.valid_bytes == path.stat().st_size
    assert past.records(0, len(past)) == [(i, g, 0.5) for i, g in enumerate(grads)]


def test_samples_that_were_not_drawn_are_no_gradients_of_zero(tmp_path: Path) -> None:
    """n-SPSA with a linear schedule draws 1, 1, 2, 2 samples; the records have room for 2."""
    past = write(tmp_path / "t", [[1.0], [-2.0], [3.0, 0.0], [-4.0, 5.0]], header(2))
    assert past.grads.tolist() == [[1.0, 0.0], [-2.0, 0.0], [3.0, 0.0], [-4.0, 5.0]]
    drawn = past.drawn_grads(lambda step: 1 + 2 * step // 4)
    assert drawn.tolist() == [1.0, -2.0, 3.0, 0.0, -4.0, 5.0]
    stats = trajectory.scalar_stats(drawn)
    assert stats == {"zero_fraction": pytest.approx(1 / 6), "mean_abs": 2.5, "min_abs": 0.0, "max_abs": 5.0}


def test_twenty_thousand_steps_of_a_large_model_stay_under_330_kb(tmp_path: Path) -> None:
    grads = np.random.default_rng(0).normal(size=(20_000, 1)).astype(np.float32)
    write(tmp_path / "t", grads.tolist(), header(tensors=400))
    assert (tmp_path / "t").stat().st_size < 330_000


def pack(path: Path, version: int, values: dict[str, Any]) -> None:
    packed = zlib.compress(json.dumps(values).encode())
    path.write_bytes(struct.pack("<8sHII", trajectory.MAGIC, version, len(packed), zlib.crc32(packed)) + packed)


@pytest.mark.parametrize(
    "more", [{"dtype": "bfloat16", "rounding": "stochastic"}, {"decay": "float64"}, {"clip": {"clip_g": "q0.9"}}]
)
def test_every_field_of_the_header_comes_back(more: dict[str, str], tmp_path: Path) -> None:
    head = dataclasses.replace(header(), **more)  # type: ignore[arg-type]
    past = write(tmp_path / "t", [[1.5]], head)
    assert past.header == head
    assert past.records(0, 1) == [(0, [1.5], 0.5)]
    assert trajectory.length(tmp_path / "t") == (1, 0)


@pytest.mark.parametrize(
    ("version", "changed", "line"),
    [
        (2, {}, "format version 2; this program reads version 1"),
        (1, {"engine": "vllm"}, "does not know such a header: engine: Unexpected keyword argument"),
        (1, {"dtype": "float8"}, r"theta is stored as float8 \(nearest\); this program knows float32"),
        (1, {"rounding": "stochastic"}, r"theta is stored as float32 \(stochastic\)"),
        (1, {"dtype": ["bfloat16"]}, "header: dtype: Input should be a valid string"),
        (1, {"decay": "float80"}, "header: decay: Input should be 'float64'"),
        (1, {"seed": ...}, "header: seed: Field required"),
        (1, {"samples": -1}, "header: samples: Input should be greater than 0"),
        (1, {"tensors": [("a", [-3])]}, "header: tensors.0.1.0: Input should be greater than 0"),
    ],
)
def test_what_is_unknown_is_refused_by_name(tmp_path: Path, version: int, changed: dict[str, Any], line: str) -> None:
    values = {**dataclasses.asdict(header()), **changed}
    pack(tmp_path / "t", version, {name: value for name, value in values.items() if value is not ...})
    with pytest.raises(UserError, match=line):
        trajectory.read(tmp_path / "t")
    with pytest.raises(UserError, match=line):
        trajectory.length(tmp_path / "t")


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (None, "cannot be read"),
        (b"", "t is damaged"),
        (b"MEZOTRAJ" + bytes(40), r"t is damaged, or of a version of mezo before 1\.0"),
    ],
)
def test_what_is_no_trajectory_is_reported(tmp_path: Path, content: bytes | None, line: str) -> None:
    if content is not None:
        (tmp_path / "t").write_bytes(content)
    with pytest.raises(UserError, match=line):
        trajectory.read(tmp_path / "t")
