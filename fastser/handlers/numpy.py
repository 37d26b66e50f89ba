"""numpy arrays, matrices and masked arrays."""

from __future__ import annotations

import contextlib
import pickle
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from fastser import _frames, dispatch
from fastser import pickle as fast_pickle
from fastser.dispatch import dask_deserialize, dask_serialize
from fastser.errors import DispatchError, FrameError
from fastser.wrappers import Frames, Header

ndarray = np.ndarray
PickleBuffer: Any = pickle.PickleBuffer
MaskedArray: Any = np.ma.MaskedArray
NOMASK: Any = np.ma.nomask

OPAQUE = 0x01 | 0x02 | 0x04  # flags of a dtype whose items count references, are listed, or are pointers
EXPORTED = frozenset("biufcSU")  # kinds that have a buffer; for others the bytes are shown instead
# The dtypes of which there is one object for ever: by id, since dtypes that differ in metadata are equal.
NAMES = {
    id(dt): dt.str if np.dtype(dt.str).char == dt.char else dt.char
    for dt in map(np.dtype, "?bBhHiIlLqQefdgFDG")
}


# ---- layout: which memory travels for an array


def _memory(x: Any) -> Any:
    """Return a view of the contiguous *x* that a PickleBuffer takes."""
    dtype = x.dtype
    if dtype.kind in EXPORTED and dtype.itemsize and dtype.type.__module__ == "numpy":
        return x
    flat = x.reshape(-1, order="A") if x.ndim != 1 else x
    if not dtype.itemsize or not x.size:
        return b"" if not x.flags.writeable else bytearray()
    return flat.view(f"V{dtype.itemsize}").view(np.uint8)


def _compact(x: Any) -> tuple[Any, tuple[int, ...] | None]:
    """Return contiguous memory for *x* and the strides to view it by, None if those of the memory.

    What is contiguous, or repeats the same memory, is not copied.
    """
    flags = x.flags
    if flags.c_contiguous or flags.f_contiguous:
        return x, None
    strides, writeable = x.strides, flags.writeable
    shape = x.shape
    base = x[tuple([slice(1) if s == 0 else slice(None) for s in strides])] if 0 in strides else x
    if base.flags.c_contiguous or base.flags.f_contiguous:
        return base, tuple([0 if s == 0 else t for s, t in zip(strides, base.strides, strict=True)])
    if all(s >= 0 for s in strides):
        extent = x.itemsize + sum([(n - 1) * s for n, s in zip(shape, strides, strict=True)])
        if extent < base.nbytes:  # windows that overlap
            first = x[(slice(1),) * x.ndim].reshape(1).view(f"V{x.itemsize}").view(np.uint8)
            return as_strided(first, (extent,), (1,), writeable=writeable), strides
    if base.dtype.kind == "V":  # a copy by fields would leave what memory held before between the fields
        base = base.view(f"V{base.itemsize}") if base.itemsize else base
    base = np.array(base, order="C", copy=True, subok=False)
    if not writeable:
        base.flags.writeable = False
    if base.shape == shape:
        return base, None
    return base, tuple([0 if s == 0 else t for s, t in zip(strides, base.strides, strict=True)])


def _is_opaque(dtype: Any) -> bool:
    return bool(dtype.flags & OPAQUE)


def _exact_name(dtype: Any) -> str | None:
    """Return ``dtype.str`` if that says all about *dtype*."""
    if dtype.fields is not None or dtype.metadata is not None or not dtype.itemsize:
        return None
    name: str = dtype.str
    try:
        named = np.dtype(name)
    except TypeError:
        return None
    return name if named == dtype and named.char == dtype.char else None


# ---- ndarray in the pickle family


def reduce_ndarray(x: Any) -> Any:
    """Write the array as a call of ``numpy.ndarray`` on its memory."""
    if type(x) is not ndarray:
        return NotImplemented
    name = NAMES.get(id(x.dtype))
    if name is not None and x.flags.c_contiguous:
        return ndarray, (x.shape, name, PickleBuffer(x))
    return _reduce_any(x, name)


def _reduce_any(x: Any, name: str | None) -> Any:
    dtype = x.dtype
    if name is None:
        if _is_opaque(dtype):
            return NotImplemented
        name = _exact_name(dtype) or dtype
    data, strides = _compact(x)
    buffer = PickleBuffer(_memory(data))
    if strides is not None:
        return ndarray, (x.shape, name, buffer, 0, strides)
    if data.flags.c_contiguous:
        return ndarray, (x.shape, name, buffer)
    return ndarray, (x.shape, name, buffer, 0, None, "F")


dispatch.reducers.register(ndarray, reduce_ndarray)


# ---- ndarray in the dask family


@dask_serialize.register(ndarray)
def serialize_ndarray(x: Any, context: dict[str, Any] | None = None) -> tuple[Header, Frames]:
    """Let the memory of *x* be the frame; the header is that of distributed."""
    typ = type(x)
    if typ is not ndarray and typ is not np.matrix:
        raise DispatchError(f"{typ.__name__} is a subclass of ndarray, which keeps its class in a pickle")
    dtype = x.dtype
    if _is_opaque(dtype):
        raise DispatchError(f"items of {dtype} are not plain memory")
    name = NAMES.get(id(dtype)) or _exact_name(dtype)
    header: Header = {}
    if typ is np.matrix:
        header["matrix"] = True
        x = x.view(ndarray)
    data, strides = _compact(x)
    header["dtype"] = (0, name) if name is not None else (1, pickle.dumps(dtype))
    header["shape"] = x.shape
    header["strides"] = data.strides if strides is None else strides
    header["writeable"] = [x.flags.writeable]
    if strides is not None and 0 in strides:
        header["shape"] = data.shape
        header["broadcast_to"] = x.shape
    return header, [PickleBuffer(_memory(data)).raw()]


@dask_deserialize.register(ndarray)
def deserialize_ndarray(header: Header, frames: Frames) -> Any:
    """View the frame as an array, or a copy where a writeable array meets read-only memory."""
    if header.get("pickle"):
        if not frames:
            raise FrameError("expected a pickle, got no frames")
        return fast_pickle.loads(frames[0], buffers=frames[1:])
    if len(frames) != 1:
        raise FrameError(f"expected 1 frame, got {len(frames)}")
    frame = _frames.ensure_memoryview(frames[0])
    dtype = _read_dtype(header)
    shape = _read_sizes(header, "broadcast_to" if header.get("broadcast_to") else "shape")
    strides = _read_sizes(header, "strides")
    flags = header.get("writeable")
    if not isinstance(flags, (list, tuple)) or len(flags) != 1:
        raise FrameError(f"writeable: expected a list of 1 flag, got {flags!r:.100}")
    _check_extent(shape, strides, dtype.itemsize, frame.nbytes)
    if flags[0] and frame.readonly:
        frame = memoryview(bytearray(frame))  # the sender's array was writeable: only a copy can be
    elif not flags[0]:
        frame = frame.toreadonly()
    try:
        x = ndarray(shape, dtype=dtype, buffer=frame, strides=strides)
    except (TypeError, ValueError, OverflowError, MemoryError) as error:
        raise FrameError(f"no array of shape {shape} and strides {strides}: {error}") from error
    return x.view(np.matrix) if header.get("matrix") and x.ndim == 2 else x


def _read_dtype(header: Header) -> Any:
    spec = header.get("dtype")
    if not isinstance(spec, (list, tuple)) or len(spec) != 2:
        raise FrameError(f"dtype: expected a flag and a description, got {spec!r:.100}")
    pickled, what = spec
    if not pickled and type(what) is str:
        return _named_dtype(what)
    if pickled:
        if not isinstance(what, (bytes, bytearray, memoryview)):
            raise FrameError(f"dtype: expected a pickle, got {type(what).__name__}")
        dtype = fast_pickle.loads(what)
    else:
        if not isinstance(what, (list, tuple)):
            raise FrameError(f"dtype: expected a name or fields, got {type(what).__name__}")
        dtype = _make_dtype(what)
    if not isinstance(dtype, np.dtype):
        raise FrameError(f"dtype: expected a numpy dtype, got {dtype!r:.100}")
    if _is_opaque(dtype):
        raise FrameError(f"dtype: items of {dtype} are not plain memory")
    return dtype


@lru_cache(maxsize=256)
def _named_dtype(name: str) -> Any:
    dtype = _make_dtype(name)
    if _is_opaque(dtype):
        raise FrameError(f"dtype: items of {dtype} are not plain memory")
    return dtype


def _make_dtype(what: Any) -> Any:
    try:
        return np.dtype(what if isinstance(what, str) else _as_descr(what))
    except (TypeError, ValueError, SyntaxError, OverflowError, RecursionError) as error:
        raise FrameError(f"dtype: numpy does not take {what!r:.100}: {error}") from error


def _as_descr(fields: Any) -> list[Any]:
    """Undo what msgpack does to the lists of ``dtype.descr``."""
    descr: list[Any] = []
    for name, form, *shape in fields:
        deep = isinstance(form, (list, tuple))
        descr.append((tuple(name) if isinstance(name, list) else name, _as_descr(form) if deep else form))
        if shape:
            descr[-1] += (tuple(shape[0]) if isinstance(shape[0], (list, tuple)) else shape[0],)
    return descr


def _read_sizes(header: Header, name: str) -> tuple[int, ...]:
    sizes = header.get(name)
    if not isinstance(sizes, (list, tuple)):
        raise FrameError(f"{name}: expected a tuple of int, got {sizes!r:.100}")
    for n in sizes:
        if type(n) is not int:
            raise FrameError(f"{name}: expected a tuple of int, got {sizes!r:.100}")
    return tuple(sizes)


def _check_extent(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, nbytes: int) -> None:
    if len(shape) != len(strides) or (shape and min(shape) < 0):
        raise FrameError(f"shape and strides do not fit each other: {shape!r:.100}, {strides!r:.100}")
    low = high = 0
    if 0 not in shape:
        high = itemsize
        for i, n in enumerate(shape):
            reach = (n - 1) * strides[i]
            if reach < 0:
                low += reach
            else:
                high += reach
    if low < 0 or high != nbytes:
        raise FrameError(
            f"an array of shape {shape!r:.100}, strides {strides!r:.100} and {itemsize} bytes an item "
            f"needs the bytes {low} to {high}, got a frame of {nbytes} bytes"
        )


# ---- subclasses of numpy's own


@dispatch.reducers.register((np.matrix, np.memmap))
def reduce_view(x: Any) -> Any:
    """Write a matrix or memmap as a view of a plain array; their own way copies the memory.

    A memmap arrives as numpy's own pickle of it: detached from its file.
    """
    if type(x) is not np.matrix and type(x) is not np.memmap:
        return NotImplemented
    return NotImplemented if _is_opaque(x.dtype) else (ndarray.view, (x.view(ndarray), type(x)))


@dispatch.reducers.register(MaskedArray)
def reduce_masked_array(x: Any) -> Any:
    """Write data, mask, fill value and hardness; numpy's own pickle of it copies, and makes masks soft."""
    if type(x) is not MaskedArray:
        return NotImplemented
    data, mask, fill = x.data, x._mask, x._fill_value
    if type(data) is not ndarray and type(data) is not np.matrix:
        return NotImplemented
    if mask is not NOMASK and type(mask) is not ndarray:
        mask = mask.view(ndarray)
    if fill is None and not x._hardmask:
        return MaskedArray, (data, mask)
    return MaskedArray, (data, mask, None, False, True, 0, fill, True, bool(x._hardmask))


@dask_deserialize.register(np.ma.core.MaskedConstant)
def deserialize_masked_constant(header: Header, frames: Frames) -> Any:
    """Return the one masked constant."""
    return np.ma.masked


@dask_deserialize.register(MaskedArray)
def deserialize_masked_array(header: Header, frames: Frames) -> Any:
    """Read what distributed's handler wrote; fastser itself writes pickles of masked arrays."""
    n = header.get("nframes")
    if type(n) is not int or not 0 <= n <= len(frames):
        raise FrameError(f"nframes: expected at most {len(frames)}, got {n!r:.100}")
    data = deserialize_ndarray(_read_header(header, "data-header"), frames[:n])
    mask: Any = NOMASK
    if "mask-header" in header:
        mask = deserialize_ndarray(_read_header(header, "mask-header"), frames[n:])
    fill = header.get("fill-value")
    if not isinstance(fill, (list, tuple)) or len(fill) != 2:
        raise FrameError(f"fill-value: expected a flag and a value, got {fill!r:.100}")
    try:
        x = MaskedArray(data, mask)
    except (TypeError, ValueError, np.ma.MAError) as error:
        raise FrameError(f"data and mask do not fit each other: {error}") from error
    value = fast_pickle.loads(fill[1]) if fill[0] else fill[1]
    # A default that does not fit the dtype is written by distributed as if it were set.
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        x.fill_value = value
    return x


def _read_header(header: Header, name: str) -> Header:
    value = header.get(name)
    if not isinstance(value, dict):
        raise FrameError(f"{name}: expected a dict, got {type(value).__name__}")
    return value
