"""Object graphs: classes with every kind of reduction, a comparison that sees types, bits and identity."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

ATOMS = (type(None), bool, int, str, bytes, type(...), type(NotImplemented))


class Plain:
    """An instance that is its __dict__."""

    def __init__(self, **attributes: Any):
        self.__dict__.update(attributes)


class Slotted:
    __slots__ = ("part", "tag")


class ListKind(list):
    pass


class DictKind(dict):
    pass


class Peek:
    """An object that hands out the members of a container, not the container: by the state it reduces to."""

    def __init__(self, source: Any = None):
        self.source = source

    def parts(self) -> list[Any]:
        return self.__dict__["kept"] if "kept" in self.__dict__ else members(self.source)

    def __reduce__(self) -> Any:
        return type(self), (), self.state()

    def state(self) -> Any:
        return {"kept": self.parts(), "tag": vars(self).get("tag")}


class PeekState(Peek):
    """The same by __getstate__."""

    __reduce__ = object.__reduce__

    def __getstate__(self) -> Any:
        return self.state()


class PeekItems(Peek):
    """The same by a setter of the state."""

    def __reduce__(self) -> Any:
        return PeekItems, (), self.state(), None, None, keep

    def __reduce_ex__(self, protocol: int) -> Any:
        return self.__reduce__()


def keep(obj: Any, state: dict[str, Any]) -> None:
    vars(obj).update(state)


def members(source: Any) -> list[Any]:
    """Return what a container holds."""
    if isinstance(source, dict):
        return [*source, *source.values()]
    if isinstance(source, (set, frozenset)):
        return sorted(source, key=_key)
    if isinstance(source, (list, tuple)):
        return list(source)
    if isinstance(source, (Plain, Peek)):
        return [v for k, v in vars(source).items() if k != "source"]
    if isinstance(source, Slotted):
        return [getattr(source, name) for name in ("part",) if hasattr(source, name)]
    return []


def _key(x: Any) -> Any:
    """Order the members of sets alike in both graphs."""
    if isinstance(x, (tuple, frozenset)):
        return type(x).__name__, sorted(map(repr, map(_key, x)))
    if isinstance(x, (Plain, Peek)):
        return type(x).__name__, repr(vars(x).get("tag"))
    if isinstance(x, Slotted):
        return type(x).__name__, repr(x.tag)
    return type(x).__name__, repr(x)


def difference(a: Any, b: Any) -> str:
    """Tell where two graphs differ, '' if nowhere; mutable objects must be shared alike."""
    there: dict[int, Any] = {}
    back: dict[int, Any] = {}
    pairs: set[tuple[int, int]] = set()
    todo = [(a, b, "x")]
    hold = []
    while todo:
        a, b, path = todo.pop()
        typ = type(a)
        if typ is not type(b):
            return f"{path}: {typ.__name__} became {type(b).__name__}"
        if typ in ATOMS or isinstance(a, type):
            if a != b:
                return f"{path}: {a!r:.60} became {b!r:.60}"
            continue
        if typ in (float, complex):
            if _bits(a) != _bits(b):
                return f"{path}: {a!r} became {b!r}"
            continue
        if (id(a), id(b)) in pairs:
            continue
        pairs.add((id(a), id(b)))
        hold += [a, b]  # ids stay those of these objects
        if typ not in (tuple, frozenset) and not isinstance(a, np.generic):
            if there.setdefault(id(a), b) is not b:
                return f"{path}: one {typ.__name__} became two"
            if back.setdefault(id(b), a) is not a:
                return f"{path}: two of {typ.__name__} became one"
        wrong, steps = _compare(a, b)
        if wrong:
            return f"{path}: {wrong}"
        todo += [(left, right, path + step) for left, right, step in steps]
    return ""


def _bits(x: Any) -> bytes:
    return struct.pack("<dd", x.real, x.imag) if type(x) is complex else struct.pack("<d", x)


def _compare(a: Any, b: Any) -> tuple[str, list[Any]]:
    steps: list[Any] = []
    if isinstance(a, (np.ndarray, np.generic)):
        if a.dtype.hasobject and a.dtype == b.dtype and a.shape == b.shape:
            return "", [(a.tolist(), b.tolist(), ".tolist()")]
        if a.dtype != b.dtype or a.shape != b.shape or a.tobytes() != b.tobytes():
            return f"{a!r:.60} became {b!r:.60}", []
        if isinstance(a, np.ndarray) and a.flags.writeable != b.flags.writeable:
            return f"writeable {a.flags.writeable} became {b.flags.writeable}", []
        return "", []
    if isinstance(a, bytearray):
        return ("" if a == b else "other bytes"), []
    if isinstance(a, dict):
        if len(a) != len(b):
            return f"{len(a)} items became {len(b)}", []
        for i, (left, right) in enumerate(zip(a.items(), b.items(), strict=True)):
            steps += [(left[0], right[0], f".key{i}"), (left[1], right[1], f"[{left[0]!r:.20}]")]
    elif isinstance(a, (list, tuple, set, frozenset)):
        if len(a) != len(b):
            return f"{len(a)} items became {len(b)}", []
        if isinstance(a, (set, frozenset)):
            a, b = sorted(a, key=_key), sorted(b, key=_key)
        steps += [(left, right, f"[{i}]") for i, (left, right) in enumerate(zip(a, b, strict=True))]
    if isinstance(a, Peek):
        return "", [(a.parts(), b.parts(), ".parts")] if a.parts() or b.parts() else []
    if isinstance(a, Slotted):
        for name in Slotted.__slots__:
            if hasattr(a, name) != hasattr(b, name):
                return f"slot {name}", []
            if hasattr(a, name):
                steps.append((getattr(a, name), getattr(b, name), f".{name}"))
    left, right = getattr(a, "__dict__", {}), getattr(b, "__dict__", {})
    if left.keys() != right.keys():
        return f"attributes {list(left)} became {list(right)}", []
    steps += [(left[name], right[name], f".{name}") for name in left]
    return "", steps


def check(a: Any, b: Any) -> None:
    """Raise AssertionError where two graphs differ."""
    wrong = difference(a, b)
    assert not wrong, wrong
