"""The msgpack codec: against msgpack-python, and against bad objects and bad bytes."""

from __future__ import annotations

import collections
import contextlib
import enum
import gc
import random
import struct
import sys
import threading
import time
import tracemalloc
from functools import partial
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastser._msgpack import pack, unpack
from fastser.errors import FrameError

RESERVED = ("__Serialized__", "__Pickled__", "__Set__", "__Enum__")
MAX_DEPTH = 400
FUZZ_ROUNDS = 100_000
OPENINGS = [b"\x91", b"\x81\x01", b"\x81", b"\xdc\x00\x01", b"\xdf\x00\x00\x00\x01\x00"]


class Str(str):
    __slots__ = ()


class Int(int):
    pass


class Float(float):
    pass


class Bytes(bytes):
    pass


class ByteArray(bytearray):
    pass


class List(list):  # type: ignore[type-arg]
    pass


class Tuple(tuple):  # type: ignore[type-arg]
    __slots__ = ()


class Dict(dict):  # type: ignore[type-arg]
    pass


class Colour(enum.IntEnum):
    RED = 1


Point = collections.namedtuple("Point", "x y")


def default(obj: Any) -> Any:
    """Answer for what msgpack-python gives to default too."""
    if isinstance(obj, int):
        return {"__Pickled__": str(obj)}
    if isinstance(obj, frozenset | set):
        return {"__Set__": True, "as-list": sorted(obj, key=repr)}
    return {"__Pickled__": type(obj).__name__}


def oracle_pack(obj: Any) -> bytes:
    packed: bytes = msgpack.packb(obj, default=default, use_bin_type=True)
    return packed


def hook(obj: dict[Any, Any]) -> Any:
    """Answer for what is a placeholder."""
    return ("hooked", tuple(obj.items())) if any(name in obj for name in RESERVED) else obj


def only_placeholders(obj: dict[Any, Any]) -> Any:
    assert type(obj) is dict
    assert any(name in obj for name in RESERVED)
    return hook(obj)


def oracle_unpack(data: Any) -> Any:
    return msgpack.unpackb(data, object_hook=hook, use_list=False, raw=False, strict_map_key=False)


def same(a: Any, b: Any) -> bool:
    """Tell whether the objects are of the same types and values, bit for bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    return bool(a == b)


def check(obj: Any) -> None:
    data = pack(obj, default)
    assert data == oracle_pack(obj)
    assert same(unpack(data, only_placeholders), oracle_unpack(data))


# ---- against msgpack-python

floats = st.floats() | st.integers(0, 2**64 - 1).map(lambda n: struct.unpack("d", struct.pack("Q", n))[0])
texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=40)
ints = st.integers(-(2**63), 2**64 - 1) | st.integers(-(2**70), 2**70) | st.integers(-40, 300)
atoms = st.none() | st.booleans() | ints | floats | texts | st.binary(max_size=40)
keys = st.recursive(
    texts | st.sampled_from(["op", "key", "status", "", "a", "__", "__Set", "__dict__", "_" * 14]) | atoms,
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=3,
)
data_of_all_kinds = st.recursive(
    atoms | st.frozensets(st.integers(), max_size=3),
    lambda inner: (
        st.lists(inner, max_size=20)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(keys, inner, max_size=20)
    ),
    max_leaves=60,
)


@settings(max_examples=600, deadline=None)
@given(data_of_all_kinds)
def test_matches_msgpack(obj: Any) -> None:
    check(obj)


@given(st.binary(max_size=60))
def test_reads_any_bytes_as_msgpack_does(data: bytes) -> None:
    agree(data)


BOUNDARIES = sorted(
    {sign * 2**bits + delta for bits in range(66) for delta in (-1, 0, 1) for sign in (1, -1)}
    | {-32, -33, -31}
)


@pytest.mark.parametrize("n", BOUNDARIES)
def test_ints(n: int) -> None:
    check(n)
    check([n, Int(n)])
    check({n: n})


LENGTHS = [0, 1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 30, 31, 32, 63, 64, 254, 255, 256, 257, 65535, 65536, 65537]


@pytest.mark.parametrize("n", LENGTHS)
def test_lengths(n: int) -> None:
    check("x" * n)
    check("é" * n)
    check("é" * (n // 2))
    check("€" * (n // 3))
    check("\U0001f600" * (n // 4))
    check("x" * max(n - 2, 0) + "é")
    check(bytes(n))
    check(bytearray(n))
    check(memoryview(bytes(n)))
    check([None] * n)
    check((1,) * n)
    check([[]] * n)
    check({i: None for i in range(n)})
    check({f"key {i}": i for i in range(n)})
    check({"x" * n: 1, "é" * n: 2})


@pytest.mark.parametrize("n", [5_000_000, 20_000_000])
def test_output_beyond_the_kept_buffer(n: int) -> None:
    check([b"x" * n, "y" * n, list(range(100)), "é" * (n // 2)])


@pytest.mark.parametrize("n", [0, 1, 2, 3, 4, 5, 8, 15, 16, 17, 255, 256, 65536])
@pytest.mark.parametrize("code", [0, 5, 127])
def test_extension_types(n: int, code: int) -> None:
    check([msgpack.ExtType(code, bytes(n)), 1])


@pytest.mark.parametrize("seconds", [0, 2**32 - 1, 2**32, 2**34 - 1, 2**34, -1, 2**62])
@pytest.mark.parametrize("nanoseconds", [0, 1, 10**9 - 1])
def test_timestamps(seconds: int, nanoseconds: int) -> None:
    check({"at": msgpack.Timestamp(seconds, nanoseconds)})


class Reversed(dict):  # type: ignore[type-arg]
    def items(self) -> Any:
        return list(super().items())[::-1]


class Doubled(list):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return (2 * item for item in list.__iter__(self))


ordered = collections.OrderedDict(a=1, b=2)
ordered.move_to_end("a")
SUBCLASSES: list[Any] = [
    Str("text"),
    Str("téxt"),
    Int(7),
    Float(1.5),
    Bytes(b"ab"),
    ByteArray(b"ab"),
    List([1, [2]]),
    Tuple((1, (2,))),
    Dict(a=1),
    Colour.RED,
    Point(1, [2]),
    ordered,
    collections.defaultdict(list, a=[1]),
    collections.Counter("abca"),
    Reversed(a=1, b=2),
    Doubled([1, 2]),
    np.float64(1.5),
    np.str_("text"),
    np.bytes_(b"ab"),
]
FOR_DEFAULT: list[Any] = [
    object(),
    {1, 2},
    frozenset(),
    1j,
    range(3),
    np.int64(3),
    np.float32(3),
    np.bool_(True),
    np.arange(3),
    len,
    int,
    2**64,
    -(2**63) - 1,
    Int(2**64),
]


@pytest.mark.parametrize("obj", SUBCLASSES + FOR_DEFAULT, ids=lambda obj: type(obj).__name__)
def test_other_types(obj: Any) -> None:
    check(obj)
    check([obj, (obj, {"x": obj})])
    try:
        hash(obj)
    except TypeError:
        return
    check({obj: 1, (1, obj): 2})


VIEWS = [
    memoryview(b"abc"),
    memoryview(bytearray(b"abcdef"))[1:4],
    memoryview(np.arange(6, dtype="i4")),
    memoryview(np.arange(6.0).reshape(2, 3)),
    memoryview(b""),
]


@pytest.mark.parametrize("view", VIEWS, ids=repr)
def test_memoryviews(view: memoryview) -> None:
    check([view, 1])


@pytest.mark.parametrize("step", [2, -1])
def test_strided_memoryviews_go_to_default(step: int) -> None:
    view = memoryview(b"abcdef")[::step]
    assert unpack(pack([view], bytes)) == (bytes(view),)


def test_released_memoryview() -> None:
    view = memoryview(b"abc")
    view.release()
    with pytest.raises(ValueError, match="released"):
        pack([view])


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, np.frombuffer])
def test_reads_any_buffer(kind: Any) -> None:
    data = pack({"a": [1, "b"]})
    buffer = np.frombuffer(data, "u1") if kind is np.frombuffer else kind(data)
    assert unpack(buffer) == {"a": (1, "b")}


def test_reads_strided_buffers() -> None:
    data = pack({"a": [1, "b"]})
    assert unpack(memoryview(b"".join(bytes([c, 0]) for c in data))[::2]) == {"a": (1, "b")}


def test_needs_a_buffer() -> None:
    for data in ("text", None, 3, [b"x"]):
        with pytest.raises(TypeError):
            unpack(data)  # type: ignore[arg-type]


def test_lists() -> None:
    data = pack([1, [2, []], {"a": [3]}])
    assert unpack(data, tuples=False) == [1, [2, []], {"a": [3]}]
    assert unpack(data, None, True) == (1, (2, ()), {"a": (3,)})


# ---- what goes to default


def asked_for(obj: Any) -> list[Any]:
    """Return the objects that default is called with."""
    asked = []

    def note(obj: Any) -> None:
        asked.append(obj)

    pack(obj, note)
    return asked


@pytest.mark.parametrize("name", RESERVED)
@pytest.mark.parametrize("kind", [dict, Dict, collections.OrderedDict])
def test_reserved_keys(name: str, kind: Any) -> None:
    for keys in ([name], ["a", name], [name, "a"], ["a", b"b", name, 3], [Str(name)]):
        user = kind(dict.fromkeys(keys, 1))
        inner = [user, {"x": user}]
        assert asked_for(user) == [user]
        assert asked_for(inner) == [user, user]
        assert all(item is user for item in asked_for(inner))


@pytest.mark.parametrize("name", ["__Set", "__Set___", "__set__", "_Set_", "__", "__Picked__", "x__Set__"])
def test_other_keys_are_not_reserved(name: str) -> None:
    check({name: 1, "a": name, name.encode(): RESERVED, RESERVED: 1})
    assert asked_for({name: {name: 1}}) == []


def test_default_is_not_called_inside_a_dict_that_goes_to_default() -> None:
    for last in (*RESERVED, "\ud800"):
        inner = {"a": object(), "b": [object()], "c": {"d": object()}, last: 1}
        assert asked_for(inner) == [inner]
        inner = {(1, 2**70): 1, "a": object(), last: 1}
        assert asked_for(inner) == [inner]
        tree = [1, {"x": 2, "inner": inner, "y": "z"}]
        expected = oracle_pack([1, {"x": 2, "inner": {"__Pickled__": 1}, "y": "z"}])
        assert pack(tree, lambda obj: {"__Pickled__": 1}) == expected


def test_answers_are_packed_as_they_are() -> None:
    marker = object()
    answer = {"__Pickled__": 3, "x": {"y": 2}}
    assert pack([marker], lambda obj: answer) == oracle_pack([answer])
    user = {"__Set__": 1}
    asked = []

    def nested(obj: Any) -> Any:
        asked.append(obj)
        return {"__Pickled__": user} if obj is marker else None

    assert pack(marker, nested) == oracle_pack({"__Pickled__": None})
    assert asked == [marker, user]  # not the answer, but what is in it


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "é\udc80", "\U0001f600\ud912", "x" * 300 + "\udd00"])
def test_lone_surrogates(text: str) -> None:
    assert asked_for(text) == [text]
    assert asked_for(["a", text, Str(text)]) == [text, text]
    for user in ({text: 1}, {"a": object(), text: 1}, {Str(text): 1}, Dict({text: 1})):
        assert asked_for([user]) == [user]
    assert asked_for({("a", text): 1}) == [text]


def nested(depth: int, kind: Any) -> Any:
    obj: Any = []
    for _ in range(depth - 1):
        obj = {"k": obj} if kind is dict else Dict(k=obj) if kind is Dict else kind([obj])
    return obj


@pytest.mark.parametrize("kind", [list, tuple, dict, List, Tuple, Dict])
def test_depth_of_writing(kind: Any) -> None:
    obj = nested(MAX_DEPTH, kind)
    assert asked_for(obj) == []
    assert pack(obj) == oracle_pack(obj)
    assert pack(unpack(pack(obj))) == oracle_pack(obj)
    asked = asked_for(nested(MAX_DEPTH + 1, kind))
    assert asked == [[]]
    deep = nested(100_000, kind)
    (asked_once,) = asked_for(deep)
    level = deep
    for _ in range(MAX_DEPTH):
        level = level["k"] if isinstance(level, dict) else level[0]
    assert asked_once is level
    while isinstance(deep, dict) and deep:  # so that its end does not go deep either
        deep = deep.pop("k")


def test_cycles() -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    assert asked_for(cycle) == [cycle]
    loop: dict[str, Any] = {}
    loop["x"] = [loop]
    assert len(asked_for(loop)) == 1


def test_answers_without_end() -> None:
    with pytest.raises(RecursionError, match="500 levels"):
        pack(object(), lambda obj: [object()])
    with pytest.raises(RecursionError, match="500 levels"):
        pack(object(), lambda obj: {"x": object()})
    assert unpack(pack(1)) == 1


def test_answers_at_the_greatest_depth() -> None:
    data = pack(nested(MAX_DEPTH + 1, list), lambda obj: {"__Pickled__": 7})
    result = unpack(data, only_placeholders)
    for _ in range(MAX_DEPTH):
        (result,) = result
    assert result == ("hooked", (("__Pickled__", 7),))


# ---- errors of writing


class BoomError(Exception):
    pass


def boom(obj: Any) -> Any:
    raise BoomError(obj)


def test_errors_of_default_propagate() -> None:
    marker = object()
    for obj in (marker, [1, marker], {"a": {"b": marker}}, {(1, 2**80): 1}, Dict(a=marker), List([marker])):
        for _ in range(3):
            with pytest.raises(BoomError) as caught:
                pack(obj, boom)
            assert caught.value.__cause__ is None
            assert caught.value.__context__ is None
    check({"a": [1, 2, "three"]})  # no half-written state


@pytest.mark.parametrize("bad", [object(), {1}, 2**64, "\ud800", {"__Set__": 1}, 1j, nested(500, list)])
def test_unpackable(bad: Any) -> None:
    bad = bad if type(bad) is not list else nested(MAX_DEPTH + 1, list)
    name = "list" if type(bad) is list else type(bad).__name__
    with pytest.raises(TypeError, match=f"type {name}$"):
        pack([bad])
    with pytest.raises(TypeError, match=f"type {name}: default answered an object of type {name}$"):
        pack([bad], lambda obj: obj)
    if not isinstance(bad, dict | list):
        with pytest.raises(TypeError, match=f"type complex: default answered an object of type {name}$"):
            pack([2j], lambda obj: bad)


def test_default_must_be_callable() -> None:
    with pytest.raises(TypeError, match="not callable"):
        pack(object(), 3)  # type: ignore[arg-type]


def test_calls_inside_default() -> None:
    def again(obj: Any) -> Any:
        return pack([1, "x" * 5000, obj], lambda obj: "inner")

    inner = oracle_pack([1, "x" * 5000, "inner"])
    assert pack({"a": "y" * 300, "b": object(), "c": [object()]}, again) == oracle_pack(
        {"a": "y" * 300, "b": inner, "c": [inner]}
    )


def changing(change: Any) -> Any:
    def run(obj: Any) -> str:
        change()
        return "answer"

    return run


def test_lists_that_change() -> None:
    for change in ("clear", "pop", "append", "reverse"):
        for kind in (list, List):
            items = kind([[1, object(), []], "a", "b"])
            arguments = ["c"] * (change == "append")
            answer = changing(partial(getattr(items, change), *arguments))
            if change == "reverse":  # either is what the list was at some time
                last = (1, "answer", ()) if kind is list else "b"
                assert unpack(pack(items, answer)) == ((1, "answer", ()), "a", last)
                continue
            with pytest.raises(RuntimeError, match="list changed size"):
                pack([items], answer)


def test_dicts_that_change() -> None:
    def swap(user: dict[Any, Any]) -> None:
        user["new"] = user.pop("a", 1)

    changes = {
        "clear": lambda user: user.clear(),
        "pop": lambda user: user.popitem(),
        "add": lambda user: user.update(new=1),
        "grow": lambda user: user.update(dict.fromkeys(range(1000))),
        "swap": swap,
    }
    for kind in (dict, Dict):
        for name, change in changes.items():
            for key in ("b", (1, 2**70)):
                user = kind({"a": [1], key: [object()], "c": [3], "d": 4})
                answer = changing(partial(change, user))
                if kind is Dict and name == "swap":
                    assert list(unpack(pack({"outer": user}, answer), hook)["outer"])[::3] == ["a", "d"]
                    continue
                with pytest.raises(RuntimeError, match="changed while it was packed"):
                    pack({"outer": user}, answer)


def test_reserved_keys_that_come_late() -> None:
    user: dict[Any, Any] = {"a": object(), "b": 1, "c": 2}

    def run(obj: Any) -> str:
        del user["b"]
        user["__Set__"] = 1
        return "answer"

    with pytest.raises(RuntimeError, match="changed while it was packed"):
        pack(user, run)


def test_objects_that_vanish() -> None:
    """default drops what is being packed: the walk must hold it."""
    tree: list[Any] = [{"a": [[object()], "x" * 100]}, "end"]

    def run(obj: Any) -> str:
        tree[0] = None
        gc.collect()
        return "answer"

    assert unpack(pack(tree, run)) == ({"a": (("answer",), "x" * 100)}, "end")

    key = (1, frozenset())
    user = {key: ["v" * 50]}
    del key

    def empty(obj: Any) -> str:
        user.clear()
        gc.collect()
        return "answer"

    with pytest.raises(RuntimeError, match="changed"):
        pack(user, empty)


# ---- reading: hooks and keys


def test_hook_gets_placeholders_only() -> None:
    obj = {"a": {"b": 1}, "__Set": {}, "p": [{"__Pickled__": 1}], "s": {"x": 1, "__Set__": True}}
    data = oracle_pack(obj)
    assert unpack(data, only_placeholders) == oracle_unpack(data)
    assert unpack(data) == {**obj, "p": ({"__Pickled__": 1},)}


def test_errors_of_the_hook_propagate() -> None:
    for _ in range(3):
        with pytest.raises(BoomError) as caught:
            unpack(oracle_pack([1, {"a": [{"__Set__": 1}]}]), boom)
        assert caught.value.__context__ is None


def test_calls_inside_the_hook() -> None:
    data = oracle_pack([{"__Pickled__": b"\x92\xa3abc\x01"}, "abc"])
    assert unpack(data, lambda obj: unpack(obj["__Pickled__"])) == (("abc", 1), "abc")


def test_hook_that_changes_the_data() -> None:
    data = bytearray(oracle_pack([{"__Set__": 1}, "x" * 40, [1, 2, 3], {"a": 1}]))

    def spoil(obj: Any) -> None:
        with pytest.raises(BufferError):
            data.clear()
        data[10:] = b"\xdd" + b"\xff" * (len(data) - 11)

    with pytest.raises(FrameError):
        unpack(data, spoil)


def test_hook_sees_no_unfinished_collection() -> None:
    found = []

    def look(obj: Any) -> int:
        found.extend(item for item in gc.get_objects() if type(item) in (tuple, list) and len(item) == 4321)
        return 5

    data = oracle_pack([[{"__Set__": 1}] + [7] * 4320])
    for tuples in (True, False):
        result = unpack(data, look, tuples)
        assert len(result[0]) == 4321
        assert gc.is_tracked(result[0])
        del result
    assert found == []


def test_keys() -> None:
    for key in (None, True, 1, -1.5, "a", b"a", (), (1, ("b",)), 2**64 - 1, "é"):
        assert unpack(pack({key: 1})) == {key: 1}
    data = b"\x81\x81\xa1a\x01\x02"  # a map as a key
    with pytest.raises(FrameError, match="byte offset 1: expected a hashable key of a map, found a dict"):
        unpack(data)
    with pytest.raises(FrameError, match="found a tuple"):
        unpack(b"\x81\x91\x80\x02")
    with pytest.raises(FrameError, match="found a list"):
        unpack(b"\x81\x91\x02\x02", None, False)
    data = oracle_pack([1]).replace(b"\x01", b"\x81\x81\xa7__Set__\x01\x02")
    assert unpack(data, lambda obj: "key") == ({"key": 2},)
    # a key that came out of a hook counts as well
    assert unpack(data, lambda obj: "__Enum__" if "__Set__" in obj else "both") == ("both",)
    assert oracle_of(data, lambda obj: "__Enum__" if "__Set__" in obj else "both") == ("both",)


def oracle_of(data: bytes, answer: Any) -> Any:
    return msgpack.unpackb(data, object_hook=answer, use_list=False, strict_map_key=False)


def test_repeated_strings_are_made_once() -> None:
    rows = unpack(pack([{"name of it": "a value"} for _ in range(50)]))
    assert len({id(key) for row in rows for key in row}) == 1
    assert len({id(value) for row in rows for value in row.values()}) == 1


def test_many_strings_share_a_cache() -> None:
    r = random.Random(1)
    words = ["".join(r.choices("ab_é0", k=r.randrange(34))) for _ in range(20_000)]
    check([{word: word[::-1], "x": word} for word in words])


# ---- bad bytes


def agree(data: Any) -> None:
    """Check that both read the same, or that neither reads anything."""
    try:
        expected = oracle_unpack(data)
    except (ValueError, TypeError, msgpack.UnpackException):
        with pytest.raises(FrameError, match=r"^msgpack at byte offset \d+: expected .+, found .+"):
            unpack(data, hook)
        return
    assert same(unpack(data, hook), expected)


CORPUS: list[Any] = [
    None,
    {"op": "task-finished", "key": "increment-0123456789abcdef", "nbytes": 28, "type": b"\x80\x05K\x01."},
    {"startstops": [{"action": "compute", "start": 1760000000.25, "stop": 1760000001.5}], "metadata": {}},
    [{"__Serialized__": 3}, {"__Set__": True, "as-list": [1, "é", None]}, {"__Pickled__": 1, "x": 2}],
    [*BOUNDARIES[60:80], 2**32, 2**63, -(2**63), 1e300, True, False],
    {1: "x" * 40, (1, "b"): b"y" * 300, "text": "é€\U0001f600" * 9, None: list(range(20))},
    [msgpack.ExtType(5, b"abc"), msgpack.ExtType(6, b"abcd"), msgpack.Timestamp(3, 4), "x" * 300],
    {str(i): i for i in range(20)},
]


@pytest.mark.parametrize("obj", CORPUS, ids=range(len(CORPUS)))
def test_truncated_and_flipped(obj: Any) -> None:
    data = msgpack.packb(obj, default=default)
    assert same(unpack(data, hook), oracle_unpack(data))
    for n in range(len(data)):
        with pytest.raises(FrameError):
            unpack(data[:n], hook)
        with pytest.raises(FrameError):
            unpack(memoryview(data)[:n], hook)
    for at in range(len(data)):
        for bit in range(8):
            agree(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])
        for byte in (0x00, 0x7F, 0xC1, 0xC6, 0xC9, 0xDB, 0xDD, 0xDF, 0xFF):
            agree(data[:at] + bytes([byte]) + data[at + 1 :])
            agree(data[:at] + bytes([byte]) + data[at:])


def test_all_short_inputs() -> None:
    for first in range(256):
        for second in (b"", *(bytes([n]) for n in range(256))):
            agree(bytes([first]) + second)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "byte offset 0: expected 1 more bytes, found 0"),
        (b"\x01\x02\x03", "byte offset 1: expected the end, found 2 more bytes"),
        (b"\xc1", "byte offset 0: expected the first byte of an object, found 0xc1"),
        (b"\xa5abc", "byte offset 1: expected 5 more bytes, found 3"),
        (b"\x92\xa1a\xcd\x01", "byte offset 4: expected 2 more bytes, found 1"),
        (b"\x91\xa3a\xffb", "byte offset 3: expected UTF-8, found byte 0xff"),
        (b"\x91\xa2a\xc3", "byte offset 3: expected UTF-8, found byte 0xc3"),
        (b"\xd9\x24" + b"a" * 33 + b"\xed\xa0\x80", "byte offset 35: expected UTF-8, found byte 0xed"),
        (b"\xdd\x00\x00\x00\x05\x01", "byte offset 5: expected 5 more bytes for collections, found 1"),
        (b"\xdf\x00\x00\x00\x05\x01", "byte offset 5: expected 10 more bytes for collections, found 1"),
        (b"\x93\x92\x01\x02", "byte offset 2: expected 4 more bytes for collections, found 2"),
        (b"\xd4\xfe\x01", "byte offset 1: expected an extension type, found code -2 with 1 bytes"),
        (b"\xd6\xff\x01\x02", "byte offset 2: expected 4 more bytes, found 2"),
        (b"\xd4\xff\x01", "byte offset 1: expected an extension type, found code -1 with 1 bytes"),
    ],
)
def test_messages_say_what_and_where(data: bytes, message: str) -> None:
    with pytest.raises(FrameError) as caught:
        unpack(data)
    assert str(caught.value) == f"msgpack at {message}"
    agree(data)


def deep(opening: bytes, n: int) -> bytes:
    return opening * n + b"\x01"


@pytest.mark.parametrize("opening", OPENINGS)
def test_depth_of_reading(opening: bytes) -> None:
    if opening != b"\x81":  # maps as keys, which cannot be
        unpack(deep(opening, 1024))
        unpack(deep(opening, 1024), None, False)
    for n in (1025, 1026, 100_000):
        with pytest.raises(FrameError, match=r"at most 1024 levels|collections"):
            unpack(deep(opening, n) + b"\x01" * (opening == b"\x81") * n)
        with pytest.raises(FrameError):
            unpack(deep(opening, n), None, False)


LIES = {
    "str": b"\xdb\xff\xff\xff\xff",
    "bin": b"\xc6\xff\xff\xff\xff",
    "ext": b"\xc9\xff\xff\xff\xff\x05",
    "array": b"\xdd\xff\xff\xff\xff",
    "map": b"\xdf\xff\xff\xff\xff",
    "array within bytes left": b"\xdd\x00\x02\x00\x00" + b"\xc1" * 100_000,
    "map within bytes left": b"\xdf\x00\x01\x00\x00" + b"\xc1" * 100_000,
    "arrays in arrays": b"\xdd\x00\x01\x00\x00" * 1000 + b"\xc1" * 70_000,
    "maps in maps": b"\xdf\x00\x00\x80\x00\x01" * 1000 + b"\xc1" * 70_000,
}


@pytest.mark.parametrize("name", LIES)
def test_lying_lengths_take_no_memory(name: str) -> None:
    data = LIES[name]
    with pytest.raises(FrameError):
        unpack(data)
    tracemalloc.start()
    try:
        for wrapped in (data, b"\x91" + data, b"\x81\x01" + data):
            for tuples in (True, False):
                with pytest.raises(FrameError):
                    unpack(wrapped, None, tuples)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 9 * len(data) + 50_000


def mutated(data: bytes, r: random.Random) -> bytes:
    """Return *data* with a few random faults."""
    out = bytearray(data)
    for _ in range(r.randrange(1, 4)):
        at = r.randrange(len(out) + 1)
        kind = r.randrange(6)
        if kind == 0:
            out[at:] = b""
        elif kind == 1:
            out[at:at] = bytes([r.randrange(0xC0, 0xE0)])
        elif kind == 2:
            out[at : at + r.randrange(4)] = b""
        elif kind == 3:
            out[at:at] = out[r.randrange(len(out) + 1) :][: r.randrange(20)]
        elif out:
            out[at % len(out)] = r.choice((r.randrange(256), r.randrange(0x80, 0xE0)))
    return bytes(out)


def fuzz(rounds: int, seed: int, seconds: float) -> int:
    """Read random mutations of the corpus beside msgpack-python; return how many."""
    r = random.Random(seed)
    corpus = [msgpack.packb(obj, default=default) for obj in CORPUS]
    end = time.monotonic() + seconds
    for i in range(rounds):
        data = mutated(r.choice(corpus), r)
        try:
            expected: Any = oracle_unpack(data)
        except Exception:  # it raises what it likes
            expected = FrameError
        try:
            result = unpack(data, hook)
        except FrameError:
            result = FrameError
        assert result is expected or same(result, expected), data
        if expected is not FrameError:
            assert same(unpack(pack(result, default), hook), oracle_unpack(pack(expected, default)))
        if i % 1000 == 0 and time.monotonic() > end:
            return i
    return rounds


def test_fuzz() -> None:
    assert fuzz(FUZZ_ROUNDS, 5, 8.0) > 10_000


# ---- threads and leaks


def test_threads() -> None:
    objects = [[{f"key {i}": f"value {i * j}", "x": [object(), i / 7]} for i in range(60)] for j in range(8)]
    expected = [oracle_pack(obj) for obj in objects]
    results = [oracle_unpack(data) for data in expected]
    failures = []

    def work(n: int) -> None:
        for i in range(200):
            k = (n + i) % len(objects)
            if pack(objects[k], default) != expected[k] or unpack(expected[k], hook) != results[k]:
                failures.append(k)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert failures == []


def test_leaks() -> None:
    """Blocks stay flat on success and on error."""
    marker = object()
    good = msgpack.packb(CORPUS[1:6], default=default)
    special = [{"__Set__": 1}, "\ud800", {"\ud800": 1}, nested(MAX_DEPTH + 1, list), VIEWS]
    writable = [*CORPUS, *SUBCLASSES, *FOR_DEFAULT, *special]
    unwritable = [{"a": marker, "b": 1}, [{(1, 2**70): 3}], Dict(a=marker), List([marker]), {"x": "\ud800"}]
    flipped = [good[:n] + b"\xc1" + good[n + 1 :] for n in range(0, len(good), 7)]

    def run() -> None:
        for obj in writable:
            pack(obj, default)
        for obj in unwritable:
            for answer in (boom, lambda obj: obj, lambda obj: marker, None):
                with pytest.raises((TypeError, BoomError)):
                    pack(obj, answer)
        unpack(good, hook)
        unpack(msgpack.packb(CORPUS[1:4], default=default), hook, False)
        with pytest.raises(BoomError):
            unpack(good, boom)
        for data in (*flipped, good[:100], good + b"x", b"", b"\x81\x91\x80\x02", b"\x91\xa3a\xffb"):
            with contextlib.suppress(FrameError):
                unpack(data, hook)

    for _ in range(3):
        run()
    least = sys.maxsize
    for _ in range(5):
        gc.collect()
        before = sys.getallocatedblocks()
        for _ in range(20):
            run()
        gc.collect()
        least = min(least, sys.getallocatedblocks() - before)
    assert least < 20


def test_references_are_given_back() -> None:
    items = [object(), (1, 2), [3], {"k": 4}, "a long text of its own" * 2]
    before = [sys.getrefcount(item) for item in items]
    for _ in range(50):
        pack([items, {"x": items, tuple(map(id, items)): items}], default)
        with pytest.raises(BoomError):
            pack([items, {"x": items}], boom)
    assert [sys.getrefcount(item) for item in items] == before
