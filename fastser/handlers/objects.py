"""Objects that are their ``__dict__``: written attribute by attribute, as distributed reads them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from fastser import core
from fastser import pickle as fast_pickle
from fastser.dispatch import Dispatch, dask_deserialize, dask_serialize
from fastser.errors import DispatchError, FrameError, SerializationError
from fastser.wrappers import SCAN_BUDGET, Frames, Header, msgpack_exact

SIMPLE_BYTES = 4096  # a longer attribute is worth frames of its own
SIMPLE_ITEMS = 100
SIMPLE_DEPTH = 8  # far from where msgpack gives up
ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, type})


def register_generic(
    cls: type,
    serializer_name: str = "dask",
    serialize_func: Dispatch = dask_serialize,
    deserialize_func: Dispatch = dask_deserialize,
) -> None:
    """Let objects of *cls* and its subclasses travel as the attributes in their ``__dict__``.

    Each attribute is written by the families *serializer_name* and pickle, so arrays become frames of
    their own; the object is made anew by ``object.__new__(cls)``.  Objects whose attributes hold the
    same mutable object twice are left to the pickle family, which keeps it one.

    Parameters
    ----------
    cls : type
    serializer_name : str
        Family that attributes are tried with first.
    serialize_func, deserialize_func : Dispatch
        Where to register; fastser's own registries by default.

    Raises
    ------
    TypeError
        When an object without a ``__dict__`` is serialized.

    Examples
    --------
    >>> from fastser import deserialize, serialize
    >>> class Model:
    ...     pass
    >>> register_generic(Model)
    >>> model = Model()
    >>> model.alpha, model.steps = 0.5, [1, 2]
    >>> header, frames = serialize(model)
    >>> header["sub-header"]["simple"]
    {'alpha': 0.5}
    >>> vars(deserialize(header, frames))
    {'alpha': 0.5, 'steps': [1, 2]}
    """
    serialize_func.register(cls, partial(serialize_object, serializer_name))
    deserialize_func.register(cls, deserialize_object)


def serialize_object(serializer_name: str, x: Any, context: dict[str, Any] | None = None) -> Any:
    """Write the attributes of *x*."""
    try:
        attributes: dict[Any, Any] = x.__dict__
    except AttributeError:
        raise TypeError(
            f"register_generic needs objects with a __dict__, {type(x).__qualname__} has none; "
            "use register_serialization"
        ) from None
    simple: dict[str, Any] = {}
    hard: dict[str, Any] = {}
    for name, value in list(attributes.items()):
        if type(name) is not str or not msgpack_exact(name):
            raise DispatchError(f"attribute name {name!r} is none for a header")
        (simple if _is_simple(value) else hard)[name] = value
    if _holds_shared(x, hard.values()):
        raise DispatchError(f"attributes of {type(x).__qualname__} share objects, which a pickle keeps")
    parts: dict[str, Any] = {}
    frames: Frames = []
    for name, value in hard.items():
        try:
            sub_header, sub_frames = core.codec.serialize(
                value, serializers=(serializer_name, "pickle"), on_error="raise", context=context
            )
        except SerializationError as error:
            raise SerializationError(f"attribute {name!r}: {error}") from error
        stop = len(frames) + len(sub_frames)
        parts[name] = {"header": sub_header, "start": len(frames), "stop": stop}
        frames.extend(sub_frames)
    return {
        "serializer": serializer_name,
        "type-serialized": core.codec.pickle_type(type(x)),
        "simple": simple,
        "complex": parts,
    }, frames


def deserialize_object(header: Header, frames: Frames) -> Any:
    """Make the object that the header names, without a call of its ``__init__``."""
    cls = fast_pickle.loads(_field(header, "type-serialized", bytes))
    if cls is dict:
        return deserialize_dict(header, frames)
    if not isinstance(cls, type):
        raise FrameError(f"type-serialized: expected a type, got {cls!r:.100}")
    try:
        x: Any = object.__new__(cls)
        attributes = x.__dict__
    except (AttributeError, TypeError) as error:
        raise FrameError(f"{cls.__qualname__} cannot be made from attributes: {error}") from error
    attributes.update(deserialize_dict(header, frames))
    return x


def deserialize_dict(header: Header, frames: Frames) -> dict[str, Any]:
    """Read attributes, also those that distributed wrote as nested dicts."""
    attributes: dict[str, Any] = dict(_field(header, "simple", dict))
    for name, part in _field(header, "complex", dict).items():
        sub_header = _field(part, "header", dict)
        start, stop = _field(part, "start", int), _field(part, "stop", int)
        if not 0 <= start <= stop <= len(frames):
            raise FrameError(f"{name}: expected some of {len(frames)} frames, got {start} to {stop}")
        read: Callable[..., Any] = core.codec.deserialize
        if sub_header.get("nested-dict"):
            sub_header, read = _field(sub_header, "nested-dict", dict), deserialize_dict
        attributes[name] = read(sub_header, frames[start:stop])
    return attributes


def _is_simple(x: Any, depth: int = SIMPLE_DEPTH) -> bool:
    """Tell whether *x* is small and keeps its type in a header, however strict its reader is."""
    typ = type(x)
    if typ is str or typ is bytes:
        return len(x) <= SIMPLE_BYTES and msgpack_exact(x)
    if typ is tuple or typ is dict:
        if len(x) > SIMPLE_ITEMS or not depth or (typ is dict and not all(type(k) is str for k in x)):
            return False
        return all(_is_simple(v, depth - 1) for v in (x if typ is tuple else (*x, *x.values())))
    return msgpack_exact(x)


def _holds_shared(x: Any, values: Any) -> bool:
    """Tell whether an object is met twice below *values*, as far as `SCAN_BUDGET` goes, or *x* is."""
    seen = {id(x)}
    todo = list(values)
    while todo and len(seen) < SCAN_BUDGET:
        node = todo.pop()
        typ = type(node)
        if typ in ATOMS or (typ is tuple and not node):
            continue
        if id(node) in seen:
            return True
        seen.add(id(node))
        if typ is dict:
            todo.extend(node.values())
        elif typ is list or typ is tuple or typ is set:
            todo.extend(node)
        elif isinstance(getattr(node, "__dict__", None), dict):
            todo.extend(node.__dict__.values())
    return False


def _field(header: Any, name: str, typ: type) -> Any:
    value = header.get(name) if isinstance(header, dict) else None
    if type(value) is not typ:
        raise FrameError(f"{name}: expected {typ.__name__}, got {type(value).__name__}")
    return value
