"""What fastser writes is read by plain Python and by stock distributed, where fastser cannot be imported."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from graphs import DictKind, ListKind, Peek, PeekItems, PeekState, Plain, Slotted, check

import fastser
from fastser import Serialize, Serialized, serialize, serialize_and_split

BIG = 100_000

# Reads what each way is read by, and pickles it again with the standard pickler.
READER = """
import pickle, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ImportError(f"{name} shall not be imported here")

way, BLOCKED = sys.argv[1], sys.argv[2].split(",")
sys.setrecursionlimit(5000)
sys.meta_path.insert(0, Blocked())
sys.path.insert(0, sys.argv[3])
items = pickle.load(sys.stdin.buffer)
if way == "pickle":
    out = [pickle.loads(frames[0], buffers=frames[1:]) for header, frames in items]
elif way == "deserialize":
    from distributed.protocol import deserialize
    out = [deserialize(header, frames) for header, frames in items]
elif way == "loads":
    from distributed.protocol import loads
    out = [loads(frames) for header, frames in items]
elif way == "relay":
    from distributed.protocol import dumps, loads
    out = [loads(list(map(bytearray, dumps(loads(f, deserialize=False))))) for h, f in items]
elif way == "bytes":
    from distributed.protocol import deserialize_bytes
    out = [deserialize_bytes(frames[0]) for header, frames in items]
assert not [name for name in sys.modules if name.partition(".")[0] in BLOCKED]
sys.stdout.buffer.write(pickle.dumps(out, protocol=5))
"""


def read_elsewhere(way: str, items: list[Any], blocked: str = "fastser") -> list[Any]:
    data = pickle.dumps([(header, [bytearray(f) for f in frames]) for header, frames in items])
    command = [sys.executable, "-c", READER, way, blocked, __file__.rpartition("/")[0]]
    done = subprocess.run(command, input=data, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    return pickle.loads(done.stdout)


def shared() -> Any:
    a: list[Any] = [1]
    return [a, a, {"k": a}, (a, a)]


def cyclic() -> Any:
    x: list[Any] = [{}]
    x[0]["top"] = x
    t: Any = ([],)
    t[0].append(t)
    obj = Plain(tag=1)
    obj.me = {obj, (obj,)}
    return [x, t, obj]


def peeks() -> Any:
    source = [[1], {2: []}]
    return [source, Peek(source), PeekState(source), PeekItems(source)]


def slotted() -> Any:
    x = Slotted()
    x.part, x.tag = [1], 2
    return x


PLAIN: dict[str, Any] = {
    "numbers": [1, True, 1.5, -0.0, None, 2**63, -(2**70), 1j],
    "floats": [i / 3 for i in range(10_000)],
    "small floats": [i / 3 for i in range(100)],
    "tuple of floats": tuple(i / 3 for i in range(100)),
    "large tuple of floats": tuple(i / 3 for i in range(BIG)),
    **{
        f"ints up to {limit}": [(-1) ** (low < 0 and i % 2) * (i * 7919 % limit) for i in range(10_000)]
        for low, limit in [(0, 2**8), (-1, 2**7), (-1, 2**15), (-1, 2**31), (-1, 2**63), (0, 2**64)]
    },
    "tuple of small ints": tuple(range(200)) * 400,
    "bools": [i % 3 == 0 for i in range(70_000)],
    "tuple of bools": tuple(i % 3 == 0 for i in range(200)),
    "repeated": [["abc"] * 1000, (None,) * 1000, [2.5] * 1000, [b"x" * 70_000] * 50],
    "strings": ["", "a", "é\udcff", "x" * 300, "日本" * 40_000],
    "bytes": [b"", b"x" * BIG, bytearray(BIG), bytearray(b"a")],
    "containers": [{1: (2, [3])}, {1, "a"}, frozenset([b"c"]), {}, set()],
    "shared": shared(),
    "cyclic": cyclic(),
    "peeks": peeks(),
    "objects": [Plain(a=[1], b=Plain()), ListKind([1]), DictKind(a=1), slotted()],
    "marks": [Serialize([1, Serialize("a")]), {"k": Serialized(*serialize([1.5, "b"]))}],
    "many": [{"id": i, "name": f"n{i}", "xs": [i] * 5} for i in range(800)],
    "globals": [len, int, type(None), ..., pickle.loads, ListKind],
}
NUMPY: dict[str, Any] = {
    "array": np.arange(BIG),
    "arrays": [np.arange(5), {"a": np.ones((300, 300))}, np.float32(1.5)],
    "records": np.zeros(3, [("a", "i4"), ("b", "f8")]),
    "object array": np.array([1, "a", None, [2]], dtype=object),
    "fortran": np.asfortranarray(np.ones((400, 300))),
    "read-only": np.broadcast_to(np.arange(3), (4, 3)),
    "in objects": [Plain(a=np.zeros(BIG), b=[np.zeros(3)]), np.zeros(0)],
}


def expected(x: Any) -> Any:
    """The object as the standard pickler sends it, marks taken off."""
    if x is PLAIN["marks"]:
        return [[1, "a"], {"k": [1.5, "b"]}]
    return pickle.loads(pickle.dumps(x, protocol=5))


def compare(values: list[Any], read: list[Any]) -> None:
    assert len(values) == len(read)
    for x, r in zip(values, read, strict=True):
        check(expected(x), r)


def test_plain_python_without_numpy_reads_programs() -> None:
    values = list(PLAIN.values())
    items = [(header, frames) for header, frames in map(one_program, values)]
    # the classes of graphs need numpy to be imported
    needs = [k in ("cyclic", "peeks", "objects", "globals") for k in PLAIN]
    bare = [item for item, n in zip(items, needs, strict=True) if not n]
    compare(
        [v for v, n in zip(values, needs, strict=True) if not n],
        read_elsewhere("pickle", bare, "fastser,numpy,distributed,dask,cloudpickle,msgpack"),
    )
    compare(values, read_elsewhere("pickle", items, "fastser,distributed,dask,cloudpickle"))


def one_program(x: Any) -> Any:
    header, frames = fastser.core.codec.pickle_dumps(x)
    return header, frames


def test_plain_python_with_numpy_reads_programs() -> None:
    values = list(NUMPY.values())
    items = [one_program(x) for x in values]
    compare(values, read_elsewhere("pickle", items, "fastser,distributed,dask,cloudpickle"))


def test_pickles_without_buffers() -> None:
    values = [*PLAIN.values(), *NUMPY.values()]
    items = [({}, [fastser.pickle.dumps(x)]) for x in values if x is not PLAIN["marks"]]
    compare([x for x in values if x is not PLAIN["marks"]], read_elsewhere("pickle", items))


@pytest.mark.parametrize("wish", [True, False, None])
def test_stock_deserialize(wish: Any) -> None:
    values = [*PLAIN.values(), *NUMPY.values()]
    if wish:  # apart, what is shared by elements becomes two
        apart = (PLAIN["shared"], PLAIN["cyclic"], PLAIN["peeks"])
        small = [x for x in values if not isinstance(x, (list, tuple)) or len(x) < 10]
        values = [x for x in small if not any(x is y for y in apart)]
    items = [serialize(x, on_error="raise", iterate_collection=wish) for x in values]
    compare(values, read_elsewhere("deserialize", items))


@pytest.mark.parametrize("way", ["loads", "relay"])
def test_stock_messages(way: str) -> None:
    values = [*PLAIN.values(), *NUMPY.values()]
    items = [
        (
            {},
            fastser.dumps(
                {"k": (Serialize(x), "a")}, frame_split_size=size, context={"compression": compression}
            ),
        )
        for x, size, compression in zip(
            values, [None, 50_000] * 30, ["auto", None, "zlib"] * 20, strict=False
        )
    ]
    read = read_elsewhere(way, items)
    compare(values, [msg["k"][0] for msg in read])
    items = [({}, fastser.dumps({"k": fastser.ToPickle(x)})) for x in values]
    if way == "loads":
        read = [msg["k"] for msg in read_elsewhere(way, items)]
        for x, r in zip(values, read, strict=True):
            if x is not NUMPY["read-only"] and x is not PLAIN["marks"]:
                check(expected(x), r)


def test_stock_bytes() -> None:
    values = [*PLAIN.values(), *NUMPY.values()]
    items = [({}, [fastser.serialize_bytes(x)]) for x in values]
    compare(values, read_elsewhere("bytes", items))


def test_messages_that_distributed_cannot_write_are_read_by_it() -> None:
    deep: Any = "leaf"
    for _ in range(1500):
        deep = {"k": deep}
    messages: list[Any] = [
        {"i": 2**64, "j": (-(2**70), {2**80})},
        {"\udcff": "\udc80"},
        {"u": {"__Set__": 1}, "v": {"__Serialized__": 3}, "w": ({"__Pickled__": 1},)},
        {(1, 2**65): 1},
        deep,
    ]
    read = read_elsewhere("loads", [({}, fastser.dumps(msg)) for msg in messages])
    for msg, r in zip(messages, read, strict=True):
        check(msg, r)


def test_split_frames_that_a_reader_holds() -> None:
    x = np.arange(float(BIG))
    header, frames = serialize_and_split(x, size=200_000)
    held = Serialized(header, [bytes(f) for f in frames])
    items = [serialize([held, {"k": held}]), serialize(Plain(a=held))]
    a, b = read_elsewhere("deserialize", items)
    check(x, a[0])
    check(x, a[1]["k"])
    check(x, b.a)
