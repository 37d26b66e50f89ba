"""Objects of scipy, pyarrow, h5py, netCDF4, sparse and pandas, and objects that are their attributes."""

from __future__ import annotations

import functools
import os
import pickle
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from typing import Any

import h5py
import netCDF4
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.fs
import pytest
import scipy.sparse
import sparse
from distributed.protocol import serialize as stock_serialize
from round_trip import nested, stock, trip
from stock_reader import describe, pack, read_by_stock

import fastser
from fastser.errors import DispatchError, FastserError, FrameError
from fastser.handlers.objects import register_generic

N = 20_000


def size(x: Any) -> int:
    return sum(memoryview(f).nbytes for f in fastser.serialize(x, on_error="raise")[1])


def described(x: Any) -> Any:
    """Describe attributes in any order: simple ones come first in distributed's form."""
    return {name: describe(value) for name, value in vars(x).items()}


READERS = (trip, nested, stock)

# ---- register_generic


class Model:
    def __init__(self, **attributes: Any):
        self.__dict__.update(attributes)


class SubModel(Model):
    pass


class NoDict:
    __slots__ = ()


register_generic(Model)
register_generic(NoDict)

ATTRIBUTES = {
    "none": {},
    "plain": {"a": 1, "b": "x", "c": 2.5, "d": None, "e": True, "f": b"y", "g": (1, ("a",))},
    "list": {"history": [1, 2.5], "empty": [], "in_tuple": ([1], 2)},
    "dicts": {"names": {"a": 1}, "numbers": {1: "a", (2, 3): [4]}, "deep": {"a": {1: {}}}, "e": {}},
    "bigint": {"n": 2**80, "m": -(2**70), "u": 2**64 - 1},
    "surrogate": {"s": "a\udc80", "t": ("a\udc80",)},
    "arrays": {"x": np.arange(5.0), "y": np.asfortranarray(np.eye(3)), "f": np.float64(2), "l": [np.ones(2)]},
    "types": {"s": {1, 2}, "b": bytearray(b"a"), "c": 1j, "k": np.int8(3), "t": int, "f": len, "r": range(3)},
    "long": {"s": "x" * 10_000, "b": b"y" * 10_000, "t": tuple(range(1000)), "d": dict.fromkeys("abc", 1)},
    "deep": {"t": functools.reduce(lambda t, _: (t,), range(100), ())},
    "float-keys": {"d": {1.5: 1, None: 2, b"b": 3}},
}


@pytest.mark.parametrize("name", ATTRIBUTES)
@pytest.mark.parametrize("cls", [Model, SubModel])
def test_generic(name: str, cls: Any) -> None:
    x = cls(**ATTRIBUTES[name])
    header, _ = fastser.serialize(x, on_error="raise")
    assert header["serializer"] == "dask"
    for y in (trip(x), nested(x)):
        assert type(y) is cls and described(y) == described(x)


def test_stock_reads_generic_objects() -> None:
    from distributed.protocol import register_generic as stock_register

    stock_register(Model)
    for attributes in ATTRIBUTES.values():
        x = Model(**attributes)
        y = stock(x)
        assert type(y) is Model and described(y) == described(x)
        if (
            not {"bigint", "surrogate"} & attributes.keys()
            and "n" not in attributes
            and "s" not in attributes
        ):
            header, frames = stock_serialize(x)
            y = fastser.deserialize(header, frames)
            assert described(y) == described(x)


def test_generic_keeps_sharing() -> None:
    shared = [1]
    x = Model(a=shared, b={"c": shared})
    y = trip(x)
    assert y.a is y.b["c"] and y.a == [1]
    x = Model()
    x.me = x
    y = trip(x)
    assert y.me is y
    a = np.ones(3)
    y = trip(Model(a=a, b=a))
    assert y.a is y.b


def test_generic_arrays_are_not_copied() -> None:
    x = Model(x=np.ones(N))
    y = fastser.deserialize(*fastser.serialize(x))
    assert np.shares_memory(x.x, y.x)


def test_generic_says_what_is_wrong() -> None:
    with pytest.raises(TypeError, match=r"__dict__, NoDict has none"):
        fastser.serialize(NoDict(), on_error="raise")
    with pytest.raises(TypeError, match=r"attribute 'g': .*generator"):
        fastser.serialize(Model(a=1, g=(i for i in range(3))), on_error="raise")


@pytest.mark.parametrize(
    "change",
    [
        {"simple": None},
        {"complex": [1]},
        {"type-serialized": pickle.dumps(3)},
        {"type-serialized": pickle.dumps(np.ndarray)},
        {"type-serialized": pickle.dumps(int)},
        {"type-serialized": "x"},
        {"complex": {"x": {}}},
        {"complex": {"x": {"header": {}, "start": 0, "stop": 9}}},
        {"complex": {"x": {"header": {}, "start": -1, "stop": 0}}},
        {"complex": {"x": {"header": {}, "start": True, "stop": 1}}},
        {"complex": {"x": {"header": {}, "start": 0, "stop": 1}}},
        {"complex": {"x": {"header": {"nested-dict": 3}, "start": 0, "stop": 1}}},
    ],
)
def test_lying_generic_headers_raise(change: Any) -> None:
    header, frames = fastser.serialize(Model(x=np.ones(3)))
    with pytest.raises(FastserError):
        fastser.dask_deserialize.dispatch(Model)({**header["sub-header"], **change}, frames)


# ---- scipy

FORMATS = ("csr", "csc", "coo", "bsr", "dia", "lil", "dok")


def matrix(form: str, kind: str) -> Any:
    dense = np.array([[1.5, 0, 2], [0, 0, 0], [0, 3, 0]])
    return getattr(scipy.sparse, f"{form}_{kind}")(dense)


@pytest.mark.parametrize("kind", ["matrix", "array"])
@pytest.mark.parametrize("form", FORMATS)
def test_sparse(form: str, kind: str) -> None:
    x = matrix(form, kind)
    x.labels, x.names, x.big, x.odd = [1, "a"], {1: "x"}, 2**80, "\udc80"
    for read in READERS:
        y = read(x)
        assert type(y) is type(x) and describe(y) == describe(x)
        assert (y != x).sum() == 0 and y.dtype == x.dtype


def test_another_process_reads_sparse() -> None:
    objects = []
    for form in FORMATS:
        for kind in ("matrix", "array"):
            x = matrix(form, kind)
            for name, attributes in ATTRIBUTES.items():
                if name != "types":
                    vars(x).update({f"{name}_{k}": v for k, v in attributes.items()})
            objects.append(x)
    for wrapped in (objects, [[x] for x in objects]):
        encoded = [fastser.serialize(x, on_error="raise") for x in wrapped]
        assert read_by_stock(encoded) == [describe(x) for x in wrapped]


@pytest.mark.parametrize("form", FORMATS)
def test_reads_sparse_matrices_of_stock(form: str) -> None:
    x = matrix(form, "matrix")
    header, frames = stock_serialize(x)
    y = fastser.deserialize(pack(header), frames)
    assert type(y) is type(x) and (y != x).sum() == 0


class OwnMatrix(scipy.sparse.csr_matrix):
    def __reduce__(self) -> Any:
        return OwnMatrix, (self.toarray(),)


def test_subclass_of_a_sparse_matrix_keeps_its_pickle() -> None:
    x = OwnMatrix(np.eye(3))
    for read in READERS:
        assert type(read(x)) is OwnMatrix


def test_sparse_memory_is_not_copied() -> None:
    for kind in ("matrix", "array"):
        x = getattr(scipy.sparse, f"csr_{kind}")(np.ones((200, 200)))
        y = fastser.deserialize(*fastser.serialize(x))
        assert np.shares_memory(x.data, y.data) and np.shares_memory(x.indices, y.indices)


@pytest.mark.parametrize("fill", [0, 2.5])
def test_coo(fill: float) -> None:
    x = sparse.COO(np.array([[0, 1], [1, 2]]), np.array([1.0, 2.0]), shape=(3, 4), fill_value=fill)
    for read in READERS:
        y = read(x)
        assert describe(y) == describe(x) and (y.todense() == x.todense()).all()
    if not fill:
        header, frames = stock_serialize(x)
        assert describe(fastser.deserialize(pack(header), frames)) == describe(x)
        for key in header["sub-header"]:
            with pytest.raises(FastserError):
                fastser.deserialize({**header, "sub-header": {**header["sub-header"], key: "lie"}}, frames)


# ---- pyarrow


def table(n: int = 3) -> Any:
    columns = {
        "i": pa.array(range(n)),
        "s": pa.array([str(i) if i % 3 else None for i in range(n)]),
        "d": pa.array([f"k{i % 5}" for i in range(n)]).dictionary_encode(),
        "l": pa.array([[i, None] for i in range(n)]),
        "t": pa.array([{"a": i, "b": "x"} for i in range(n)]),
        "b": pa.array([i % 2 == 0 for i in range(n)]),
    }
    return pa.table(columns).replace_schema_metadata({"k": "v"})


ARROW = {
    "table": table,
    "table-empty": lambda: table(0),
    "table-none": lambda: pa.table({}),
    "table-rows": lambda: pa.table({"a": [1, 2]}).select([]),
    "batch-rows": lambda: pa.record_batch({"a": [1, 2]}).select([]),
    "table-rows-metadata": lambda: pa.table({"a": [1, 2]}, metadata={"k": "v"}).select([]),
    "table-slice": lambda: table(1000).slice(10, 5),
    "table-chunks": lambda: pa.concat_tables([table(3), table(5)]),
    "table-large": lambda: table(50_000),
    "batch": lambda: table().to_batches()[0],
    "batch-slice": lambda: table(1000).to_batches()[0].slice(10, 5),
    "batch-large": lambda: table(50_000).to_batches()[0],
    "array": lambda: pa.array([1, None, 3]),
    "array-slice": lambda: pa.array(range(N)).slice(5, 10),
    "string-slice": lambda: pa.array([str(i) for i in range(N)]).slice(5, 10),
    "struct-slice": lambda: table(5000)["t"].chunk(0).slice(7, 3),
    "list-slice": lambda: table(5000)["l"].chunk(0).slice(7, 3),
    "dictionary-slice": lambda: table(50_000)["d"].chunk(0).slice(7, 3),
    "bool-slice": lambda: table(100_000)["b"].chunk(0).slice(7, 3),
    "null": lambda: pa.nulls(5),
    "chunked": lambda: table()["i"],
    "chunked-slice": lambda: table(50_000)["s"].slice(3, 4),
    "chunked-empty": lambda: pa.chunked_array([], pa.int8()),
    "view": lambda: pa.array(["a" * 30] * 5000, pa.string_view()).slice(2, 3),
    "run-ends": lambda: pa.RunEndEncodedArray.from_arrays([1000, 5000], ["a", "b"]).slice(2, 3),
    "union": lambda: pa.UnionArray.from_sparse(
        pa.array([0, 1] * 2000, pa.int8()), [pa.array(range(4000))] * 2
    )[5:8],
    "uuid": lambda: pa.ExtensionArray.from_storage(
        pa.uuid(), pa.array([bytes(range(i, i + 16)) for i in range(200)] * 100, pa.binary(16))
    ).slice(4, 2),
    "scalar": lambda: pa.scalar(3),
    "schema": lambda: pa.schema([("a", pa.int8())], metadata={"a": "b"}).field(0).type,
    "file": lambda: pyarrow.fs.FileInfo("a/b", pyarrow.fs.FileType.File, size=3, mtime_ns=12),
    "file-unknown": lambda: pyarrow.fs.FileInfo("a/b"),
    "dir": lambda: pyarrow.fs.FileInfo("a", pyarrow.fs.FileType.Directory, mtime_ns=10**18 + 1),
}


def look(x: Any) -> Any:
    return repr(x) if isinstance(x, (pa.Scalar, pa.DataType)) else describe(x)


@pytest.mark.parametrize("name", ARROW)
def test_arrow(name: str) -> None:
    x = ARROW[name]()
    for read in READERS:
        y = read(x)
        assert type(y) is type(x) and look(y) == look(x)
        if hasattr(y, "validate"):
            y.validate(full=True)
    if name.endswith("slice"):
        assert size(x) < 8000 and size([x]) < 8000


def test_another_process_reads_arrow() -> None:
    objects = [make() for name, make in ARROW.items() if name not in ("scalar", "schema")]
    for wrapped in (objects, [[x] for x in objects]):
        encoded = [fastser.serialize(x, on_error="raise") for x in wrapped]
        assert read_by_stock(encoded) == [describe(x) for x in wrapped]


@pytest.mark.parametrize("name", ["table", "table-chunks", "batch"])
def test_reads_arrow_of_stock(name: str) -> None:
    x = ARROW[name]()
    header, frames = stock_serialize(x)
    for y in (fastser.deserialize(header, frames), fastser.deserialize(header, [bytes(f) for f in frames])):
        assert y.equals(x) and describe(y) == describe(x)


def test_large_tables_are_not_copied() -> None:
    column = pa.array(np.arange(200_000))
    for x in (pa.table({"a": column}), pa.record_batch({"a": column}), [pa.table({"a": column})]):
        header, frames = fastser.serialize(x)
        assert header["serializer"] == "pickle" and len(frames) == 2
        y = fastser.deserialize(header, frames)
        got = (y[0] if type(y) is list else y).column(0)
        got = got.chunk(0) if isinstance(got, pa.ChunkedArray) else got
        assert got.buffers()[1].address == column.buffers()[1].address


@pytest.mark.parametrize("name", ["table", "batch"])
def test_bad_arrow_frames_raise(name: str) -> None:
    header, frames = fastser.serialize(ARROW[name]())
    data = bytes(frames[0])
    for bad in ([], [b""], [data, data], [b"x" * 100], *([data[:n]] for n in range(0, len(data), 97))):
        try:
            fastser.deserialize(header, bad)
        except FrameError:
            continue
        assert len(bad) == 1 and len(bad[0]) > 100  # what is missing is at most the end mark


def test_pandas_string_slice() -> None:
    x = pd.Series([str(i) for i in range(N)], dtype="string[pyarrow]").head(3)
    assert size(x) < 6000 and size([x]) < 6000
    for read in READERS:
        pd.testing.assert_series_equal(read(x), x)


def test_pandas_frame() -> None:
    x = pd.DataFrame({"a": np.arange(N), "b": np.arange(N) / 2, "s": ["x"] * N, "d": pd.Timestamp("2020")})
    x["c"] = x["s"].astype("category")
    x["n"] = pd.array(range(N), dtype="Int32")
    for read in READERS:
        pd.testing.assert_frame_equal(read(x), x)
    y = fastser.deserialize(*fastser.serialize(x))
    assert np.shares_memory(x["b"].to_numpy(), y["b"].to_numpy())


# ---- h5py, netCDF4


@pytest.fixture(scope="module")
def folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as name:
        with h5py.File(os.path.join(name, "a.h5"), "w") as f:
            f["x"] = np.arange(5)
            f["g/y"] = np.arange(3.0)
        with netCDF4.Dataset(os.path.join(name, "a.nc"), "w") as ds:
            ds.createDimension("n", 3)
            ds.createVariable("v", "f8", ("n",))[:] = [1, 2, 3]
            group = ds.createGroup("g").createGroup("h")
            group.createVariable("w", "i4", ("n",))[:] = [4, 5, 6]
        yield name


def test_h5py(folder: str) -> None:
    path = os.path.join(folder, "a.h5")
    with h5py.File(path, "r") as f:
        for read in READERS:
            with read(f) as y:
                assert type(y) is h5py.File and y.filename == path and y.mode == "r"
                assert y["x"][:].tolist() == [0, 1, 2, 3, 4]
            for x in (f["x"], f["g"], f["g/y"]):
                y = read(x)
                assert type(y) is type(x) and y.name == x.name
                y.file.close()
        header, frames = stock_serialize(f["g/y"])
        y = fastser.deserialize(header, frames)
        assert y[:].tolist() == [0, 1, 2]
        y.file.close()


def test_h5py_errors(folder: str) -> None:
    path = os.path.join(folder, "a.h5")
    with h5py.File(path, "r") as f:
        header, frames = fastser.serialize(f["x"], on_error="raise")
    sub = header["sub-header"]
    assert sub == {"filename": path, "name": "/x"}
    with pytest.raises(OSError, match=r"'/no/such' travels by name, but does not open here"):
        fastser.deserialize({**header, "sub-header": {**sub, "filename": "/no/such"}}, frames)
    with pytest.raises(FrameError, match="has no 'z'"):
        fastser.deserialize({**header, "sub-header": {**sub, "name": "z"}}, frames)
    with pytest.raises(FrameError):
        fastser.deserialize({**header, "sub-header": {**sub, "name": 3}}, frames)
    with pytest.raises(TypeError, match="closed"):
        fastser.serialize(f, on_error="raise")
    with h5py.File(os.path.join(folder, "w.h5"), "w") as w:
        for x in (w, [w]):
            with pytest.raises(TypeError, match=r"read-only.*mode 'r\+'"):
                fastser.serialize(x, on_error="raise")


def test_netcdf4(folder: str) -> None:
    path = os.path.join(folder, "a.nc")
    with netCDF4.Dataset(path, "r") as ds:
        for read in READERS:
            with read(ds) as y:
                assert type(y) is netCDF4.Dataset and y.filepath() == path
            y = read(ds["g/h"])
            assert type(y) is netCDF4.Group and y.path == "/g/h"
            for x in (ds["v"], ds["g/h/w"]):
                y = read(x)
                assert type(y) is netCDF4.Variable and y.name == x.name
                assert y[:].tolist() == x[:].tolist() and y.group().path == x.group().path
        for x in (ds["v"], ds["g/h/w"], ds["g"]):
            header, frames = stock_serialize(x)
            before = repr(header)
            assert fastser.deserialize(header, frames).name == x.name
            assert repr(header) == before
    with pytest.raises(TypeError, match="closed"):
        fastser.serialize(ds, on_error="raise")


def test_netcdf4_errors(folder: str) -> None:
    with netCDF4.Dataset(os.path.join(folder, "a.nc"), "r") as ds:
        header, frames = fastser.serialize(ds["v"], on_error="raise")
    for change in (
        {"name": 3},
        {"name": "zz"},
        {"parent-type-serialized": 3},
        {"parent-type-serialized": pickle.dumps(bytes)},
        {"sub-header": {}},
    ):
        with pytest.raises(FastserError):
            fastser.deserialize({**header, "sub-header": {**header["sub-header"], **change}}, frames)
    lost = {**header["sub-header"], "sub-header": {"filename": "/no/such"}}
    with pytest.raises(OSError, match="travels by name"):
        fastser.deserialize({**header, "sub-header": lost}, frames)


def test_another_process_opens_files(folder: str) -> None:
    program = """
        import sys
        sys.modules["fastser"] = None
        import pickle
        from distributed.protocol import deserialize
        out = []
        for header, frames in pickle.load(sys.stdin.buffer):
            x = deserialize(header, frames)
            x = x[0] if type(x) is list else x
            out.append((type(x).__name__, x.name, x[:].tolist()))
        print(out)
    """
    with (
        h5py.File(os.path.join(folder, "a.h5"), "r") as f,
        netCDF4.Dataset(os.path.join(folder, "a.nc")) as ds,
    ):
        objects = [f["x"], [f["g/y"]], ds["v"], [ds["v"]], ds["g/h/w"], [ds["g/h/w"]]]
        data = pickle.dumps([(pack(h), fr) for h, fr in map(fastser.serialize, objects)])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], input=data, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().count("Dataset") == 2 and done.stdout.decode().count("Variable") == 4


def test_subclasses_of_files_are_refused() -> None:
    class File(h5py.File):
        pass

    with pytest.raises(DispatchError, match="subclass"):
        fastser.dask_serialize.dispatch(File)(File.__new__(File))
