"""Objects to pickles and back, by reference or by value; the standard pickle reads what is written."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pickle import HIGHEST_PROTOCOL, PickleBuffer, PickleError, PicklingError, UnpicklingError, load, loads
from typing import Any

from fastser import _pickler
from fastser._pickler import Pickler
from fastser.dispatch import reducers

__all__ = [
    "HIGHEST_PROTOCOL",
    "PickleBuffer",
    "PickleError",
    "Pickler",
    "PicklingError",
    "Unpickler",
    "UnpicklingError",
    "dump",
    "dumps",
    "load",
    "loads",
]

Unpickler = pickle.Unpickler


def dumps(
    obj: object,
    protocol: int | None = None,
    *,
    fix_imports: bool = True,
    buffer_callback: Callable[[PickleBuffer], Any] | None = None,
) -> bytes:
    """Return a pickle of *obj*; functions and classes go by value where cloudpickle would do so.

    Parameters
    ----------
    obj : object
        Only read.
    protocol : int, optional
        5 by default; 0 to 4 are left to cloudpickle.
    fix_imports : bool
        For protocols 0 to 2.
    buffer_callback : callable, optional
        Called with a PickleBuffer for each buffer that may travel out-of-band: those of the objects
        themselves, and typed blocks, bytes and bytearrays of 64 KiB and more.  The buffers are views of
        the memory of *obj*, new memory for typed blocks.  If it returns true the buffer is written
        in-band.

    Returns
    -------
    bytes
        What ``pickle.loads(data, buffers=...)`` reads, without fastser.

    Raises
    ------
    PicklingError, TypeError, RecursionError
        And whatever the reductions of the objects raise.
    ValueError
        If *protocol* is above 5, or *buffer_callback* is given with a lower one.

    Examples
    --------
    >>> import pickle
    >>> buffers = []
    >>> data = dumps([i / 2 for i in range(100_000)], buffer_callback=buffers.append)
    >>> len(data) < 200, [buffer.raw().nbytes for buffer in buffers]
    (True, [800000])
    >>> pickle.loads(data, buffers=buffers)[:3]
    [0.0, 0.5, 1.0]
    """
    return _pickler.dumps(
        obj,
        protocol,
        fix_imports=fix_imports,
        buffer_callback=buffer_callback,
        find_reducer=reducers.find,
    )


def dump(
    obj: object,
    file: Any,
    protocol: int | None = None,
    *,
    fix_imports: bool = True,
    buffer_callback: Callable[[PickleBuffer], Any] | None = None,
) -> None:
    """Write a pickle of *obj* to *file* in one ``write``; the rest is as in `dumps`.

    Examples
    --------
    >>> import io
    >>> file = io.BytesIO()
    >>> dump({"a": 1}, file)
    >>> loads(file.getvalue())
    {'a': 1}
    """
    file.write(dumps(obj, protocol, fix_imports=fix_imports, buffer_callback=buffer_callback))
