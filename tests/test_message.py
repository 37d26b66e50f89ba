"""Messages: what msgpack holds, what it does not, marks, relays, and frames that lie."""

from __future__ import annotations

import collections
import copy
import datetime
import enum
import random
import subprocess
import sys
import threading
from typing import Any

import distributed.protocol as stock
import msgpack
import numpy as np
import pytest
from distributed.core import Status
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
    dumps,
    loads,
)

BIG = 100_000


def sent(msg: Any, **kwargs: Any) -> list[Any]:
    """The frames as a receiver has them."""
    return [bytearray(f) for f in dumps(msg, **kwargs)]


class Colour(enum.Enum):
    RED = 1


Point = collections.namedtuple("Point", "x y")


class Text(str):
    pass


KEPT: dict[str, Any] = {
    "plain": {"op": "task-finished", "n": 3, "f": 1.5, "t": (1, "a"), "none": None, "b": b"xyz", "yes": True},
    "nested": {"a": {"b": ({"c": ()},)}},
    "not a dict": (1, 2, "three"),
    "a number": 5,
    "text": "é日本",
    "limits": (2**64 - 1, -(2**63), 2**63, 0),
    "wide ints": (2**64, -(2**63) - 1, 10**100, -(10**100)),
    "a wide int as key": {2**70: 1, 1: {-(2**80): 2}},
    "keys": {1: "a", (1, "x"): 2, b"k": 3, None: 4, 1.5: 5, True and "t": 6},
    "wide ints in a key": {(1, 2**70): 1},
    "sets": ({1, "a", (2, 3)}, set(), frozenset([1]), {frozenset([2])}),
    "wide ints in sets": ({2**70},),
    "surrogates": ("\udcff", {"\ud800": 1, "k": "a\udcff"}, {"\udcaa"}, ("\udcff",)),
    "surrogates in a key": {("\udcff", 1): "a"},
    "reserved": {"__Serialized__": 3},
    "reserved, 1": {"__Pickled__": 1},
    "reserved set": {"__Set__": True, "as-list": (1, 2)},
    "reserved enum": {"__Enum__": True, "name": "a", "__module__": "os", "__name__": "b"},
    "reserved among others": {
        "a": ({"__Set__": 1}, {"__Serialized__": {"__Pickled__": 0}}),
        "__Enum__": None,
    },
    "reserved as value": {"a": "__Serialized__", "b": ("__Set__", b"__Pickled__")},
    "enum of distributed": {"status": Status.running},
    "numpy scalars": (np.int64(3), np.float32(1.5), np.bool_(True), np.uint8(3)),
    "arrays": {"a": np.arange(5), "b": (np.ones(3),)},
    "objects": {"o": Plain(a=[1]), "e": Colour.RED, "d": datetime.date(2026, 1, 2), "c": 1j},
    "types": {"t": int, "f": len},
}


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("place", ["top", "inside", "beside a mark"])
def test_what_is_kept(name: str, place: str) -> None:
    x, again = KEPT[name], copy.deepcopy(KEPT[name])
    msg: Any = {"top": x, "inside": {"k": (x, {"j": again})}, "beside a mark": (x, Serialize([again]))}[place]
    before = copy.deepcopy(msg)
    read = loads(sent(msg))
    check((x, [again]) if place == "beside a mark" else msg, read)
    check(before, msg)


CHANGED = [
    ([1, [2]], (1, (2,))),
    (ListKind([1]), (1,)),
    (Point(1, 2), (1, 2)),
    (Text("a"), "a"),
    (np.float64(1.5), 1.5),
    (bytearray(b"a"), b"a"),
    (enum.IntEnum("Three", {"C": 3}).C, 3),
    ({"a": collections.OrderedDict(b=[1])}, {"a": {"b": (1,)}}),
]


@pytest.mark.parametrize(("msg", "read"), CHANGED)
def test_what_msgpack_turns_into_its_own(msg: Any, read: Any) -> None:
    """As with distributed, whose messages rely on it."""
    for answer in (loads(sent(msg)), stock.loads(sent(msg)), loads(stock.dumps(msg))):
        check(read, answer)
    if isinstance(msg, list):
        check(msg, loads(sent({"x": Serialize(msg)}))["x"])


@pytest.mark.parametrize("depth", [10, 398, 399, 400, 401, 510, 511, 512, 1500])
@pytest.mark.parametrize("kind", ["dict", "tuple", "mixed", "marked", "pickled"])
def test_nesting(depth: int, kind: str) -> None:
    leaf: Any = {"marked": Serialize(["leaf"]), "pickled": ToPickle(["leaf"])}.get(kind, "leaf")
    msg = leaf
    for i in range(depth):
        msg = (msg,) if kind == "tuple" or (kind == "mixed" and i % 2) else {"k": msg}
    read = loads(sent(msg))
    for _ in range(depth):
        assert type(read) in (dict, tuple)
        read = next(iter(read.values() if type(read) is dict else read))
    assert read == (["leaf"] if kind in ("marked", "pickled") else "leaf")


def test_too_deep_is_an_error() -> None:
    code = (
        "import fastser\n"
        "msg = 1\n"
        "for _ in range(200_000): msg = {'k': (msg,)}\n"
        "try:\n"
        "    fastser.dumps(msg)\n"
        "except RecursionError: pass\n"
        "else: raise SystemExit('no error')\n"
        "msg = b'\\x91' * 1_000_000 + b'\\x01'\n"
        "try:\n"
        "    fastser.loads([msg])\n"
        "except fastser.FrameError: pass\n"
        "else: raise SystemExit('no error')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_marks() -> None:
    x = np.arange(BIG)
    msg = {
        "s": Serialize({"a": [x, (1, [2])]}),
        "in": {"k": (Serialize([1.5]), ToPickle([2]), [Serialize({3})])},
        "p": ToPickle(Plain(a=x)),
        "done": Serialized(*fastser.serialize([x])),
        ("key", 1): Serialize("v"),
    }
    read = loads(sent(msg))
    check({"a": [x, (1, [2])]}, read["s"])
    check(([1.5], [2], ({3},)), read["in"]["k"])
    check(Plain(a=x), read["p"])
    check([x], read["done"])
    assert read["key", 1] == "v"


def test_large_buffers_are_not_copied() -> None:
    x = np.arange(float(BIG))
    for mark in (Serialize(x), Serialize([x]), ToPickle([x])):
        frames = dumps({"x": mark}, context={"compression": None})
        assert any(
            np.shares_memory(np.frombuffer(f, "u1"), x) for f in frames if memoryview(f).nbytes == x.nbytes
        )
        received = [bytearray(f) for f in frames]
        read = loads(received)["x"]
        read = read if isinstance(read, np.ndarray) else read[0]
        assert any(np.shares_memory(np.frombuffer(f, "u1"), read) for f in received)
        assert read.flags.writeable


def test_read_only_stays_read_only() -> None:
    x = np.arange(float(BIG))
    x.flags.writeable = False
    y = np.arange(float(BIG))
    for msg in (
        {"x": x, "y": y},
        {"x": Serialize(x), "y": Serialize(y)},
        {"x": ToPickle(x), "y": ToPickle(y)},
    ):
        for kind in (bytes, bytearray):
            read = loads([kind(f) for f in dumps(msg)])
            assert (read["x"].flags.writeable, read["y"].flags.writeable) == (False, True)


# ---- relays


@pytest.mark.parametrize("split", [None, BIG])
@pytest.mark.parametrize("compression", [None, "zlib", "auto"])
def test_a_relay_stays_blind(split: Any, compression: Any) -> None:
    class Secret:
        def __reduce__(self) -> Any:
            return pytest.fail, ("a relay unpickled it",)

    x = np.zeros(BIG)
    context = {"compression": compression}
    frames = sent(
        {"x": Serialize([x, "a"]), "t": Serialize(Secret()), "n": 1}, frame_split_size=split, context=context
    )
    relayed = loads(frames, deserialize=False)
    assert type(relayed["x"]) is Serialized
    assert type(relayed["t"]) is Serialized
    before = copy.deepcopy(relayed["x"].header)
    again = sent({"moved": [relayed["x"]], "n": 2}, frame_split_size=1000, context=context)
    check({"moved": ([x, "a"],), "n": 2}, loads(again))
    check(
        [x, "a"],
        loads(again, deserialize=False)["moved"][0] and fastser.deserialize(before, relayed["x"].frames),
    )
    assert relayed["x"].header == before
    twice = loads(sent({"x": Serialize({"k": loads(again, deserialize=False)["moved"][0]})}))
    check({"x": {"k": [x, "a"]}}, twice)
    check([x, "a"], stock.loads(again)["moved"][0])


def test_pickled_passes_unread() -> None:
    header, frames = None, None
    pickled = Pickled({"pickled-obj": fastser.pickle.dumps([1, 2]), "writeable": ()}, [])
    for read in (loads(sent({"a": pickled})), stock.loads(sent({"a": pickled}))):
        assert read == {"a": [1, 2]}
    assert header is frames is None


def test_to_pickle_is_read_by_relays_too() -> None:
    assert loads(sent({"a": ToPickle([1])}), deserialize=False) == {"a": [1]}
    assert loads(sent({"a": Plain(b=1)}), deserialize=False)["a"].b == 1


# ---- options


def test_compression_context() -> None:
    x = {"x": Serialize(np.zeros(BIG)), "p": ToPickle([np.zeros(BIG)])}

    def size(**context: Any) -> int:
        return sum(memoryview(f).nbytes for f in dumps(x, context=context))

    assert size(compression=None) > 16 * BIG
    assert size(compression=False) > 16 * BIG
    for name in ("zlib", "auto", "lz4"):
        assert size(compression=name) < BIG
        check(x["x"].data, loads(sent(x, context={"compression": name}))["x"])
        check(x["x"].data, stock.loads(sent(x, context={"compression": name}))["x"])
    noise = np.random.default_rng(0).bytes(BIG)
    assert sum(memoryview(f).nbytes for f in dumps({"x": Serialize(noise)})) > BIG


@pytest.mark.parametrize("size", [10_000, 99_999, 10**9, None])
def test_frame_split_size(size: Any) -> None:
    x = {"x": Serialize([np.arange(BIG), b"a" * 3 * BIG]), "y": Serialize(np.ones((300, 300)))}
    frames = dumps(x, frame_split_size=size, context={"compression": None})
    sizes = [memoryview(f).nbytes for f in frames]
    assert max(sizes) <= (size or 2**26)
    expected = {k: v.data for k, v in x.items()}
    check(expected, loads([bytearray(f) for f in frames]))
    check(expected, stock.loads([bytearray(f) for f in frames]))
    check(expected, loads(frames))


def test_serializers_and_deserializers() -> None:
    frames = sent({"a": Serialize(1), "b": Serialize(np.ones(2))}, serializers=("pickle",))
    assert loads(frames, deserializers=("pickle",))["a"] == 1
    with pytest.raises(DispatchError, match="serialized with pickle"):
        loads(frames, deserializers=("dask",))
    assert type(loads(frames, deserialize=False, deserializers=("dask",))["a"]) is Serialized
    with pytest.raises(DispatchError, match="unknown serialization family 'nope'"):
        dumps({"a": Serialize(1)}, serializers=("nope",))


def test_on_error() -> None:
    lock = threading.Lock()
    frames = sent({"bad": Serialize(lock), "good": Serialize([1])})
    with pytest.raises(SerializationError, match="of type lock"):
        loads(frames)
    relayed = loads(frames, deserialize=False)
    assert relayed["bad"].header["serializer"] == "error"
    assert fastser.deserialize(relayed["good"].header, relayed["good"].frames) == [1]
    with pytest.raises(SerializationError, match="of type lock"):
        dumps({"bad": Serialize(lock)}, on_error="raise")
    with pytest.raises(TypeError, match="lock"):
        dumps({"bad": lock})
    with pytest.raises(TypeError, match="of type lock"):
        stock.loads(frames)
    assert loads(sent({"a": 1})) == {"a": 1}


def test_errors_of_user_code_pass() -> None:
    class Bad:
        def __reduce__(self) -> Any:
            raise ValueError("of the user")

    for msg in ({"a": Bad()}, {"a": ToPickle(Bad())}):
        with pytest.raises(ValueError, match="of the user"):
            dumps(msg)
    with pytest.raises(SerializationError, match="ValueError: of the user"):
        dumps({"a": Serialize(Bad())}, on_error="raise")


# ---- frames that lie

ANSWERS = (FrameError, SerializationError, DispatchError)
RICH = {
    "op": "update",
    "set": {1, 2},
    "status": Status.running,
    "a": Serialize([np.arange(BIG), "abc"]),
    "b": Serialize(np.arange(5)),
    "c": ToPickle({"k": 1}),
    "d": [{"e": Serialized(*fastser.serialize([1, np.ones(3)], iterate_collection=True))}],
}
RICH_FRAMES = [bytes(f) for f in dumps(RICH, frame_split_size=3 * BIG, context={"compression": "zlib"})]


def test_missing_and_swapped_frames() -> None:
    loads(RICH_FRAMES)
    assert len(RICH_FRAMES) > 8
    for i in range(len(RICH_FRAMES)):
        with pytest.raises((*ANSWERS, Exception)) as raised:
            loads(RICH_FRAMES[:i])
        assert isinstance(raised.value, ANSWERS), repr(raised.value)
    with pytest.raises(FrameError, match="no frames"):
        loads([])
    for i in range(1, len(RICH_FRAMES)):
        for j in range(i):
            frames = list(RICH_FRAMES)
            frames[i], frames[j] = frames[j], frames[i]
            answered(frames)


def answered(frames: list[Any], payload: bool = True) -> None:
    """Read frames that lie: an error of ours, one of the payload's unpickling, or nothing noticed."""
    try:
        loads(frames)
    except ANSWERS:
        pass
    except Exception as error:
        assert payload, repr(error)
        assert in_unpickling(error), repr(error)
    for kwargs in ({"deserialize": False}, {"deserializers": ()}):
        try:
            loads(frames, **kwargs)
        except ANSWERS:
            pass
        except Exception as error:
            assert in_unpickling(error), repr(error)


def in_unpickling(error: BaseException) -> bool:
    """Tell whether an error came out of a pickle that was read: its last frame of ours runs programs."""
    names = []
    trace = error.__traceback__
    while trace is not None:
        names.append(trace.tb_frame.f_code.co_name)
        trace = trace.tb_next
    return bool({"pickle_loads", "dask_loads", "pickled"} & set(names))


def test_truncated_frames() -> None:
    for i, frame in enumerate(RICH_FRAMES):
        for size in {*range(0, min(len(frame), 60), 3), len(frame) // 2, len(frame) - 1}:
            answered([*RICH_FRAMES[:i], frame[:size], *RICH_FRAMES[i + 1 :]])


def test_flipped_bytes() -> None:
    rng = random.Random(7)
    for i, frame in enumerate(RICH_FRAMES):
        if len(frame) > 5000:  # data, compressed
            continue
        program = frame[:1] == b"\x80" or b"pickled-obj" in frame or b"type-serialized" in frame
        for _ in range(80):
            bad = bytearray(frame)
            for _ in range(rng.choice([1, 1, 3])):
                bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
            if not program:  # a flipped program may call anything
                answered([*RICH_FRAMES[:i], bytes(bad), *RICH_FRAMES[i + 1 :]])


def pack(x: Any) -> bytes:
    return bytes(msgpack.packb(x))


PROGRAM = fastser.pickle.dumps("read")
LIES: list[Any] = [
    {"__Set__": True, "as-list": 3},
    {"__Set__": True, "as-list": [{}]},
    {"__Enum__": True, "name": 3, "__module__": 4, "__name__": 5},
    {"__Enum__": True, "name": "x", "__module__": "dask.nope", "__name__": "y"},
    {"__Enum__": True, "name": "x", "__module__": "dask", "__name__": "nope"},
    {"__Enum__": True, "name": "system", "__module__": "dask.config", "__name__": "os"},
]
GOOD_HEADER = {"serializer": "pickle", "writeable": (), "num-sub-frames": 1}


@pytest.mark.parametrize(
    ("frames", "match"),
    [
        ([b""], "msgpack at byte offset"),
        ([b"\xc1"], "msgpack at byte offset"),
        ([b"\x01\x02"], "msgpack at byte offset"),
        ([b"\xdd\xff\xff\xff\xff"], "msgpack at byte offset"),
        ([b"\xc6\xff\xff\xff\xff"], "msgpack at byte offset"),
        ([b"\xa1\xff"], "msgpack at byte offset"),
        ([pack({"__Serialized__": 1})], "expected a header in frame 1 of 1"),
        ([pack({"__Serialized__": 10**15})], "in frame 1000000000000000 of 1"),
        ([pack({"__Pickled__": 2}), b""], "expected a header in frame 2 of 2"),
        ([pack({"__Serialized__": 1}), b""], "header of 0 bytes is not msgpack"),
        ([pack({"__Serialized__": 1}), b"\xc1"], "is not msgpack"),
        ([pack({"__Serialized__": 1}), pack([1])], "num-sub-frames"),
        ([pack({"__Serialized__": 1}), pack({})], "num-sub-frames of at most 0, got None"),
        (
            [pack({"__Serialized__": 1}), pack({**GOOD_HEADER, "num-sub-frames": 2}), PROGRAM],
            "at most 1, got 2",
        ),
        ([pack({"__Serialized__": 1}), pack({**GOOD_HEADER, "num-sub-frames": -1}), PROGRAM], "got -1"),
        ([pack({"__Serialized__": 1}), pack({**GOOD_HEADER, "num-sub-frames": True}), PROGRAM], "got True"),
        ([pack({"__Serialized__": 1}), pack({**GOOD_HEADER, "num-sub-frames": 1.0}), PROGRAM], "got 1.0"),
        ([pack({"__Serialized__": 1}), pack({"num-sub-frames": 0})], "family None"),
        (
            [pack({"__Pickled__": 1}), pack({"num-sub-frames": 0})],
            "pickled-obj: expected bytes, got NoneType",
        ),
        (
            [pack({"__Pickled__": 1}), pack({"num-sub-frames": 0, "pickled-obj": 3})],
            "expected bytes, got int",
        ),
        (
            [
                pack({"__Pickled__": 1}),
                pack({"num-sub-frames": 0, "pickled-obj": b"N.", "writeable": (True,)}),
            ],
            "1 buffers, got 1 frames",
        ),
    ],
)
def test_lies_are_named(frames: list[bytes], match: str) -> None:
    with pytest.raises((FrameError, DispatchError), match=match):
        loads(frames)


@pytest.mark.parametrize(
    "frames",
    [
        *[[pack(lie)] for lie in LIES],
        [pack({"__Serialized__": 1}), pack({**GOOD_HEADER, "compression": 3}), PROGRAM],
        [pack({"__Serialized__": 1}), pack({**GOOD_HEADER, "compression": [3]}), PROGRAM],
        [pack({"__Serialized__": 1}), pack({**GOOD_HEADER, "compression": ["zlib", "zlib"]}), PROGRAM],
        [pack({"__Serialized__": 1}), pack({**GOOD_HEADER, "compression": ["zlib"]}), PROGRAM],
        [pack({"__Serialized__": 1}), pack({**GOOD_HEADER, "serializer": [1]}), PROGRAM],
        [pack({"__Serialized__": 1}), pack({**GOOD_HEADER, "writeable": [1]}), PROGRAM],
        [pack({"__Serialized__": 1}), pack({**GOOD_HEADER, "split-num-sub-frames": 3}), PROGRAM],
        [pack({"__Pickled__": 1}), pack({"num-sub-frames": 0, "pickled-obj": b"N.", "writeable": 3})],
        [pack({"__Pickled__": 1}), pack({"num-sub-frames": 0, "pickled-obj": b"N.", "compression": 3})],
    ],
)
def test_other_lies_get_an_answer_of_ours(frames: list[bytes]) -> None:
    with pytest.raises(ANSWERS):
        loads(frames)


def test_enums_outside_the_allowed_imports_are_pickled() -> None:
    frames = sent({"e": Colour.RED})
    assert b"__Enum__" not in frames[0]
    assert loads(frames)["e"] is Colour.RED
    lie = pack({"__Enum__": True, "name": "RED", "__module__": __name__, "__name__": "Colour"})
    with pytest.raises(DispatchError, match="not allowed"):
        loads([lie])


def test_frames_are_only_read() -> None:
    for kind in (list, tuple):
        frames = kind(RICH_FRAMES)
        first, second = loads(frames), loads(frames)
        check(first["a"], second["a"])
        assert frames == kind(RICH_FRAMES)
