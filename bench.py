"""Measure fastser beside its peers, on this machine, in one run.

    python bench.py                         everything, in less than three minutes
    python bench.py --only objects          one section, or rows by a part of their name: --only records,tiny
    python bench.py --json new.json --against old.json

Every contender of a row runs in a forked child of its own, so that all meet the same heap; they take turns,
so that a machine that slows down slows down all of them.  The best of the turns counts.  In the tables `~`
marks a row whose turns differ much, `*` a contender that does not give the same object back (exact nested
types, bits of floats), and `-` one that fails.  The exit code is 1 if fastser itself is not exact somewhere.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import gc
import importlib.metadata
import itertools
import json
import marshal
import math
import multiprocessing
import os
import pickle
import platform
import random
import signal
import statistics
import struct
import subprocess
import sys
import threading
import time
import tracemalloc
import types
from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

DISTRIBUTIONS = (
    *("fastser", "numpy", "msgpack", "cloudpickle", "dask", "distributed", "msgspec", "ormsgpack", "pyfory"),
    *("lz4", "pandas"),
)
NOISY = 1.3  # median over best, from which on a row is marked
SLOW = 1.3  # ratio to the fastest exact peer, from which on a row is named at the end
GOALS = {"dumps": 0.75, "loads": 0.9}  # geometric means of that ratio over all objects
SAMPLE = 0.002  # seconds; what is faster is timed in a loop
BUDGET = 2.5  # seconds of turns per contender and row, after which it sits out
HANG = 120  # seconds without an answer from a child
STOCK_TIMEOUT = 20  # seconds for one result of the stock cluster
PHASE_TIMEOUT = 150  # seconds for all of one cluster

# ---- what is written and read: name -> (size with --full, maker of n elements with a seeded generator)


def _user(i: int, r: random.Random) -> dict[str, Any]:
    address = {"city": f"city {i % 97}", "zip": f"{i:05d}", "geo": [r.uniform(-90, 90), r.uniform(-180, 180)]}
    tags = [f"tag{r.randrange(50)}" for _ in range(3)]
    return {"id": i, "name": f"user {i}", "active": i % 3 > 0, "score": r.random(), "tags": tags,
            "address": address, "boss": None}  # fmt: skip


WORKLOADS: dict[str, tuple[int, Callable[[int, random.Random], Any]]] = {
    "float_const": (1_000_000, lambda n, r: [1.5] * n),
    "float": (1_000_000, lambda n, r: [r.random() for _ in range(n)]),
    "int_small": (1_000_000, lambda n, r: [r.randrange(256) for _ in range(n)]),
    "int_wide": (1_000_000, lambda n, r: [r.randrange(-(2**62), 2**62) for _ in range(n)]),
    "int_range": (1_000_000, lambda n, r: list(range(n))),
    "bool": (1_000_000, lambda n, r: [r.random() < 0.5 for _ in range(n)]),
    "str": (1_000_000, lambda n, r: [f"s{i}" for i in range(n)]),
    "str_repeat": (1_000_000, lambda n, r: r.choices([f"word {i}" for i in range(100)], k=n)),
    "num_mixed": (1_000_000, lambda n, r: [i if i % 2 else r.random() for i in range(n)]),
    "float_none": (1_000_000, lambda n, r: [None if i % 10 == 0 else r.random() for i in range(n)]),
    "tuple_float": (1_000_000, lambda n, r: tuple(r.random() for _ in range(n))),
    "rows": (100_000, lambda n, r: [(i, r.random(), f"name {i}") for i in range(n)]),
    "list_of_lists": (1_000_000, lambda n, r: [[r.random() for _ in range(1000)] for _ in range(n // 1000)]),
    "pairs": (200_000, lambda n, r: [(i, r.random()) for i in range(n)]),
    "dict_str_float": (100_000, lambda n, r: {f"key {i}": r.random() for i in range(n)}),
    "dict_of_lists": (1000, lambda n, r: {f"key {i}": [r.random() for _ in range(100)] for i in range(n)}),
    "records": (
        100_000,
        lambda n, r: [{"id": i, "x": r.random(), "name": f"n{i}", "ok": i % 2 == 0} for i in range(n)],
    ),
    "json_tree": (20_000, lambda n, r: {"users": [_user(i, r) for i in range(n)], "total": n}),
    "set_int": (100_000, lambda n, r: {r.randrange(2**40) for _ in range(n)}),
    "arrays_small": (
        1000,
        lambda n, r: [np.random.default_rng(i).random(100) for i in range(n)],
    ),
    "array_big": (50_000_000, lambda n, r: np.random.default_rng(1).random(n)),
    "bytes_list": (100_000, lambda n, r: [r.randbytes(16) for _ in range(n)]),
}


def build(name: str, n: int) -> Any:
    """Make the workload *name* with *n* elements, the same ones every time."""
    return WORKLOADS[name][1](n, random.Random(name))


def build_array(n: int) -> Any:
    return build("array_big", n)


def increment(x: int) -> int:
    return x + 1


def scale(x: float, factor: float = 2.0) -> float:
    return math.sqrt(x) * factor


scale.__module__ = "__main__"  # pickled by value, as functions of a script or a notebook are


class Plain:
    def __init__(self, i: int):
        self.i, self.name, self.children = i, f"plain {i}", [i, i + 1]


@dataclasses.dataclass
class Point:
    x: float
    y: float
    label: str


class Reduced:
    def __init__(self, i: int, text: str):
        self.i, self.text = i, text

    def __reduce__(self) -> tuple[Any, ...]:
        return Reduced, (self.i, self.text)


def _frame(n: int) -> Any:
    import pandas as pd

    return pd.DataFrame({"a": np.arange(n), "b": np.arange(n) / 7, "c": [f"row {i}" for i in range(n)]})


def _dask_tasks(n: int) -> Any:
    from dask._task_spec import Task, TaskRef

    return [Task(("sum", i), sum, [TaskRef(("x", i)), i]) for i in range(n)]


ALL = None  # every contender that is installed
FIXED: dict[str, tuple[Callable[[], Any], tuple[str, ...] | None]] = {
    "tiny_dict": (lambda: {"a": 1, "b": 2.5, "c": "text", "d": None}, ALL),
    "none": (lambda: None, ALL),
    "tiny_message": (lambda: {"op": "get", "id": 7, "x": [1, 2, 3], "s": "text"}, ALL),
    "dataclass": (lambda: Point(1.5, 2.5, "p"), ("pickle5", "cloudpickle")),
    "dataclasses 10,000": (lambda: [Point(i / 7, i / 3, f"p{i}") for i in range(10_000)], ("pickle5",)),
    "instances 10,000": (lambda: [Plain(i) for i in range(10_000)], ("pickle5",)),
    "reduced 10,000": (lambda: [Reduced(i, f"r{i}") for i in range(10_000)], ("pickle5",)),
    "pandas frame 10,000": (lambda: _frame(10_000), ("pickle5",)),
    "dask tasks 1,000": (lambda: _dask_tasks(1000), ("pickle5",)),
}


def _task_finished(i: int) -> dict[str, Any]:
    start = 1_760_000_000.25 + i / 1000
    return {
        "op": "task-finished",
        "key": f"increment-{i:032x}",
        "run_id": i,
        "nbytes": 28 + i,
        "type": pickle.dumps(int),
        "typename": "builtins.int",
        "metadata": {},
        "thread": 140_000_000_000_000 + i % 2,
        "startstops": [{"action": "compute", "start": start, "stop": start + 0.0005}],
        "stimulus_id": f"task-finished-{start + 0.001}",
        "status": "OK",
    }


def _compute_task(run_spec: Any) -> dict[str, Any]:
    return {
        "op": "compute-task",
        "key": "scale-0123456789abcdef0123456789abcdef",
        "run_id": 12,
        "priority": (0, 1, 12),
        "stimulus_id": "compute-task-1760000000.2512345",
        "who_has": {"x-1": ("tcp://127.0.0.1:40001",)},
        "nbytes": {"x-1": 28},
        "run_spec": run_spec,
        "resource_restrictions": {},
        "actor": False,
        "annotations": {},
        "span_id": "01234567-89ab-cdef-0123-456789abcdef",
    }


HEALTH = {"op": "health", "status": "OK"}
MESSAGES: dict[str, Callable[[bool], Any]] = {  # name -> maker, told whether --full
    "tiny": lambda full: {"op": "get", "id": 7, "x": [1, 2, 3], "s": "text"},
    "20 task-finished": lambda full: [_task_finished(i) for i in range(20)],
    "health": lambda full: [dict(HEALTH) for _ in range(100_000 if full else 10_000)],
    "compute-task by value": lambda full: scale,
    "compute-task by reference": lambda full: increment,
}
MARKED: dict[str, tuple[str, int]] = {  # to_serialize: name -> workload and size
    "float 20,000": ("float", 20_000),
    "rows 10,000": ("rows", 10_000),
    "records 10,000": ("records", 10_000),
    "dict_str_float 10,000": ("dict_str_float", 10_000),
}
GROWTH = {f"float 1e{e}": 10**e for e in (3, 4, 5, 6, 7)}  # to_serialize by fastser alone; 1e7 with --full
MEMORY = {"array 400 MB": 50_000_000}
CLUSTER: dict[str, tuple[str, str, int, tuple[str, ...]]] = {  # name -> kind, workload, size, phases
    "float_const 10,000": ("result", "float_const", 10_000, ("stock", "fastser")),
    "float 10,000": ("result", "float", 10_000, ("stock", "fastser")),
    "rows 10,000": ("result", "rows", 10_000, ("stock", "fastser")),
    "records 10,000": ("result", "records", 10_000, ("stock", "fastser")),
    "dict_str_float 10,000": ("result", "dict_str_float", 10_000, ("stock", "fastser")),
    "str 10,000": ("result", "str", 10_000, ("stock", "fastser")),
    "scatter float 10,000": ("scatter", "float", 10_000, ("stock", "fastser")),
    "map and gather 500": ("map", "", 500, ("stock", "fastser")),
    "array 1,000,000": ("result", "array_big", 1_000_000, ("stock", "fastser")),
    "float_const 1,000,000": ("result", "float_const", 1_000_000, ("fastser",)),
    "float 1,000,000": ("result", "float", 1_000_000, ("fastser",)),
}

# ---- who writes and reads: name -> function that imports it and returns (dumps, loads)

Pair = tuple[Callable[[Any], Any], Callable[[Any], Any]]


def _fastser() -> Pair:
    import fastser

    return fastser.serialize, lambda data: fastser.deserialize(*data)


def _buffered(dumps: Callable[..., bytes]) -> Pair:
    def write(x: Any) -> tuple[bytes, list[Any]]:
        buffers: list[Any] = []
        return dumps(x, protocol=5, buffer_callback=buffers.append), buffers

    return write, lambda data: pickle.loads(data[0], buffers=data[1])


def _fastser_pickle() -> Pair:
    import fastser.pickle

    return _buffered(fastser.pickle.dumps)


def _cloudpickle() -> Pair:
    import cloudpickle

    return lambda x: cloudpickle.dumps(x, protocol=5), cloudpickle.loads


def _msgpack() -> Pair:
    import msgpack

    return msgpack.Packer().pack, lambda data: msgpack.unpackb(data, strict_map_key=False)


def _msgpack_tuples() -> Pair:
    import msgpack

    return msgpack.Packer().pack, lambda data: msgpack.unpackb(data, strict_map_key=False, use_list=False)


def _ormsgpack() -> Pair:
    import ormsgpack

    return ormsgpack.packb, ormsgpack.unpackb


def _msgspec() -> Pair:
    import msgspec.msgpack

    return msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder().decode


def _pyfory() -> Pair:
    import pyfory

    fory = pyfory.Fory(xlang=False, ref=False, strict=False)
    return fory.serialize, fory.deserialize


def _distributed() -> Pair:
    from distributed.protocol import deserialize, serialize

    return serialize, lambda data: deserialize(*data)


def _module(name: str) -> Any:
    if name == "distributed":
        import distributed.protocol as module
    else:
        import fastser as module  # type: ignore[no-redef]
    return module


def _messages_of(name: str) -> Callable[[], Pair]:
    return lambda: (_module(name).dumps, _module(name).loads)


def _marked_of(name: str) -> Callable[[], Pair]:
    def pair() -> Pair:
        m = _module(name)
        to_serialize = m.Serialize
        return (lambda x: m.dumps({"op": "x", "data": to_serialize(x)})), (lambda data: m.loads(data)["data"])

    return pair


def _tasks_of(name: str) -> Callable[[], Pair]:
    def pair() -> Pair:
        if name == "distributed":
            from distributed.protocol.serialize import ToPickle
        else:
            from fastser import ToPickle  # type: ignore[assignment]
        m = _module(name)
        return (lambda f: m.dumps(_compute_task(ToPickle(f)))), (lambda data: m.loads(data)["run_spec"])

    return pair


Contenders = dict[str, Callable[[], Pair]]
OBJECT_CONTENDERS: Contenders = {
    "fastser": _fastser,
    "fastser.pickle": _fastser_pickle,  # read by the standard pickle
    "pickle5": lambda: _buffered(pickle.dumps),
    "cloudpickle": _cloudpickle,
    "marshal": lambda: (marshal.dumps, marshal.loads),
    "msgpack": _msgpack,
    "ormsgpack": _ormsgpack,
    "msgspec": _msgspec,
    "pyfory": _pyfory,
    "distributed": _distributed,
}
MESSAGE_CONTENDERS: Contenders = {
    "fastser": _messages_of("fastser"),
    "distributed": _messages_of("distributed"),
    "msgpack": _msgpack_tuples,
    "msgspec": _msgspec,
    "ormsgpack": _ormsgpack,
}
MARKED_CONTENDERS: Contenders = {name: _marked_of(name) for name in ("fastser", "distributed")}
TASK_CONTENDERS: Contenders = {name: _tasks_of(name) for name in ("fastser", "distributed")}

# ---- exactness

PLAIN = frozenset({int, str, bytes, bool, type(None), bytearray})


def same(a: Any, b: Any) -> bool:
    """Tell whether *b* is what *a* is, to the exact nested types, order of keys and bits of floats."""
    cls = type(a)
    if cls is not type(b):
        return False
    if cls in PLAIN:
        return bool(a == b)
    if cls is float:
        return struct.pack("d", a) == struct.pack("d", b)
    if cls is list or cls is tuple:
        kinds = set(map(type, a))
        if len(a) != len(b) or kinds != set(map(type, b)):
            return False
        if kinds <= PLAIN:
            return list(map(type, a)) == list(map(type, b)) and bool(a == b)
        if kinds == {float}:
            return array("d", a).tobytes() == array("d", b).tobytes()
        return all(map(same, a, b))
    if cls is dict:
        return same(list(a), list(b)) and same(list(a.values()), list(b.values()))
    if cls is set or cls is frozenset:
        return {(type(x), x) for x in a} == {(type(x), x) for x in b}
    if cls is types.FunctionType:
        return a is b or (a.__code__.co_code, a.__defaults__) == (b.__code__.co_code, b.__defaults__)
    if cls is np.ndarray:
        alike = a.dtype == b.dtype and a.shape == b.shape and a.flags.writeable == b.flags.writeable
        return alike and a.tobytes() == b.tobytes()
    if hasattr(a, "equals"):  # a pandas object
        return bool(a.equals(b)) and same([str(t) for t in a.dtypes], [str(t) for t in b.dtypes])
    if hasattr(a, "__dict__"):
        return same(vars(a), vars(b))
    return bool(a == b)


def as_tuples(x: Any) -> Any:
    """Return *x* with its lists made tuples, as messages arrive in distributed."""
    if isinstance(x, dict):
        return {k: as_tuples(v) for k, v in x.items()}
    return tuple(map(as_tuples, x)) if isinstance(x, list | tuple) else x


def same_message(a: Any, b: Any) -> bool:
    return same(a, b) or same(as_tuples(a), b)


def size_of(data: Any) -> int:
    """Count the bytes of what a contender wrote: frames, buffers, and its header as msgpack or text."""
    if isinstance(data, list | tuple):
        return sum(map(size_of, data))
    if isinstance(data, pickle.PickleBuffer):
        return data.raw().nbytes
    if isinstance(data, dict):
        return len(repr(data))
    return memoryview(data).nbytes


# ---- measuring


@dataclasses.dataclass
class Cell:
    """What one contender did in one row."""

    section: str
    row: str
    contender: str
    samples: dict[str, list[float]] = dataclasses.field(default_factory=dict)  # seconds, by metric
    size: int | None = None  # bytes
    exact: bool | None = None
    error: str | None = None
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def ours(self) -> bool:
        return self.contender.startswith("fastser")

    def best(self, metric: str) -> float | None:
        return min(self.samples.get(metric) or [], default=None)  # type: ignore[return-value]

    def median(self, metric: str) -> float | None:
        samples = self.samples.get(metric)
        return statistics.median(samples) if samples else None

    def noisy(self, metric: str) -> bool:
        return len(self.samples.get(metric, ())) > 1 and self.median(metric) > NOISY * self.best(metric)

    def as_json(self) -> dict[str, Any]:
        stats = {
            metric: {"best": self.best(metric), "median": self.median(metric), "noisy": self.noisy(metric)}
            for metric in self.samples
        }
        return {**dataclasses.asdict(self), "stats": stats}


def sample(fn: Callable[[Any], Any], x: Any, number: int) -> float:
    gc.collect()
    if number == 1:
        start = time.perf_counter()
        result = fn(x)  # noqa: F841  its end is not part of the time
        return time.perf_counter() - start
    start = time.perf_counter()
    for _ in itertools.repeat(None, number):
        fn(x)
    return (time.perf_counter() - start) / number


def loops(fn: Callable[[Any], Any], x: Any) -> int:
    """Return how often *fn* must be called for one sample."""
    number = 1
    while (taken := sample(fn, x, number) * number) < SAMPLE and number < 2**20:
        number = max(2 * number, min(int(number * SAMPLE / max(taken, 1e-7)), 100 * number))
    return number


def _serve(conn: Any, pair: Pair, value: Any, check: Any, finish: Any) -> None:
    dumps, loads = pair
    try:
        start = time.perf_counter()
        data = dumps(value)
        loads(data)
        if time.perf_counter() - start < SAMPLE * 100:
            numbers = loops(dumps, value), loops(loads, data)
        else:
            numbers = 1, 1
        conn.send(None)
        while conn.recv():
            data = dumps(value)  # some readers use their data up
            conn.send((sample(dumps, value, numbers[0]), sample(loads, data, numbers[1])))
        data = None
        extra = finish(dumps, loads, value) if finish else {}
        data = dumps(value)
        conn.send((size_of(data), check(value, loads(data)), extra))
    except BaseException as error:
        conn.send(f"{type(error).__name__}: {error}"[:300])


class Child:
    """A contender in a forked process, ready to take turns."""

    def __init__(self, pair: Pair, value: Any, check: Any, finish: Any):
        context = multiprocessing.get_context("fork")
        self.conn, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, pair, value, check, finish), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, question: Any = None) -> Any:
        """Send *question*, unless it is None, and return the answer; RuntimeError if there is none."""
        try:
            if question is not None:
                self.conn.send(question)
            if not self.conn.poll(HANG):
                raise RuntimeError(f"no answer in {HANG} s")
            answer = self.conn.recv()
        except (EOFError, ConnectionError):
            self.process.join(5)
            raise RuntimeError(f"crashed with exit code {self.process.exitcode}") from None
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return answer

    def end(self) -> None:
        self.conn.close()
        self.process.join(0.2)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


class Bench:
    """The options of a run, its progress and its results."""

    def __init__(self, options: argparse.Namespace):
        self.full: bool = options.full
        self.repeat: int = options.repeat
        self.only = [part for part in (options.only or "").split(",") if part]
        self.cells: list[Cell] = []
        self.missing: dict[str, str] = {}
        self.pairs: dict[Any, Pair | None] = {}
        self.summary: dict[str, Any] = {}
        self.bar: Any = None
        self.done, self.total = 0, sum(len(self.rows(section)) for section in SECTIONS)

    def wants(self, section: str, row: str) -> bool:
        return not self.only or any(part in f"{section}/{row}" for part in self.only)

    def rows(self, section: str) -> list[str]:
        rows = [row for row in SECTIONS[section][1] if self.wants(section, row)]
        return [row for row in rows if row != "float 1e7" or self.full]

    def installed(self, contenders: Contenders) -> dict[str, Pair]:
        """Import *contenders* and return those that can be."""
        for name, factory in contenders.items():
            if factory not in self.pairs:
                try:
                    self.pairs[factory] = factory()
                except ImportError as error:
                    self.pairs[factory] = None
                    self.missing[name] = str(error)
        gc.collect()
        gc.freeze()  # modules are not what the collections within the timings shall walk through
        return {name: pair for name, f in contenders.items() if (pair := self.pairs[f]) is not None}

    def compete(
        self,
        section: str,
        row: str,
        value: Any,
        pairs: dict[str, Pair],
        check: Callable[[Any, Any], bool] = same,
        finish: Callable[..., dict[str, Any]] | None = None,
    ) -> None:
        """Let the contenders *pairs* write and read *value* in turns, each in a child of its own."""
        self.step(f"{section}: {row}")
        cells = {name: Cell(section, row, name, {"dumps": [], "loads": []}) for name in pairs}
        children = {name: Child(pair, value, check, finish) for name, pair in pairs.items()}

        def tell(name: str, question: Any = None) -> Any:
            try:
                return children[name].ask(question)
            except RuntimeError as error:
                cells[name].error = str(error)
                children.pop(name).end()

        for name in list(children):
            tell(name)
        spent: collections.Counter[str] = collections.Counter()
        for turn in range(self.repeat):
            for name in list(children):
                if (turn < 2 or spent[name] < BUDGET) and (answer := tell(name, True)):
                    for metric, seconds in zip(("dumps", "loads"), answer, strict=True):
                        cells[name].samples[metric].append(seconds)
                        spent[name] += seconds
        for name in list(children):
            if answer := tell(name, False):
                cells[name].size, cells[name].exact, cells[name].extra = answer
                children.pop(name).end()
        self.cells.extend(cells.values())

    def of(self, section: str) -> dict[str, dict[str, Cell]]:
        """Return the cells of *section*, by row and contender."""
        table: dict[str, dict[str, Cell]] = {}
        for cell in self.cells:
            if cell.section == section:
                table.setdefault(cell.row, {})[cell.contender] = cell
        return table

    def step(self, text: str) -> None:
        self.done += 1
        if self.bar is not None:
            self.bar.update(0, completed=self.done, description=text, refresh=True)
        else:
            print(f"[{self.done}/{self.total}] {text}", file=sys.stderr, flush=True)


# ---- sections: each measures its rows


def run_objects(bench: Bench) -> None:
    pairs = bench.installed(OBJECT_CONTENDERS)
    for row in bench.rows("objects"):
        size = WORKLOADS[row][0]
        bench.compete("objects", row, build(row, size if bench.full else size // 10), pairs)


def run_fixed(bench: Bench) -> None:
    pairs = bench.installed(OBJECT_CONTENDERS)
    for row in bench.rows("fixed"):
        make, peers = FIXED[row]
        try:
            value = make()
        except ImportError as error:
            bench.missing[row] = str(error)
            bench.step(f"fixed: {row}: not installed")
            continue
        chosen = {n: p for n, p in pairs.items() if peers is None or n in peers or n.startswith("fastser")}
        bench.compete("fixed", row, value, chosen)


def run_marked(bench: Bench) -> None:
    pairs = bench.installed(MARKED_CONTENDERS)
    for row in bench.rows("to_serialize"):
        if row in MARKED:
            bench.compete("to_serialize", row, build(*MARKED[row]), pairs)
        else:
            bench.compete("to_serialize", row, build("float", GROWTH[row]), {"fastser": pairs["fastser"]})


def run_messages(bench: Bench) -> None:
    for row in bench.rows("messages"):
        pairs = bench.installed(TASK_CONTENDERS if row.startswith("compute") else MESSAGE_CONTENDERS)
        bench.compete("messages", row, MESSAGES[row](bench.full), pairs, same_message)


def _address(buffer: Any) -> int:
    raw = buffer.raw() if isinstance(buffer, pickle.PickleBuffer) else memoryview(buffer)
    return int(np.frombuffer(raw, "u1").ctypes.data)


def _rss() -> int:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _memory_growth(dumps: Any, loads: Any, value: Any) -> dict[str, Any]:
    gc.collect()
    before = _rss()
    data = dumps(value)
    rss = _rss() - before
    frames = [frame for part in data if isinstance(part, list) for frame in part]
    shared = any(size_of(f) == value.nbytes and _address(f) == value.ctypes.data for f in frames)
    view = bool(shared and loads(data).ctypes.data == value.ctypes.data)
    del data, frames
    tracemalloc.start()
    data = dumps(value)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {"rss": rss, "peak": peak, "zero_copy_out": shared, "zero_copy_in": view}


def run_memory(bench: Bench) -> None:
    pairs = bench.installed(OBJECT_CONTENDERS)
    chosen = {name: pairs[name] for name in ("fastser", "pickle5", "distributed") if name in pairs}
    for row in bench.rows("memory"):
        bench.compete("memory", row, build_array(MEMORY[row]), chosen, same, _memory_growth)


def run_cluster(bench: Bench) -> None:
    """Run a stock and a fastser cluster, one after the other, each below a process of its own."""
    rows = bench.rows("cluster")
    try:
        import distributed  # noqa: F401
    except ImportError as error:
        bench.missing["distributed"] = str(error)
        bench.done += len(rows)
        return
    here = os.path.dirname(os.path.abspath(__file__))
    path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    for phase in ("stock", "fastser"):
        todo = [row for row in rows if phase in CLUSTER[row][3]]
        command = [sys.executable, __file__, "--phase", phase, "--repeat", str(bench.repeat)]
        process = subprocess.Popen(
            [*command, "--only", "|".join(todo)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
            env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        errors: list[str] = []
        reader = threading.Thread(target=lambda file, to: to.extend(file), args=(process.stderr, errors))
        guard = threading.Timer(PHASE_TIMEOUT, os.killpg, (process.pid, signal.SIGKILL))
        reader.start()
        guard.start()
        seen: set[str] = set()
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                cell = Cell("cluster", contender=phase, **json.loads(line))
                bench.cells.append(cell)
                seen.add(cell.row)
                if phase == CLUSTER[cell.row][3][0]:
                    bench.step(f"cluster: {cell.row} ({phase})")
        process.wait()
        guard.cancel()
        guard.join()
        reader.join()
        text = [line.strip() for line in errors if line.strip()]
        for row in todo:
            if row not in seen:
                problem = text[-1] if text else f"no answer in {PHASE_TIMEOUT} s"
                bench.cells.append(Cell("cluster", row, phase, error=problem[:300]))


def run_phase(phase: str, rows: list[str], repeat: int) -> None:
    """Time *rows* on one cluster, in this process; a line of JSON for each on stdout."""
    import logging

    from distributed import Client, LocalCluster

    with (
        LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, protocol="tcp", dashboard_address=None,
            silence_logs=logging.ERROR,
        ) as cluster,
        Client(cluster) as client,
    ):  # fmt: skip
        if phase == "fastser":
            import fastser.dask

            fastser.dask.install(client)
        for row in rows:
            cell = Cell("cluster", row, phase, collections.defaultdict(list))
            try:
                _time_on_cluster(client, cell, min(repeat, 2) if phase == "stock" else repeat)
            except Exception as error:
                name = type(error).__name__
                cell.error = f"over {STOCK_TIMEOUT} s" if "Timeout" in name else f"{name}: {error}"[:300]
            answer = dataclasses.asdict(cell)
            del answer["section"], answer["contender"]
            print(json.dumps(answer), flush=True)


def _time_on_cluster(client: Any, cell: Cell, repeat: int) -> None:
    from distributed import wait

    kind, workload, n, _ = CLUSTER[cell.row]

    def timed(metric: str, fn: Callable[[], Any]) -> Any:
        gc.collect()
        start = time.perf_counter()
        result = fn()
        cell.samples[metric].append(time.perf_counter() - start)
        return result

    def results() -> Any:
        future = client.submit(build, workload, n, pure=False)
        wait(future, timeout=STOCK_TIMEOUT)
        value = timed("result", lambda: future.result(timeout=STOCK_TIMEOUT))
        if workload == "array_big":
            timed("tolist", value.tolist)
        timed("submit", lambda: client.submit(build, workload, n, pure=False).result(timeout=STOCK_TIMEOUT))
        return value

    def scatter() -> Any:
        value = build(workload, n)
        return timed("scatter", lambda: client.scatter(value, hash=False, timeout=STOCK_TIMEOUT)).result()

    def gather() -> Any:
        return timed(
            "gather", lambda: client.gather(client.map(increment, range(n), pure=False), errors="raise")
        )

    kinds = {"result": (results, 10), "scatter": (scatter, 10), "map": (gather, 0)}
    run, small = kinds[kind]
    if small and n > small:  # warm up both workers
        client.gather([client.submit(build, workload, small, pure=False) for _ in range(4)])
    expected = [i + 1 for i in range(n)] if kind == "map" else build(workload, n)
    cell.exact = True
    for _ in range(1 if kind == "scatter" and cell.contender == "stock" else repeat):
        cell.exact = same(expected, run()) and cell.exact


SECTIONS: dict[str, tuple[Callable[[Bench], None], Iterable[str]]] = {
    "cluster": (run_cluster, CLUSTER),
    "objects": (run_objects, WORKLOADS),
    "fixed": (run_fixed, FIXED),
    "to_serialize": (run_marked, [*MARKED, *GROWTH]),
    "messages": (run_messages, MESSAGES),
    "memory": (run_memory, MEMORY),
}

# ---- tables

METRICS = ("dumps", "loads")


def show(title: str, header: Iterable[str], lines: Iterable[Iterable[str]]) -> None:
    """Print a table: the first column to the left, numbers to the right."""
    grid = [list(header), *map(list, lines)]
    widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
    print(f"\n{title}")
    for line in grid:
        cells = [text.rjust(width) for text, width in zip(line, widths, strict=True)]
        print("  ".join([line[0].ljust(widths[0]), *cells[1:]]).rstrip())


def short(x: float | None, unit: float = 1.0) -> str:
    if x is None:
        return "-"
    x /= unit
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def timing(cell: Cell | None, metric: str, unit: float) -> str:
    if cell is None or cell.best(metric) is None or (cell.error and cell.exact is None):
        return "-"
    marks = "~" * cell.noisy(metric) + "*" * (cell.exact is False)
    return short(cell.best(metric), unit) + marks


def ratio(a: Cell | None, b: Cell | None, metric: str) -> float | None:
    if a is None or b is None or not (x := a.best(metric)) or not (y := b.best(metric)):
        return None
    return x / y


def mean(ratios: Iterable[float | None]) -> float | None:
    logs = [math.log(x) for x in ratios if x]
    return math.exp(sum(logs) / len(logs)) if logs else None


def fastest(cells: dict[str, Cell], metric: str) -> Cell | None:
    """Return the fastest contender that is not ours and gives the same object back."""
    peers = [c for c in cells.values() if not c.ours and c.exact and c.best(metric)]
    return min(peers, key=lambda c: c.best(metric) or 0.0, default=None)


def show_matrix(bench: Bench, section: str, unit: float, unit_name: str) -> None:
    table = bench.of(section)
    names = list(dict.fromkeys(name for cells in table.values() for name in cells))
    for metric in METRICS:
        lines = [[r, *(timing(cells.get(n), metric, unit) for n in names)] for r, cells in table.items()]
        show(f"{section}, {metric}, {unit_name}", ["", *names], lines)
    if section in ("objects", "fixed"):
        sizes = {r: [short(cells[n].size) if n in cells else "-" for n in names] for r, cells in table.items()}
        show(f"{section}, bytes", ["", *names], [[r, *texts] for r, texts in sizes.items()])


def show_ratios(bench: Bench, section: str, unit: float, unit_name: str, baseline: str) -> None:
    """Show ours beside the fastest exact peer and beside *baseline*; keep the geometric means."""
    for name in ("fastser", "fastser.pickle"):
        table = {row: cells for row, cells in bench.of(section).items() if name in cells}
        if not table:
            continue
        lines = []
        found: dict[str, list[float | None]] = collections.defaultdict(list)
        slow = []
        for row, cells in table.items():
            line = [row]
            for metric in METRICS:
                peer = fastest(cells, metric)
                to_peer = ratio(cells[name], peer, metric)
                to_baseline = ratio(cells[name], cells.get(baseline), metric)
                found[metric].append(to_peer)
                found[f"{metric} to {baseline}"].append(to_baseline)
                line += [timing(cells[name], metric, unit), peer.contender if peer else "",
                         timing(peer, metric, unit), short(to_peer), short(to_baseline)]  # fmt: skip
                if to_peer and to_peer > SLOW:
                    slow.append(f"  {row}: {metric} {short(to_peer)} times {peer.contender}")  # type: ignore[union-attr]
            lines.append(line)
        means = {metric: mean(ratios) for metric, ratios in found.items()}
        bench.summary[f"{section} {name}"] = means
        header = [h for m in METRICS for h in (m, "fastest exact", unit_name, "ratio", f"/ {baseline}")]
        show(f"{section}: {name} beside its fastest exact peer, {unit_name}", ["", *header], lines)
        print(f"geometric means: {', '.join(f'{m} {short(x)}' for m, x in means.items())}")
        if section == "objects":
            print(f"goals over all objects: {', '.join(f'{m} <= {x}' for m, x in GOALS.items())}")
        print("\n".join(slow))


def report_objects(bench: Bench) -> None:
    show_matrix(bench, "objects", 1e-3, "ms")
    show_ratios(bench, "objects", 1e-3, "ms", "pickle5")


def report_fixed(bench: Bench) -> None:
    show_matrix(bench, "fixed", 1e-6, "us")
    show_ratios(bench, "fixed", 1e-6, "us", "pickle5")


def report_messages(bench: Bench) -> None:
    show_matrix(bench, "messages", 1e-6, "us")
    show_ratios(bench, "messages", 1e-6, "us", "distributed")


def report_marked(bench: Bench) -> None:
    table = bench.of("to_serialize")
    lines = []
    for row, cells in table.items():
        ours, stock = cells.get("fastser"), cells.get("distributed")
        line = [row]
        for metric in METRICS:
            line += [timing(ours, metric, 1e-3), timing(stock, metric, 1e-3), short(ratio(stock, ours, metric))]
        count = MARKED[row][1] if row in MARKED else GROWTH[row]
        each = [timing(ours, metric, 1e-9 * count) for metric in METRICS]
        lines.append([*line, *each])
    header = [h for m in METRICS for h in (f"{m} ms", "distributed", "times")]
    each = [f"{m} ns/element" for m in METRICS]
    show("to_serialize: a message with one marked object", ["", *header, *each], lines)
    if "float 20,000" in table:
        print("goal: 20,000 random floats 300 times as fast as distributed")


def report_memory(bench: Bench) -> None:
    lines = []
    for row, cells in bench.of("memory").items():
        for name, cell in cells.items():
            sizes = [short(cell.extra.get(key), 2**20) for key in ("rss", "peak")]
            flags = [str(cell.extra.get(key, "-")) for key in ("zero_copy_out", "zero_copy_in")]
            lines.append([f"{row}, {name}", *(timing(cell, m, 1e-6) for m in METRICS), *sizes, *flags])
    header = ("", "dumps us", "loads us", "RSS + MiB", "peak MiB", "zero copy out", "in")
    show("memory: one large array", header, lines)


def report_cluster(bench: Bench) -> None:
    lines = []
    table = bench.of("cluster")
    for row, cells in table.items():
        stock, ours = cells.get("stock"), cells.get("fastser")
        for metric in list(dict.fromkeys(m for cell in cells.values() for m in cell.samples)) or [""]:
            medians = [short(cell.median(metric), 1e-3) if cell else "-" for cell in (stock, ours)]
            texts = [timing(cell, metric, 1e-3) for cell in (stock, ours)]
            times = short(ratio(stock, ours, metric))
            lines.append([row, metric, texts[0], medians[0], texts[1], medians[1], times])
    header = ("", "", "stock", "median", "fastser", "median", "times")
    show("cluster: 2 worker processes over TCP, ms", header, lines)
    arrays = table.get("array 1,000,000", {}).get("fastser")
    base = arrays and arrays.best("result")
    for row, added, text in (
        ("float 1,000,000", arrays and arrays.best("tolist"), "an array and its tolist"),
        ("float_const 1,000,000", 0.0, "an array"),
    ):
        ours = table.get(row, {}).get("fastser")
        if base and ours and (best := ours.best("result")):
            relative = best / (base + (added or 0.0))
            bench.summary[f"cluster {row}"] = relative
            print(f"{row}: {short(relative)} times the result of {text} (goal: 2)")


REPORTS = {
    "cluster": report_cluster,
    "objects": report_objects,
    "fixed": report_fixed,
    "to_serialize": report_marked,
    "messages": report_messages,
    "memory": report_memory,
}


def report_against(bench: Bench, path: str) -> None:
    """Show ours as a ratio to an earlier run, and how the peers moved meanwhile."""
    with open(path) as file:
        earlier = json.load(file)
    old = {(c["section"], c["row"], c["contender"]): c["stats"] for c in earlier["cells"]}
    lines, drift, change = [], [], []
    for cell in bench.cells:
        before = old.get((cell.section, cell.row, cell.contender), {})
        for metric in cell.samples:
            now, then = cell.best(metric), before.get(metric, {}).get("best")
            if not now or not then:
                continue
            (change if cell.ours else drift).append(now / then)
            if cell.ours:
                mark = "~" if cell.noisy(metric) or before[metric]["noisy"] else ""
                name = f"{cell.section}/{cell.row}"
                lines.append([name, cell.contender, metric, short(then, 1e-3), short(now, 1e-3),
                              short(now / then) + mark])  # fmt: skip
    if not lines:
        print(f"\nnothing in common with {path}")
        return
    show(f"against {path}, ms", ("", "", "", "then", "now", "ratio"), lines)
    print(f"geometric mean {short(mean(change))}; that of the peers, which is the machine: {short(mean(drift))}")
    if earlier["machine"] != machine():
        print(f"another machine: {earlier['machine']}")


# ---- command line


def machine() -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as file:
            cpu = next((x.partition(":")[2].strip() for x in file if x.startswith("model name")), cpu)
    except OSError:
        pass
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"cpu": cpu, "cores": cores, "system": platform.platform()}


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    if found["fastser"] is None:
        import fastser

        found["fastser"] = fastser.__version__
    return found


def failures(bench: Bench) -> list[str]:
    """Name the rows where fastser gave no answer or a wrong one."""
    return [
        f"{c.section}/{c.row}: {c.contender}: {c.error or 'not the same object'}"
        for c in bench.cells
        if c.ours and (c.error or c.exact is False)
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", metavar="NAMES", help="sections, or parts of section/row, with commas")
    parser.add_argument("--full", action="store_true", help="the full sizes (ten minutes)")
    parser.add_argument("--repeat", type=int, default=5, metavar="N", help="turns per contender (5)")
    parser.add_argument("--json", metavar="FILE", help="write all results there")
    parser.add_argument("--against", metavar="FILE", help="compare with the results of an earlier run")
    parser.add_argument("--list", action="store_true", help="list sections and rows")
    parser.add_argument("--phase", choices=("stock", "fastser"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.repeat < 1:
        parser.error("--repeat must be at least 1")
    if options.phase:
        run_phase(options.phase, options.only.split("|"), options.repeat)
        return 0
    bench = Bench(options)
    sections = [section for section in SECTIONS if bench.rows(section)]
    if options.list:
        print("\n".join(f"{section}/{row}" for section in sections for row in bench.rows(section)))
        return 0
    if not sections:
        parser.error(f"no row matches {options.only!r}; see --list")
    facts, found = machine(), versions()
    print(f"{facts['cpu']}, {facts['cores']} cores, {facts['system']}")
    print(", ".join(f"{name} {version or '(not installed)'}" for name, version in found.items()))
    load = os.getloadavg()[0]
    if load > 0.5:
        print(f"the machine is not idle: load {load:.1f}")
    begin = time.perf_counter()
    for section in sections:
        with progress(bench):
            SECTIONS[section][0](bench)
        REPORTS[section](bench)
        sys.stdout.flush()
    failed = failures(bench)
    took = time.perf_counter() - begin
    for name, reason in bench.missing.items():
        print(f"left out: {name}: {reason}")
    for cell in bench.cells:
        if cell.error and not cell.ours and cell.section == "cluster":
            print(f"cluster/{cell.row}: {cell.contender}: {cell.error}")
    if options.against:
        report_against(bench, options.against)
    if options.json:
        facts_now = {"versions": found, "machine": facts, "load": load, "seconds": took}
        settings = {"full": bench.full, "repeat": bench.repeat, "only": bench.only}
        results = {"cells": [cell.as_json() for cell in bench.cells], "summary": bench.summary}
        with open(options.json, "w") as file:
            json.dump({**facts_now, "options": settings, **results, "failures": failed}, file, indent=1)
    print(f"\n{took:.0f} s")
    for text in failed:
        print(f"FAILED {text}")
    return 1 if failed else 0


@contextlib.contextmanager
def progress(bench: Bench) -> Iterator[None]:
    """Show a bar of rich on a terminal, if there are both, else let `Bench.step` print lines."""
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        yield
        return
    if not sys.stderr.isatty():
        yield
        return
    # No refreshing thread: the children are forked.
    with Progress(console=Console(stderr=True), auto_refresh=False, transient=True) as bench.bar:
        bench.bar.add_task("", total=bench.total, completed=bench.done)
        yield
    bench.bar = None


if __name__ == "__main__":
    import bench  # by its own name, so that its classes are pickled by reference, as those of a library are

    sys.exit(bench.main())
