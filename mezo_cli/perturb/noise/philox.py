"""Philox4x32-10, the counter-based generator, on integer tensors.

Salmon, Moraes, Dror, Shaw: "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011). A 128-bit counter and a 64-bit
key give four 32-bit words. There is no state, so any word can be computed alone, in any order, on any device.
"""

from functools import lru_cache
from hashlib import blake2b

from torch import Tensor

MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10


def philox(c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, k0: Tensor, k1: Tensor) -> tuple[Tensor, ...]:
    """Return the four words of each (counter, key), int64: only their *low* 32 bits are meaningful.

    Args:
        c0, c1, c2, c3: the counter's words, int64 with zero high halves; they broadcast with each other and the key.
        k0, k1: the key's words, likewise; only their low halves are read.
    """
    for r in range(ROUNDS):
        # Products wrap at 64 bits and >> repeats the sign, so high halves are arbitrary. Only c0 and c2, which are
        # multiplied next, need zero high halves: no other operation moves high bits to the low half.
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((p1 >> 32) ^ c1 ^ (k0 + WEYL[0] * r)) & MASK,
            p1,
            ((p0 >> 32) ^ c3 ^ (k1 + WEYL[1] * r)) & MASK,
            p0,
        )
    return c0, c1, c2, c3


@lru_cache(maxsize=8192)
def stream_key(seed: int, name: str) -> tuple[int, int]:
    """Return the 64-bit key of one tensor's stream under one seed, as two 32-bit words."""
    digest = blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")
