"""Objects to pickles and back, by reference or by value; the standard pickle reads what is written."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pickle import HIGHEST_PROTOCOL, PickleBuffer, PickleError, PicklingError, UnpicklingError, load, loads
from typing import Any

from fastser._pickler import Pickler, dumps

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
