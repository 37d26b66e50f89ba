"""netCDF4 datasets, groups and variables: opened again, read-only, by the name of the file."""

from __future__ import annotations

import operator
from typing import Any

import netCDF4

from fastser import core
from fastser.dispatch import Call, dask_deserialize, dask_serialize, reducers
from fastser.errors import DispatchError, FrameError
from fastser.wrappers import Frames, Header


def _root(x: Any) -> Any:
    while x.parent is not None:
        x = x.parent
    return x


def _filename(dataset: Any) -> str:
    if not dataset.isopen():
        raise ValueError("cannot serialize a closed netCDF4 Dataset")
    name: str = dataset.filepath()
    return name


def _check_exact(x: Any, cls: type) -> None:
    if type(x) is not cls:
        raise DispatchError(f"{type(x).__name__} is a subclass of netCDF4.{cls.__name__}")


@dask_serialize.register(netCDF4.Dataset)
def serialize_dataset(x: Any) -> tuple[Header, Frames]:
    """Write the name of the file."""
    _check_exact(x, netCDF4.Dataset)
    return {"filename": _filename(x)}, []


@dask_serialize.register(netCDF4.Group)
def serialize_group(x: Any) -> tuple[Header, Frames]:
    """Write the name of the file and the path of the group."""
    _check_exact(x, netCDF4.Group)
    return {"filename": _filename(_root(x)), "path": x.path}, []


@dask_serialize.register(netCDF4.Variable)
def serialize_variable(x: Any) -> tuple[Header, Frames]:
    """Write the dataset or group that holds *x*, and the name of *x*."""
    _check_exact(x, netCDF4.Variable)
    parent_header, frames = core.codec.serialize(x.group(), serializers=("dask",), on_error="raise")
    return {
        **parent_header,
        "parent-type": parent_header["type"],
        "parent-type-serialized": parent_header["type-serialized"],
        "name": x.name,
    }, frames


@dask_deserialize.register(netCDF4.Dataset)
def deserialize_dataset(header: Header, frames: Frames) -> Any:
    """Open the file read-only."""
    filename = header.get("filename")
    if not isinstance(filename, str):
        raise FrameError(f"filename: expected str, got {type(filename).__name__}")
    try:
        return netCDF4.Dataset(filename, "r")
    except OSError as error:
        raise OSError(
            error.errno, f"the netCDF file {filename!r} travels by name, but does not open here: {error}"
        ) from error


@dask_deserialize.register(netCDF4.Group)
def deserialize_group(header: Header, frames: Frames) -> Any:
    """Open the file read-only and look the group up."""
    path = header.get("path")
    if not isinstance(path, str):
        raise FrameError(f"path: expected str, got {type(path).__name__}")
    return _member(deserialize_dataset(header, frames), path)


@dask_deserialize.register(netCDF4.Variable)
def deserialize_variable(header: Header, frames: Frames) -> Any:
    """Open the file read-only and look the variable up."""
    name, cls = header.get("name"), header.get("parent-type-serialized")
    if not isinstance(name, str) or not isinstance(cls, bytes):
        raise FrameError("expected name as str and parent-type-serialized as bytes")
    parent = core.codec.deserialize({**header, "type-serialized": cls, "serializer": "dask"}, frames)
    if not isinstance(parent, netCDF4.Dataset):
        raise FrameError(f"expected a dataset or group as parent, got {type(parent).__name__}")
    return _member(parent, name)


def _member(parent: Any, name: str) -> Any:
    try:
        return parent[name]
    except (IndexError, KeyError) as error:
        raise FrameError(f"no {name!r} in the netCDF file: {error}") from error


@reducers.register(netCDF4.Dataset)
def reduce_dataset(x: Any) -> Any:
    """Write a call that opens the file read-only."""
    if type(x) is netCDF4.Group:
        return operator.getitem, (_root(x), x.path)
    return (netCDF4.Dataset, (_filename(x), "r")) if type(x) is netCDF4.Dataset else NotImplemented


@reducers.register(netCDF4.Variable)
def reduce_variable(x: Any) -> Any:
    """Write a look-up in the dataset or group that holds *x*."""
    if type(x) is not netCDF4.Variable:
        return NotImplemented
    return operator.getitem, (Call(operator.attrgetter("variables"), x.group()), x.name)
