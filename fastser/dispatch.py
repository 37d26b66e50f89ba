"""Who writes a type: handlers by type, families by name, and how to register them."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar, overload

from fastser.wrappers import COLLECTIONS, SCAN_BUDGET

F = TypeVar("F", bound=Callable[..., Any])
CACHE_LIMIT = 4096  # types; classes made at run time must not pile up in the cache


class Dispatch:
    """Find the handler of a type: its own, or that of the nearest base that has one.

    Handlers of a library can be registered lazily, by the name of its top-level module: they are
    registered when a type of that module is first looked up.  May be used from many threads.

    Examples
    --------
    >>> size = Dispatch("size")
    >>> @size.register(int)
    ... def size_int(x):
    ...     return 8
    >>> size(True)
    8
    """

    def __init__(self, name: str | None = None):
        self._lookup: dict[type, Callable[..., Any]] = {}
        self._cache: dict[type, Callable[..., Any] | None] = {}
        self._lazy: dict[str, Callable[[], Any]] = {}
        self._lock = threading.RLock()
        self.__name__ = name or type(self).__name__

    @overload
    def register(self, type: type | tuple[type, ...], func: None = None) -> Callable[[F], F]: ...
    @overload
    def register(self, type: type | tuple[type, ...], func: F) -> F: ...
    def register(self, type: type | tuple[type, ...], func: F | None = None) -> F | Callable[[F], F]:
        """Register *func* as the handler of *type* (or of each in a tuple of types)."""

        def wrapper(func: F) -> F:
            with self._lock:
                for typ in type if isinstance(type, tuple) else (type,):
                    self._lookup[typ] = func
                self._cache.clear()
            return func

        return wrapper(func) if func is not None else wrapper

    def register_lazy(self, toplevel: str, func: F | None = None) -> F | Callable[[F], F]:
        """Call *func* once, when a type of the module *toplevel* is first looked up.

        *func* imports or registers the handlers.
        """

        def wrapper(func: F) -> F:
            with self._lock:
                self._lazy[toplevel] = func
                self._cache.clear()
            return func

        return wrapper(func) if func is not None else wrapper

    def find(self, cls: type) -> Callable[..., Any] | None:
        """Return the handler of *cls*, or None."""
        try:
            return self._cache[cls]
        except KeyError:
            pass
        with self._lock:
            handler = self._find(cls)
            if len(self._cache) >= CACHE_LIMIT:
                self._cache.clear()
            self._cache[cls] = handler
        return handler

    def _find(self, cls: type) -> Callable[..., Any] | None:
        for base in cls.__mro__:
            toplevel = str(getattr(base, "__module__", "")).partition(".")[0]
            load = self._lazy.get(toplevel)
            if load is not None:
                load()  # an error must not lose the registration: it is forgotten only after success
                self._lazy.pop(toplevel, None)
                return self._find(cls)
            if base in self._lookup:
                return self._lookup[base]
        return None

    def dispatch(self, cls: type) -> Callable[..., Any]:
        """Return the handler of *cls*; raise TypeError if it has none."""
        handler = self.find(cls)
        if handler is None:
            raise TypeError(f"No dispatch for {cls} in {self.__name__}")
        return handler

    def __call__(self, arg: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the handler of ``type(arg)``."""
        return self.dispatch(type(arg))(arg, *args, **kwargs)


dask_serialize = Dispatch("dask_serialize")
dask_deserialize = Dispatch("dask_deserialize")

# Exact type -> function that tells the pickler how to write an object of it instead of by its own
# __reduce__: a reduce value, ``(other,)`` to write *other* in its place, or NotImplemented.
reducers = Dispatch("reducers")


class Call:
    """A call as part of a reduction: travels as a call, arrives as its result.

    With it a reducer can write a program of more than one step; the pickle does not name this class.

    Examples
    --------
    >>> from fastser.pickle import dumps, loads
    >>> loads(dumps(Call(divmod, Call(len, "abcde"), 3)))
    (1, 2)
    """

    __slots__ = ("args", "func")

    def __init__(self, func: Callable[..., Any], *args: Any):
        self.func = func
        self.args = args

    def __call__(self, *args: Any) -> Any:
        """Make the call and call its result; here only because a pickler asks for a callable."""
        return self.func(*self.args)(*args)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.func, self.args


class Family(NamedTuple):
    """A named pair: how objects become a header and frames, and how they come back."""

    dumps: Callable[..., Any] | None
    loads: Callable[..., Any] | None
    wants_context: bool


families: dict[str, Family] = {}


def has_keyword(func: Callable[..., Any], name: str) -> bool:
    """Tell whether *func* takes an argument called *name*."""
    try:
        return _has_keyword(func, name)
    except TypeError:  # not hashable
        return _has_keyword.__wrapped__(func, name)


@lru_cache(maxsize=1024)
def _has_keyword(func: Callable[..., Any], name: str) -> bool:
    try:
        return name in inspect.signature(func).parameters
    except (TypeError, ValueError):  # a callable without a signature
        return False


def register_serialization_family(
    name: str,
    dumps: Callable[..., Any] | None,
    loads: Callable[..., Any] | None,
) -> None:
    """Register a family under *name*, for ``serializers=`` and ``deserializers=``.

    Parameters
    ----------
    name : str
    dumps : callable
        ``dumps(x)`` or ``dumps(x, context=None)``; returns a header (a dict that msgpack takes) and a
        list of frames (bytes-like); for "not mine" it raises NotImplementedError or returns NotImplemented.
    loads : callable
        ``loads(header, frames)``; must change neither.

    Examples
    --------
    >>> from fastser import deserialize, serialize
    >>> register_serialization_family(
    ...     "text", lambda x: ({}, [str(x).encode()]), lambda header, frames: bytes(frames[0]).decode()
    ... )
    >>> deserialize(*serialize(12, serializers=["text"]))
    '12'
    >>> _ = families.pop("text")
    """
    families[name] = Family(dumps, loads, bool(dumps and has_keyword(dumps, "context")))


def register_serialization(
    cls: type, serialize: Callable[..., Any], deserialize: Callable[..., Any]
) -> None:
    """Register a handler pair of the dask family for *cls* and its subclasses.

    Parameters
    ----------
    cls : type
    serialize : callable
        ``serialize(obj)`` or ``serialize(obj, context=None)``; returns a header (a dict that msgpack
        takes) and a list of frames (bytes-like), or raises NotImplementedError to pass.
    deserialize : callable
        ``deserialize(header, frames)``; must change neither.

    Raises
    ------
    TypeError
        If *cls* is not a type; a name of a class was accepted by old releases of distributed.

    Examples
    --------
    >>> from fastser import deserialize, serialize
    >>> class Human:
    ...     def __init__(self, name):
    ...         self.name = name
    >>> register_serialization(
    ...     Human,
    ...     lambda human: ({}, [human.name.encode()]),
    ...     lambda header, frames: Human(bytes(frames[0]).decode()),
    ... )
    >>> header, frames = serialize(Human("Alice"))
    >>> frames
    [b'Alice']
    >>> deserialize(header, frames).name
    'Alice'
    """
    if not isinstance(cls, type):
        raise TypeError(
            f"cls must be a type, got {cls!r}; to wait for a module use "
            "dask_serialize.register_lazy and dask_deserialize.register_lazy"
        )
    dask_serialize.register(cls, serialize)
    dask_deserialize.register(cls, deserialize)


def check_dask_serializable(x: object) -> bool:
    """Tell whether *x*, or an object that the collection *x* holds, has a handler of the dask family.

    At most `SCAN_BUDGET` objects are looked at, at any depth.

    Examples
    --------
    >>> check_dask_serializable([1, {"a": b"bytes have a handler"}]), check_dask_serializable([1, "a"])
    (True, False)
    """
    seen: set[int] = set()
    todo = [x]
    while todo and len(seen) < SCAN_BUDGET:
        node = todo.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if type(node) not in COLLECTIONS:
            if dask_serialize.find(type(node)) is not None:
                return True
        else:
            room = SCAN_BUDGET - len(todo)
            items = node.values() if type(node) is dict else node
            todo.extend(item for item, _ in zip(items, range(room), strict=False))  # type: ignore[call-overload]
    return False
