"""pyarrow tables, record batches, arrays and file infos."""

from __future__ import annotations

import operator
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.fs

from fastser import _frames
from fastser.dispatch import dask_deserialize, dask_serialize, reducers
from fastser.errors import DispatchError, FrameError
from fastser.wrappers import Frames, Header

WORTH_NO_COPY = 1 << 20  # bytes; IPC copies, a pickle of a larger table does not
FRAME_WORTH = 1 << 16  # bytes that an array should have for a frame of its own
SLACK = 4096  # bytes of padding and spare room that are not worth a copy


def _wastes(size: int, total: int) -> bool:
    """Tell whether *total* bytes of buffers are much for *size* bytes of values: slices of more."""
    return total > size + size // 4 + SLACK


def _prefer_pickle(x: Any, arrays: int) -> None:
    size = x.nbytes
    if (
        size >= WORTH_NO_COPY
        and arrays * FRAME_WORTH <= size
        and not _wastes(size, x.get_total_buffer_size())
    ):
        raise DispatchError("its buffers travel without a copy in a pickle")


@dask_serialize.register(pa.RecordBatch)
def serialize_batch(x: Any) -> tuple[Header, Frames]:
    """Write an IPC stream of one batch, or leave it to the pickle family, which copies no buffer."""
    if not x.num_columns and x.num_rows:
        raise DispatchError("rows without columns")
    _prefer_pickle(x, x.num_columns)
    sink = pa.BufferOutputStream()
    with pa.RecordBatchStreamWriter(sink, x.schema) as writer:
        writer.write_batch(x)
    return {}, [sink.getvalue()]


@dask_serialize.register(pa.Table)
def serialize_table(x: Any) -> tuple[Header, Frames]:
    """Write an IPC stream, or leave it to the pickle family, which copies no buffer."""
    if not x.num_columns and x.num_rows:
        raise DispatchError("rows without columns")
    _prefer_pickle(x, sum([column.num_chunks for column in x.columns]))
    sink = pa.BufferOutputStream()
    with pa.RecordBatchStreamWriter(sink, x.schema) as writer:
        writer.write_table(x)
    return {}, [sink.getvalue()]


def _open(frames: Frames) -> Any:
    if len(frames) != 1:
        raise FrameError(f"expected 1 frame, got {len(frames)}")
    frame = frames[0]
    if not isinstance(frame, pa.Buffer):
        frame = pa.py_buffer(_frames.ensure_memoryview(frame))
    return pa.RecordBatchStreamReader(pa.BufferReader(frame))


@dask_deserialize.register(pa.RecordBatch)
def deserialize_batch(header: Header, frames: Frames) -> Any:
    """Read the one batch of an IPC stream; its arrays view the frame."""
    try:
        return _open(frames).read_next_batch()
    except (pa.ArrowException, OSError, StopIteration) as error:
        raise FrameError(f"not an Arrow stream of a batch: {error}") from error


@dask_deserialize.register(pa.Table)
def deserialize_table(header: Header, frames: Frames) -> Any:
    """Read an IPC stream; the arrays view the frame."""
    try:
        return _open(frames).read_all()
    except (pa.ArrowException, OSError) as error:
        raise FrameError(f"not an Arrow stream: {error}") from error


@reducers.register((pa.Table, pa.RecordBatch))
def reduce_table(x: Any) -> Any:
    """Write rows without columns as those of a column that is then dropped; others their own way."""
    if x.num_columns or not x.num_rows:
        return NotImplemented
    column = pa.nulls(x.num_rows)
    whole = type(x).from_arrays([column], schema=pa.schema([("", column.type)], x.schema.metadata))
    return operator.methodcaller("select", []), (whole,)


@reducers.register(pa.Array)
def reduce_array(x: Any) -> Any:
    """Write of a slice only what it shows, not the buffers of its parent."""
    try:
        if not _wastes(x.nbytes, x.get_total_buffer_size()):
            return NotImplemented
        compact = pa.concat_arrays([x])
    except (pa.ArrowException, NotImplementedError):
        return NotImplemented
    return compact.__reduce__() if type(compact) is type(x) else NotImplemented


@reducers.register(pyarrow.fs.FileInfo)
def reduce_file_info(x: Any) -> Any:
    """Write the arguments of *x*; FileInfo itself refuses to be pickled."""
    known = {"size": x.size, "mtime_ns": x.mtime_ns}
    known = {name: value for name, value in known.items() if value is not None}
    return partial(pyarrow.fs.FileInfo, **known), (x.path, x.type)
