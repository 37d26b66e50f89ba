"""fastser: Python objects and messages to frames and back, written fast, read by stock Python."""

from fastser import handlers as handlers
from fastser import pickle as pickle
from fastser._frames import frame_split_size, merge_memoryviews, pack_frames, unpack_frames
from fastser._message import dumps, loads
from fastser.compression import decompress, maybe_compress
from fastser.core import (
    deserialize,
    deserialize_bytes,
    infer_if_recurse_to_serialize_list,
    merge_and_deserialize,
    serialize,
    serialize_and_split,
    serialize_bytelist,
    serialize_bytes,
)
from fastser.dispatch import (
    check_dask_serializable,
    dask_deserialize,
    dask_serialize,
    register_serialization,
    register_serialization_family,
)
from fastser.errors import DispatchError, FastserError, FrameError, SerializationError
from fastser.handlers.objects import register_generic
from fastser.tasks import dumps_function, dumps_task, loads_function, loads_task, warn_dumps
from fastser.wrappers import Pickled, Serialize, Serialized, ToPickle, to_serialize

__version__ = "0.1.0"

__all__ = [
    "DispatchError",
    "FastserError",
    "FrameError",
    "Pickled",
    "SerializationError",
    "Serialize",
    "Serialized",
    "ToPickle",
    "check_dask_serializable",
    "dask_deserialize",
    "dask_serialize",
    "decompress",
    "deserialize",
    "deserialize_bytes",
    "dumps",
    "dumps_function",
    "dumps_task",
    "frame_split_size",
    "infer_if_recurse_to_serialize_list",
    "loads",
    "loads_function",
    "loads_task",
    "maybe_compress",
    "merge_and_deserialize",
    "merge_memoryviews",
    "pack_frames",
    "pickle",
    "register_generic",
    "register_serialization",
    "register_serialization_family",
    "serialize",
    "serialize_and_split",
    "serialize_bytelist",
    "serialize_bytes",
    "to_serialize",
    "unpack_frames",
    "warn_dumps",
]
