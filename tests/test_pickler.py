"""The pickler: what leaves out-of-band, what is shared, and what happens when things go wrong."""

from __future__ import annotations

import array
import collections
import copyreg
import datetime
import decimal
import enum
import fractions
import functools
import io
import pickle
import pickletools
import struct
import subprocess
import sys
import threading
import uuid
from typing import Any

import numpy as np
import pytest
from graphs import ListKind, Plain, check

import fastser
import fastser.pickle as fp

BIG = 100_000


def trip(x: Any) -> Any:
    return pickle.loads(fp.dumps(x))


def out_of_band(x: Any) -> tuple[bytes, list[Any]]:
    buffers: list[Any] = []
    return fp.dumps(x, buffer_callback=buffers.append), buffers


def address(buffer: Any) -> int:
    raw = buffer.raw() if isinstance(buffer, pickle.PickleBuffer) else memoryview(buffer)
    return int(np.frombuffer(raw, "u1").__array_interface__["data"][0])


class Foreign:
    """Has Python code in its reduction, for which a dump starts over."""

    def __reduce__(self) -> Any:
        return Foreign, ()


# ---- values


class Colour(enum.IntEnum):
    RED = 1


class Weekday(enum.Enum):
    MONDAY = "mo"


class Text(str):
    pass


class Number(int):
    pass


class Real(float):
    pass


Point = collections.namedtuple("Point", "x y")
NAN_BITS = [0x7FF8000000000000, 0xFFF8000000000000, 0x7FF8DEADBEEF0001, 0x7FF0000000000001]
NANS = [struct.unpack("<d", struct.pack("<Q", bits))[0] for bits in NAN_BITS]
EDGES = [v for n in (7, 8, 15, 16, 31, 32, 62, 63, 64, 65) for v in (2**n - 1, 2**n, -(2**n), -(2**n) - 1)]

VALUES: dict[str, Any] = {
    "bool among ints": [1] * 100 + [True],
    "bool first": [True] + [1] * 100,
    "int among floats": [1.0] * 100 + [1],
    "None late": [0.5] * 10_000 + [None],
    "None late in ints": [*range(10_000), None],
    "zeros": [0.0, -0.0] * 50,
    "NaN payloads": NANS * 20,
    "NaNs in a tuple": tuple(NANS * 20),
    "infinities": [float("inf"), float("-inf")] * 30,
    "edges of ints": EDGES,
    "edges alone": [[v] * 20 + [v - 1] * 20 for v in EDGES],
    "far beyond": [10**n for n in range(0, 400, 7)] + [-(10**n) for n in range(0, 400, 7)],
    "a very long int": [1 << 3000, -(1 << 3000), -(1 << 2047), 1 << 2039],
    "numpy scalars": [np.float64(1), np.int64(1), np.bool_(True), np.uint8(1), np.float32(1)] * 20,
    "one numpy scalar": [1.5] * 200 + [np.float64(1.5)],
    "subclasses": [Text("a"), Number(1), Real(1.5), Colour.RED, Weekday.MONDAY, Point(1, [2])] * 10,
    "one subclass": [1.5] * 100 + [Real(2.5)],
    "one enum": [1] * 100 + [Colour.RED],
    "ragged": [[1.0] * 60, [1.0], [], [1] * 60, [2**70] * 60],
    "empty": [[], (), {}, set(), frozenset(), "", b"", bytearray()],
    "trailing NULs": ["a\0", b"a\0", "\0", b"\0"] * 30,
    "surrogates": ["\udcff", "a\ud800b", "é", "日本", "\U0001f600"] * 20,
    "sets": [{1, 1.5, "a", None, (1, True)}, frozenset([b"a", frozenset([2])])],
    "keys": {1: "a", "1": "b", (1, 2): 3, None: 4, 1.5: 5, b"k": 6, frozenset([1]): 7, Colour: 8},
    "dict order": {str(i): i for i in range(2000, 0, -1)},
    "complex": [1j, complex(-0.0, 0.0), complex("nan"), 3 + 4j],
    "singletons": [None, ..., NotImplemented, type(None), type(...), type(NotImplemented), int, len],
    "standard types": [
        decimal.Decimal("1.10"),
        fractions.Fraction(1, 3),
        datetime.datetime(2026, 1, 2, fold=1),
        datetime.timedelta(3),
        uuid.UUID(int=5),
        range(3, 9, 2),
        slice(1, None),
    ],
    "collections": [
        collections.OrderedDict([(2, 1), (1, 2)]),
        collections.defaultdict(list, a=[1]),
        collections.Counter("aab"),
        collections.deque([1, 2], maxlen=5),
        ListKind([1, 2]),
    ],
    "array": [array.array("d", [1.5, -0.0]), array.array("q", range(100))],
    "batches": [list(map(str, range(n))) for n in (999, 1000, 1001, 2000, 2001)],
    "sets of batches": [set(map(str, range(n))) for n in (999, 1000, 1001, 2001)],
    "dicts of batches": [dict.fromkeys(map(str, range(n)), n) for n in (999, 1000, 1001, 2001)],
    "long tuples": [tuple(map(str, range(n))) for n in (3, 4, 255, 256, 5000)],
    "lengths of strings": ["x" * n for n in (0, 1, 255, 256, 257, 65535, 65536)],
    "lengths of bytes": [b"x" * n for n in (0, 1, 255, 256, 257, 65535, 65536)],
    "bytes keep their kind": [b"a", bytearray(b"a"), bytearray(b"b" * 300)],
    "slices": [np.arange(20)[::2], np.asfortranarray(np.ones((3, 4))), np.float32(2)],
}


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: [x, x], lambda x: {"k": (x, [x])}])
def test_values_keep_types_and_bits(name: str, wrap: Any) -> None:
    x = wrap(VALUES[name])
    check(x, trip(x))
    program, buffers = out_of_band(x)
    check(x, pickle.loads(program, buffers=buffers))
    check(x, fastser.deserialize(*fastser.serialize(x, on_error="raise")))
    check(x, fp.loads(fp.dumps([Foreign(), x]))[1])


@pytest.mark.parametrize("name", VALUES)
def test_programs_are_well_formed(name: str) -> None:
    """The standard library's checker of opcodes finds nothing to complain about."""
    pickletools.dis(fp.dumps(VALUES[name]), out=io.StringIO())


# ---- sharing


def test_a_long_string_a_million_times_is_stored_once() -> None:
    text = "longer than a short string " * 40
    for x in ([text] * 1_000_000, [text if i % 2 else text + "" for i in range(100_000)]):
        data = fp.dumps(x)
        assert len(data) < 1_000_000 * 0.4 + 3 * len(text)
        r = pickle.loads(data)
        assert r == x
        assert len(set(map(id, r))) == 1
    made = "".join(["x"] * 5000)  # held by the list alone, many times
    r = trip([made, [made, {"k": made}], (made,)])
    assert r[0] is r[1][0] is r[1][1]["k"] is r[2][0]


def test_repeated_objects_cost_nothing() -> None:
    assert len(fp.dumps([1.5] * 1_000_000)) < 100
    assert len(fp.dumps(("abc",) * 1_000_000)) < 100
    inner: list[Any] = []
    r = trip([inner] * 100)
    assert all(item is r[0] for item in r)


@pytest.mark.parametrize(
    "make",
    [
        lambda: [[]],
        lambda: {"k": []},
        lambda: [{}],
        lambda: [set()],
        lambda: [bytearray(b"a")],
        lambda: [Plain()],
        lambda: ([],),
        lambda: [[1.5] * 100],
        lambda: {"k": [None] * 100},
    ],
)
@pytest.mark.parametrize("kind", ["Peek", "PeekState", "PeekItems"])
@pytest.mark.parametrize("before", [True, False])
def test_parts_that_a_reduction_hands_out_stay_the_same_objects(make: Any, kind: str, before: bool) -> None:
    import graphs

    source = make()
    peek = getattr(graphs, kind)(source)
    x = [source, peek] if before else [peek, source]
    del source
    check(x, trip(x))
    check(x, fastser.deserialize(*fastser.serialize(x)))
    r = trip(x)
    source, peek = r if before else r[::-1]
    assert peek.parts()[-1] is graphs.members(source)[-1]


class Callable:
    """A reduction that is no function: still foreign code."""

    def __init__(self, source: Any):
        self.source = source

    class _Reduce:
        def __get__(self, obj: Any, cls: Any) -> Any:
            return self if obj is None else lambda protocol: (list, ([obj.source[0]],))

    __reduce_ex__ = _Reduce()


class State(dict):
    pass


class Dynamic:
    """Its __dict__ is made up on each look."""

    source: Any = None

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        return {"part": Dynamic.source[0]}

    @__dict__.setter
    def __dict__(self, value: Any) -> None:
        raise AssertionError("not reached")


class Slots:
    __slots__ = ("part",)


class Overridden(Slots):
    source: Any = None
    __slots__ = ()

    @property
    def part(self) -> Any:  # type: ignore[override]
        return Overridden.source[0]

    @part.setter
    def part(self, value: Any) -> None:
        Slots.part.__set__(self, value)  # type: ignore[attr-defined]


def test_a_callable_reduction_may_hand_out_parts() -> None:
    x: list[Any] = [[[]]]
    x.append(Callable(x[0]))
    r = trip(x)
    assert r[1][0] is r[0][0]


def test_a_reduction_in_the_dict_of_the_instance_may_hand_out_parts() -> None:
    class Local:
        pass

    Local.__qualname__ = "Late"
    globals()["Late"] = Local
    x: list[Any] = [[[]], Local()]
    source = x[0]
    x[1].__reduce_ex__ = lambda protocol: (list, ([source[0]],))
    r = trip(x)
    assert r[1][0] is r[0][0]


def test_a_property_over_a_slot_may_hand_out_parts() -> None:
    x: list[Any] = [[[]], Overridden()]
    Overridden.source = x[0]
    r = trip(x)
    Overridden.source = None
    assert Slots.part.__get__(r[1]) is r[0][0]  # type: ignore[attr-defined]


def test_cycles_of_every_kind() -> None:
    t: Any = ([],)
    t[0].append(t)
    r = trip(t)
    assert r[0][0] is r
    ring: dict[Any, Any] = {}
    ring["self"] = ring
    assert (r := trip(ring))["self"] is r
    obj = Plain()
    obj.set = {obj}
    obj.frozen = frozenset([obj, (obj,)])
    r = trip(obj)
    assert r.set == {r}
    assert r.frozen == {r, (r,)}
    own = ListKind()
    own.append(own)
    own.me = own
    r = trip(own)
    assert r[0] is r.me is r
    deep: Any = []
    x: Any = deep
    for _ in range(1000):
        x = (x,)
    deep.append(x)
    r = trip(deep)
    y = r
    for _ in range(1001):
        y = y[0]
    assert y is r


def test_frozenset_that_holds_itself_through_an_instance() -> None:
    obj = Plain()
    obj.back = frozenset([obj])
    f = obj.back
    (r,) = trip(f)
    assert r.back == {r}


# ---- buffers


@pytest.mark.parametrize("size", [65_535, 65_536, 65_537])
@pytest.mark.parametrize(
    "make",
    [
        lambda n: b"x" * n,
        bytearray,
        lambda n: [0.5 * i for i in range(n // 8)] + [1.5] * (n % 8 > 0),
        lambda n: list(range(250)) * (n // 250) + [1] * (n % 250),
        lambda n: tuple(i * 2**40 for i in range(-(-n // 8))),
    ],
)
def test_from_64_kib_on_buffers_go_out_of_band(make: Any, size: int) -> None:
    x = make(size)
    program, buffers = out_of_band([x])
    assert len(buffers) == (
        size >= 65_536 or (type(x) in (list, tuple) and size == 65_535 and len(x) == 8192)
    )
    assert len(program) < 200 or not buffers
    check([x], pickle.loads(program, buffers=buffers))


def test_large_buffers_are_the_memory_of_the_object() -> None:
    data = bytes(range(256)) * 1000
    mutable = bytearray(data)
    typed = memoryview(bytearray(data))
    x = [data, {"k": mutable}, np.asarray(typed), np.arange(BIG), Plain(a=np.ones(BIG))]
    header, frames = fastser.serialize(x)
    assert header["serializer"] == "pickle"
    assert [address(f) for f in frames[1:]] == [address(b) for b in (data, mutable, typed, x[3], x[4].a)]
    assert header["writeable"] == (False, True, True, True, True)
    r = fastser.deserialize(header, frames)
    check(x, r)
    assert address(r[3]) == address(x[3])


def test_arrays_arrive_as_views_of_the_frames() -> None:
    x = {"a": np.arange(BIG), "b": [np.ones((300, 300))]}
    header, frames = fastser.serialize(x)
    received = [bytearray(f) for f in frames]
    r = fastser.deserialize(header, received)
    assert address(r["a"]) == address(received[1])
    assert address(r["b"][0]) == address(received[2])
    assert r["a"].flags.writeable
    r = fastser.deserialize(header, list(map(bytes, received)))
    assert r["a"].flags.writeable  # a copy: bytes cannot be written to
    x["a"].flags.writeable = False
    header, frames = fastser.serialize(x)
    r = fastser.deserialize(header, [bytes(f) for f in frames])
    assert not r["a"].flags.writeable


def test_small_arrays_stay_in_band() -> None:
    for x in ([np.arange(5)] * 2 + [np.full(7, i) for i in range(1000)], [b"x" * 1000] * 100):
        header, frames = fastser.serialize(x)
        assert len(frames) == 1
        check(x, fastser.deserialize(header, frames))


def test_a_million_floats_are_a_few_frames() -> None:
    x = [i / 7 for i in range(1_000_000)]
    for y in (x, tuple(x), {"k": [x]}):
        header, frames = fastser.serialize(y)
        assert len(frames) <= 3
        assert sum(memoryview(f).nbytes for f in frames) < 8_000_400
        r = fastser.deserialize(header, frames)
        assert r == y
        assert type(r) is type(y)


def test_a_true_answer_means_in_band() -> None:
    x = [bytearray(BIG), np.arange(BIG), [i / 3 for i in range(BIG)], b"y" * BIG]
    seen: list[Any] = []
    data = fp.dumps(x, buffer_callback=lambda buffer: seen.append(buffer) or True)
    assert len(seen) == 4
    check(x, pickle.loads(data))


def test_any_pickle_buffer_is_offered() -> None:
    small = pickle.PickleBuffer(b"abc")
    seen: list[Any] = []
    data = fp.dumps([small], buffer_callback=seen.append)
    assert seen == [small]
    assert pickle.loads(data, buffers=[b"xyz"])[0] == b"xyz"
    assert pickle.loads(fp.dumps([small])) == [b"abc"]
    assert pickle.loads(fp.dumps([pickle.PickleBuffer(bytearray(b"abc"))])) == [bytearray(b"abc")]
    with pytest.raises(pickle.PicklingError, match="non-contiguous"):
        fp.dumps(pickle.PickleBuffer(np.arange(10)[::2]))


@pytest.mark.parametrize(
    "make",
    [
        lambda: [b"x" * BIG, Foreign()],
        lambda: [bytearray(BIG), Foreign(), bytearray(BIG)],
        lambda: [[i / 3 for i in range(BIG)], Foreign(), tuple(i / 7 for i in range(BIG))],
        lambda: [np.zeros(BIG), Foreign()],
        lambda: [np.zeros(BIG), Foreign(), np.ones(BIG)],
        lambda: [bytearray(BIG), np.zeros(BIG), Foreign(), np.ones(BIG)],
        lambda: [array.array("d", range(BIG)), Foreign(), bytearray(BIG)],
    ],
)
def test_starting_over_asks_once_for_each_buffer(make: Any) -> None:
    x = make()
    program, buffers = out_of_band(x)
    assert len(buffers) == len([part for part in x if not isinstance(part, Foreign)])
    r = pickle.loads(program, buffers=buffers)
    for left, right in zip(x, r, strict=True):
        if not isinstance(left, Foreign):
            check(left, right)
    header, frames = fastser.serialize(x)
    assert len(frames) == 1 + len(buffers) == 1 + len(header["writeable"])


def test_a_callback_that_raises() -> None:
    def refuse(buffer: Any) -> Any:
        raise LookupError("no room")

    with pytest.raises(LookupError, match="no room"):
        fp.dumps([1, bytearray(BIG)], buffer_callback=refuse)
    assert trip([1]) == [1]


# ---- objects that change while they are written


class Acts:
    """Does something when it is reduced."""

    def __init__(self, act: Any):
        self.act = act

    def __reduce__(self) -> Any:
        self.act()
        return Foreign, ()


def _grow_list(x: Any) -> None:
    x.extend([[]] * 3)


def _replace(x: Any) -> None:
    x[:] = [[i] for i in range(50)]


@pytest.mark.parametrize(
    "act",
    [list.clear, list.pop, _grow_list, _replace, lambda x: x.sort(key=id), lambda x: x.__delitem__(slice(2))],
)
@pytest.mark.parametrize("size", [3, 1500])
def test_a_list_that_changes(act: Any, size: int) -> None:
    for at in (0, 1, size // 2, size):
        x: list[Any] = [[i] for i in range(size)]
        done: list[bool] = []

        def once(x: list[Any] = x, done: list[bool] = done) -> None:
            if not done:
                done.append(True)
                act(x)

        x.insert(at, Acts(once))
        try:
            r = trip(x)
        except (RuntimeError, pickle.PicklingError):
            continue
        assert type(r) is list
        assert all(type(item) in (list, Foreign) for item in r)


@pytest.mark.parametrize(
    "act",
    [
        dict.clear,
        dict.popitem,
        lambda x: x.update({i: [i] for i in range(5000)}),
        lambda x: (x.popitem(), x.update({"new": []})),
        lambda x: [x.pop(k) for k in list(x)[:2]] and x.update({"n1": [], "n2": []}),
    ],
)
@pytest.mark.parametrize("size", [3, 1500])
def test_a_dict_that_changes(act: Any, size: int) -> None:
    for at in (0, size // 2):
        for as_key in (False, True):
            x: dict[Any, Any] = {}
            for i in range(size):
                x[f"k{i}"] = [i]
                if i == at:
                    bad = Acts(lambda x=x: act(x))
                    x[bad if as_key else "bad"] = [] if as_key else bad
            try:
                r = trip(x)
            except (RuntimeError, KeyError, pickle.PicklingError):
                continue
            assert type(r) is dict


@pytest.mark.parametrize("act", [set.clear, lambda x: x.update(range(5000)), set.pop])
def test_a_set_that_changes(act: Any) -> None:
    x: set[Any] = set(map(str, range(50)))
    x.add(Acts(lambda: act(x)))
    try:
        r = trip(x)
    except (RuntimeError, KeyError):
        return
    assert type(r) is set


def test_a_list_that_changes_in_the_callback() -> None:
    x: list[Any] = [[i / 3 for i in range(BIG)], bytearray(BIG), [1, 2]]

    def callback(buffer: Any) -> Any:
        x.clear()

    r = pickle.loads(fp.dumps(x, buffer_callback=callback), buffers=[bytes(8 * BIG)] * 2)
    assert r[0][:2] == [0.0, 0.0]


def test_a_dump_inside_of_a_dump() -> None:
    inner: list[bytes] = []
    x = [b"a" * 3000, Acts(lambda: inner.append(fp.dumps(["nested", b"z" * 20_000_000]))), "end"]
    r = trip(x)
    assert (r[0], r[2]) == (x[0], "end")
    assert pickle.loads(inner[0])[0] == "nested"


REENTRANT = """
import io, pickle, fastser.pickle as fp
class Inner:
    def __reduce__(self):
        pickler.dump(b"y" * {size})
        return int, ()
fp.dumps([1])
file = io.BytesIO()
pickler = fp.Pickler(file)
try:
    pickler.dump([Inner(), "a" * 500, Inner()])
except RuntimeError:
    print("refused")
else:
    file.seek(0)
    read = pickle.Unpickler(file).load
    parts = [read() for _ in range(3)]
    assert [0, "a" * 500, 0] in parts
    print("worked")
"""


@pytest.mark.parametrize("size", [3_000_000, 50_000_000])
def test_a_pickler_used_inside_its_own_dump(size: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", REENTRANT.format(size=size)], capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()[-500:]
    assert done.stdout.strip() in (b"refused", b"worked")


# ---- failures


def test_a_failing_element_leaves_the_pickler_usable() -> None:
    file = io.BytesIO()
    pickler = fp.Pickler(file)
    lock = threading.Lock()
    for bad in ([lock], [1, [lock]], (lock, 2), {"k": lock}, frozenset([lock]), Plain(a=lock)):
        with pytest.raises(TypeError, match="lock"):
            pickler.dump(bad)
        assert file.getvalue() == b""
    pickler.dump({"k": [1]})
    assert pickle.loads(file.getvalue()) == {"k": [1]}


def test_what_failed_is_not_remembered() -> None:
    file = io.BytesIO()
    pickler = fp.Pickler(file)
    inner = [1, "abc", [2]]
    with pytest.raises(TypeError):
        pickler.dump([inner, threading.Lock()])
    pickler.dump(inner)
    assert pickle.loads(file.getvalue()) == inner


def test_what_was_dumped_before_a_failure_is_still_remembered() -> None:
    file = io.BytesIO()
    pickler = fp.Pickler(file)
    first = ["kept"]
    pickler.dump(first)
    with pytest.raises(TypeError):
        pickler.dump([first, threading.Lock()])
    pickler.dump([first])
    file.seek(0)
    unpickler = pickle.Unpickler(file)
    a = unpickler.load()
    assert unpickler.load()[0] is a


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (3, "string or tuple"),
        ((int,), None),
        ((3, ()), "callable"),
        ((int, []), "must be a tuple"),
        ((int, (), None, 5), "iterator"),
        ((int, (), None, None, 5), "iterator"),
        ((int, (), None, None, None, 5), "function"),
        ((int, (), None, None, None, None, None), "2 through 6"),
        ("no_such_global", "no_such_global"),
        ((copyreg.__newobj__, ()), "empty"),  # type: ignore[attr-defined]
        ((copyreg.__newobj__, (int,)), "wrong class"),  # type: ignore[attr-defined]
        ((copyreg.__newobj_ex__, (1,)), "exactly 3"),  # type: ignore[attr-defined]
        ((dict, (), None, None, iter([1])), "2-tuples"),
    ],
)
def test_bad_reductions_are_named(value: Any, match: str | None) -> None:
    class Bad:
        def __reduce__(self) -> Any:
            return value

    if match is None:
        pytest.skip("a reducer's way to say: write this in its place")
    with pytest.raises((pickle.PicklingError, TypeError), match=match):
        fp.dumps([1, Bad()])


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="protocol must be <= 5, got 6"):
        fp.dumps(1, 6)
    with pytest.raises(ValueError, match="protocol must be <= 5, got 6"):
        fp.Pickler(io.BytesIO(), 6)
    with pytest.raises(ValueError, match="buffer_callback needs protocol >= 5"):
        fp.dumps(1, 4, buffer_callback=print)
    with pytest.raises(ValueError, match="buffer_callback needs protocol >= 5"):
        fp.Pickler(io.BytesIO(), 4, buffer_callback=print)
    with pytest.raises(TypeError, match="write"):
        fp.Pickler(3)
    with pytest.raises(TypeError, match="memo"):
        fp.Pickler(io.BytesIO()).memo = 3


@pytest.mark.parametrize("protocol", range(6))
def test_every_protocol(protocol: int) -> None:
    x = [1.5, {"a": (1, Plain(b=[2]))}, np.arange(3), len]
    data = fp.dumps(x, protocol)
    assert protocol < 2 or data[:2] == bytes([0x80, protocol])
    check(x, pickle.loads(data))
    file = io.BytesIO()
    fp.dump(x, file, protocol)
    file.seek(0)
    check(x, fp.load(file))
    file = io.BytesIO()
    fp.Pickler(file, protocol).dump(x)
    check(x, pickle.loads(file.getvalue()))


def test_hooks() -> None:
    class Mine(fp.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            return ("array", obj.tolist()) if isinstance(obj, np.ndarray) else None

        def reducer_override(self, obj: Any) -> Any:
            return (list, ((obj.a,),)) if isinstance(obj, Plain) else NotImplemented

    class Reader(fp.Unpickler):
        def persistent_load(self, pid: Any) -> Any:
            return pid

    file = io.BytesIO()
    Mine(file).dump([np.arange(2), Plain(a=5)])
    file.seek(0)
    assert Reader(file).load() == [("array", [0, 1]), [5]]
    file = io.BytesIO()
    pickler = fp.Pickler(file)
    pickler.dispatch_table = {Plain: lambda obj: (list, ((obj.a,),))}
    pickler.dump(Plain(a=6))
    assert pickle.loads(file.getvalue()) == [6]


def test_memo_and_fast() -> None:
    file = io.BytesIO()
    pickler = fp.Pickler(file)
    x = ["abc", ["def"]]
    pickler.dump(x)
    assert {id(x), id(x[1])} <= set(pickler.memo)
    size = file.tell()
    pickler.dump(x)
    assert file.tell() - size < 10
    pickler.clear_memo()
    assert pickler.memo == {}
    size = file.tell()
    pickler.dump(x)
    assert file.tell() - size > 10
    fast = fp.Pickler(file := io.BytesIO())
    fast.fast = True
    fast.dump([x, x])
    assert b"\x94" not in file.getvalue()
    assert pickle.loads(file.getvalue()) == [x, x]


# ---- depth


class Link:
    pass


def chain(kind: str, depth: int) -> Any:
    x: Any = None
    for _ in range(depth):
        if kind == "list":
            x = [x]
        elif kind == "tuple":
            x = (x,)
        elif kind == "long tuple":
            x = (x, 1, 2, 3)
        elif kind == "dict":
            x = {"k": x}
        elif kind == "frozenset":
            x = frozenset([x])
        elif kind == "instance":
            link = Link()
            link.next = x  # type: ignore[attr-defined]
            x = link
        elif kind == "reduction":
            x = functools.partial(len, x)
        else:
            x = ListKind([x])
    return x


def depth_of(x: Any) -> int:
    n = 0
    while x is not None:
        if isinstance(x, Link):
            x = x.next  # type: ignore[attr-defined]
        elif isinstance(x, functools.partial):
            x = x.args[0]
        else:
            x = next(iter(x.values() if isinstance(x, dict) else x))
        n += 1
    return n


@pytest.mark.parametrize("kind", ["list", "tuple", "long tuple", "dict", "frozenset"])
def test_3000_levels_work(kind: str) -> None:
    x = chain(kind, 3000)
    assert depth_of(trip(x)) == 3000
    assert depth_of(fastser.deserialize(*fastser.serialize(x, on_error="raise"))) == 3000


@pytest.mark.parametrize("kind", ["instance", "reduction", "subclass"])
def test_1000_levels_of_objects_work(kind: str) -> None:
    assert depth_of(trip(chain(kind, 1000))) == 1000


@pytest.mark.parametrize(
    "kind", ["list", "tuple", "long tuple", "dict", "frozenset", "instance", "reduction", "subclass"]
)
def test_too_deep_is_an_error(kind: str) -> None:
    depth = 20_000 if kind in ("reduction", "subclass") else 200_000
    code = (
        "import sys, fastser, fastser.pickle as fp, io\n"
        "from test_pickler import chain\n"
        f"x = chain({kind!r}, {depth})\n"
        "pickler = fp.Pickler(io.BytesIO())\n"
        "for f in (fp.dumps, pickler.dump, lambda x: fp.dumps([x, x])):\n"
        "    try:\n"
        "        f(x)\n"
        "    except RecursionError:\n"
        "        continue\n"
        "    raise SystemExit('no error')\n"
        "pickler.dump(1)\n"
        "try:\n"
        "    fastser.serialize(x, on_error='raise')\n"
        "except fastser.SerializationError as error:\n"
        "    assert isinstance(error.__cause__, RecursionError)\n"
        "header, frames = fastser.serialize([x])\n"
        "assert header == {'serializer': 'error'}\n"
        "import os; os._exit(0)\n"  # some of these cannot be freed by Python itself
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, cwd=_here())
    assert done.returncode == 0, done.stderr.decode()[-500:]


def _here() -> str:
    return __file__.rpartition("/")[0]


NESTED_DUMPS = """
import pickle, fastser.pickle as fp
class Nest:
    def __init__(self, x): self.x = x
    def __reduce__(self): return pickle.loads, (fp.dumps(self.x),)
x = 1
for _ in range(60):
    for _ in range(3000):
        x = (x,)
    x = Nest(x)
try:
    fp.dumps(x)
except RecursionError:
    pass
"""


def test_depth_of_dumps_inside_of_dumps() -> None:
    done = subprocess.run([sys.executable, "-c", NESTED_DUMPS], capture_output=True, check=False)
    assert done.returncode == 0, done.returncode
