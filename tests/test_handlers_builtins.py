"""bytes, arrays, memoryviews, exceptions and cached functions: exact types, read by stock Python."""

from __future__ import annotations

import copyreg
import ctypes
import functools
import pickle
import subprocess
import sys
import textwrap
from array import array
from typing import Any

import cloudpickle
import numpy as np
import pytest
from distributed.protocol import deserialize as stock_deserialize
from distributed.protocol import serialize as stock_serialize
from hypothesis import given
from hypothesis import strategies as st
from round_trip import nested, stock, trip
from stock_reader import describe, read_by_stock

import fastser
from fastser.dispatch import Call, reducers
from fastser.errors import FastserError, FrameError

READERS = (trip, nested, stock)


class Bytes(bytes):
    pass


class ByteArray(bytearray):
    pass


class Array(array):
    def __reduce_ex__(self, protocol: Any) -> Any:
        return Array, (self.typecode, self.tolist()), self.__dict__


# ---- bytes, bytearray, array.array


@pytest.mark.parametrize("size", [0, 5, 100_000])
@pytest.mark.parametrize("typ", [bytes, bytearray, Bytes, ByteArray])
def test_bytes(typ: Any, size: int) -> None:
    x = typ(b"x" * size)
    for read in READERS:
        y = read(x)
        assert type(y) is typ and y == x


def test_bytes_are_the_frame() -> None:
    for x in (b"abc", bytearray(b"abc")):
        header, frames = fastser.serialize(x)
        assert frames[0] is x and fastser.deserialize(header, frames) is x
    assert fastser.deserialize(*stock_serialize(b"abc")) == b"abc"


@pytest.mark.parametrize("code", "bBuhHiIlLqQfd")
@pytest.mark.parametrize("size", [0, 3, 50_000])
def test_array(code: str, size: int) -> None:
    x = array(code, "ab" * size if code == "u" else [1, 2] * size)
    for read in READERS:
        y = read(x)
        assert type(y) is array and y.typecode == code and y == x
    y = fastser.deserialize(*stock_serialize(x))
    assert type(y) is array and y.typecode == code and y == x


def test_subclass_of_array_keeps_its_class() -> None:
    x = Array("h", [1, 2])
    x.tag = "t"
    for read in READERS:
        y = read(x)
        assert type(y) is Array and y == x and y.tag == "t"


@pytest.mark.parametrize(
    "typ, header, frames",
    [
        (bytes, {}, []),
        (bytes, {}, [b"", b""]),
        (bytearray, {}, []),
        (array, {}, [b""]),
        (array, {"typecode": "z"}, [b""]),
        (array, {"typecode": 3}, [b""]),
        (array, {"typecode": "d"}, [b"1234"]),
        (array, {"typecode": "d"}, []),
        (memoryview, {}, [b""]),
        (memoryview, {"format": "d", "shape": (3,)}, [bytes(16)]),
        (memoryview, {"format": "d", "shape": (-1,)}, [bytes(16)]),
        (memoryview, {"format": "d", "shape": "x"}, [bytes(16)]),
        (memoryview, {"format": "O", "shape": (2,)}, [bytes(16)]),
        (memoryview, {"format": "d", "shape": (2, 0)}, [b""]),
        (memoryview, {"format": "d", "shape": (1 << 70,)}, [bytes(16)]),
    ],
)
def test_lying_headers_raise(typ: Any, header: Any, frames: Any) -> None:
    with pytest.raises((FastserError, OverflowError)):
        fastser.dask_deserialize.dispatch(typ)(header, frames)


# ---- memoryview


def fortran() -> memoryview:
    return memoryview(np.asfortranarray(np.arange(6.0).reshape(2, 3)))


VIEWS = {
    "bytes": lambda: memoryview(b"abc"),
    "bytearray": lambda: memoryview(bytearray(b"abc")),
    "empty": lambda: memoryview(b""),
    "empty-writeable": lambda: memoryview(bytearray()),
    "slice": lambda: memoryview(bytearray(range(20)))[3:9],
    "strided": lambda: memoryview(bytearray(range(20)))[::3],
    "reversed": lambda: memoryview(bytes(range(20)))[::-1],
    "fortran": fortran,
    "fortran-readonly": lambda: fortran().toreadonly(),
    "3d": lambda: memoryview(bytearray(range(24))).cast("B", [2, 3, 4]),
    "0d": lambda: memoryview(bytearray(8)).cast("d", []),
    "0d-bytes": lambda: memoryview(b"a").cast("B", []),
    "signed": lambda: memoryview(bytearray(range(8))).cast("b"),
    "char": lambda: memoryview(b"abc").cast("c"),
    "at": lambda: memoryview(bytearray(8)).cast("@i"),
    "at-B": lambda: memoryview(bytearray(8)).cast("@B"),
    "longlong": lambda: memoryview(bytearray(16)).cast("q", [1, 2]),
    "pointer": lambda: memoryview(bytearray(16)).cast("P"),
    "size": lambda: memoryview(bytearray(16)).cast("N"),
    "empty-typed": lambda: memoryview(b"").cast("i"),
    "empty-2d": lambda: memoryview(np.empty((2, 0))),
    "empty-2d-int": lambda: memoryview(np.empty((0, 3), "i4")),
    "empty-2d-longlong": lambda: memoryview(np.empty((0, 3), "q")),
    "empty-2d-bytes": lambda: memoryview(np.empty((0, 3), "u1")),
    "empty-3d-readonly": lambda: memoryview(np.empty((2, 0, 5), "f4")).toreadonly(),
    "array": lambda: memoryview(array("d", [1, 2])),
    "array-u": lambda: memoryview(array("u", "ab")),
    "half": lambda: memoryview(np.ones(3, "f2")),
    "long-double": lambda: memoryview(np.ones(3, "g")),
    "complex": lambda: memoryview(np.ones(3, "c16")),
    "complex-strided": lambda: memoryview(np.ones((3, 4), "c8"))[::2],
    "big-endian": lambda: memoryview(np.arange(3, dtype=">i4")),
    "big-endian-f": lambda: memoryview(np.asfortranarray(np.arange(6, dtype=">i4").reshape(2, 3))),
    "text": lambda: memoryview(np.array(["ab", "c"])),
    "void": lambda: memoryview(np.zeros(3, "S4")),
    "record": lambda: memoryview(np.zeros(2, [("a", "i4"), ("b", "f8", 2)])),
    "record-aligned": lambda: memoryview(np.zeros(2, np.dtype([("a", "i1"), ("b", "f8")], align=True))),
    "ctypes": lambda: memoryview((ctypes.c_int * 3)(1, 2, 3)),
    "ctypes-2d": lambda: memoryview(((ctypes.c_short * 3) * 2)()),
    "ctypes-0d": lambda: memoryview(ctypes.c_double(1.5)),
    "ctypes-readonly": lambda: memoryview((ctypes.c_int * 3)(1, 2, 3)).toreadonly(),
    "ctypes-big": lambda: memoryview((ctypes.c_int.__ctype_be__ * 2)(1, 2)),
    "ctypes-long": lambda: memoryview((ctypes.c_long * 2)(1, 2)),
    "ctypes-strided": lambda: memoryview((ctypes.c_int * 6)(*range(6)))[::2],
    "ctypes-empty": lambda: memoryview((ctypes.c_int * 0)()),
    "ctypes-empty-2d": lambda: memoryview(((ctypes.c_int * 0) * 2)()),
    "large": lambda: memoryview(bytearray(200_000)),
    "large-typed": lambda: memoryview(bytearray(200_000)).cast("d").toreadonly(),
    "large-ctypes": lambda: memoryview((ctypes.c_int * 50_000)()),
    "large-complex": lambda: memoryview(np.ones((100, 100), "c16")),
}


@pytest.mark.parametrize("name", VIEWS)
def test_memoryview(name: str) -> None:
    x = VIEWS[name]()
    for read in READERS:
        assert describe(read(x)) == describe(x)


def test_another_process_reads_memoryviews() -> None:
    views = [make() for make in VIEWS.values()]
    for objects in (views, [[x] for x in views]):
        encoded = [fastser.serialize(x, on_error="raise") for x in objects]
        assert read_by_stock(encoded) == [describe(x) for x in objects]


@pytest.mark.parametrize("name", [name for name in VIEWS if name.startswith("large")])
def test_large_memoryview_is_not_copied(name: str) -> None:
    x = VIEWS[name]()
    for obj in (x, [x]):
        header, frames = fastser.serialize(obj)
        y = fastser.deserialize(header, frames)
        y = y if obj is x else y[0]
        assert np.shares_memory(np.asarray(x), np.asarray(y)) and describe(y) == describe(x)


@given(st.sampled_from("bBhHiIlLqQfd?"), st.lists(st.integers(1, 4), max_size=3), st.booleans(), st.data())
def test_any_memoryview(form: str, shape: list[int], readonly: bool, data: Any) -> None:
    size = int(np.prod(shape, dtype=int)) * memoryview(bytearray(8)).cast(form).itemsize
    buffer = bytearray([1]) * size
    x = memoryview(bytes(buffer) if readonly else buffer).cast(form, shape)
    if shape and data.draw(st.booleans()):
        x = x[:: data.draw(st.sampled_from([-2, -1, 2]))]
    for read in READERS:
        assert describe(read(x)) == describe(x)


def test_reads_memoryviews_of_stock() -> None:
    for name in ("bytes", "bytearray", "signed", "3d", "longlong", "empty", "empty-typed"):
        x = VIEWS[name]()
        y = fastser.deserialize(*stock_serialize(x))
        assert (y.format, y.shape, y.tobytes()) == (x.format, x.shape, x.tobytes())


@pytest.mark.parametrize(
    "x", [np.array([None]), np.zeros(2, np.dtype([("a", "i4"), ("o", object)], align=True))]
)
def test_pointers_in_a_memoryview_are_refused(x: Any) -> None:
    with pytest.raises(TypeError, match=r"format .*O.*pointers"):
        fastser.serialize(memoryview(x), on_error="raise")


def test_unknown_format_is_named() -> None:
    class Point(ctypes.Structure):
        _fields_ = (("x", ctypes.c_int), ("next", ctypes.POINTER(ctypes.c_int)))

    with pytest.raises(TypeError, match="format 'T"):
        fastser.serialize(memoryview((Point * 2)()), on_error="raise")


def test_released_memoryview_is_refused() -> None:
    x = memoryview(b"a")
    x.release()
    with pytest.raises(TypeError, match="released"):
        fastser.serialize(x, on_error="raise")


# ---- exceptions


class TwoArgs(Exception):
    def __init__(self, message: str, code: int):
        super().__init__(message)
        self.code = code


class Reworded(ValueError):
    def __init__(self, code: int):
        super().__init__(f"code {code}")
        self.code = code


class Plain(KeyError):
    pass


class Slotted(Exception):
    __slots__ = ("code",)

    def __init__(self, code: int = 3):
        super().__init__(code)
        self.code = code


class File(OSError):
    def __init__(self, path: str):
        super().__init__(2, "gone", path)
        self.path = path


class Stop(StopIteration):
    def __init__(self, a: int, b: int):
        super().__init__(a)
        self.b = b


class OwnReduce(Exception):
    def __init__(self, a: int, b: int):
        super().__init__(a + b)
        self.a, self.b = a, b

    def __reduce__(self) -> Any:
        return type(self), (self.a, self.b)


class OwnNew(Exception):
    def __new__(cls, *args: Any) -> Any:
        return super().__new__(cls, *args)

    def __init__(self, *args: Any):
        super().__init__(*args)


class Copied(Exception):
    def __init__(self, a: int, b: int):
        super().__init__(a)
        self.b = b


copyreg.pickle(Copied, lambda x: (Copied, (x.args[0], x.b)))


def with_notes() -> Any:
    error = TwoArgs("a", 3)
    error.__notes__ = ["n"]
    return error


ERRORS = {
    "two": lambda: TwoArgs("m", 3),
    "notes": with_notes,
    "reworded": lambda: Reworded(3),
    "plain": lambda: Plain("k", 2),
    "slotted": lambda: Slotted(4),
    "stop": lambda: Stop(1, 2),
    "own-reduce": lambda: OwnReduce(1, 2),
    "own-new": lambda: OwnNew(1, 2),
    "copyreg": lambda: Copied(1, 2),
    "builtin": lambda: ZeroDivisionError("x"),
    "os": lambda: FileNotFoundError(2, "gone", "path"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_exceptions(name: str) -> None:
    x = ERRORS[name]()
    for read in READERS:
        y = read(x)
        assert type(y) is type(x) and y.args == x.args and vars(y) == vars(x) and str(y) == str(x)
    if name == "slotted":
        assert nested(x).code == 4


def test_exception_way_is_told_apart() -> None:
    ways = {
        name: reducers.find(type(x))(x) is NotImplemented for name, x in ((n, f()) for n, f in ERRORS.items())
    }
    assert [name for name, own in ways.items() if not own] == ["two", "notes", "reworded", "stop"]
    assert reducers.find(File)(File("p")) is NotImplemented


# ---- functools.lru_cache


@functools.lru_cache(maxsize=5)
def known(x: int) -> int:
    return x + 1


def test_cached_function_of_a_module_travels_by_reference() -> None:
    assert nested(known) is known and stock(known) is known


def test_cached_function_by_value() -> None:
    program = """
        import functools, pickle, sys
        import fastser

        @functools.lru_cache(maxsize=7, typed=True)
        def fib(n):
            return n if n < 2 else fib(n - 1) + fib(n - 2)
        fib.tag = "t"

        @functools.cache
        def twice(n):
            return 2 * n

        fib(20)
        sys.stdout.buffer.write(pickle.dumps(fastser.serialize([fib, twice, fib], on_error="raise")))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, check=True)
    fib, twice, again = stock_deserialize(*pickle.loads(done.stdout))
    assert fib is again and fib.cache_info() == (0, 0, 7, 0)
    assert fib.cache_parameters() == {"maxsize": 7, "typed": True}
    assert fib(30) == 832040 and fib.tag == "t" and fib.__name__ == "fib" and fib.cache_info().misses == 31
    assert twice(4) == 8 and twice.cache_parameters() == {"maxsize": None, "typed": False}


def test_cached_function_of_a_module_that_travels_by_value() -> None:
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    try:
        header, frames = fastser.serialize(known)
    finally:
        cloudpickle.unregister_pickle_by_value(module)
    y = stock_deserialize(header, frames)
    assert y is not known and y(2) == 3 and y.cache_parameters()["maxsize"] == 5


def test_cached_closure() -> None:
    base = 10

    @functools.lru_cache
    def add(x: int) -> int:
        return x + base

    y = nested(add)
    assert y(5) == 15 and y.cache_parameters()["maxsize"] == 128


# ---- calls


def test_call_leaves_no_trace() -> None:
    data = pickle.dumps(Call(Call(functools.partial, divmod), Call(len, "abcde"), 3))
    assert b"fastser" not in data and pickle.loads(data) == (1, 2)
    assert Call(functools.partial, divmod)(5, 3) == (1, 2)


def test_nested_dict_header() -> None:
    read = fastser.dask_deserialize.dispatch(dict)
    inner = {"simple": {"b": 1}, "complex": {}}
    part = {"header": {"nested-dict": inner}, "start": 0, "stop": 0}
    assert read({"simple": {"x": 2}, "complex": {"a": part}}, []) == {"x": 2, "a": {"b": 1}}
    with pytest.raises(FrameError, match="expected some of 0 frames"):
        read({"simple": {}, "complex": {"a": {**part, "stop": 1}}}, [])
