"""Messages to frames in the event loop, or in a thread if they are large."""

from __future__ import annotations

import importlib
import logging
from typing import Any

from distributed.sizeof import safe_sizeof
from distributed.utils import offload

comm = importlib.import_module("distributed.comm.utils")
logger = logging.getLogger(comm.__name__)

WALK = 5_000  # items of a message that are looked at one by one; dask samples longer ones
SMALL = frozenset({int, float, bool, type(None)})
SIZED = frozenset({str, bytes, bytearray})
LISTS = frozenset({list, tuple, set, frozenset})
UNKNOWN = -1.0  # bytes; what the measure answers where it fails


def is_large(msg: Any, limit: int) -> bool:
    """Tell whether the data of *msg* are more than *limit* bytes.

    dask's own measure takes longer than the encoding of a common message; it is asked for marked objects
    only, and for messages of very many items.

    Examples
    --------
    >>> is_large({"op": "x", "data": [b"1234", "567"]}, 8), is_large([b"123456789"], 8)
    (False, True)
    """
    total = seen = 0
    todo = [msg]
    while todo:
        x = todo.pop()
        seen += 1
        cls = type(x)
        if cls in SMALL:
            continue
        if cls in SIZED:
            total += len(x)
        elif cls is dict:
            todo.extend(x.values())
        elif cls in LISTS:
            todo.extend(x)
        else:
            size = safe_sizeof(x, default_size=UNKNOWN)
            if size == UNKNOWN:
                return True
            total += size
        if total > limit:
            return True
        if seen + len(todo) > WALK:
            size = safe_sizeof(msg, default_size=UNKNOWN)
            return size == UNKNOWN or size > limit
    return False


async def to_frames(msg: Any, allow_offload: bool = True, **kwargs: Any) -> list[Any]:
    """Turn *msg* into frames; *kwargs* are those of `dumps`."""

    def dumps() -> list[Any]:
        try:
            frames: list[Any] = comm.protocol.dumps(msg, **kwargs)
        except Exception as error:
            logger.info("Unserializable Message: %s", msg)
            logger.exception(error)
            raise
        return frames

    if allow_offload and comm.OFFLOAD_THRESHOLD and is_large(msg, comm.OFFLOAD_THRESHOLD):
        offloaded: list[Any] = await offload(dumps)
        return offloaded
    return dumps()
