"""bytes, bytearray, array.array, memoryview and exceptions."""

from __future__ import annotations

import copyreg
import ctypes
import inspect
import operator
import pickle
import re
from array import array
from functools import lru_cache
from types import FunctionType
from typing import Any

from fastser import _frames
from fastser.dispatch import Call, dask_deserialize, dask_serialize, reducers
from fastser.errors import DispatchError, FrameError
from fastser.handlers.objects import deserialize_dict
from fastser.wrappers import Frames, Header

# ---- bytes, bytearray, array.array


@dask_serialize.register((bytes, bytearray))
def serialize_bytes(x: bytes | bytearray) -> tuple[Header, Frames]:
    """Let *x* be the frame."""
    if type(x) is not bytes and type(x) is not bytearray:
        raise DispatchError(f"{type(x).__name__} is a subclass, which keeps its class in a pickle")
    return {}, [x]


@dask_deserialize.register(bytes)
def deserialize_bytes(header: Header, frames: Frames) -> bytes:
    """Return the frame if it is bytes, or a copy."""
    frame = _only(frames)
    return frame if type(frame) is bytes else bytes(_frames.ensure_memoryview(frame))


@dask_deserialize.register(bytearray)
def deserialize_bytearray(header: Header, frames: Frames) -> bytearray:
    """Return the frame if it is a bytearray, or a copy."""
    frame = _only(frames)
    return frame if type(frame) is bytearray else bytearray(_frames.ensure_memoryview(frame))


@dask_serialize.register(array)
def serialize_array(x: Any) -> tuple[Header, Frames]:
    """Let the memory of *x* be the frame."""
    if type(x) is not array:
        raise DispatchError(f"{type(x).__name__} is a subclass, which keeps its class in a pickle")
    return {"typecode": x.typecode, "writeable": (None,)}, [memoryview(x).cast("B")]


@dask_deserialize.register(array)
def deserialize_array(header: Header, frames: Frames) -> Any:
    """Copy the frame into a new array."""
    frame = _frames.ensure_memoryview(_only(frames))
    typecode: Any = header.get("typecode")
    try:
        x: Any = array(typecode)
    except (TypeError, ValueError) as error:
        raise FrameError(f"typecode: expected one of array.array, got {typecode!r:.100}") from error
    if frame.nbytes % x.itemsize:
        raise FrameError(f"expected items of {x.itemsize} bytes, got a frame of {frame.nbytes} bytes")
    x.frombytes(frame)
    return x


def _only(frames: Frames) -> Any:
    if len(frames) != 1:
        raise FrameError(f"expected 1 frame, got {len(frames)}")
    return frames[0]


# ---- memoryview

CASTABLE = frozenset("bBcdfhHiIlLnNPqQ?")  # formats that memoryview.cast takes, in every Python since 3.8


@reducers.register(memoryview)
def reduce_memoryview(x: Any) -> Any:
    """Write the values, format, shape and read-only flag; a contiguous view is not copied."""
    form, shape = x.format, x.shape
    data = x if x.c_contiguous else _logical_order(x)
    if form == "B" and len(shape) == 1:
        return memoryview, (pickle.PickleBuffer(data),)
    native = form.lstrip("@")
    if native in CASTABLE and (len(shape) == 1 or 0 not in shape):
        flat = Call(memoryview, pickle.PickleBuffer(data))
        return memoryview.cast, ((flat, form) if len(shape) == 1 else (flat, form, list(shape)))
    dtype = _numpy_of(form, x.itemsize, x)
    if dtype is not None:
        import numpy as np

        return memoryview, (Call(np.ndarray, shape, dtype, pickle.PickleBuffer(data)),)
    if form == memoryview(array("u")).format and len(shape) == 1:
        view = Call(memoryview, Call(array, "u", data.tobytes()))
        return (memoryview.toreadonly, (view,)) if x.readonly else (memoryview, (view,))
    typ = _ctype_of(form, x.itemsize)
    if typ is None:
        raise TypeError(f"cannot write a memoryview of format {form!r} exactly; cast it to 'B' first")
    for n in reversed(shape):
        typ = Call(operator.mul, typ, n)
    if x.readonly:
        method = Call(getattr, typ, "from_buffer_copy")
        return memoryview.toreadonly, (Call(memoryview, Call(method, pickle.PickleBuffer(data))),)
    return memoryview, (Call(Call(getattr, typ, "from_buffer"), pickle.PickleBuffer(data)),)


@dask_deserialize.register(memoryview)
def deserialize_memoryview(header: Header, frames: Frames) -> Any:
    """Cast the frame as distributed's handler says; fastser itself writes pickles of memoryviews."""
    view: Any = _frames.ensure_memoryview(_only(frames))
    form, shape = header.get("format"), header.get("shape")
    if not isinstance(form, str) or not isinstance(shape, (list, tuple)):
        raise FrameError(f"expected a format and a shape, got {form!r:.100} and {shape!r:.100}")
    try:
        view = view.cast(form, list(shape)) if view.nbytes else view.cast(form)
    except (TypeError, ValueError) as error:
        raise FrameError(f"no {form!r:.100} of shape {shape!r:.100}: {error}") from error
    if view.shape != tuple(shape):
        raise FrameError(f"expected shape {shape!r:.100}, got {view.shape}")
    return view


def _logical_order(x: memoryview) -> memoryview:
    data = x.tobytes()
    return memoryview(data if x.readonly else bytearray(data))


def _numpy_of(form: str, itemsize: int, x: memoryview) -> Any:
    """Return what numpy.ndarray takes as the dtype of memory that shows itself as *form*, or None."""
    import numpy as np

    if "O" in re.sub(":[^:]*:", "", form):  # not in the name of a field
        raise TypeError(f"a memoryview of format {form!r} holds pointers to objects, which cannot travel")
    for of in (lambda: form, lambda: np.asarray(x).dtype):
        try:
            dtype: Any = np.dtype(of())
            sample: Any = np.empty(1, pickle.loads(pickle.dumps(dtype)))
            view = memoryview(sample)
        except (TypeError, ValueError, NotImplementedError, RuntimeError):
            continue
        if view.format == form and view.itemsize == itemsize:
            return dtype
        if dtype.char == form and itemsize == dtype.itemsize:
            return form  # a format that the pickle of the dtype changes for one of the same meaning
    return None


@lru_cache(maxsize=1024)
def _ctype_of(form: str, itemsize: int) -> Any:
    """Return the ctypes type, or a call for it, of which arrays show themselves as *form*, or None."""
    for char in "bBcdfhHiIlLqQ?":
        typ = _CTYPES[char]
        for order in ("__ctype_le__", "__ctype_be__"):
            swapped = getattr(typ, order, typ)
            view = memoryview(swapped())
            if view.format == form and view.itemsize == itemsize:
                return typ if swapped is typ else Call(getattr, typ, order)
    return None


_CTYPES: dict[str, Any] = {
    "b": ctypes.c_byte,
    "B": ctypes.c_ubyte,
    "c": ctypes.c_char,
    "d": ctypes.c_double,
    "f": ctypes.c_float,
    "h": ctypes.c_short,
    "H": ctypes.c_ushort,
    "i": ctypes.c_int,
    "I": ctypes.c_uint,
    "l": ctypes.c_long,
    "L": ctypes.c_ulong,
    "q": ctypes.c_longlong,
    "Q": ctypes.c_ulonglong,
    "?": ctypes.c_bool,
}


# ---- dict, of which distributed writes the attributes of an object that are dicts

dask_deserialize.register(dict, deserialize_dict)


# ---- exceptions

HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made by a class statement, not in C


@reducers.register(BaseException)
def reduce_exception(x: BaseException) -> Any:
    """Restore args and attributes without a call of an ``__init__`` that takes other arguments.

    The standard way calls ``cls(*args)``, which fails, or gives other args, where ``__init__`` hands
    on to its base something else than what it was given.
    """
    cls: Any = type(x)
    if type(cls.__init__) is not FunctionType or not _reduces_as_exception(cls):
        return NotImplemented
    if not _only_args(cls):
        try:
            inspect.signature(cls.__init__).bind(x, *x.args)
        except TypeError:
            pass
        except ValueError:
            return NotImplemented
        else:
            return NotImplemented
    reduced: Any = x.__reduce__()
    _, args, *state = reduced
    return copyreg.__newobj__, (cls, *args), *state  # type: ignore[attr-defined]


def _reduces_as_exception(cls: Any) -> bool:
    return (
        cls.__reduce__ is BaseException.__reduce__
        and cls.__reduce_ex__ is BaseException.__reduce_ex__
        and not isinstance(cls.__new__, FunctionType)
        and cls not in copyreg.dispatch_table
    )


def _only_args(cls: type) -> bool:
    """Tell whether objects of *cls* hold nothing but args and a ``__dict__``."""
    for base in cls.__mro__:
        if not base.__flags__ & HEAP_TYPE:
            return base.__basicsize__ == BaseException.__basicsize__
        if base.__dict__.get("__slots__"):
            return False
    return False
