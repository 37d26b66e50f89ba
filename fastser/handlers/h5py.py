"""h5py files, groups and datasets: opened again, read-only, by the name of the file."""

from __future__ import annotations

import operator
from typing import Any

import h5py

from fastser.dispatch import dask_deserialize, dask_serialize, reducers
from fastser.errors import DispatchError, FrameError
from fastser.wrappers import Frames, Header


def _filename(x: Any) -> str:
    if not x:
        raise ValueError(f"cannot serialize a closed h5py {type(x).__name__}")
    file = x.file
    if file.mode != "r":
        raise ValueError(
            f"can only serialize h5py objects of files opened read-only, {file.filename!r} is "
            f"opened with mode {file.mode!r}"
        )
    name: str = file.filename
    return name


def _name(x: Any) -> str:
    if x.name is None:
        raise ValueError("cannot serialize an h5py object without a name in its file")
    name: str = x.name
    return name


@dask_serialize.register(h5py.File)
def serialize_file(x: Any) -> tuple[Header, Frames]:
    """Write the name of the file."""
    if type(x) is not h5py.File:
        raise DispatchError(f"{type(x).__name__} is a subclass of h5py.File")
    return {"filename": _filename(x)}, []


@dask_serialize.register((h5py.Group, h5py.Dataset))
def serialize_member(x: Any) -> tuple[Header, Frames]:
    """Write the name of the file and of the group or dataset."""
    if type(x) is not h5py.Group and type(x) is not h5py.Dataset:
        raise DispatchError(f"{type(x).__name__} is a subclass of an h5py class")
    return {"filename": _filename(x), "name": _name(x)}, []


@dask_deserialize.register(h5py.File)
def deserialize_file(header: Header, frames: Frames) -> Any:
    """Open the file read-only."""
    filename = header.get("filename")
    if not isinstance(filename, (str, bytes)):
        raise FrameError(f"filename: expected str, got {type(filename).__name__}")
    try:
        return h5py.File(filename, mode="r")
    except OSError as error:
        raise OSError(
            error.errno, f"the HDF5 file {filename!r} travels by name, but does not open here: {error}"
        ) from error


@dask_deserialize.register((h5py.Group, h5py.Dataset))
def deserialize_member(header: Header, frames: Frames) -> Any:
    """Open the file read-only and look the name up."""
    name = header.get("name")
    if not isinstance(name, (str, bytes)):
        raise FrameError(f"name: expected str, got {type(name).__name__}")
    file = deserialize_file(header, frames)
    try:
        return file[name]
    except KeyError as error:
        raise FrameError(f"{header['filename']!r} has no {name!r}: {error}") from error


@reducers.register(h5py.File)
def reduce_file(x: Any) -> Any:
    """Write a call that opens the file read-only."""
    return (h5py.File, (_filename(x), "r")) if type(x) is h5py.File else NotImplemented


@reducers.register((h5py.Group, h5py.Dataset))
def reduce_member(x: Any) -> Any:
    """Write a look-up in the file."""
    if type(x) is not h5py.Group and type(x) is not h5py.Dataset:
        return NotImplemented
    _filename(x)
    return operator.getitem, (x.file, _name(x))
