"""Marks on objects, and the policy that decides whether a collection travels together or apart."""

from __future__ import annotations

import sys
from collections.abc import Collection
from itertools import islice
from typing import Any, NamedTuple

Header = dict[str, Any]
Frames = list[Any]


class Serialize:
    """Mark an object that shall leave as a header and frames of its own.

    Parameters
    ----------
    data : object
        Held, not copied.

    Examples
    --------
    >>> {"op": "update", "data": Serialize(123)}
    {'op': 'update', 'data': <Serialize: 123>}
    """

    def __init__(self, data: Any):
        self.data = data

    def __repr__(self) -> str:
        return f"<Serialize: {self.data}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Serialize) and bool(other.data == self.data)

    def __hash__(self) -> int:
        return hash(self.data)


to_serialize = Serialize


class _Framed:
    """A header and frames, compared by value."""

    def __init__(self, header: Header, frames: Frames):
        self.header = header
        self.frames = frames

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, type(self))
            and other.header == self.header
            and [bytes(frame) for frame in other.frames] == [bytes(frame) for frame in self.frames]
        )

    __hash__ = None  # type: ignore[assignment]


class Serialized(_Framed):
    """An object that is a header and frames already; relays pass it on without a look inside.

    Parameters
    ----------
    header : dict
    frames : list of bytes-like
        Both are held, not copied, and never changed by fastser.

    Examples
    --------
    >>> from fastser import serialize
    >>> Serialized(*serialize([1.5])) == Serialized(*serialize([1.5]))
    True
    """


class ToPickle:
    """Mark an object that shall be pickled, and unpickled by every receiver, the scheduler too.

    Parameters
    ----------
    data : object
        Held, not copied.

    Examples
    --------
    >>> ToPickle([1, 2])
    <ToPickle: [1, 2]>
    """

    def __init__(self, data: Any):
        self.data = data

    def __repr__(self) -> str:
        return f"<ToPickle: {self.data!s}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and bool(other.data == self.data)

    def __hash__(self) -> int:
        return hash(self.data)


class Pickled(_Framed):
    """An object that is pickled already, as the header and frames of a `ToPickle`."""


class Wrappers(NamedTuple):
    """The wrapper classes that one codec knows; distributed's own in a cluster."""

    serialize: Any
    serialized: Any
    to_pickle: Any
    pickled: Any


WRAPPERS = Wrappers(Serialize, Serialized, ToPickle, Pickled)

COLLECTIONS = (list, tuple, set, dict)
DEVICE_MODULES = frozenset({"cudf", "cuml", "cupy", "cupyx", "dask_cudf", "numba.cuda", "rmm"})
SCAN_BUDGET = 10_000  # objects that the deciding scan looks at before it stops looking


def msgpack_exact(x: Any) -> bool:
    """Tell whether msgpack gives back *x* with the same types, lists arriving as tuples.

    Examples
    --------
    >>> msgpack_exact((1, "a", {"k": None})), msgpack_exact([1]), msgpack_exact(2**70)
    (True, False, False)
    """
    typ = type(x)
    if x is None or typ is bool or typ is float or typ is bytes:
        return True
    if typ is int:
        return bool(-(2**63) <= x < 2**64)
    if typ is str:
        return x.isascii() or _encodes(x)
    if typ is tuple:
        return all(map(msgpack_exact, x))
    if typ is dict:
        return all(msgpack_exact(k) and msgpack_exact(v) for k, v in x.items())
    return False


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate
        return False
    return True


def is_device_type(cls: type) -> bool:
    """Tell whether objects of *cls* live in device memory, so that their frames may not be host memory."""
    module = cls.__module__
    return module.partition(".")[0] in DEVICE_MODULES or module.startswith("numba.cuda")


def travels_apart(x: object, serializers: Collection[str]) -> bool:
    """Decide whether each element of the collection *x* needs a header and frames of its own.

    One program holds everything that host memory holds, so the answer is no unless a leaf lives on a
    device, or msgpack instead of pickle would change a type.  Where no family takes the collection as one,
    its elements are tried apart too, but that is seen only then.  At most `SCAN_BUDGET` objects are looked
    at, and none while no library for devices is loaded.
    """
    if "pickle" not in serializers:
        return "msgpack" in serializers and not msgpack_exact(x)
    return any(map(sys.modules.__contains__, DEVICE_MODULES)) and _holds_device(x)


def _holds_device(x: Any) -> bool:
    seen: set[int] = set()
    host: set[type] = set(COLLECTIONS)
    left = SCAN_BUDGET
    todo = [x]
    while todo and left > 0:
        node = todo.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        items = list(islice(node.values() if type(node) is dict else node, left))
        left -= len(items)
        types = set(map(type, items))
        if any(map(is_device_type, types - host)):
            return True
        host |= types
        if not types.isdisjoint(COLLECTIONS):
            todo.extend(item for item in items if type(item) in COLLECTIONS)
    return False
