"""Plain Python twins of the typed rooms: slow, obvious, the oracles of the tests."""

from __future__ import annotations

import struct
from collections.abc import Sequence


class Bad(Exception):
    """The bytes do not hold what they say."""


def split(data: bytes, limit: int) -> list[bytes]:
    """Cut *data* into pieces of at most *limit* bytes; one empty piece for no data."""
    return [data[i : i + limit] for i in range(0, len(data), limit)] or [b""]


def pack(frames: Sequence[bytes]) -> bytes:
    """Put the count and the lengths before the frames."""
    return struct.pack(f"<{1 + len(frames)}Q", len(frames), *map(len, frames)) + b"".join(frames)


def unpack(
    data: bytes, remainder: bool = False, partial: bool = False
) -> list[bytes] | tuple[list[bytes], list[int]]:
    """Take apart what pack put together, or raise Bad."""
    words = len(data) // 8
    if not words:
        raise Bad
    (count,) = struct.unpack_from("<Q", data)
    if count > words - 1:
        raise Bad
    lengths = list(struct.unpack_from(f"<{count}Q", data, 8))
    frames: list[bytes] = []
    rest = data[8 * (1 + count) :]
    while lengths and not (partial and not rest):
        if lengths[0] > len(rest):
            raise Bad
        frames.append(rest[: lengths[0]])
        rest = rest[lengths.pop(0) :]
    if remainder:
        frames.append(rest)
    return (frames, lengths) if partial else frames
