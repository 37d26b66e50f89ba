"""Kinds of trouble that users of serializers reported, each on all the ways an object travels."""

from __future__ import annotations

import array
import collections
import ctypes
import datetime
import decimal
import enum
import functools
import http
import pickle
import subprocess
import sys
import threading
import zoneinfo
from typing import Any, NamedTuple

import distributed.protocol as stock
import numpy as np
import pytest
from graphs import check

import fastser
from fastser import Serialize


def by_serialize(x: Any) -> Any:
    header, frames = fastser.serialize(x, on_error="raise")
    return fastser.deserialize(header, [bytearray(f) for f in frames])


def by_message(x: Any) -> Any:
    return fastser.loads([bytearray(f) for f in fastser.dumps({"x": Serialize(x)}, on_error="raise")])["x"]


def by_bytes(x: Any) -> Any:
    return fastser.deserialize_bytes(fastser.serialize_bytes(x, on_error="raise"))


def by_zlib_pieces(x: Any) -> Any:
    frames = fastser.dumps(
        {"x": Serialize(x)}, on_error="raise", frame_split_size=900, context={"compression": "zlib"}
    )
    return fastser.loads([bytes(f) for f in frames])["x"]


def by_one_process(x: Any) -> Any:
    return fastser.loads(fastser.dumps({"x": Serialize(x)}, frame_split_size=900))["x"]


def by_stock_reader(x: Any) -> Any:
    return stock.loads([bytearray(f) for f in fastser.dumps({"x": Serialize(x)})])["x"]


WAYS = [by_serialize, by_message, by_bytes, by_zlib_pieces, by_one_process, by_stock_reader]


class Unit(np.ndarray):
    """Has an attribute that its pickle keeps."""

    unit = ""

    def __array_finalize__(self, obj: Any) -> None:
        self.unit = getattr(obj, "unit", "")

    def __reduce__(self) -> Any:
        function, args, state = super().__reduce__()
        return function, args, (*state, self.unit)

    def __setstate__(self, state: Any) -> None:
        self.unit = state[-1]
        super().__setstate__(state[:-1])


def unit() -> Any:
    x = np.arange(3.0).view(Unit)
    x.unit = "m"
    return x


class Tagged(array.array):
    def __reduce_ex__(self, protocol: Any) -> Any:
        return _tagged, (self.typecode, self.tolist(), self.tag)


def _tagged(code: str, values: Any, tag: str) -> Any:
    x = Tagged(code, values)
    x.tag = tag
    return x


class Colour(enum.IntEnum):
    RED = 1


class Method(str, enum.Enum):
    GET = "get"


class Place(NamedTuple):
    name: str
    data: Any


class Pair(tuple):
    pass


class TwoArguments(Exception):
    def __init__(self, a: Any, b: Any):
        super().__init__(f"{a} and {b}")
        self.a = a


def frozen(x: np.ndarray) -> np.ndarray:
    x.flags.writeable = False
    return x


padded = np.dtype({"names": ["a"], "formats": ["i1"], "offsets": [0], "itemsize": 8})
Struct = type("Struct", (ctypes.Structure,), {"_fields_": [("a", ctypes.c_int)]})

# Arrays: name -> object; compared by dtype with metadata, layout, flags and bytes
ARRAYS: dict[str, Any] = {
    "record array": np.rec.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8")]),
    "metadata of a dtype": np.ones(3, np.dtype("i1", metadata={"vocabulary": {"off": 0}})),
    "padding after the last field": np.zeros(3, padded),
    "big-endian": np.arange(3000.0).astype(">f8"),
    "generic time unit": np.array([1, 2], "m8"),
    "datetimes": np.array(["2026-01-01", "NaT"], "M8[ns]"),
    "object field": np.array([(1, [2])], dtype=[("a", "i4"), ("b", "O")]),
    "broadcast and reversed": np.broadcast_to(np.arange(4), (3, 4))[:, ::-1],
    "slice of Fortran": np.asfortranarray(np.arange(24).reshape(4, 6))[1:3, ::2],
    "flipped": np.arange(12).reshape(3, 4)[::-1, ::-1],
    "empty": np.empty((0, 3)),
    "empty in the middle": np.empty((2, 0, 5), "i2"),
    "zero-dimensional": np.array(5.5),
    "long double": np.arange(6, dtype="g").reshape(2, 3).T,
    "large and 2-D": np.arange(5000.0).reshape(50, 100),
    "read-only": frozen(np.arange(5000)),
    "half precision": np.arange(700).astype("f2"),
    "strings": np.array(["a\0", "", "é"]),
    "masked, default fill": np.ma.masked_array(np.array([1, 2], "u1"), [0, 1]),
    "masked, hard": np.ma.masked_array([1, 2], [0, 1], hard_mask=True),
    "masked, own fill": np.ma.masked_array([1.0, 2], [0, 1], "f4", fill_value=7),
    "subclass": unit(),
}


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("name", ARRAYS)
def test_arrays(name: str, way: Any) -> None:
    from stock_reader import describe

    x = ARRAYS[name]
    for wrap, part in ((lambda y: y, lambda y: y), (lambda y: [1, {"k": y}], lambda y: y[1]["k"])):
        r = part(way(wrap(x)))
        assert type(r) is type(x)
        assert getattr(r, "unit", "") == getattr(x, "unit", "")
        left, right = (y.view(np.ndarray) if name == "subclass" else y for y in (x, r))
        told, expected = list(describe(right)[1]), list(describe(left)[1])
        if not (x.flags.c_contiguous or x.flags.f_contiguous):  # what has no order may get one
            told[2] = expected[2]
        assert told == expected


VALUES: dict[str, Any] = {
    "bool, int and float": [True, 1, 1.0, False, 0, 0.0, -0.0],
    "late strangers": [[0.5] * 1000 + [1], [1] * 1000 + [True], [1] * 1000 + [None], [1.5] * 1000 + [None]],
    "trailing NULs": ["a\0", b"a\0"] * 40,
    "numpy scalars": [np.float64(1), np.int64(1), np.bool_(True), 1, True, np.str_("a"), np.bytes_(b"a")],
    "keys": {1: "a", "1": "b", (1, "x"): "c", b"1": "d", None: "e", Colour.RED: np.arange(3)},
    "enum keys": {Colour.RED: np.ones(2), Method.GET: np.zeros(2)},
    "named tuple keys": {Place("a", 1): np.ones(2), ("a", 2): np.ones(3)},
    "named tuple of arrays": Place("x", np.arange(3)),
    "tuple subclass": Pair([np.arange(3), 1]),
    "dict subclasses": [collections.defaultdict(list, a=[1]), collections.OrderedDict(b=1)],
    "ordered": {"z": 1, "a": 2, "m": {"y": 1, "b": 2}},
    "bytes": [b"a", bytearray(b"b"), b"x" * 70_000, bytearray(70_000)],
    "edges": [2**63 - 1, 2**63, -(2**63), 2**64 - 1, 2**64, -(2**64), 10**50],
    "lists in tuples": ([1, (2, [3])], [(), []]),
    "ragged": [[1.0, 2.0], [1.0], [], [[1.0]]],
    "mixed sets": [{1, "a", (2, 3.5)}, frozenset([None, b"x"])],
    "standard": [
        decimal.Decimal("1.50"),
        datetime.date(2026, 1, 2),
        datetime.timedelta(1),
        http.HTTPStatus.OK,
    ],
    "types": [int, Colour, len, type(None)],
}


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("name", VALUES)
def test_values(name: str, way: Any) -> None:
    x = VALUES[name]
    check(x, way(x))


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_sharing(way: Any) -> None:
    a, inner = np.arange(20_000), [1]
    r = way([a, a, {"x": inner, "y": inner}])
    assert r[0] is r[1]
    assert r[2]["x"] is r[2]["y"]
    ring: list[Any] = [a, 1]
    ring.append(ring)
    r = way(ring)
    assert r[2] is r
    left, right = {"n": 1}, {"n": 2}
    left["other"], right["other"] = right, left
    r = way([left])
    assert r[0]["other"]["other"] is r[0]


def test_what_is_repeated_is_sent_once() -> None:
    a, text = np.arange(5000), "x" * 5000
    assert len(fastser.serialize_bytes([a] * 20, compression=None)) < 45_000
    assert len(fastser.serialize_bytes([text] * 1000, compression=None)) < 12_000
    assert len(fastser.serialize_bytes({i: b"y" * 5000 for i in range(3)}, compression=None)) < 16_000
    wide = np.broadcast_to(np.arange(5), (10_000, 5))
    assert len(fastser.serialize_bytes([{"in": wide}], compression=None)) < 2000
    check(wide.tolist(), by_bytes([{"in": wide}])[0]["in"].tolist())
    assert not by_bytes([wide])[0].flags.writeable


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_flags_of_parts(way: Any) -> None:
    r = way({"a": frozen(np.arange(9000)), "b": np.arange(9000), "c": [frozen(np.arange(3)), np.arange(3)]})
    parts = [r["a"], r["b"], *r["c"]]
    assert [part.flags.writeable for part in parts] == [False, True, False, True]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_memoryviews(way: Any) -> None:
    grid = np.arange(12, dtype="i4").reshape(3, 4)
    for x in (
        memoryview(b"abc"),
        memoryview(bytearray(b"abc")),
        memoryview(grid),
        memoryview(np.asfortranarray(grid)),
        memoryview(grid[:, ::2]),
        memoryview(grid[::-1]),
        memoryview(np.zeros((0, 3))),
        memoryview((ctypes.c_int * 3)(1, 2, 3)),
        memoryview(array.array("d", [1.5])),
    ):
        r = way([x])[0]
        assert (r.tobytes(), r.shape, r.readonly) == (x.tobytes(), x.shape, x.readonly)
        assert r.format == x.format


def test_subclass_of_array() -> None:
    x = _tagged("d", [1.5], "t")
    for way in WAYS:
        r = way([x])[0]
        assert (type(r), r.tag, r.tolist()) == (Tagged, "t", [1.5])


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_exceptions(way: Any) -> None:
    try:
        raise TwoArguments(1, 2) from ValueError("cause")
    except TwoArguments as error:
        x = error
    r = way([x])[0] if way is not by_stock_reader else by_serialize([x])[0]
    assert type(r) is TwoArguments
    assert r.args == ("1 and 2",)
    assert r.a == 1


def test_time_zones_and_folds() -> None:
    zone = zoneinfo.ZoneInfo("UTC")
    x = [datetime.datetime(2026, 10, 25, 2, fold=1, tzinfo=zone), datetime.time(1, fold=1)]
    for way in WAYS:
        r = way(x)
        assert r == x
        assert [part.fold for part in r] == [1, 1]
        assert r[0].tzinfo is zone


def test_one_member_that_cannot_travel_is_named() -> None:
    for x, path in (
        ({"good": 1, "bad": threading.Lock()}, "x['bad']"),
        ([1, (i for i in "a"), 3], "x[1]"),
        ((1, {"k": [threading.Lock()]}), "x[1]['k'][0]"),
    ):
        msg = fastser.dumps({"x": Serialize(x), "y": 1})  # the others are not harmed
        with pytest.raises(fastser.SerializationError) as raised:
            fastser.loads(msg)
        assert path in str(raised.value)


def test_an_error_of_unpickling_is_the_users() -> None:
    class Breaks:
        def __reduce__(self) -> Any:
            return int, ("not a number",)

    header, frames = fastser.serialize([Breaks()])
    for _ in range(2):
        with pytest.raises(ValueError, match="not a number"):
            fastser.deserialize(header, frames)


@pytest.mark.parametrize(
    "make",
    [
        lambda: [i / 7 for i in range(300_000)],
        lambda: {str(i): i / 7 for i in range(100_000)},
        lambda: [(i, i / 7) for i in range(100_000)],
        lambda: [b"%d" % i for i in range(100_000)],
        lambda: [str(i) for i in range(100_000)],
        lambda: [np.arange(4) for _ in range(3000)],
        lambda: np.ones((2000, 1000))[::-1, ::-1],
    ],
)
def test_frames_do_not_multiply(make: Any) -> None:
    """Each of these became a header and a frame for each element somewhere, which took minutes."""
    x = make()
    r = by_message(x)
    assert type(r) is type(x)
    assert len(r) == len(x)
    assert len(fastser.serialize(x)[1]) <= 3


def test_mostly_zeros_are_compressed() -> None:
    x = np.zeros(300_000)
    x[::10] = np.random.default_rng(1).random(30_000)
    x[:1000] = np.random.default_rng(2).random(1000)
    assert len(fastser.serialize_bytes(x)) < 0.6 * x.nbytes
    check(x, by_bytes(x))


SENDER = """
import functools, pickle, sys, fastser
from typing import NamedTuple

class Point(NamedTuple):
    x: int

@functools.lru_cache(maxsize=10)
def double(x, *, by=2):
    return by * x

class Kind:
    def __init__(self, f): self.f = f
    def __call__(self, x): return self.f(x) + 1

items = [
    (double, 3, 6),
    (lambda x, *, k=5: x + k, 1, 6), (Kind(lambda x: x * 10), 2, 21),
    (lambda x: Point(x).x, 4, 4),
    (functools.partial(lambda a, b: a - b, 10), 1, 9),
]
out = []
for f, x, y in items:
    for wrapped in (f, [f], {"k": (f,)}):
        header, frames = fastser.serialize(wrapped, on_error="raise")
        out.append((header, [bytes(b) for b in frames], x, y))
sys.stdout.buffer.write(pickle.dumps(out))
"""

RECEIVER = """
import pickle, sys
sys.modules["fastser"] = None
from distributed.protocol import deserialize
for header, frames, x, y in pickle.load(sys.stdin.buffer):
    f = deserialize(header, frames)
    f = f[0] if isinstance(f, list) else f["k"][0] if isinstance(f, dict) else f
    assert f(x) == y, (f, x, y)
"""


def test_functions_of_main_run_in_another_process() -> None:
    sent = subprocess.run([sys.executable, "-c", SENDER], capture_output=True, check=False)
    assert sent.returncode == 0, sent.stderr.decode()
    done = subprocess.run(
        [sys.executable, "-c", RECEIVER], input=sent.stdout, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()


def test_registered_class_keeps_its_attributes() -> None:
    class Model:
        pass

    fastser.register_generic(Model)
    try:
        x = Model()
        x.__dict__.update(
            a=[1, (2,)], b={1: "x"}, c=2**80, d="\udcff", e=np.arange(9000), f=np.float64(1), g=None
        )
        for way in WAYS[:-1]:
            r = way([x])[0]
            check(sorted(x.__dict__.items()), sorted(r.__dict__.items()))
    finally:
        for registry in (fastser.dask_serialize, fastser.dask_deserialize):
            registry._lookup.pop(Model)
            registry._cache.clear()


def test_pandas() -> None:
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame(
        {"a": [1.5, None], "b": ["x", None]}, index=pd.date_range("2026", periods=2, freq="D")
    )
    frame.attrs["source"] = "test"
    wide = pd.DataFrame(np.arange(60_000.0).reshape(600, 100))
    for way in WAYS:
        r = way([frame, wide])
        pd.testing.assert_frame_equal(r[0], frame, check_freq=True)
        assert r[0].attrs == {"source": "test"}
        pd.testing.assert_frame_equal(r[1], wide)
    assert len(pickle.dumps(frame)) > 0


def test_cached_function_is_not_called_to_be_sent() -> None:
    calls = []

    @functools.lru_cache
    def f(x: Any) -> Any:
        calls.append(x)
        return x

    assert by_message([f])[0](5) == 5
