# mypy: allow-untyped-defs
"""The noise's kernels for a GPU, in Triton: those of `simd.cpp`, each one launch.

Like those they are checked against the tensor operations before they are used, bit for bit. A program draws the words
of a few tiles, by products of 32 bits, and goes over their elements in blocks of 8 rows of 32 lanes; a block has its
own words for rounding. bfloat16 is read and written as an integer. There is no fused multiply-add: c z is rounded
before it is added (see kernels.py).
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

TILES = {"gaussian": 32, "rademacher": 4, "none": 32}  # per program


@triton.jit
def _words(numbers, lane, keys, step_sample):
    """Return the four random words of each lane: `kernels.random_words`."""
    block = numbers * 32 + lane
    step, sample = tl.load(step_sample).to(tl.uint32), tl.load(step_sample + 1).to(tl.uint32)
    return tl.philox(keys, block.to(tl.uint32), (block >> 32).to(tl.uint32), step, sample)


@triton.jit
def _pick(w0, w1, w2, w3, i):
    return tl.where(i == 0, w0, tl.where(i == 1, w1, tl.where(i == 2, w2, w3)))


@triton.jit
def _load(at, inside):
    """Return values in float32; those of bfloat16 come as int16."""
    values = tl.load(at, mask=inside)
    if at.dtype.element_ty == tl.int16:
        return (values.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return values.to(tl.float32)


@triton.jit
def _store(at, values, inside):
    """Write float32 values, rounded to the nearest, the even one of two."""
    if at.dtype.element_ty == tl.int16:
        bits = values.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        tl.store(at, tl.where(values == values, rounded, 0x7FC0).to(tl.int16), mask=inside)
    else:
        tl.store(at, values.to(at.dtype.element_ty), mask=inside)


@triton.jit
def _rounded(values, random, TO: tl.constexpr):
    """Return values rounded at random to those of bfloat16 or float16: the functions of rounding.py."""
    bits, size = values.to(tl.int32, bitcast=True), tl.abs(values)
    if TO == "bfloat16":
        rounded = ((bits + random) & -65536).to(tl.float32, bitcast=True)
    else:
        sign, normal = bits & -2147483648, (bits + (random >> 3)) & -8192
        normal = tl.where((normal & 0x7FFFFFFF) < 0x47800000, normal, sign | 0x7F800000)  # 65,536 and inf
        steps = size * 16777216.0
        whole = tl.floor(steps)
        up = ((steps - whole) * 65536.0 > random.to(tl.float32)).to(tl.float32)
        small = ((whole + up) * 5.9604644775390625e-08).to(tl.int32, bitcast=True) | sign
        rounded = tl.where(size < 6.103515625e-05, small, normal).to(tl.float32, bitcast=True)
    return tl.where(values == values, rounded, values)


# Without alignments one layout suits the look-up in the table and all else, and no element goes through shared memory.
@triton.jit(
    do_not_specialize=["count"],
    do_not_specialize_on_alignment=[
        "theta",
        "out",
        "minus",
        "tiles",
        "keys",
        "step_sample",
        "scaled",
        "rounding",
        "number",
    ],
)
def _noise(
    theta,
    out,
    minus,
    tiles,
    keys,
    step_sample,
    scaled,
    rounding,
    number,
    count,
    KIND: tl.constexpr,
    OPERATION: tl.constexpr,
    ROUNDS_TO: tl.constexpr,
    PAIR: tl.constexpr,
    BLOCKS: tl.constexpr,  # of a tile
    TILES: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64) * TILES + tl.arange(0, TILES)[:, None]
    inside, lane = t < count, tl.arange(0, 32)[None, :]
    numbers, key = tl.load(tiles + t, mask=inside, other=0).to(tl.int64), tl.load(keys + t, mask=inside, other=0)
    if KIND != "none":
        z0, z1, z2, z3 = _words(numbers, lane, key, step_sample)
    for block in range(BLOCKS):
        if ROUNDS_TO != "":
            r0, r1, r2, r3 = _words(numbers * BLOCKS + block, lane, key, rounding)
        for row in tl.static_range(8):
            at = (t * BLOCKS + block) * 256 + row * 32 + lane
            values = _load(theta + at, inside)
            if KIND == "gaussian":
                code = (_pick(z0, z1, z2, z3, row // 2) >> (row % 2 * 16)).to(tl.int32) & 0xFFFF
                # Entry 65535 - i is entry i with its sign flipped: the upper half is read, which fits in an L1.
                upper = tl.load(scaled + 32768 + (tl.where(code < 32768, ~code, code) & 0x7FFF))
                cz = tl.where(code < 32768, -upper, upper)
            elif KIND == "rademacher":
                c = tl.load(scaled)
                bit = (_pick(z0, z1, z2, z3, block // 4) >> (block % 4 * 8 + row)) & 1
                cz = tl.where(bit != 0, c, -c)
            if OPERATION == "decay":
                values = (values.to(tl.float64) * tl.load(number) + cz.to(tl.float64)).to(tl.float32)
            elif OPERATION == "shrink":
                wide = values.to(tl.float64)
                values = (wide - wide * tl.load(number) + cz.to(tl.float64)).to(tl.float32)
            elif KIND != "none":
                if PAIR:
                    _store(minus + at, values - cz, inside)
                values = values + cz
            if ROUNDS_TO != "":
                random = (_pick(r0, r1, r2, r3, row // 2) >> (row % 2 * 16)).to(tl.int32) & 0xFFFF
                values = _rounded(values, random, ROUNDS_TO)
            _store(out + at, values, inside)


def compile_kernel(kind: str, operation: str, tile: int, arrays: tuple[Tensor, ...]) -> Callable[..., None]:
    """Return a kernel, called as its tensor operations are; it is compiled at its first call.

    Args:
        kind, operation: of `compiled.KINDS` and `compiled.OPERATIONS`; another kind raises NotImplementedError.
        tile: elements per tile.
        arrays: theta, then the outputs: for their dtypes.
    """
    if kind not in TILES:
        raise NotImplementedError("this kind of noise has no kernels for GPUs")
    stored, size, last = str(arrays[0].dtype).removeprefix("torch."), TILES[kind], min(1, len(arrays) - 1)
    to = "" if operation == "perturb" or stored == "float32" else stored
    to = operation.removeprefix("round_") if kind == "none" else to

    def kernel(*tensors: Tensor) -> None:
        passed = [t.view(torch.int16) if t.dtype == torch.bfloat16 else t for t in tensors[: len(arrays)]]
        tiles, keys, step_sample, *more = tensors[len(arrays) :]
        scaled = step_sample if kind == "none" else more.pop(0)
        rounding = step_sample if kind == "none" or not to else more.pop(0)
        number = more.pop() if more else scaled
        used = (passed[0], passed[last], passed[-1], tiles, keys, step_sample, scaled, rounding, number, len(tiles))
        with torch.cuda.device_of(tensors[0]):
            how = kind, operation, to, len(arrays) == 3, tile // 256, size
            _noise[(triton.cdiv(len(tiles), size),)](*used, *how, enable_fp_fusion=False)

    return kernel
