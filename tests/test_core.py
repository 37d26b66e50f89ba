"""Objects to header and frames: the policy, marks at any depth, errors, and arguments left alone."""

from __future__ import annotations

import copy
import importlib
import pickle
import subprocess
import sys
import threading
from typing import Any

import distributed.protocol as stock
import msgpack
import numpy as np
import pytest
from graphs import ListKind, Plain, check

import fastser
from fastser import (
    DispatchError,
    FrameError,
    Pickled,
    SerializationError,
    Serialize,
    Serialized,
    ToPickle,
    deserialize,
    serialize,
    serialize_and_split,
)

BIG = 100_000
stock_merge = importlib.import_module("distributed.protocol.serialize").merge_and_deserialize
COLLECTIONS: dict[str, Any] = {
    "list": [1, [2.5, "a"], np.arange(5), {"k": (1, [2])}, None],
    "tuple": (np.ones(3), (1, [2]), "x"),
    "set": {1, "a", (2, 3), None},
    "dict": {"a": np.arange(4), (1, "b"): [1, {2}], 7: None, b"k": 1.5, None: True},
    "empty list": [],
    "empty dict": {},
    "floats": [i / 3 for i in range(1000)],
    "arrays": [np.full(BIG, i) for i in range(3)],
}


def wire(header: Any, frames: Any) -> Any:
    """Send a header and frames as messages do."""
    packed = msgpack.packb(header)
    return msgpack.unpackb(packed, use_list=False, strict_map_key=False), [bytearray(f) for f in frames]


# ---- together or apart


@pytest.mark.parametrize("name", COLLECTIONS)
@pytest.mark.parametrize("wish", [True, False, None])
@pytest.mark.parametrize("mark", [lambda x: x, Serialize])
def test_iterate_collection(name: str, wish: Any, mark: Any) -> None:
    x = COLLECTIONS[name]
    header, frames = serialize(mark(x), on_error="raise", iterate_collection=wish)
    assert ("is-collection" in header) == (wish is True)
    if wish:
        assert header["type-serialized"] == type(x).__name__
        assert len(header["sub-headers"]) == len(x) == len(header["frame-lengths"])
        # one level: what is inside of the elements is decided
        assert not any("is-collection" in sub_header for sub_header in header["sub-headers"])
    for read in (deserialize, stock.deserialize):
        for _ in range(2):
            check(x, read(*wire(header, frames)))


def test_decided_is_a_few_frames() -> None:
    x = {"floats": [0.5 * i for i in range(BIG)], "many": [[i, str(i)] for i in range(1000)]}
    assert len(serialize(x)[1]) == len(serialize(Serialize(x))[1]) == 2
    assert len(serialize([np.arange(5)] * 1000)[1]) == 1


def test_shared_elements_stay_one_unless_apart() -> None:
    a = np.arange(BIG)
    r = deserialize(*serialize([a, a]))
    assert r[0] is r[1]
    assert len(serialize([a, a], iterate_collection=True)[1]) == 2


def test_keys_that_msgpack_would_change_keep_the_dict_whole() -> None:
    for key in (frozenset([1]), np.float64(1), ListKind, (1, frozenset()), 2**64, "\udcff", Plain):
        header, frames = serialize({key: np.ones(3)}, iterate_collection=True)
        assert "is-collection" not in header
        check({key: np.ones(3)}, deserialize(*wire(header, frames)))


def test_subclasses_are_no_collections() -> None:
    header, frames = serialize(ListKind([1, 2]), iterate_collection=True)
    assert "is-collection" not in header
    check(ListKind([1, 2]), deserialize(header, frames))


def test_msgpack_alone_keeps_lists() -> None:
    for mark in (Serialize, lambda x: x):
        for x in ([1, [2, (3, [4])], "a"], {"k": [1, {"j": []}]}, (1, [2]), 5, {1, 2}):
            header, frames = serialize(mark(x), serializers=("msgpack",), on_error="raise")
            check(x, deserialize(*wire(header, frames)))
            check(x, stock.deserialize(*wire(header, frames)))
    msg = fastser.dumps({"a": Serialize([1, [2]])}, serializers=("msgpack",))
    assert fastser.loads(msg, deserializers=("msgpack",)) == {"a": [1, [2]]}


# ---- marks at any depth


def split_and_compressed() -> tuple[Any, Serialized]:
    x = np.zeros(BIG)
    frames = fastser.dumps({"x": Serialize(x)}, frame_split_size=BIG, context={"compression": "zlib"})
    relayed = fastser.loads([bytes(f) for f in frames], deserialize=False)["x"]
    assert relayed.header["compression"][0] == "zlib"
    assert len(relayed.frames) > 2
    return x, relayed


def framed() -> dict[str, tuple[Any, Any]]:
    array, big = np.arange(3), np.arange(float(BIG))
    return {
        "Serialize": ([1.5], Serialize([1.5])),
        "Serialized, pickle": ([1, "a"], Serialized(*serialize([1, "a"]))),
        "Serialized, buffers": ([big], Serialized(*serialize([big]))),
        "Serialized, dask": (array, Serialized(*serialize(array))),
        "Serialized, collection": ([1, array], Serialized(*serialize([1, array], iterate_collection=True))),
        "Serialized, split": (big, Serialized(*serialize_and_split(big, size=BIG))),
        "Serialized, split and compressed": split_and_compressed(),
        "Serialize of Serialized": (array, Serialize(Serialized(*serialize(array)))),
        "Serialized of Serialize": ([2], Serialized(*serialize([Serialize(2)]))),
    }


PLACES: dict[str, Any] = {
    "top": lambda m: m,
    "list": lambda m: [0, m],
    "tuple": lambda m: (m, (m,)),
    "dict": lambda m: {"k": {"j": [m]}},
    "object": lambda m: Plain(a=m, b=[Plain(c=(m,))]),
    "deep": lambda m: [[[[({"x": [m, 1]},)]]]],
    "subclass": lambda m: ListKind([m]),
    "mark in mark": lambda m: Serialize([Serialize({"k": m})]),
    "beside": lambda m: [np.ones(BIG), m, bytearray(BIG), m],
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", framed())
@pytest.mark.parametrize("wish", [True, False, None])
def test_marks_are_unwrapped_at_any_depth(place: str, kind: str, wish: Any) -> None:
    value, mark = framed()[kind]
    x = PLACES[place](mark)
    header, frames = serialize(x, on_error="raise", iterate_collection=wish)
    expected = PLACES[place](value)
    while isinstance(expected, Serialize):
        expected = [{"k": value}]
    read = deserialize(*wire(header, frames))
    if place in ("tuple", "object", "beside"):  # values that are not marked are copied apart or shared alike
        assert "Serialize" not in repr(read)
        read, expected = pickle.loads(pickle.dumps(read)), pickle.loads(pickle.dumps(expected))
        if place == "beside":
            read, expected = read[1], expected[1]
        elif place == "tuple":
            read, expected = read[1][0], expected[1][0]
        else:
            read, expected = read.b[0].c, expected.b[0].c
    check(expected, read)
    again = fastser.loads([bytes(f) for f in fastser.dumps({"x": Serialize(x)})])["x"]
    assert type(again) is type(deserialize(header, frames))


def test_serialized_goes_out_as_it_is() -> None:
    x = np.arange(BIG)
    header, frames = serialize(x)
    again = serialize(Serialized(header, frames))
    assert again == (header, frames)
    assert again[0] is not header
    assert again[1][0] is frames[0]


def test_what_was_serialized_as_pickle_needs_no_fastser_to_be_read() -> None:
    _, frames = serialize({"k": [Serialized(*serialize([np.ones(BIG), "a"]))]})
    r = pickle.loads(frames[0], buffers=frames[1:])
    check({"k": [[np.ones(BIG), "a"]]}, r)
    assert b"fastser" not in bytes(frames[0])


def test_a_mark_that_holds_itself() -> None:
    code = (
        "import fastser\n"
        "mark = fastser.Serialize(None)\n"
        "mark.data = mark\n"
        "for f in (fastser.serialize, lambda x: fastser.dumps({'a': x})):\n"
        "    try:\n"
        "        f(mark)\n"
        "    except (RecursionError, ValueError, TypeError): pass\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=5)


# ---- errors


class Refuses:
    def __reduce__(self) -> Any:
        raise LookupError("not today")


@pytest.mark.parametrize("wish", [True, False, None])
def test_on_error(wish: Any) -> None:
    for bad, kind, cause in [
        (threading.Lock(), "lock", TypeError),
        (Refuses(), "Refuses", LookupError),
        ((i for i in "a"), "generator", TypeError),
    ]:
        for x in (bad, [1, bad], {"a": [bad]}, (1, (2, bad)), Plain(a=bad)):
            with pytest.raises(SerializationError, match=f"of type {kind}") as raised:
                serialize(x, on_error="raise", iterate_collection=wish)
            assert isinstance(raised.value.__cause__, cause)
            header, frames = serialize(x, iterate_collection=wish)  # type: ignore[arg-type]
            assert deserialize_error(header, frames)
            with pytest.raises(TypeError, match=f"of type {kind}"):
                stock.deserialize(*wire(header, frames))


def deserialize_error(header: Any, frames: Any) -> str:
    with pytest.raises(SerializationError, match="Could not serialize object of type") as raised:
        deserialize(*wire(header, frames))
    return str(raised.value)


def test_on_error_is_checked() -> None:
    with pytest.raises(ValueError, match="on_error"):
        serialize(1, on_error="ignore")  # type: ignore[arg-type]


def test_a_bad_element_apart_spoils_itself_only() -> None:
    header, _ = serialize([1, threading.Lock(), np.ones(2)], iterate_collection=True)
    assert [h["serializer"] for h in header["sub-headers"]] == ["pickle", "error", "dask"]


def test_a_failed_dump_does_not_spoil_the_next() -> None:
    for _ in range(3):
        with pytest.raises(SerializationError):
            serialize([np.ones(BIG), threading.Lock()], on_error="raise")
        check([1.5], deserialize(*serialize([1.5])))


def test_a_handler_that_raises_or_passes() -> None:
    class Odd(Exception):
        pass

    class Mine:
        pass

    Mine.__qualname__ = "Mine"
    globals()["Mine"] = Mine
    answers: list[Any] = [Odd("broken"), NotImplementedError()]

    def dumps(x: Any) -> Any:
        raise answers[0]

    fastser.register_serialization(Mine, dumps, lambda header, frames: None)
    try:
        with pytest.raises(SerializationError, match="Odd: broken"):
            serialize(Mine(), serializers=("dask",), on_error="raise")
        answers.pop(0)
        assert type(deserialize(*serialize(Mine(), on_error="raise"))) is Mine  # pickle takes it
        assert type(deserialize(*serialize([Mine()], on_error="raise"))[0]) is Mine
    finally:
        for registry in (fastser.dask_serialize, fastser.dask_deserialize):
            del registry._lookup[Mine]
            registry._cache.clear()


def test_deserializers_refuse() -> None:
    for x, family in ((5, "pickle"), (np.ones(2), "dask")):
        header, frames = serialize(x)
        with pytest.raises(DispatchError, match=f"serialized with {family} but only"):
            deserialize(header, frames, deserializers=("msgpack",))
        check(x, deserialize(header, frames, deserializers=("msgpack", family)))
        with pytest.raises(DispatchError):
            fastser.loads(fastser.dumps({"a": Serialize(x)}), deserializers=("msgpack",))
    header, frames = serialize([1, np.ones(2)], iterate_collection=True)
    with pytest.raises(DispatchError, match="serialized with dask"):
        deserialize(header, frames, deserializers=("pickle",))


@pytest.mark.parametrize(
    ("header", "frames", "match"),
    [
        ([], [], "header must be a dict"),
        ({"serializer": "pickle"}, [b"N."], "lacks 'writeable'"),
        ({"serializer": "pickle", "writeable": 3}, [b"N."], "writeable: expected list or tuple"),
        ({"serializer": "pickle", "writeable": ()}, [], "expected a program and 0 buffers, got 0 frames"),
        ({"serializer": "pickle", "writeable": (True,)}, [b"N."], "and 1 buffers, got 1 frames"),
        ({"serializer": "dask"}, [], "type-serialized"),
        ({"serializer": "dask", "type-serialized": b"N."}, [], "expected a type"),
        ({"serializer": "msgpack"}, [b"\xc1"], "not msgpack"),
        ({"serializer": "msgpack"}, [], "not msgpack"),
        ({"is-collection": True}, [], "sub-headers"),
        (
            {"is-collection": True, "sub-headers": (), "frame-lengths": (), "type-serialized": "frozenset"},
            [],
            "type-serialized: expected one of",
        ),
        (
            {"is-collection": True, "sub-headers": ({},), "frame-lengths": (), "type-serialized": "list"},
            [],
            "1 sub-headers, but 0 frame-lengths",
        ),
        (
            {"is-collection": True, "sub-headers": ({},), "frame-lengths": (2,), "type-serialized": "list"},
            [b""],
            "must add up to 1 frames",
        ),
        (
            {
                "is-collection": True,
                "sub-headers": ({}, {}),
                "frame-lengths": (2, -1),
                "type-serialized": "list",
            },
            [b""],
            "frame-lengths",
        ),
        (
            {"split-num-sub-frames": (2, 2), "split-offsets": (0,), "serializer": "pickle"},
            [b""],
            "split-offsets",
        ),
        (
            {"split-num-sub-frames": (2,), "split-offsets": (1,), "serializer": "pickle"},
            [b"", b""],
            "pieces from 0",
        ),
        (
            {"split-num-sub-frames": (2,), "split-offsets": (0,), "serializer": "pickle"},
            [b""] * 3,
            "2 pieces",
        ),
        *[
            ({"serializer": "pickle", **lie}, [b""], "split-num-sub-frames|compression")
            for lie in ({"split-num-sub-frames": 5, "split-offsets": (0,)}, {"compression": 5})
        ],
        ({"compression": ("nope",), "serializer": "pickle"}, [b""], "nope"),
    ],
)
def test_lying_headers(header: Any, frames: Any, match: str) -> None:
    with pytest.raises((FrameError, DispatchError), match=match):
        deserialize(header, frames)


# ---- nothing is harmed


@pytest.mark.parametrize("kind", framed())
@pytest.mark.parametrize("wish", [True, None])
def test_arguments_are_left_alone(kind: str, wish: Any) -> None:
    mark = framed()[kind][1]
    x = {"a": mark, "b": [mark, 1]}
    inner = mark.data if isinstance(mark, Serialize) else mark
    before = copy.deepcopy(inner.header) if isinstance(inner, Serialized) else None
    n = len(inner.frames) if isinstance(inner, Serialized) else 0
    header, frames = serialize(x, iterate_collection=wish)
    fastser.dumps({"x": Serialize(x), "y": mark})
    if before is not None:
        assert inner.header == before
        assert len(inner.frames) == n
    kept, count, held = copy.deepcopy(header), len(frames), list(frames)
    first, second = deserialize(header, frames), deserialize(header, frames)
    check(first, second)
    assert header == kept
    assert len(frames) == count
    assert all(a is b for a, b in zip(frames, held, strict=True))
    split_header, split_frames = serialize_and_split(x, size=1000)
    first = deserialize(*serialize(x))
    kept = copy.deepcopy(split_header)
    check(first, fastser.merge_and_deserialize(split_header, split_frames))
    check(first, fastser.merge_and_deserialize(split_header, tuple(split_frames)))
    check(first, deserialize(split_header, split_frames))
    assert split_header == kept


def test_the_caller_may_change_what_was_answered() -> None:
    x = Serialized(*serialize([1]))
    header, frames = serialize(x)
    header["key"] = 1
    frames.append(b"")
    assert deserialize(x.header, x.frames) == [1]


def test_one_serialized_under_two_keys() -> None:
    s = Serialized(*serialize(np.arange(3)))
    for wish in (True, None):
        r = deserialize(*wire(*serialize({"a": s, "b": s}, iterate_collection=wish)))
        assert list(r) == ["a", "b"]
    assert "key" not in s.header


# ---- split, merged, as bytes


@pytest.mark.parametrize("size", [1, 7, 1000, 10**9, None])
def test_split_and_merge(size: Any) -> None:
    x = [np.arange(9000), bytearray(70_000), "a"] if size != 1 else np.arange(10, dtype="u1")
    header, frames = serialize_and_split(x, size=size)
    assert all(memoryview(f).nbytes <= (size or 2**26) for f in frames)
    check(x, fastser.merge_and_deserialize(header, frames))
    check(x, fastser.merge_and_deserialize(*wire(header, frames)))
    check(x, stock_merge(*wire(header, frames)))


@pytest.mark.parametrize("compression", ["auto", "zlib", None, False])
@pytest.mark.parametrize("kind", ["zeros", "small", "collection", "empty"])
def test_bytes(compression: Any, kind: str) -> None:
    x: Any = {
        "zeros": [np.zeros(BIG), "a"],
        "small": {"a": 1},
        "collection": [np.ones(4), np.zeros(BIG)],
        "empty": np.empty((0, 3)),
    }[kind]
    data = fastser.serialize_bytes(x, compression=compression)
    assert data == b"".join(fastser.serialize_bytelist(x, compression=compression))
    if kind == "zeros":
        assert (len(data) < BIG) == bool(compression)
    check(x, fastser.deserialize_bytes(data))
    check(x, fastser.deserialize_bytes(bytearray(data)))
    check(x, stock.deserialize_bytes(data))
    check(x, fastser.deserialize_bytes(stock.serialize_bytes(x, compression=compression)))


def test_truncated_bytes_at_every_offset() -> None:
    data = fastser.serialize_bytes({"a": [1, 2.5], "b": np.arange(20)})
    for i in range(len(data)):
        with pytest.raises((FrameError, pickle.UnpicklingError, EOFError)):
            fastser.deserialize_bytes(data[:i])


def test_deep_collections() -> None:
    x: Any = 1
    for _ in range(200_000):
        x = [x]
    header, _ = serialize(x)
    assert header == {"serializer": "error"}
    with pytest.raises(SerializationError, match="RecursionError"):
        serialize([x], on_error="raise", iterate_collection=True)


class Nest:
    """Written by a handler that serializes what is inside."""

    def __init__(self, inner: Any):
        self.inner = inner


def test_failure_deep_inside_of_handlers_costs_no_more_than_the_way_there() -> None:
    calls = []

    def dumps(x: Nest) -> Any:
        calls.append(x)
        header, frames = serialize([x.inner], on_error="raise")
        return {"sub": header}, frames

    fastser.register_serialization(
        Nest, dumps, lambda header, frames: Nest(deserialize(header["sub"], frames)[0])
    )
    try:
        x: Any = threading.Lock()
        for _ in range(5):
            x = Nest(x)
        with pytest.raises(SerializationError, match="lock"):
            serialize(x, on_error="raise")
        assert len(calls) < 100
    finally:
        for registry in (fastser.dask_serialize, fastser.dask_deserialize):
            del registry._lookup[Nest]
            registry._cache.clear()


def test_a_mark_for_pickling_that_is_the_data_arrives_as_a_mark() -> None:
    mark = deserialize(*serialize(ToPickle([1, ToPickle(2)])))
    assert type(mark) is ToPickle
    assert mark.data == [1, 2]
    header, frames = {"pickled-obj": b"N."}, [b"x"]
    held = deserialize(*serialize(Pickled(header, frames)))
    assert type(held) is Pickled
    assert (held.header, held.frames) == (header, frames)
