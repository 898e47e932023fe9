"""How Python writes the structs that kernels take: the counterparts of device/common.cuh and cursor.cuh."""

from __future__ import annotations

import struct

from .geometry import Triple


def int64s(*values: int) -> bytes:
    return struct.pack(f"{len(values)}q", *values)


def int32s(*values: int) -> bytes:
    return struct.pack(f"{len(values)}i", *values)


def divider(divisor: int) -> bytes:
    """`struct Divider`: n / divisor == (mulhi(n, multiplier) + n) >> shift for 0 <= n < 2^31."""
    divisor = max(divisor, 1)
    shift = (divisor - 1).bit_length()
    multiplier = ((1 << 32) * ((1 << shift) - divisor)) // divisor + 1
    return struct.pack("3I", divisor, multiplier, shift)


def dividers(size: Triple) -> bytes:
    return b"".join(divider(extent) for extent in size)


def walk(size: Triple, step: int) -> bytes:
    """`struct Walk`: a walk over a volume of `size` with any batch, `step` positions at a time."""
    d, h, w = (max(extent, 1) for extent in size)
    digits = (step // (w * h) % d, step // w % h, step % w)
    return int32s(d, h, w, *digits, step // (w * h * d)) + dividers((d, h, w))


def padded(*parts: bytes) -> bytes:
    """The parts in a row, the whole filled up to the 8-byte alignment that a struct with 64-bit members has."""
    whole = b"".join(parts)
    return whole + bytes(-len(whole) % 8)
