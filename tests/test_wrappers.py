"""Marks compare, hash and show themselves by what they hold; the policy decides together or apart."""

from __future__ import annotations

import pickle
import sys
import types
from typing import Any

import distributed.protocol as stock
import numpy as np
import pytest

import fastser
from fastser import Pickled, Serialize, Serialized, ToPickle, serialize, to_serialize
from fastser.wrappers import is_device_type, msgpack_exact, travels_apart


@pytest.mark.parametrize("cls", [Serialize, ToPickle])
def test_marks_of_data(cls: Any) -> None:
    assert cls(1) == cls(1)
    assert cls(1) != cls(2)
    assert cls(1) != 1
    assert cls([1]) == cls([1])
    assert hash(cls("a")) == hash(cls("a"))
    assert {cls(1), cls(1)} == {cls(1)}
    with pytest.raises(TypeError, match="unhashable"):
        hash(cls([]))
    data: list[int] = []
    assert cls(data).data is data
    assert (
        repr(cls([1, "a"])) == f"<{cls.__name__}: [1, 'a']>" == repr(getattr(stock, cls.__name__)([1, "a"]))
    )
    assert pickle.loads(pickle.dumps(cls([1]))) == cls([1])


def test_unlike_marks_are_not_equal() -> None:
    assert Serialize(1) != ToPickle(1)
    assert Serialized({}, []) != Pickled({}, [])
    assert to_serialize is Serialize


@pytest.mark.parametrize("cls", [Serialized, Pickled])
def test_framed(cls: Any) -> None:
    header, frames = {"serializer": "pickle"}, [b"abc", b"d"]
    x = cls(header, frames)
    assert x.header is header
    assert x.frames is frames
    assert x == cls(dict(header), [bytearray(b"abc"), memoryview(b"d")])
    assert x != cls({}, frames)
    assert x != cls(header, [b"abc"])
    assert x != cls(header, [b"abcd"])
    assert x != 3
    with pytest.raises(TypeError, match="unhashable"):
        hash(x)


def test_marks_of_marks() -> None:
    assert fastser.deserialize(*serialize(Serialize(Serialize([1])))) == [1]
    assert fastser.loads(fastser.dumps({"a": Serialize(Serialize(1))})) == {"a": 1}
    assert fastser.loads(fastser.dumps({"a": ToPickle(ToPickle(1))}))["a"] in (1, ToPickle(1))


@pytest.mark.parametrize(
    ("x", "exact"),
    [
        (1, True),
        (2**64 - 1, True),
        (2**64, False),
        (-(2**63), True),
        (-(2**63) - 1, False),
        ("a", True),
        ("é", True),
        ("\udcff", False),
        (None, True),
        (True, True),
        (1.5, True),
        (b"a", True),
        (bytearray(b"a"), False),
        ([1], False),
        (("a", (1, b"b")), True),
        (("a", [1]), False),
        ({"a": 1, 2: (3,)}, True),
        ({"a": [1]}, False),
        ({1}, False),
        (np.float64(1), False),
        (np.str_("a"), False),
        (object(), False),
    ],
)
def test_msgpack_exact_says_the_truth(x: Any, exact: bool) -> None:
    import msgpack
    from graphs import difference

    assert msgpack_exact(x) is exact
    if exact:
        packed = msgpack.packb(x)
        assert not difference(x, msgpack.unpackb(packed, use_list=False, strict_map_key=False))


def test_plain_data_travels_together() -> None:
    for x in ([], [1.5] * 10, [np.ones(3), "a"], {"a": [b"x"]}, {1, 2}, (1, {"a": 2})):
        assert not travels_apart(x, ("dask", "pickle"))
    assert not fastser.infer_if_recurse_to_serialize_list([1, "a", [np.ones(2)]])


def test_without_pickle_lists_travel_apart() -> None:
    assert travels_apart([1], ("msgpack",))
    assert not travels_apart((1, 2), ("msgpack",))
    assert not travels_apart([1], ("dask",))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in for a library of arrays on a device."""
    module = types.ModuleType("cupy")

    class ndarray:
        __module__ = "cupy"

    module.ndarray = ndarray  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", module)
    return ndarray


def test_what_lives_on_a_device_travels_apart(device: Any) -> None:
    assert is_device_type(device)
    assert not is_device_type(np.ndarray)
    for x in (
        [device()],
        [1, 2, device()],
        {"a": device()},
        (1, [2, {"k": device()}]),
        [*range(5000), device()],
    ):
        assert travels_apart(x, ("dask", "pickle"))
    assert not travels_apart([1, [2, {"k": 3}]], ("dask", "pickle"))
    assert fastser.infer_if_recurse_to_serialize_list([1, device()])


def test_the_deciding_scan_ends(device: Any) -> None:
    ring: list[Any] = [1]
    ring.append(ring)
    assert not travels_apart(ring, ("dask", "pickle"))
    assert not travels_apart([[i] for i in range(100_000)], ("dask", "pickle"))


def test_device_leaves_are_given_to_their_handler(device: Any) -> None:
    fastser.register_serialization(
        device, lambda x: ({"n": 1}, [b"on the device"]), lambda header, frames: ("read", bytes(frames[0]))
    )
    try:
        header, frames = serialize([1, device()])
        assert header["is-collection"]
        assert header["sub-headers"][1]["serializer"] == "dask"
        assert fastser.deserialize(header, frames) == [1, ("read", b"on the device")]
    finally:
        for registry in (fastser.dask_serialize, fastser.dask_deserialize):
            del registry._lookup[device]
            registry._cache.clear()
