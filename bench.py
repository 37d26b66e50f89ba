"""Measure fastser beside its peers, on this machine, in one run.

    python bench.py                      everything, in less than three minutes
    python bench.py --only objects       one section, or rows by a part of their name: --only records,tiny
    python bench.py --json new.json --against old.json

Every contender of a row runs in a forked child of its own, so that all meet the same heap; they take turns,
so that a machine that slows down slows down all of them.  The best of the turns counts.  In the tables `~`
marks times that differ much from turn to turn, `*` a contender that does not give the same object back
(exact nested types, bits of floats), and `-` one that fails.  The exit code is 1 if fastser is not exact.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import importlib
import importlib.metadata
import itertools
import json
import logging
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
import tempfile
import threading
import time
import tracemalloc
import types
from array import array
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np

NOISY = 1.3  # median over best, from which on a time is marked
SLOW = 1.3  # ratio to the fastest exact peer, from which on a row is named below the table
GOALS = "goal over all objects: dumps 0.75, loads 0.9 times the fastest exact peer"
SAMPLE = 0.002  # seconds; what is faster is timed in a loop
ROW = 1.0  # seconds, within which a row may take more turns than asked for
BUDGET = 2.5  # seconds of one contender in one row, after which it sits out
HANG = 120  # seconds without an answer from a child
STOCK_TIMEOUT = 20  # seconds for one result from a cluster
PHASE_TIMEOUT = 150  # seconds for all of one cluster
METRICS = ("dumps", "loads")
PHASES = ("stock", "fastser")

# ---- what is written and read.  A new workload is one more line.


def user(i: int, r: random.Random) -> dict[str, Any]:
    place = {"city": f"city {i % 97}", "zip": f"{i:05d}", "geo": [r.uniform(-90, 90), r.uniform(-180, 180)]}
    tags = [f"tag{r.randrange(50)}" for _ in range(3)]
    return {"id": i, "name": f"user {i}", "ok": i % 3 > 0, "score": r.random(), "tags": tags, "at": place}


def record(i: int, r: random.Random) -> dict[str, Any]:
    return {"id": i, "x": r.random(), "name": f"n{i}", "ok": i % 2 == 0}


# fmt: off
WORKLOADS: dict[str, tuple[int, Callable[[int, random.Random], Any]]] = {  # name -> (full size, maker)
    "float_const": (1_000_000, lambda n, r: [1.5] * n),
    "float": (1_000_000, lambda n, r: [r.random() for _ in range(n)]),
    "int_small": (1_000_000, lambda n, r: [r.randrange(256) for _ in range(n)]),
    "int_wide": (1_000_000, lambda n, r: [r.randrange(-(2**62), 2**62) for _ in range(n)]),
    "int_range": (1_000_000, lambda n, r: list(range(n))),
    "bool": (1_000_000, lambda n, r: [r.random() < 0.5 for _ in range(n)]),
    "str": (1_000_000, lambda n, r: [f"s{i}" for i in range(n)]),
    "str_repeat": (1_000_000, lambda n, r: r.choices([f"word {i}" for i in range(100)], k=n)),
    "num_mixed": (1_000_000, lambda n, r: [i if i % 2 else r.random() for i in range(n)]),
    "float_none": (1_000_000, lambda n, r: [r.random() if i % 10 else None for i in range(n)]),
    "tuple_float": (1_000_000, lambda n, r: tuple(r.random() for _ in range(n))),
    "rows": (100_000, lambda n, r: [(i, r.random(), f"name {i}") for i in range(n)]),
    "list_of_lists": (1_000_000, lambda n, r: [[r.random() for _ in range(1000)] for _ in range(n // 1000)]),
    "pairs": (200_000, lambda n, r: [(i, r.random()) for i in range(n)]),
    "dict_str_float": (100_000, lambda n, r: {f"key {i}": r.random() for i in range(n)}),
    "dict_of_lists": (1000, lambda n, r: {f"key {i}": [r.random() for _ in range(100)] for i in range(n)}),
    "records": (100_000, lambda n, r: [record(i, r) for i in range(n)]),
    "json_tree": (20_000, lambda n, r: {"users": [user(i, r) for i in range(n)], "total": n, "next": None}),
    "set_int": (100_000, lambda n, r: {r.randrange(2**40) for _ in range(n)}),
    "arrays_small": (1000, lambda n, r: [np.random.default_rng(i).random(100) for i in range(n)]),
    "array_big": (50_000_000, lambda n, r: np.random.default_rng(1).random(n)),
    "bytes_list": (100_000, lambda n, r: [r.randbytes(16) for _ in range(n)]),
}


def build(name: str, n: int) -> Any:
    """Make the workload *name* with *n* elements, always the same."""
    return WORKLOADS[name][1](n, random.Random(name))


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


def increment(x: int) -> int:
    return x + 1


def scale(x: float, factor: float = 2.0) -> float:
    return math.sqrt(x) * factor


scale.__module__ = "__main__"  # pickled by value, as the functions of a script are


def pandas_frame(n: int) -> Any:
    import pandas as pd

    return pd.DataFrame({"a": np.arange(n), "b": np.arange(n) / 7, "c": [f"row {i}" for i in range(n)]})


def dask_tasks(n: int) -> Any:
    from dask._task_spec import Task, TaskRef

    return [Task(("sum", i), sum, [TaskRef(("x", i)), i]) for i in range(n)]


TINY = {"op": "get", "id": 7, "x": [1, 2, 3], "s": "text"}
FIXED: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {  # name -> (maker, peers; all if none)
    "tiny dict": (lambda: {"a": 1, "b": 2.5, "c": "text", "d": None}, ()),
    "none": (lambda: None, ()),
    "tiny message": (lambda: TINY, ()),
    "dataclass": (lambda: Point(1.5, 2.5, "p"), ("pickle5", "cloudpickle")),
    "dataclasses 10,000": (lambda: [Point(i / 7, i / 3, f"p{i}") for i in range(10_000)], ("pickle5",)),
    "instances 10,000": (lambda: [Plain(i) for i in range(10_000)], ("pickle5",)),
    "reduced 10,000": (lambda: [Reduced(i, f"r{i}") for i in range(10_000)], ("pickle5",)),
    "pandas frame 10,000": (lambda: pandas_frame(10_000), ("pickle5",)),
    "dask tasks 1,000": (lambda: dask_tasks(1000), ("pickle5",)),
}


def task_finished(i: int) -> dict[str, Any]:
    at = 1_760_000_000.25 + i / 1000
    return {
        "op": "task-finished", "status": "OK", "key": f"increment-{i:032x}", "run_id": i, "nbytes": 28 + i,
        "type": pickle.dumps(int), "typename": "builtins.int", "thread": 140_000_000_000_000 + i % 2,
        "startstops": [{"action": "compute", "start": at, "stop": at + 0.0005}], "metadata": {},
        "stimulus_id": f"task-finished-{at + 0.001}",
    }


def compute_task(run_spec: Any) -> dict[str, Any]:
    return {
        "op": "compute-task", "key": "scale-0123456789abcdef0123456789abcdef", "run_id": 12,
        "priority": (0, 1, 12), "stimulus_id": "compute-task-1760000000.2512345",
        "who_has": {"x-1": ("tcp://127.0.0.1:40001",)}, "nbytes": {"x-1": 28}, "run_spec": run_spec,
        "resource_restrictions": {}, "actor": False, "annotations": {},
        "span_id": "01234567-89ab-cdef-0123-456789abcdef",
    }


MESSAGES: dict[str, Callable[[bool], Any]] = {  # name -> maker, told whether --full
    "tiny": lambda full: TINY,
    "20 task-finished": lambda full: [task_finished(i) for i in range(20)],
    "health": lambda full: [{"op": "health", "status": "OK"} for _ in range(100_000 if full else 10_000)],
    "compute-task by value": lambda full: scale,
    "compute-task by reference": lambda full: increment,
}
MARKED: dict[str, tuple[str, int, tuple[str, ...]]] = {  # name -> (workload, size, contenders; all if none)
    "float 20,000": ("float", 20_000, ()),
    "rows 10,000": ("rows", 10_000, ()),
    "records 10,000": ("records", 10_000, ()),
    "dict_str_float 10,000": ("dict_str_float", 10_000, ()),
    **{f"float 1e{e}": ("float", 10**e, ("fastser",)) for e in (3, 4, 5, 6, 7)},
}
MEMORY = {"array 400 MB": 50_000_000}
CLUSTER: dict[str, tuple[str, str, int, tuple[str, ...]]] = {  # name -> (what, workload, size, phases)
    "float_const 10,000": ("result", "float_const", 10_000, PHASES),
    "float 10,000": ("result", "float", 10_000, PHASES),
    "rows 10,000": ("result", "rows", 10_000, PHASES),
    "records 10,000": ("result", "records", 10_000, PHASES),
    "dict_str_float 10,000": ("result", "dict_str_float", 10_000, PHASES),
    "str 10,000": ("result", "str", 10_000, PHASES),
    "scatter float 10,000": ("scatter", "float", 10_000, PHASES),
    "map and gather 200": ("map", "", 200, PHASES),
    "array 1,000,000": ("result", "array_big", 1_000_000, PHASES),
    "float_const 1,000,000": ("result", "float_const", 1_000_000, ("fastser",)),
    "float 1,000,000": ("result", "float", 1_000_000, ("fastser",)),
}
# fmt: on

# ---- who writes and reads: name -> (module, function of it that gives dumps and loads)

Pair = tuple[Callable[[Any], Any], Callable[[Any], Any]]
Contenders = dict[str, tuple[str, Callable[[Any], Pair]]]


def plain(m: Any) -> Pair:
    return m.dumps, m.loads


def methods(m: Any) -> Pair:
    return m.serialize, m.deserialize


def framed(m: Any) -> Pair:
    return m.serialize, lambda data: m.deserialize(*data)


def buffered(m: Any) -> Pair:
    def write(x: Any) -> tuple[bytes, list[Any]]:
        buffers: list[Any] = []
        return m.dumps(x, protocol=5, buffer_callback=buffers.append), buffers

    return write, lambda data: pickle.loads(data[0], buffers=data[1])


def wrapped(write: Callable[[Any, Any], Any], key: str) -> Callable[[Any], Pair]:
    return lambda m: (lambda x: m.dumps(write(m, x)), lambda data: m.loads(data)[key])


OBJECT_CONTENDERS: Contenders = {
    "fastser": ("fastser", framed),
    "fastser.pickle": ("fastser.pickle", buffered),  # read by the standard pickle
    "pickle5": ("pickle", buffered),
    "cloudpickle": ("cloudpickle", lambda m: (partial(m.dumps, protocol=5), m.loads)),
    "marshal": ("marshal", plain),
    "msgpack": ("msgpack", lambda m: (m.Packer().pack, partial(m.unpackb, strict_map_key=False))),
    "ormsgpack": ("ormsgpack", lambda m: (m.packb, m.unpackb)),
    "msgspec": ("msgspec.msgpack", lambda m: (m.Encoder().encode, m.Decoder().decode)),
    "pyfory": ("pyfory", lambda m: methods(m.Fory(xlang=False, ref=False, strict=False))),
    "distributed": ("distributed.protocol", framed),
}
MESSAGE_CONTENDERS: Contenders = {
    "fastser": ("fastser", plain),
    "distributed": ("distributed.protocol", plain),
    "msgpack": ("msgpack", lambda m: (m.Packer().pack, partial(m.unpackb, use_list=False))),
    "msgspec": OBJECT_CONTENDERS["msgspec"],
    "ormsgpack": OBJECT_CONTENDERS["ormsgpack"],
}
marked = wrapped(lambda m, x: {"op": "x", "data": m.to_serialize(x)}, "data")
in_task = wrapped(lambda m, x: compute_task(m.ToPickle(x)), "run_spec")
MARKED_CONTENDERS = {"fastser": ("fastser", marked), "distributed": ("distributed.protocol", marked)}
TASK_CONTENDERS = {"fastser": ("fastser", in_task), "distributed": ("distributed.protocol", in_task)}
OPTIONAL = ("dask", "distributed", "lz4", "msgspec", "ormsgpack", "pandas", "pyfory", "rich")

# ---- exactness

PLAIN = frozenset({int, str, bytes, bool, type(None)})


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
        alike = (a.dtype, a.shape, a.flags.writeable) == (b.dtype, b.shape, b.flags.writeable)
        return alike and a.tobytes() == b.tobytes()
    if hasattr(a, "equals"):  # a pandas object
        return bool(a.equals(b)) and same([str(t) for t in a.dtypes], [str(t) for t in b.dtypes])
    return same(vars(a), vars(b)) if hasattr(a, "__dict__") else bool(a == b)


def same_message(a: Any, b: Any) -> bool:
    """Tell the same of messages, whose lists may arrive as tuples."""
    return same(a, b) or same(as_tuples(a), b)


def as_tuples(x: Any) -> Any:
    if isinstance(x, dict):
        return {k: as_tuples(v) for k, v in x.items()}
    return tuple(map(as_tuples, x)) if isinstance(x, list | tuple) else x


def size_of(data: Any) -> int:
    """Count the bytes of what a contender wrote: frames, buffers, and its header as text."""
    if isinstance(data, list | tuple):
        return sum(map(size_of, data))
    return len(repr(data)) if isinstance(data, dict) else memoryview(data).nbytes


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

    def best(self, metric: str) -> float:
        return min(self.samples.get(metric) or [math.nan])

    def median(self, metric: str) -> float:
        return statistics.median(self.samples.get(metric) or [math.nan])

    def noisy(self, metric: str) -> bool:
        return self.median(metric) > NOISY * self.best(metric)

    def as_json(self) -> dict[str, Any]:
        stats = {m: {"best": self.best(m), "median": self.median(m), "noisy": self.noisy(m)}
                 for m, samples in self.samples.items() if samples}  # fmt: skip
        return {**dataclasses.asdict(self), "stats": stats}


def sample(fn: Callable[[Any], Any], x: Any, number: int) -> float:
    """Return the seconds of one call, from *number* calls."""
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
    while number < 2**20 and (seconds := sample(fn, x, number) * number) < SAMPLE:
        number *= max(2, min(int(SAMPLE / max(seconds, 1e-7)), 100))
    return number


def serve(conn: Any, pair: Pair, value: Any, check: Any, finish: Any) -> None:
    """Be a contender: get ready, take turns, and at the end tell the size and whether it was exact."""
    dumps, loads = pair
    try:
        start = time.perf_counter()
        data = dumps(value)
        loads(data)
        fast = time.perf_counter() - start < 100 * SAMPLE
        numbers = (loops(dumps, value), loops(loads, data)) if fast else (1, 1)
        conn.send(None)
        while conn.recv():
            conn.send((sample(dumps, value, numbers[0]), sample(loads, data, numbers[1])))
        extra = finish(dumps, loads, value) if finish else {}
        conn.send((size_of(data), check(value, loads(data)), extra))
    except BaseException as error:
        conn.send(f"{type(error).__name__}: {error}"[:300])


class Child:
    """A contender in a forked process."""

    def __init__(self, *args: Any):
        context = multiprocessing.get_context("fork")
        self.conn, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, *args), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, question: bool | None) -> Any:
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
        self.process.join(0.5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


class Bench:
    """The options of a run, its progress and its results."""

    def __init__(self, options: argparse.Namespace):
        self.full, self.repeat = options.full, options.repeat
        self.only = [part for part in (options.only or "").split(",") if part]
        self.cells: list[Cell] = []
        self.summary: dict[str, Any] = {}
        self.missing: dict[str, str] = {}
        self.bar: Any = None
        self.done, self.total = 0, sum(len(self.rows(section)) for section in SECTIONS)

    def rows(self, section: str) -> list[str]:
        rows = [row for row in SECTIONS[section][2] if self.full or row != "float 1e7"]
        return [r for r in rows if not self.only or any(part in f"{section}/{r}" for part in self.only)]

    def installed(self, contenders: Contenders) -> dict[str, Pair]:
        """Import *contenders* and return those that can be."""
        pairs = {}
        for name, (module, make) in contenders.items():
            try:
                pairs[name] = make(importlib.import_module(module))
            except ImportError as error:
                self.missing[name] = str(error)
        gc.collect()
        gc.freeze()  # collections during what is timed shall not walk through modules and the value
        return pairs

    def compete(self, section: str, row: str, value: Any, pairs: dict[str, Pair], *ends: Any) -> None:
        """Let the contenders *pairs* write and read *value*, in turns; *ends* is for the end."""
        cells = {name: Cell(section, row, name, {metric: [] for metric in METRICS}) for name in pairs}
        children: dict[str, Child] = {}

        def ask(name: str, question: bool | None) -> Any:
            try:
                return children[name].ask(question)
            except RuntimeError as error:
                cells[name].error = str(error)
                children.pop(name).end()

        for name, pair in pairs.items():  # one after the other, each gets ready undisturbed
            children[name] = Child(pair, value, *ends)
            ask(name, None)
        start = time.perf_counter()
        spent = dict.fromkeys(pairs, 0.0)
        for turn in range(4 * self.repeat):
            if turn >= self.repeat and time.perf_counter() - start > ROW:
                break
            for name in list(children):
                if (turn < 2 or spent[name] < BUDGET) and (answer := ask(name, True)):
                    spent[name] += sum(answer)
                    for metric, seconds in zip(METRICS, answer, strict=True):
                        cells[name].samples[metric].append(seconds)
        for name in list(children):
            if answer := ask(name, False):
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

    def failures(self) -> list[str]:
        """Name the rows where fastser gave no answer or a wrong one."""
        wrong = [cell for cell in self.cells if cell.ours and (cell.error or not cell.exact)]
        return [f"{c.section}/{c.row}: {c.contender}: {c.error or 'not the same object'}" for c in wrong]


# ---- sections: each measures its rows


def case(section: str, row: str, full: bool) -> tuple[Callable[[], Any], Contenders, Any, Any]:
    """Return what a row measures: maker of the value, contenders, check of the result, last question."""
    if section == "objects":
        return partial(build, row, WORKLOADS[row][0] // (1 if full else 10)), OBJECT_CONTENDERS, same, None
    if section == "fixed":
        make, peers = FIXED[row]
        return make, only(OBJECT_CONTENDERS, peers and ("fastser", "fastser.pickle", *peers)), same, None
    if section == "to_serialize":
        workload, size, peers = MARKED[row]
        return partial(build, workload, size), only(MARKED_CONTENDERS, peers), same, None
    if section == "messages":
        contenders = TASK_CONTENDERS if row.startswith("compute") else MESSAGE_CONTENDERS
        return partial(MESSAGES[row], full), contenders, same_message, None
    contenders = only(OBJECT_CONTENDERS, ("fastser", "pickle5", "distributed"))
    return partial(build, "array_big", MEMORY[row]), contenders, same, growth


def only(contenders: Contenders, names: tuple[str, ...]) -> Contenders:
    return {name: contenders[name] for name in names or contenders}


def run(bench: Bench, section: str) -> None:
    for row in bench.rows(section):
        make, contenders, check, finish = case(section, row, bench.full)
        bench.step(f"{section}: {row}")
        try:
            value = make()
        except ImportError as error:
            bench.missing[f"{section}/{row}"] = str(error)
            continue
        bench.compete(section, row, value, bench.installed(contenders), check, finish)


def growth(dumps: Any, loads: Any, value: Any) -> dict[str, Any]:
    """Tell how much memory *dumps* takes, in bytes, and whether the array and its copy are one memory."""
    before = resident()
    data = dumps(value)
    rss = resident() - before
    frames = [np.frombuffer(frame, "u1") for part in data if type(part) is list for frame in part]
    out = any(f.nbytes == value.nbytes and f.ctypes.data == value.ctypes.data for f in frames)
    back = out and loads(data).ctypes.data == value.ctypes.data
    del data, frames
    tracemalloc.start()
    dumps(value)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {"rss": rss, "peak": peak, "zero copy out": out, "zero copy in": back}


def resident() -> int:
    gc.collect()
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def run_cluster(bench: Bench, section: str) -> None:
    """Time a stock and then a fastser cluster, each below a process of its own."""
    try:
        import distributed  # noqa: F401
    except ImportError as error:
        bench.missing["cluster"] = str(error)
        bench.done += len(bench.rows(section))
        return
    here = os.path.dirname(os.path.abspath(__file__))
    path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    for phase in PHASES:
        rows = [row for row in bench.rows(section) if phase in CLUSTER[row][3]]
        if not rows:
            continue
        command = [sys.executable, __file__, "--phase", phase, "--repeat", str(bench.repeat)]
        seen = set()
        with tempfile.TemporaryFile("w+") as log:
            process = subprocess.Popen(
                [*command, "--only", "|".join(rows)], env={**os.environ, "PYTHONPATH": path},
                stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True,
            )  # fmt: skip
            guard = threading.Timer(PHASE_TIMEOUT, os.killpg, (process.pid, signal.SIGKILL))
            guard.start()
            for line in process.stdout or ():
                if line.startswith("{"):
                    cell = Cell(**json.loads(line))
                    bench.cells.append(cell)
                    seen.add(cell.row)
                    bench.done -= phase != CLUSTER[cell.row][3][0]  # a row counts once
                    bench.step(f"cluster: {cell.row} ({phase})")
            process.wait()
            guard.cancel()
            guard.join()
            log.seek(0)
            problem = (log.read().strip().splitlines() or [f"no answer in {PHASE_TIMEOUT} s"])[-1][:300]
        bench.cells += [Cell("cluster", row, phase, error=problem) for row in rows if row not in seen]


def run_phase(phase: str, rows: list[str], repeat: int) -> None:
    """Time *rows* on one cluster, and print each as a line of JSON."""
    from distributed import Client, LocalCluster

    with (
        LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, protocol="tcp", dashboard_address=None,
            silence_logs=logging.ERROR,
        ) as cluster,
        Client(cluster) as client,
    ):  # fmt: skip
        if phase == "fastser":
            importlib.import_module("fastser.dask").install(client)
        for row in rows:
            cell = Cell("cluster", row, phase)
            try:
                time_on_cluster(client, cell, min(repeat, 2) if phase == "stock" else repeat)
            except Exception as error:
                name = type(error).__name__
                cell.error = f"over {STOCK_TIMEOUT} s" if "Timeout" in name else f"{name}: {error}"[:300]
            print(json.dumps(dataclasses.asdict(cell)), flush=True)


def time_on_cluster(client: Any, cell: Cell, repeat: int) -> None:
    from distributed import wait

    what, workload, n, _ = CLUSTER[cell.row]

    def timed(metric: str, fn: Callable[[], Any]) -> Any:
        gc.collect()
        start = time.perf_counter()
        result = fn()
        cell.samples.setdefault(metric, []).append(time.perf_counter() - start)
        return result

    def submit(size: int = n) -> Any:
        return client.submit(build, workload, size, pure=False)

    def result() -> Any:
        future = submit()
        wait(future, timeout=STOCK_TIMEOUT)
        value = timed("result", lambda: future.result(timeout=STOCK_TIMEOUT))
        if workload == "array_big":
            timed("tolist", value.tolist)
        timed("submit + result", lambda: submit().result(timeout=STOCK_TIMEOUT))
        return value

    def scatter() -> Any:
        return timed("scatter", lambda: client.scatter([expected], hash=False, timeout=STOCK_TIMEOUT))[
            0
        ].result()

    def map_and_gather() -> Any:
        return timed("map + gather", lambda: client.gather(client.map(increment, range(n), pure=False)))

    if what == "map":
        expected: Any = list(range(1, n + 1))
    else:
        expected = build(workload, n)
        client.gather([submit(10) for _ in range(4)])  # both workers have met it before
    run = {"result": result, "scatter": scatter, "map": map_and_gather}[what]
    for _ in range(1 if what == "scatter" and cell.contender == "stock" else repeat):
        cell.exact = same(expected, run()) and cell.exact is not False


# ---- tables


def show(title: str, header: Iterable[str], lines: Iterable[Iterable[str]]) -> None:
    grid = [list(header), *map(list, lines)]
    widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
    print(f"\n{title}")
    for first, *rest in grid:
        texts = [text.rjust(width) for text, width in zip(rest, widths[1:], strict=True)]
        print("  ".join([first.ljust(widths[0]), *texts]).rstrip())


def short(x: float | None, unit: float = 1.0) -> str:
    if x is None or math.isnan(x):
        return "-"
    return f"{x / unit:,.0f}" if x >= 100 * unit else f"{x / unit:.3g}"


def timing(cell: Cell | None, metric: str, unit: float) -> str:
    if cell is None or not cell.samples.get(metric):
        return "-"
    return short(cell.best(metric), unit) + "~" * cell.noisy(metric) + "*" * (cell.exact is False)


def ratio(a: Cell | None, b: Cell | None, metric: str) -> float:
    return a.best(metric) / b.best(metric) if a and b else math.nan


def mean(ratios: Iterable[float]) -> float:
    logs = [math.log(x) for x in ratios if not math.isnan(x)]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def fastest(cells: dict[str, Cell], metric: str) -> Cell | None:
    """Return the fastest contender that is not ours and gives the same object back."""
    peers = [c for c in cells.values() if not c.ours and c.exact and c.samples[metric]]
    return min(peers, key=lambda c: c.best(metric), default=None)


def report_peers(bench: Bench, section: str, unit: float, unit_name: str, baseline: str) -> None:
    """Show all contenders, then ours beside the fastest exact peer and beside *baseline*."""
    table = bench.of(section)
    names = list(dict.fromkeys(name for cells in table.values() for name in cells))
    for metric in METRICS:
        lines = [[r, *(timing(cells.get(n), metric, unit) for n in names)] for r, cells in table.items()]
        show(f"{section}: {metric}, {unit_name}", ["", *names], lines)
    sizes = [
        [r, *(short(c.size) if (c := cells.get(n)) else "-" for n in names)] for r, cells in table.items()
    ]
    show(f"{section}: bytes", ["", *names], sizes)
    ours = [name for name in names if name.startswith("fastser")]
    ratios: dict[str, list[float]] = {}
    lines, slow = [], []
    for row, cells in table.items():
        line = [row]
        for metric in METRICS:
            peer = fastest(cells, metric)
            line += [peer.contender if peer else "", timing(peer, metric, unit)]
            for name in ours:
                found = [ratio(cells.get(name), other, metric) for other in (peer, cells.get(baseline))]
                line += map(short, found)
                for other, x in zip(("the fastest exact peer", baseline), found, strict=True):
                    ratios.setdefault(f"{name} {metric} / {other}", []).append(x)
                if found[0] > SLOW and peer:
                    slow.append(f"{row} {metric} ({name} {short(found[0])} times {peer.contender})")
        lines.append(line)
    columns = ["fastest exact", unit_name, *(text for name in ours for text in (name, f"/ {baseline}"))]
    show(f"{section}: dumps, then loads: fastser as a ratio", ["", *columns, *columns], lines)
    print("geometric means:")
    for text, found in ratios.items():
        if not math.isnan(mean(found)):
            bench.summary[f"{section}: {text}"] = mean(found)
        print(f"  {text}: {short(mean(found))}")
    if section == "objects":
        print(GOALS)
    print("".join(f"slow: {text}\n" for text in slow), end="")


def report_marked(bench: Bench, section: str) -> None:
    lines = []
    for row, cells in bench.of(section).items():
        ours, stock = cells["fastser"], cells.get("distributed")
        line = [row]
        for metric in METRICS:
            texts = [timing(cell, metric, 1e-3) for cell in (ours, stock)]
            line += [*texts, short(ratio(stock, ours, metric)), timing(ours, metric, 1e-9 * MARKED[row][1])]
        lines.append(line)
    columns = [text for m in METRICS for text in (f"{m} ms", "distributed", "times", "ns/element")]
    show("to_serialize: a message with one marked object", ["", *columns], lines)
    print(
        "goal: 20,000 random floats 300 times as fast as distributed; the same time per element at any size"
    )


def report_memory(bench: Bench, section: str) -> None:
    lines = []
    for row, cells in bench.of(section).items():
        for name, cell in cells.items():
            sizes = [short(cell.extra.get(key), 2**20) for key in ("rss", "peak")]
            flags = [str(cell.extra.get(key, "-")) for key in ("zero copy out", "zero copy in")]
            lines.append([f"{row}, {name}", *(timing(cell, m, 1e-6) for m in METRICS), *sizes, *flags])
    columns = ("", "dumps us", "loads us", "RSS + MiB", "peak MiB", "zero copy out", "in")
    show("memory: one large array", columns, lines)


def report_cluster(bench: Bench, section: str) -> None:
    lines = []
    table = bench.of(section)
    for row, cells in table.items():
        stock, ours = cells.get("stock"), cells.get("fastser")
        for metric in list(dict.fromkeys(m for cell in cells.values() for m in cell.samples)) or [""]:
            texts = [
                t
                for c in (stock, ours)
                for t in (timing(c, metric, 1e-3), short(c and c.median(metric), 1e-3))
            ]
            lines.append([f"{row}: {metric}", *texts, short(ratio(stock, ours, metric))])
        if stock and stock.error:
            lines.append([f"{row}: stock: {stock.error}", *[""] * 5])
    columns = ("", "stock", "median", "fastser", "median", "times")
    show("cluster: 2 worker processes over TCP, ms", columns, lines)
    arrays = table.get("array 1,000,000", {}).get("fastser")
    for name, extra, text in (
        ("float", "tolist", "an array and its tolist"),
        ("float_const", "", "an array"),
    ):
        ours = table.get(f"{name} 1,000,000", {}).get("fastser")
        if arrays and ours and not (arrays.error or ours.error):
            relative = ours.best("result") / (arrays.best("result") + (arrays.best(extra) if extra else 0))
            bench.summary[f"cluster: {name} 1,000,000 / {text}"] = relative
            print(f"{name} 1,000,000: {short(relative)} times the result of {text} (goal: 2)")


def report_against(bench: Bench, path: str) -> None:
    """Show ours as a ratio to an earlier run, and how the peers moved meanwhile."""
    with open(path) as file:
        earlier = json.load(file)
    stats = {(c["section"], c["row"], c["contender"]): c["stats"] for c in earlier["cells"]}
    lines, ours, peers = [], [], []
    for cell in bench.cells:
        for metric in cell.samples:
            then = stats.get((cell.section, cell.row, cell.contender), {}).get(metric)
            if then and not math.isnan(now := cell.best(metric)):
                (ours if cell.ours else peers).append(now / then["best"])
                if cell.ours:
                    mark = "~" * (cell.noisy(metric) or then["noisy"])
                    texts = [short(then["best"], 1e-3), short(now, 1e-3), short(now / then["best"]) + mark]
                    lines.append([f"{cell.section}/{cell.row}", cell.contender, metric, *texts])
    show(f"against {path}, ms", ("", "", "", "then", "now", "ratio"), lines)
    print(f"geometric mean {short(mean(ours))}; of the peers, which is the machine: {short(mean(peers))}")
    for key, facts in (("machine", machine()), ("full", bench.full)):
        if earlier[key] != facts:
            print(f"not alike: {key} was {earlier[key]}")


SECTIONS: dict[str, tuple[Callable[..., None], Callable[..., None], Iterable[str]]] = {
    "cluster": (run_cluster, report_cluster, CLUSTER),
    "objects": (run, partial(report_peers, unit=1e-3, unit_name="ms", baseline="pickle5"), WORKLOADS),
    "fixed": (run, partial(report_peers, unit=1e-6, unit_name="us", baseline="pickle5"), FIXED),
    "to_serialize": (run, report_marked, MARKED),
    "messages": (run, partial(report_peers, unit=1e-6, unit_name="us", baseline="distributed"), MESSAGES),
    "memory": (run, report_memory, MEMORY),
}

# ---- command line


def machine() -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        cpu = next((x.partition(":")[2].strip() for x in file if x.startswith("model name")), cpu)
    return {"cpu": cpu, "cores": len(os.sched_getaffinity(0)), "system": platform.platform()}


def versions() -> dict[str, str]:
    import fastser

    found = {"python": platform.python_version(), "fastser": fastser.__version__}
    for name in ("numpy", "cloudpickle", "msgpack", *OPTIONAL):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


@contextlib.contextmanager
def progress(bench: Bench) -> Iterator[None]:
    """Show a bar, if rich is installed and there is a terminal; else `Bench.step` prints lines."""
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        yield
        return
    if not sys.stderr.isatty():
        yield
        return
    with Progress(
        console=Console(stderr=True), auto_refresh=False, transient=True
    ) as bench.bar:  # no thread:
        bench.bar.add_task("", total=bench.total, completed=bench.done)  # the children are forked
        yield
    bench.bar = None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", metavar="NAMES", help="sections, or parts of section/row, with commas")
    parser.add_argument("--full", action="store_true", help="the full sizes; takes ten minutes")
    parser.add_argument("--repeat", type=int, default=5, metavar="N", help="turns that each takes (5)")
    parser.add_argument("--json", metavar="FILE", help="write all results to a file")
    parser.add_argument("--against", metavar="FILE", help="compare with the results of an earlier run")
    parser.add_argument("--list", action="store_true", help="list all rows")
    parser.add_argument("--phase", choices=PHASES, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.phase:
        run_phase(options.phase, options.only.split("|"), options.repeat)
        return 0
    bench = Bench(options)
    sections = [section for section in SECTIONS if bench.rows(section)]
    if options.list:
        print("\n".join(f"{section}/{row}" for section in sections for row in bench.rows(section)))
        return 0
    if not sections or options.repeat < 1:
        parser.error(f"no row matches {options.only}; see --list" if not sections else "--repeat: 1 or more")
    facts = {"machine": machine(), "versions": versions(), "load": os.getloadavg()[0], "full": bench.full}
    print("{cpu}, {cores} cores, {system}".format(**facts["machine"]))
    print(", ".join(f"{name} {version}" for name, version in facts["versions"].items()))
    if facts["load"] > 0.5:
        print(f"the machine is not idle: load {facts['load']:.1f}")
    begin = time.perf_counter()
    for section in sections:
        measure, report, _ = SECTIONS[section]
        with progress(bench):
            measure(bench, section)
        report(bench, section)
        sys.stdout.flush()
    facts["seconds"] = time.perf_counter() - begin
    failures = bench.failures()
    if options.against:
        report_against(bench, options.against)
    if options.json:
        results = {"cells": [cell.as_json() for cell in bench.cells], "summary": bench.summary}
        with open(options.json, "w") as file:
            json.dump({**facts, **results, "missing": bench.missing, "failures": failures}, file, indent=1)
    print(f"\n{facts['seconds']:.0f} s")
    print("".join(f"left out: {name}: {reason}\n" for name, reason in bench.missing.items()), end="")
    print("".join(f"FAILED {text}\n" for text in failures), end="")
    return 1 if failures else 0


if __name__ == "__main__":
    import bench  # by its own name, so that its classes are pickled by reference, as those of a library are

    sys.exit(bench.main())
