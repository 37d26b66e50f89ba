"""Handlers by type, families by name."""

from __future__ import annotations

import sys
import threading
import types
from typing import Any

import pytest

import fastser
from fastser import DispatchError, deserialize, dispatch, serialize
from fastser.dispatch import CACHE_LIMIT, Call, Dispatch, has_keyword


class Base:
    pass


class Derived(Base):
    pass


class Other:
    pass


def test_the_nearest_base_counts() -> None:
    d = Dispatch("d")
    d.register(object, lambda x: "object")
    d.register(Base, lambda x: "base")
    assert (d(Base()), d(Derived()), d(Other())) == ("base", "base", "object")
    d.register(Derived, lambda x: "derived")  # the cache does not stand in the way
    assert d(Derived()) == "derived"


def test_decorator_and_tuples() -> None:
    d = Dispatch("d")

    @d.register((int, str))
    def handle(x: Any, *args: Any, **kwargs: Any) -> Any:
        return x, args, kwargs

    assert d(1, 2, k=3) == (1, (2,), {"k": 3})
    assert d.dispatch(str) is handle
    assert d.find(bytes) is None
    with pytest.raises(TypeError, match=r"No dispatch for <class 'bytes'> in d"):
        d(b"")


def test_lazy(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("some_library")
    cls = type("Array", (), {"__module__": "some_library.inner"})
    monkeypatch.setitem(sys.modules, "some_library", module)
    d = Dispatch("lazy")
    d.register(object, lambda x: "object")
    calls = []

    @d.register_lazy("some_library")
    def load() -> None:
        calls.append(1)
        d.register(cls, lambda x: "lazy")

    assert d(1) == "object"
    assert not calls
    assert d(cls()) == d(type("Sub", (cls,), {})()) == "lazy"
    assert calls == [1]


def test_lazy_that_fails_is_tried_again() -> None:
    cls = type("Array", (), {"__module__": "broken_library"})
    d = Dispatch("lazy")
    attempts = []

    def load() -> None:
        attempts.append(1)
        if len(attempts) < 3:
            raise ImportError("not yet")
        d.register(cls, lambda x: "there")

    d.register_lazy("broken_library", load)
    for _ in range(2):
        with pytest.raises(ImportError, match="not yet"):
            d(cls())
    assert d(cls()) == "there"


def test_the_cache_is_bounded() -> None:
    d = Dispatch("d")
    d.register(object, lambda x: 1)
    for _ in range(CACHE_LIMIT + 10):
        d.find(type("Made", (), {}))
    assert len(d._cache) <= CACHE_LIMIT


def test_lookup_from_many_threads() -> None:
    d = Dispatch("d")
    classes = [type(f"C{i}", (Base,), {}) for i in range(200)]
    d.register(Base, lambda x: "base")
    wrong: list[Any] = []

    def run() -> None:
        for cls in classes * 5:
            if d(cls()) not in ("base", "new"):
                wrong.append(cls)

    def register() -> None:
        for cls in classes:
            d.register(cls, lambda x: "new")

    threads = [threading.Thread(target=run) for _ in range(4)] + [threading.Thread(target=register)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
    assert {d(cls()) for cls in classes} == {"new"}


def test_has_keyword() -> None:
    class Unhashable:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self, x: Any, context: Any = None) -> None: ...

    assert has_keyword(lambda x, context=None: x, "context")
    assert not has_keyword(lambda x: x, "context")
    assert has_keyword(Unhashable(), "context")
    assert not has_keyword(dict.get, "context")


@pytest.fixture
def family() -> Any:
    names: list[str] = []

    def register(name: str, dumps: Any, loads: Any) -> None:
        names.append(name)
        fastser.register_serialization_family(name, dumps, loads)

    yield register
    for name in names:
        dispatch.families.pop(name, None)


def test_families_in_order(family: Any) -> None:
    def refuse(x: Any) -> Any:
        raise NotImplementedError

    family("no", refuse, None)
    family("not", lambda x: NotImplemented, None)
    family("yes", lambda x: ({}, [str(x).encode()]), lambda h, f: ("read", bytes(f[0])))
    header, frames = serialize(5, serializers=["no", "not", "yes"])
    assert header["serializer"] == "yes"
    assert deserialize(header, frames) == ("read", b"5")
    assert fastser.loads(fastser.dumps({"a": fastser.to_serialize(5)}, serializers=["no", "yes"])) == {
        "a": ("read", b"5")
    }
    with pytest.raises(fastser.SerializationError, match="of type int"):
        serialize(5, serializers=["no", "not"], on_error="raise")
    with pytest.raises(DispatchError, match="cannot read"):
        deserialize({"serializer": "no"}, [])


def test_families_get_the_context(family: Any) -> None:
    seen = []

    def dumps(x: Any, context: Any = None) -> Any:
        seen.append(context)
        return {}, [b""]

    family("asks", dumps, lambda h, f: 0)
    serialize(5, serializers=["asks"], context={"a": 1})
    fastser.dumps({"k": fastser.to_serialize(5)}, serializers=["asks"], context={"b": 1})
    assert seen == [{"a": 1}, {"b": 1}]


def test_an_unknown_family_is_named() -> None:
    with pytest.raises(DispatchError, match=r"unknown serialization family 'nope'.*'pickle'"):
        serialize(1, serializers=("nope",))
    with pytest.raises(DispatchError, match="unknown serialization family 'nope'"):
        deserialize({"serializer": "nope"}, [])


def test_register_serialization_wants_a_type() -> None:
    with pytest.raises(TypeError, match=r"cls must be a type, got 'module.Name'.*register_lazy"):
        fastser.register_serialization("module.Name", len, len)  # type: ignore[arg-type]


def test_check_dask_serializable() -> None:
    import numpy as np

    x = np.ones(1)
    for yes in (x, [x], [1, x], [x, 1], {"a": x}, ([1, {"k": (x,)}],), b"a", {"a": [b""]}):
        assert fastser.check_dask_serializable(yes), yes
    for no in (1, "a", [], {}, [1, 2.5], {"a": ["b"]}, (1, [2]), {x.size}):
        assert not fastser.check_dask_serializable(no), no
    ring: list[Any] = []
    ring.append(ring)
    assert not fastser.check_dask_serializable(ring)
    assert not fastser.check_dask_serializable([1] * 1_000_000)


def test_call() -> None:
    assert fastser.pickle.loads(fastser.pickle.dumps([Call(divmod, 7, Call(len, "ab")), 1])) == [(3, 1), 1]
    assert Call(dict.get, {"a": len}, "a")("xyz") == 3
