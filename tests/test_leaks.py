"""Nothing is kept: blocks and references are flat over many calls, on success and on error."""

from __future__ import annotations

import contextlib
import gc
import io
import pickle
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from graphs import ListKind, Peek, Plain, Slotted

import fastser
from fastser import FrameError, Serialize, Serialized, ToPickle, serialize
from fastser._lists import kind, to_ndarray

CALLS = 2000
BIG = 70_000


class Refuses:
    def __reduce__(self) -> Any:
        raise LookupError("not today")


class Foreign:
    def __reduce__(self) -> Any:
        return Foreign, ()


def cyclic() -> Any:
    x: list[Any] = [{}, ()]
    x[0]["top"] = x
    t: Any = ([],)
    t[0].append(t)
    return [x, t]


LOCK = threading.Lock()
VALUES: dict[str, Any] = {
    "plain": [1, 2**70, 1.5, "a", "é" * 300, b"x", None, (1, {2}), {"k": frozenset([3])}],
    "blocks": [[i / 3 for i in range(60)], list(range(100)), tuple(range(-50, 50)), [True, False] * 40],
    "repeated": ["abc" * 10] * 100,
    "large": [bytearray(BIG), b"x" * BIG, [i / 3 for i in range(BIG // 8 + 1)]],
    "objects": [Plain(a=[1]), ListKind([1]), Slotted(), Peek([1, [2]])],
    "restart": [[1.5] * 60, bytearray(BIG), Foreign(), {"k": []}],
    "cycles": cyclic(),
    "arrays": [np.arange(5), {"a": np.zeros(BIG)}, np.float64(1)],
    "marks": [Serialize([1]), (Serialized(*serialize([np.zeros(BIG)])),)],
    "shared": [[]] * 20,
    "functions": [len, lambda x: x, ListKind],
}
BAD: dict[str, Any] = {
    "lock": [1, [LOCK], 2],
    "in a tuple": (1, (2, [LOCK])),
    "in a set": {1, frozenset([LOCK])},
    "in a dict": {"a": {"b": LOCK}},
    "in an object": Plain(a=[1.5] * 60, b=LOCK),
    "raises": [bytearray(BIG), Refuses()],
    "after a restart": [Foreign(), [bytearray(BIG)], LOCK],
    "generator": [(i for i in "a")],
}


def grown(call: Callable[[], Any], calls: int = CALLS) -> int:
    """Return by how many blocks memory grew; the least of three tries, since caches may fill."""
    least = 10**9
    for _ in range(4):
        call()
    for _ in range(3):
        gc.collect()
        before = sys.getallocatedblocks()
        for _ in range(calls):
            call()
        gc.collect()
        least = min(least, sys.getallocatedblocks() - before)
        if least < calls // 2:
            break
    return least


def flat(call: Callable[[], Any], calls: int = CALLS) -> None:
    n = grown(call, calls)  # one block a call is a leak; a few come and go in free lists
    assert n < calls // 2, f"{n} blocks after {calls} calls"


def test_the_measure_sees_a_leak() -> None:
    kept: list[Any] = []
    assert grown(lambda: kept.append(object())) >= CALLS


def out_of_band(x: Any) -> Any:
    buffers: list[Any] = []
    return pickle.loads(fastser.pickle.dumps(x, buffer_callback=buffers.append), buffers=buffers)


PICKLER = fastser.pickle.Pickler(io.BytesIO())


def reused(x: Any) -> None:
    PICKLER.dump(x)
    PICKLER.clear_memo()


WAYS: dict[str, Callable[[Any], Any]] = {
    "dumps": fastser.pickle.dumps,
    "out of band": out_of_band,
    "Pickler": lambda x: fastser.pickle.Pickler(io.BytesIO()).dump(x),
    "one Pickler": reused,
    "serialize": lambda x: fastser.deserialize(*serialize(x, on_error="raise")),
    "apart": lambda x: fastser.deserialize(*serialize(x, on_error="raise", iterate_collection=True)),
    "message": lambda x: fastser.loads(fastser.dumps({"a": (Serialize(x), ToPickle(1))}, on_error="raise")),
    "bytes": lambda x: fastser.deserialize_bytes(fastser.serialize_bytes(x, on_error="raise")),
}


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("way", WAYS)
def test_success(name: str, way: str) -> None:
    x, call = VALUES[name], WAYS[way]
    if way in ("Pickler", "one Pickler"):  # which knows no marks, and no functions by value
        x = {"functions": [len, ListKind], "marks": Serialize([1])}.get(name, x)
    flat(
        lambda: call(x),
        150 if way in ("bytes", "message") or name in ("large", "arrays", "functions") else 400,
    )


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("way", WAYS)
def test_failure(name: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fastser.core.codec, "find_culprit", lambda x: ("", x))  # its search is slow
    x, call = BAD[name], WAYS[way]

    def failing() -> None:
        try:
            call(x)
        except Exception:
            return
        raise AssertionError("no error")

    flat(failing, 100)


def test_error_frames() -> None:
    def call() -> None:
        header, frames = serialize([1, LOCK])
        try:
            fastser.deserialize(header, frames)
        except fastser.SerializationError:
            return

    flat(call, 100)


def test_bad_frames() -> None:
    good = [bytes(f) for f in fastser.dumps({"a": Serialize([np.arange(10), 1]), "b": ToPickle([2])})]
    cases = [
        good[:1],
        good[:2],
        good[:-1],
        [good[0][:-1], *good[1:]],
        [good[1], *good[1:]],
        [b"\xc1"],
        [],
        [good[0], b""],
    ]

    def call() -> None:
        for frames in cases:
            with contextlib.suppress(Exception):
                fastser.loads(frames)

    flat(call, 300)


def test_messages_that_msgpack_cannot_hold() -> None:
    msg = {"i": 2**70, "\udcff": {"__Set__": 1}, "s": {1}, "o": Plain()}
    flat(lambda: fastser.loads(fastser.dumps(msg)), 400)


def test_deep_nesting() -> None:
    x: Any = 1
    for _ in range(3300):
        x = (x,)

    def call() -> None:
        try:
            fastser.pickle.dumps(x)
        except RecursionError:
            return
        raise AssertionError("no error")

    flat(call, 60)


def test_callbacks_that_raise() -> None:
    def refuse(buffer: Any) -> Any:
        raise LookupError

    x = [bytearray(BIG), [i / 3 for i in range(BIG)], np.zeros(BIG)]

    def call() -> None:
        for part in x:
            with contextlib.suppress(LookupError):
                fastser.pickle.dumps([part], buffer_callback=refuse)

    flat(call, 200)


def test_lists() -> None:
    x = [i / 3 for i in range(100)]
    y = [*range(100), 2**70]
    flat(lambda: (to_ndarray(x), kind(x), to_ndarray(y), kind(y), to_ndarray(["a"])))


@pytest.mark.parametrize("way", WAYS)
def test_references_are_given_back(way: str) -> None:
    items: list[Any] = [
        "text" * 10,
        b"bytes" * 10,
        2**80,
        1.25,
        bytearray(5),
        [],
        {},
        (1, []),
        Plain(),
        np.arange(3),
    ]
    x = [items, (items[0], items[5]), {"k": items[8]}, bytearray(BIG)]

    def failing(y: Any) -> None:
        with contextlib.suppress(Exception):
            WAYS[way]([y, LOCK])

    for call in (WAYS[way], failing):
        call(x)
        gc.collect()
        before = [sys.getrefcount(item) for item in [*items, *x]]
        for _ in range(20):
            call(x)
        gc.collect()
        assert [sys.getrefcount(item) for item in [*items, *x]] == before


def test_what_was_sent_is_let_go() -> None:
    x = Plain(a=[Plain()])
    gone = weakref.ref(x), weakref.ref(x.a[0])
    for call in WAYS.values():
        call([x])
    PICKLER.clear_memo()
    del x
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def test_buffers_are_released() -> None:
    data = bytearray(BIG)
    for call in WAYS.values():
        call([data])
    PICKLER.clear_memo()
    gc.collect()
    data.append(1)  # a BufferError if a view of it were left

    header, _ = serialize([data, LOCK])
    assert header["serializer"] == "error"
    data.append(1)
    with pytest.raises(FrameError):
        fastser.deserialize({"serializer": "pickle", "writeable": (True,)}, [data])
    data.append(1)


def test_frames_do_not_wait_for_the_collector() -> None:
    """No reference cycle keeps large memory after a read or a failed write."""
    gc.disable()
    try:
        x = np.zeros(BIG)
        gone = weakref.ref(x)
        header, frames = serialize([x])
        r = fastser.deserialize(header, frames)
        del x, header, frames, r
        assert gone() is None
        y = np.zeros(BIG)
        gone = weakref.ref(y)
        with pytest.raises(fastser.SerializationError):
            serialize([y, LOCK], on_error="raise")
        serialize([y, LOCK])
        del y
        gc.collect() if gone() is not None else None
        assert gone() is None
    finally:
        gc.enable()


def test_memory_while_writing_is_the_output() -> None:
    import tracemalloc

    x = [str(i) * 10 for i in range(200_000)]
    floats = [i / 3 for i in range(500_000)]
    for value, bound in ((x, 1.6), (floats, 1.3)):
        size = sum(memoryview(f).nbytes for f in serialize(value)[1])
        tracemalloc.start()
        frames = serialize(value)[1]
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        del frames
        assert peak < bound * size + 2_000_000, (peak, size)
