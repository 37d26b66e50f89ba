"""scipy.sparse matrices; sparse arrays travel as pickles, which is what stock distributed reads."""

from __future__ import annotations

from typing import Any

import scipy.sparse

from fastser.dispatch import dask_deserialize, dask_serialize
from fastser.errors import DispatchError, FrameError
from fastser.handlers.objects import deserialize_object, serialize_object
from fastser.wrappers import Frames, Header


@dask_serialize.register(scipy.sparse.spmatrix)
def serialize_spmatrix(x: Any, context: dict[str, Any] | None = None) -> tuple[Header, Frames]:
    """Write the attributes of *x*; a dok matrix is a dict, which its own pickle writes."""
    if not type(x).__module__.startswith("scipy.sparse.") or isinstance(x, dict):
        raise DispatchError(f"{type(x).__name__} travels as a pickle")
    header, frames = serialize_object("dask", x, context)
    return header, frames


dask_deserialize.register(scipy.sparse.spmatrix, deserialize_object)


@dask_deserialize.register(scipy.sparse.dok_matrix)
def deserialize_dok(header: Header, frames: Frames) -> Any:
    """Read what distributed's handler wrote: a coo matrix."""
    coo_header = header.get("coo_header")
    if not isinstance(coo_header, dict):
        raise FrameError(f"coo_header: expected a dict, got {type(coo_header).__name__}")
    coo = deserialize_object(coo_header, frames)
    if not isinstance(coo, scipy.sparse.coo_matrix):
        raise FrameError(f"expected a coo_matrix, got {type(coo).__name__}")
    return coo.todok()
