"""The codec of a dask cluster: fastser's machinery on distributed's wrappers, registries and families."""

from __future__ import annotations

import importlib
from array import array
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pickle import PickleBuffer
from typing import Any, NamedTuple

import dask
from distributed.metrics import context_meter

from fastser import _pickler, compression, core, dispatch
from fastser import pickle as fast_pickle
from fastser._message import Messages
from fastser.dispatch import Family
from fastser.errors import DispatchError, FrameError, SerializationError
from fastser.wrappers import WRAPPERS, Frames, Header, Wrappers

# The package attribute of this name is the function, which hides its module.
stock = importlib.import_module("distributed.protocol.serialize")
stock_compression = importlib.import_module("distributed.protocol.compression")

STOCK_WRAPPERS = Wrappers(stock.Serialize, stock.Serialized, stock.ToPickle, stock.Pickled)
STOCK_FAMILIES = {
    "dask": (stock.dask_dumps, stock.dask_loads),
    "pickle": (stock.pickle_dumps, stock.pickle_loads),
    "msgpack": (stock.msgpack_dumps, stock.msgpack_loads),
    "error": (None, stock.serialization_error_loads),
}
STOCK_COMPRESSIONS = dict(stock_compression.compressions)
READABLE_ERRORS = {FrameError: ValueError, DispatchError: TypeError, SerializationError: TypeError}
NOT_METERED = nullcontext()
JOINED = {bytes, bytearray, memoryview, array}  # some transports split their one frame, or drop it if empty
STOCK_HANDLERS = "distributed.protocol"  # the package of distributed's own handlers


class _Found(NamedTuple):
    """What a registry of distributed said about a type, and what follows from it."""

    registered: Callable[..., Any] | None
    chosen: Callable[..., Any] | None
    size: tuple[int, int]  # of the registry, then


class Handlers:
    """Handlers of a registry of distributed, with fastser's own in the place of distributed's own.

    What users or libraries registered wins.  The registry may change at any time: its dicts only grow, or
    get another handler for a known type, which is what an entry of the cache is checked against.
    """

    def __init__(self, registry: Any, own: dispatch.Dispatch):
        self.registry = registry
        self.own = own
        self._lookup: dict[type, Any] = registry._lookup
        self._lazy: dict[str, Any] = registry._lazy
        self._cache: dict[type, _Found] = {}

    def find(self, cls: type) -> Callable[..., Any] | None:
        """Return the handler of *cls*, or None."""
        found = self._cache.get(cls)
        if found is not None:
            if found.registered is None:
                if found.size == (len(self._lookup), len(self._lazy)):
                    return None
            elif self._lookup.get(cls) is found.registered:
                return found.chosen
        return self._find(cls).chosen

    def _find(self, cls: type) -> _Found:
        size = len(self._lookup), len(self._lazy)
        try:
            registered = self.registry.dispatch(cls)
        except TypeError:
            registered = None
            size = len(self._lookup), len(self._lazy)
        chosen = registered
        if registered is not None and is_stock(registered):
            chosen = self.own.find(cls) or registered
        if len(self._cache) >= dispatch.CACHE_LIMIT:
            self._cache.clear()
        found = self._cache[cls] = _Found(registered, chosen, size)
        return found


def is_stock(handler: Any) -> bool:
    """Tell whether *handler* is one of distributed's own."""
    module = getattr(handler, "__module__", None)
    return isinstance(module, str) and (module + ".").startswith(STOCK_HANDLERS + ".")


def _meter(label: str) -> AbstractContextManager[Any]:
    """Measure for the fine performance metrics, if anybody listens: a meter costs microseconds."""
    try:
        listened = bool(context_meter._callbacks.get())
    except AttributeError:  # another distributed
        listened = True
    meter: AbstractContextManager[Any] = context_meter.meter(label) if listened else NOT_METERED
    return meter


class DaskCodec(core.Codec):
    """Objects to headers and frames as the processes of a dask cluster exchange them.

    Works on the live registries of distributed, whether or not fastser is installed there.

    Examples
    --------
    >>> from distributed.protocol import to_serialize
    >>> header, frames = DaskCodec().serialize(to_serialize([1.5, 2.5]))
    >>> DaskCodec().deserialize(header, frames)
    [1.5, 2.5]
    """

    def __init__(self) -> None:
        super().__init__(
            STOCK_WRAPPERS,
            stock.dask_serialize,
            stock.dask_deserialize,
            stock.families,
        )
        self.writers = Handlers(stock.dask_serialize, dispatch.dask_serialize)
        self.readers = Handlers(stock.dask_deserialize, dispatch.dask_deserialize)
        self.own_families = {
            "dask": Family(self.dask_dumps, self.dask_loads, True),
            "pickle": Family(self.pickle_dumps, self.pickle_loads, True),
            "msgpack": Family(core.msgpack_dumps, core.msgpack_loads, False),
            "error": Family(None, core.error_loads, False),
        }
        self._stock_families = {
            name: self.families[name]
            for name, functions in STOCK_FAMILIES.items()
            if self.families[name][:2] == functions
        }
        self.register_marks(WRAPPERS)
        for cls, builtin in READABLE_ERRORS.items():
            self.reducers.register(cls, partial(_readable_error, builtin))
        self.messages = Messages(self)

    # ---- wrappers: those of fastser are as good as those of distributed

    def serialize(
        self,
        x: object,
        serializers: Any = None,
        on_error: Any = "message",
        context: dict[str, Any] | None = None,
        iterate_collection: bool | None = None,
    ) -> tuple[Header, Frames]:
        # comm.ws says None
        try:
            return super().serialize(x, serializers, on_error or "message", context, iterate_collection)
        except SerializationError as error:
            failure = TypeError(*error.args)  # which may travel to where fastser cannot be imported
            failure.__cause__ = error.__cause__
        raise failure

    def _serialize(self, x: Any, *args: Any) -> tuple[Header, Frames]:
        return super()._serialize(adopted(x), *args)

    def encode_default(self, obj: Any) -> Any:
        mine = adopted(obj)
        return super().encode_default(obj) if mine is obj else mine

    # ---- families and handlers

    def _family(self, name: Any) -> Any:
        try:
            family = self.families[name]
            if family is self._stock_families.get(name):
                return self.own_families[name]
        except (KeyError, TypeError):
            return super()._family(name)  # which says what is wrong
        return family

    def find_handler(self, cls: type) -> Callable[..., Any] | None:
        return self.writers.find(cls)

    def _serialize_whole(self, x: object, serializers: Any, context: Any) -> tuple[Header, Frames]:
        try:
            return super()._serialize_whole(x, serializers, context)
        except core._Failed as failed:
            # A handler of ours leaves to pickle what it would change; distributed's goes on without one.
            if "dask" not in serializers or not isinstance(failed.cause, NotImplementedError):
                raise
            try:
                header, frames = stock.dask_dumps(x, context=context)
            except Exception:
                raise failed from None
            return header, frames

    def dask_loads(self, header: Header, frames: Frames) -> Any:
        cls = fast_pickle.loads(core._field(header, "type-serialized", (bytes,)))
        if not isinstance(cls, type):
            raise FrameError(f"type-serialized: expected a type, got {cls!r:.100}")
        reader = self.readers.find(cls)
        if reader is None:
            raise DispatchError(f"no handler reads {cls.__module__}.{cls.__qualname__} here")
        sub_header = core._field(header, "sub-header", (object,))
        if len(frames) != 1 and cls in JOINED:
            frames = [b"".join(frames)]
        # a reader that is not ours may change what it is given
        return reader(dict(sub_header) if isinstance(sub_header, dict) else sub_header, frames)

    # ---- programs

    def reduce_part(self, header: Header, frames: Frames) -> Any:
        # ours or distributed's, pickled by its name, which every process of the cluster knows
        return stock.deserialize, (header, [PickleBuffer(frame) for frame in frames])

    # ---- the fine performance metrics of distributed

    def serialize_and_split(self, *args: Any, **kwargs: Any) -> tuple[Header, Frames]:
        with _meter("serialize"):
            return super().serialize_and_split(*args, **kwargs)

    def merge_and_deserialize(self, *args: Any, **kwargs: Any) -> Any:
        with _meter("deserialize"):
            return super().merge_and_deserialize(*args, **kwargs)

    def maybe_compress(self, frame: Any, **kwargs: Any) -> tuple[str | None, Any]:
        with _meter("compress"):
            return self._maybe_compress(frame, **kwargs)

    def decompress(self, header: Header, frames: Frames) -> Frames:
        with _meter("decompress"):
            return self._decompress(header, frames)

    # ---- codecs: what users put into distributed's table wins

    def _maybe_compress(self, frame: Any, **kwargs: Any) -> tuple[str | None, Any]:
        name = kwargs.get("compression", "auto")
        entry = stock_compression.compressions.get(name)
        if entry is None or entry is STOCK_COMPRESSIONS.get(name):
            if entry is not None:
                kwargs["compression"] = entry.name  # what "auto" is must not differ from distributed's
            return compression.maybe_compress(frame, **kwargs)
        result: tuple[str | None, Any] = _unmetered(stock_compression.maybe_compress)(frame, **kwargs)
        return result

    def _decompress(self, header: Header, frames: Frames) -> Frames:
        foreign = stock_compression.compressions
        for name in header.get("compression") or ():
            if name and name in foreign and foreign[name] is not STOCK_COMPRESSIONS.get(name):
                return list(_unmetered(stock_compression.decompress)(header, frames))
        return compression.decompress(header, frames)

    # ---- imports on the word of a message

    def import_allowed(self, name: str) -> bool:
        root = name.partition(".")[0]
        return bool(root) and root in dask.config.get("distributed.scheduler.allowed-imports")

    # ---- what stands in for distributed.protocol.pickle

    def dumps_pickle(
        self, x: Any, *, buffer_callback: Callable[[Any], Any] | None = None, protocol: int | None = None
    ) -> bytes:
        """Write *x* by reference where it can be imported, by value elsewhere.

        Parameters
        ----------
        buffer_callback : callable, optional
            Gets each buffer that travels apart, whatever its size; what it returns is ignored.
        protocol : int, optional
            5 by default; below, no buffer travels apart.
        """
        if isinstance(x, type) and (protocol or 5) >= 5:  # one for each finished task
            return self.pickle_type(x)
        buffers: list[Any] = []
        keep = buffers.append if buffer_callback is not None and (protocol or 5) >= 5 else None

        def write(find_reducer: Callable[[type], Any]) -> bytes:
            buffers.clear()
            return _pickler.dumps(x, protocol, buffer_callback=keep, find_reducer=find_reducer)

        program = self.two_tries(write)
        if buffer_callback is not None:
            for buffer in buffers:
                buffer_callback(buffer)
        return program

    def loads_pickle(self, x: Any, *, buffers: Iterable[Any] = ()) -> Any:
        """Read what `dumps_pickle` or any pickler wrote."""
        return fast_pickle.loads(x, buffers=buffers)


def _readable_error(builtin: type, error: Any) -> Any:
    """Write an error of fastser as one that can be read where fastser cannot be imported."""
    return builtin, (f"{type(error).__module__}.{type(error).__qualname__}: {error}",)


def adopted(x: Any) -> Any:
    """Return *x* in a wrapper of distributed if it is in one of fastser."""
    cls = type(x)
    if cls is WRAPPERS.serialize:
        return STOCK_WRAPPERS.serialize(x.data)
    if cls is WRAPPERS.serialized:
        return STOCK_WRAPPERS.serialized(x.header, x.frames)
    if cls is WRAPPERS.to_pickle:
        return STOCK_WRAPPERS.to_pickle(x.data)
    if cls is WRAPPERS.pickled:
        return STOCK_WRAPPERS.pickled(x.header, x.frames)
    return x


def _unmetered(func: Callable[..., Any]) -> Callable[..., Any]:
    return getattr(func, "__wrapped__", func)


codec = DaskCodec()
