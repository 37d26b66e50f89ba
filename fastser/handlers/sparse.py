"""sparse.COO as distributed writes it; fastser itself writes pickles, which keep the fill value."""

from __future__ import annotations

from typing import Any

import sparse

from fastser import core
from fastser.dispatch import dask_deserialize
from fastser.errors import FrameError
from fastser.wrappers import Frames, Header


@dask_deserialize.register(sparse.COO)
def deserialize_coo(header: Header, frames: Frames) -> Any:
    """Read coordinates and data."""
    counts, shape = header.get("nframes"), header.get("shape")
    if not isinstance(counts, (list, tuple)) or len(counts) != 2 or type(counts[0]) is not int:
        raise FrameError(f"nframes: expected 2 counts, got {counts!r:.100}")
    if not isinstance(shape, (list, tuple)) or not all(type(n) is int for n in shape):
        raise FrameError(f"shape: expected a tuple of int, got {shape!r:.100}")
    if not 0 <= counts[0] <= len(frames) or sum(counts) != len(frames):
        raise FrameError(f"nframes: expected {len(frames)} frames in all, got {counts!r:.100}")
    parts = []
    for name, part in (("coords-header", frames[: counts[0]]), ("data-header", frames[counts[0] :])):
        sub_header = header.get(name)
        if not isinstance(sub_header, dict):
            raise FrameError(f"{name}: expected a dict, got {type(sub_header).__name__}")
        parts.append(core.codec.deserialize(sub_header, part))
    try:
        return sparse.COO(*parts, shape=tuple(shape))
    except (TypeError, ValueError) as error:
        raise FrameError(f"coords, data and shape do not fit each other: {error}") from error
