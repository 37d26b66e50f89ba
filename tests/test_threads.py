"""Every public function may be called from many threads at once."""

from __future__ import annotations

import io
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from graphs import ListKind, Peek, Plain, check

import fastser
from fastser import Serialize, Serialized, ToPickle, serialize

THREADS = 8
ROUNDS = 40


def together(run: Callable[[int], None], n: int = THREADS) -> None:
    """Call *run* in threads that start at once and switch often; raise what any of them raised."""
    barrier = threading.Barrier(n)
    errors: list[BaseException] = []

    def start(i: int) -> None:
        try:
            barrier.wait()
            run(i)
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=start, args=(i,)) for i in range(n)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    finally:
        sys.setswitchinterval(interval)
    if errors:
        raise errors[0]


class Yields:
    """Lets other threads run while it is reduced."""

    def __init__(self, x: Any = None):
        self.x = x

    def __reduce__(self) -> Any:
        for _ in range(50):
            threading.Event().wait(0)
        return Yields, (self.x,)


def value(i: int) -> Any:
    return [
        [i + j / 3 for j in range(200)],
        {"k": (i, [f"text {i}"] * 50)},
        np.full(20_000, i),
        bytearray(bytes([i]) * 70_000),
        Plain(a=ListKind([i]), b=Peek([[i]])),
    ]


def test_everything_at_once() -> None:
    def run(i: int) -> None:
        x = value(i)
        for _ in range(ROUNDS):
            check(x, pickle.loads(fastser.pickle.dumps(x)))
            check(x, fastser.deserialize(*serialize(x)))
            check(x, fastser.loads(fastser.dumps({"a": Serialize(x), "b": ToPickle(i)}))["a"])
            check(x, fastser.deserialize_bytes(fastser.serialize_bytes(x)))

    together(run)


def test_dumps_that_wait_for_each_other() -> None:
    """The scratch buffer and the caches belong to one dump at a time."""

    def run(i: int) -> None:
        for _ in range(ROUNDS):
            x = [b"%d" % i * 1000, Yields(i), [f"{i}"] * 2, Yields([i]), b"end %d" % i]
            r = pickle.loads(fastser.pickle.dumps(x))
            assert (r[0], r[1].x, r[2], r[3].x, r[4]) == (x[0], i, x[2], [i], x[4])

    together(run)


def test_one_object_is_written_by_all() -> None:
    x = value(3)
    s = Serialized(*serialize(x))

    def run(i: int) -> None:
        for _ in range(ROUNDS):
            check(x, pickle.loads(fastser.pickle.dumps(x)))
            check(x, fastser.deserialize(s.header, s.frames))
            check(x, fastser.loads(fastser.dumps({"a": s}))["a"])

    together(run)


def test_one_list_changes_while_it_is_written() -> None:
    x: list[Any] = [[0.5] * 100, list(range(100)), {"k": 1}, "a" * 300, Yields()]
    stop = threading.Event()

    def change() -> None:
        while not stop.is_set():
            x.append([1.5] * 60)
            x[0].append(2.5)
            x[1].append("stranger")
            x[2][len(x[2])] = 1
            x[1].pop()
            x[0].pop()
            if len(x) > 50:
                del x[5:]
                x[2].clear()

    thread = threading.Thread(target=change)
    thread.start()
    try:

        def run(i: int) -> None:
            for _ in range(ROUNDS):
                try:
                    r = pickle.loads(fastser.pickle.dumps(x))
                except RuntimeError:
                    continue
                assert type(r) is list
                assert set(map(type, r[0])) <= {float}

        together(run, 4)
    finally:
        stop.set()
        thread.join()


def test_classes_and_handlers_that_come_and_go() -> None:
    def run(i: int) -> None:
        for n in range(ROUNDS):
            cls = type(f"Made{i}_{n}", (Plain,), {"__module__": __name__})
            fastser.register_serialization(
                cls, lambda x: ({}, [str(x.a).encode()]), lambda header, frames: int(bytes(frames[0]))
            )
            assert fastser.deserialize(*serialize(cls(a=n), on_error="raise")) == n
            assert fastser.deserialize(*serialize([cls(a=n)], on_error="raise")) == [n]
            name = f"family{i}"
            fastser.register_serialization_family(
                name, lambda x: ({}, [b"x"]), lambda header, frames: ("read", bytes(frames[0]))
            )
            assert fastser.deserialize(*serialize(n, serializers=[name])) == ("read", b"x")

    try:
        together(run)
    finally:
        for registry in (fastser.dask_serialize, fastser.dask_deserialize):
            for cls in [c for c in registry._lookup if c.__name__.startswith("Made")]:
                del registry._lookup[cls]
            registry._cache.clear()
        for i in range(THREADS):
            fastser.dispatch.families.pop(f"family{i}", None)


def test_errors_in_some_threads() -> None:
    lock = threading.Lock()

    def run(i: int) -> None:
        for _ in range(ROUNDS):
            if i % 2:
                check(value(i), fastser.deserialize(*serialize(value(i))))
            else:
                try:
                    fastser.pickle.dumps([value(i), lock])
                except TypeError:
                    continue
                raise AssertionError("no error")

    together(run)


SHARED_PICKLER = """
import io, threading, pickle, sys, fastser.pickle as fp
sys.setswitchinterval(1e-6)
class Yields:
    def __reduce__(self):
        threading.Event().wait(0.0001)
        return int, ()
file = io.BytesIO()
pickler = fp.Pickler(file)
def run():
    for i in range(50):
        try:
            pickler.dump([b"y" * 300_000 * (i % 7), Yields(), "a" * 500, Yields()])
        except RuntimeError:
            pass
threads = [threading.Thread(target=run) for _ in range(4)]
[t.start() for t in threads]
[t.join() for t in threads]
pickler.clear_memo()
file.seek(0)
file.truncate()
pickler.dump([1])
assert pickle.loads(file.getvalue()) == [1]
"""


def test_one_pickler_in_many_threads_does_not_crash() -> None:
    done = subprocess.run([sys.executable, "-c", SHARED_PICKLER], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()[-500:]


def test_each_thread_has_its_own_depth() -> None:
    x: Any = 1
    for _ in range(3000):
        x = [x]

    def run(i: int) -> None:
        for _ in range(5):
            assert len(fastser.pickle.dumps([Yields(), x])) > 3000
            fastser.pickle.Pickler(io.BytesIO()).dump(x)

    together(run)
