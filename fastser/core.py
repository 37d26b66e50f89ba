"""Objects to ``(header, frames)`` and back."""

from __future__ import annotations

import copyreg
import functools
import importlib
import itertools
import operator
import pickle
import reprlib
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from enum import Enum
from pickle import PickleBuffer
from types import ModuleType
from typing import Any, Literal, TypeVar

import msgpack

from fastser import _frames, _msgpack, _pickler, compression, dispatch
from fastser import pickle as fast_pickle
from fastser.dispatch import Call, Dispatch, Family, has_keyword
from fastser.errors import DispatchError, FrameError, SerializationError
from fastser.wrappers import COLLECTIONS, WRAPPERS, Frames, Header, Wrappers, msgpack_exact, travels_apart

T = TypeVar("T")

CULPRIT_SECONDS = 1.0
TRACEBACK_LIMIT = 100_000  # characters of a traceback that travel in an error frame
DEFAULT_SERIALIZERS = ("dask", "pickle")
ALLOWED_IMPORTS = frozenset({"dask", "distributed", "fastser"})
BUILTIN_HANDLERS = ("fastser.", "distributed.protocol.")  # packages of handlers nobody had to register
COLLECTION_NAMES = {cls.__name__: cls for cls in COLLECTIONS}


class _Nesting(threading.local):
    """How deep the calls of one thread are inside of handlers, and which reducers the outermost tries."""

    depth = 0
    find_reducer: Callable[[type], Any] | None = None


class Codec:
    """All that turns objects into headers and frames, for one set of wrappers, handlers and families.

    `fastser.serialize` and its kin are the methods of one codec, on fastser's own wrappers and
    registries; `fastser.dask` makes another on those of distributed.

    Parameters
    ----------
    wrappers : Wrappers
        The classes that mark objects.
    dask_serialize, dask_deserialize : Dispatch
        Handlers of the dask family, by type.
    families : dict of str to Family
        Looked at anew in each call, so that families can be registered at any time.
    """

    def __init__(
        self,
        wrappers: Wrappers,
        dask_serialize: Dispatch,
        dask_deserialize: Dispatch,
        families: dict[str, Family],
    ):
        self.wrappers = wrappers
        self.dask_serialize = dask_serialize
        self.dask_deserialize = dask_deserialize
        self.families = families
        self._pickled_types: dict[type, bytes] = {}
        self._nesting = _Nesting()
        self.reducers = Dispatch("reducers of a codec")
        self.register_marks(wrappers)

    def register_marks(self, wrappers: Wrappers) -> None:
        """Let the pickler unwrap marks of these classes at any depth."""
        self.reducers.register(wrappers.serialize, self._reduce_mark)
        self.reducers.register(wrappers.to_pickle, self._reduce_mark)
        self.reducers.register(wrappers.serialized, self._reduce_serialized)
        self.reducers.register(wrappers.pickled, self._reduce_pickled)

    # ---- objects to header and frames

    def serialize(
        self,
        x: object,
        serializers: Collection[str] | None = None,
        on_error: Literal["message", "raise"] = "message",
        context: dict[str, Any] | None = None,
        iterate_collection: bool | None = None,
    ) -> tuple[Header, Frames]:
        """Turn *x* into a header and frames.

        Parameters
        ----------
        x : object
            `Serialize` marks and `Serialized` data are unwrapped at any depth.
        serializers : collection of str, optional
            Names of families, tried in order; ``("dask", "pickle")`` by default.
        on_error : {"message", "raise"}
            What to do with an object that no family can write: answer with frames that raise when they
            are read, or raise now.
        context : dict, optional
            Passed to families and handlers that take it.
        iterate_collection : bool, optional
            For an exact list, tuple, set or dict: True gives each element a header and frames of its
            own (one level deep), False writes the collection as one, None decides.

        Returns
        -------
        header : dict
            Plain data that msgpack takes.
        frames : list of bytes-like
            Views of the memory of *x* where a buffer is worth a frame of its own, copies elsewhere.

        Raises
        ------
        SerializationError
            With ``on_error="raise"``, naming the type and the cause.
        DispatchError
            If *serializers* names a family that is not registered.
        ValueError
            If *on_error* is neither.

        Examples
        --------
        >>> header, frames = serialize([1.5, 2.5])
        >>> header
        {'serializer': 'pickle', 'writeable': ()}
        >>> deserialize(header, frames)
        [1.5, 2.5]
        """
        if on_error not in ("message", "raise"):
            raise ValueError(f"on_error must be 'message' or 'raise', got {on_error!r}")
        if serializers is None:
            serializers = DEFAULT_SERIALIZERS
        try:
            return self._serialize(x, serializers, on_error, context, iterate_collection)
        except RecursionError as error:
            if self._nesting.depth:
                raise  # the call that this one is part of has no more room either
            return self._failure(x, error, on_error)

    def _serialize(
        self, x: Any, serializers: Collection[str], on_error: str, context: Any, iterate: bool | None
    ) -> tuple[Header, Frames]:
        marks: set[int] = set()
        while isinstance(x, self.wrappers.serialize):
            if id(x) in marks:
                raise RecursionError(f"a {type(x).__name__} mark that leads back to itself")
            marks.add(id(x))
            x = x.data
        if isinstance(x, self.wrappers.serialized):
            return dict(x.header), list(x.frames)
        try:
            if type(x) in COLLECTIONS and self._iterates(x, iterate, serializers):
                return self._serialize_apart(x, serializers, on_error, context)
            try:
                return self._serialize_whole(x, serializers, context)
            except _Failed as failed:
                refused = isinstance(failed.cause, NotImplementedError)
                if not refused or iterate is not None or not self._is_divisible(x):
                    raise
            return self._serialize_apart(x, serializers, on_error, context)  # no family takes it as one
        except _Failed as failed:
            return self._failure(failed.obj, failed.cause, on_error)

    def _iterates(self, x: Any, wish: bool | None, serializers: Collection[str]) -> bool:
        apart = travels_apart(x, serializers) if wish is None else wish
        return bool(apart) and self._is_divisible(x)

    def _is_divisible(self, x: Any) -> bool:
        """Tell whether *x* is a collection whose elements can have headers of their own.

        The keys of a dict must survive msgpack, which carries the headers.
        """
        return type(x) in COLLECTIONS and (type(x) is not dict or all(map(msgpack_exact, x)))

    def _serialize_apart(
        self, x: Any, serializers: Collection[str], on_error: Any, context: Any
    ) -> tuple[Header, Frames]:
        is_dict = type(x) is dict
        sub_headers: list[Header] = []
        frames: Frames = []
        lengths: list[int] = []
        compressions: list[Any] = []
        for key, element in x.items() if is_dict else ((None, element) for element in x):
            sub_header, sub_frames = self._serialize(element, serializers, on_error, context, None)
            if "split-num-sub-frames" in sub_header:  # a Serialized that travelled already
                sub_header, sub_frames = self._joined(sub_header, sub_frames)
            if is_dict:
                sub_header["key"] = key
            sub_headers.append(sub_header)
            frames.extend(sub_frames)
            lengths.append(len(sub_frames))
            compressions.extend(sub_header.get("compression") or [None] * len(sub_frames))
        header: Header = {
            "is-collection": True,
            "sub-headers": sub_headers,
            "frame-lengths": lengths,
            "type-serialized": type(x).__name__,
        }
        if any(name is not None for name in compressions):
            header["compression"] = compressions
        return header, frames

    def _serialize_whole(
        self, x: object, serializers: Collection[str], context: Any
    ) -> tuple[Header, Frames]:
        refusal: BaseException | None = None
        try:
            for name in serializers:
                dumps, _, wants_context = self._family(name)
                if dumps is None:
                    continue
                self._nesting.depth += 1
                try:
                    answer = dumps(x, context=context) if wants_context else dumps(x)
                except NotImplementedError as error:
                    refusal = refusal or error
                    continue
                except RecursionError:
                    raise
                except Exception as error:
                    raise _Failed(x, error) from error
                finally:
                    self._nesting.depth -= 1
                if answer is not NotImplemented:
                    header, frames = answer
                    header["serializer"] = name
                    return header, frames
            raise _Failed(x, refusal or DispatchError(f"none of the families {list(serializers)} takes it"))
        finally:
            refusal = None  # its traceback holds this frame: no cycle shall keep the frames alive

    def _failure(self, obj: Any, cause: BaseException, on_error: str) -> tuple[Header, Frames]:
        text = f"Could not serialize object of type {type(obj).__name__}"
        # a handler that calls serialize leaves the search to the outermost call
        if not self._nesting.depth and not isinstance(cause, (RecursionError, MemoryError)):
            path, culprit = self.find_culprit(obj)
            if path:
                text += f", because of x{path} of type {type(culprit).__name__}"
        if on_error == "raise":
            raise SerializationError(f"{text}: {type(cause).__name__}: {cause}") from cause
        trace = "".join(traceback.format_exception(cause))[-TRACEBACK_LIMIT:]
        return {"serializer": "error"}, [part.encode(errors="replace") for part in (text, trace)]

    def find_culprit(self, x: Any) -> tuple[str, Any]:
        """Return the innermost member of *x* that cannot be pickled, and the path to it.

        The path is empty if *x* itself is to blame.  The search tries the members one by one, for about
        `CULPRIT_SECONDS` at most.
        """
        deadline = time.monotonic() + CULPRIT_SECONDS
        path = ""
        seen = {id(x)}
        while True:
            for step, member in _members(x):
                if time.monotonic() > deadline:
                    return path, x
                if id(member) not in seen and not self._is_picklable(member):
                    seen.add(id(member))
                    path += step
                    x = member
                    break
            else:
                return path, x

    def _is_picklable(self, x: Any) -> bool:
        nesting = self._nesting
        nesting.depth += 1
        nesting.find_reducer = self.find_any_reducer
        try:
            _pickler.dumps(x, buffer_callback=_apart, find_reducer=self.find_any_reducer)
        except Exception:  # whatever a reduction raises
            return False
        finally:
            nesting.depth -= 1
            nesting.find_reducer = None
        return True

    def _family(self, name: Any) -> tuple[Any, Any, bool]:
        try:
            return self.families[name]
        except KeyError:
            raise DispatchError(
                f"unknown serialization family {name!r}; known are {list(self.families)}; "
                "others are made known by register_serialization_family"
            ) from None

    # ---- header and frames to objects

    def deserialize(
        self, header: Header, frames: Iterable[Any], deserializers: Collection[str] | None = None
    ) -> Any:
        """Turn a header and its frames back into the object.

        Frames that are still split or compressed, as a relay holds them, are put together first.

        Parameters
        ----------
        header : dict
        frames : list of bytes-like
            Both are only read.  Arrays and other large buffers of the result are views of the frames,
            except where a writeable buffer meets read-only memory.
        deserializers : collection of str, optional
            Names of the families that may be used; all by default.

        Raises
        ------
        FrameError
            If header and frames do not fit each other.
        DispatchError
            If the family is not among *deserializers*, or not known.
        SerializationError
            If the sender could not serialize the object.

        Examples
        --------
        >>> deserialize(*serialize({"a": (1, 2)}))
        {'a': (1, 2)}
        """
        header, frames = self._joined(header, list(frames))
        return self._decode(header, frames, deserializers)

    def _joined(self, header: Header, frames: Frames) -> tuple[Header, Frames]:
        """Undo split and compression, if frames still are as they travelled."""
        if not isinstance(header, Mapping):
            raise FrameError(f"a header must be a dict, got {type(header).__name__}")
        names = header.get("compression")
        if names is not None:
            names = _field(header, "compression", (list, tuple))
            if any(names) and len(names) == len(frames):
                frames = self.decompress(header, frames)
        counts = header.get("split-num-sub-frames")
        if counts is not None and len(_field(header, "split-num-sub-frames", (list, tuple))) != len(frames):
            frames = _merged(header, frames)
        if counts is None and names is None:
            return header, frames
        return {k: v for k, v in header.items() if k not in _TRAVEL_KEYS}, frames

    def _decode(self, header: Header, frames: Frames, deserializers: Collection[str] | None) -> Any:
        if header.get("is-collection"):
            return self._decode_collection(header, frames, deserializers)
        name = header.get("serializer")
        if deserializers is not None and name not in deserializers:
            raise DispatchError(
                f"Data serialized with {name} but only able to deserialize data with {list(deserializers)}"
            )
        loads = self._family(name)[1]
        if loads is None:
            raise DispatchError(f"the family {name!r} cannot read")
        return loads(header, frames)

    def _decode_collection(
        self, header: Header, frames: Frames, deserializers: Collection[str] | None
    ) -> Any:
        cls, parts = _parts_of_collection(header, frames)
        values = [self._decode(*self._joined(*part), deserializers) for part in parts]
        if cls is dict:
            return dict(zip((_field(part[0], "key", (object,)) for part in parts), values, strict=True))
        return values if cls is list else cls(values)

    # ---- frames that are fit to travel

    def serialize_and_split(
        self,
        x: object,
        serializers: Collection[str] | None = None,
        on_error: Literal["message", "raise"] = "message",
        context: dict[str, Any] | None = None,
        size: int | None = None,
    ) -> tuple[Header, Frames]:
        """Serialize *x* and cut its frames into pieces of at most *size* bytes (64 MiB by default).

        The counterpart is `merge_and_deserialize`.  Pieces are views; frames that a handler compressed
        itself are left whole.  Arguments and errors are those of `serialize`.

        Examples
        --------
        >>> import numpy as np
        >>> header, frames = serialize_and_split(np.arange(4.0), size=16)
        >>> [frame.nbytes for frame in frames]
        [16, 16]
        >>> merge_and_deserialize(header, frames)
        array([0., 1., 2., 3.])
        """
        header, frames = self.serialize(x, serializers, on_error, context)
        if "split-num-sub-frames" in header:  # a Serialized that travelled already
            return header, frames
        counts: list[int] = []
        offsets: list[int] = []
        names: list[Any] = []
        out: Frames = []
        for frame, name in zip(
            frames, header.get("compression") or [None] * len(frames), strict=True
        ):
            pieces = [frame] if name is not None else _frames.frame_split_size(frame, size)
            counts.append(len(pieces))
            offsets.append(len(out))
            names.extend([name] * len(pieces))
            out.extend(pieces)
        header["split-num-sub-frames"] = tuple(counts)
        header["split-offsets"] = tuple(offsets)
        header["compression"] = tuple(names)
        return header, out

    def merge_and_deserialize(
        self, header: Header, frames: Iterable[Any], deserializers: Collection[str] | None = None
    ) -> Any:
        """Put frames together that `serialize_and_split` cut, and deserialize.

        Frames must be decompressed already.  Pieces that are neighbours in one buffer are put together
        without a copy, others with one.  Arguments and errors are those of `deserialize`.
        """
        frames = list(frames)
        if "split-num-sub-frames" in header:
            frames = _merged(header, frames)
        return self._decode(header, frames, deserializers)

    def compress_frames(
        self, header: Header, frames: Frames, compression_name: Any = "auto"
    ) -> tuple[Header, Frames]:
        """Compress the frames that are not yet compressed, where it pays; returns new ones."""
        names = list(header.get("compression") or [None] * len(frames))
        frames = list(frames)
        for i, frame in enumerate(frames):
            if names[i] is None:
                names[i], frames[i] = self.maybe_compress(frame, compression=compression_name)
        return {**header, "compression": tuple(names)}, frames

    def maybe_compress(self, frame: Any, **kwargs: Any) -> tuple[str | None, Any]:
        return compression.maybe_compress(frame, **kwargs)

    def decompress(self, header: Header, frames: Frames) -> Frames:
        return compression.decompress(header, frames)

    def serialize_bytelist(
        self, x: object, compression: str | Literal[False] | None = "auto", **kwargs: Any
    ) -> list[Any]:
        """Serialize *x* to a list of bytes-like objects; joined they are what `deserialize_bytes` reads.

        Parameters
        ----------
        compression : str, False or None
            Name of a codec for the frames that shrink; "auto" for the best installed one.
        **kwargs
            As for `serialize_and_split`.

        Returns
        -------
        list of bytes-like
            A prelude of lengths, the header, and the frames (views where `serialize` gives views).

        Examples
        --------
        >>> deserialize_bytes(b"".join(serialize_bytelist([1, 2])))
        [1, 2]
        """
        header, frames = self.serialize_and_split(x, **kwargs)
        header, frames = self.compress_frames(header, frames, compression)
        header["count"] = len(frames)
        parts = [self.pack_header(header), *frames]
        return [_frames.pack_frames_prelude(parts), *parts]

    def serialize_bytes(self, x: object, **kwargs: Any) -> bytes:
        """Serialize *x* to one bytes object (a copy of everything).

        Arguments are those of `serialize_bytelist`, errors those of `serialize`.

        Examples
        --------
        >>> deserialize_bytes(serialize_bytes({"a": 1}))
        {'a': 1}
        """
        return b"".join(self.serialize_bytelist(x, **kwargs))

    def deserialize_bytes(self, b: Any) -> Any:
        """Read what `serialize_bytes` wrote.

        Large buffers of the result are views of *b*, which stays alive with them, except where a
        writeable buffer meets read-only memory: bytes are copied there.

        Raises
        ------
        FrameError
            If *b* is truncated, or lengths, header and frames do not fit each other.

        Examples
        --------
        >>> deserialize_bytes(b"")
        Traceback (most recent call last):
        ...
        fastser.errors.FrameError: prelude at byte offset 0: expected 8 bytes, found 0
        """
        parts = _frames.unpack_frames(b)
        if not parts:
            raise FrameError("expected a header frame, got no frames")
        frames: Frames = parts[1:]
        header = self.unpack_header(parts[0]) if parts[0].nbytes else {}
        if not isinstance(header, dict):
            raise FrameError(f"a header must be a dict, got {type(header).__name__}")
        if "compression" in header:
            frames = self.decompress(header, frames)
        return self.merge_and_deserialize(header, frames)

    # ---- headers as bytes

    def pack_header(self, header: Header) -> bytes:
        """Turn a header into msgpack; sets and allowed enums are marked as distributed marks them."""
        return _msgpack.pack(header, self._encode_header_default)

    def _encode_header_default(self, obj: Any) -> Any:
        answer = self.encode_default(obj)
        # headers have no placeholders of objects: a dict with a reserved key is what it seems
        return {**obj} if answer is obj and isinstance(obj, dict) else answer

    def unpack_header(self, data: Any) -> Any:
        """Read a header from msgpack; raise FrameError if it is none."""
        try:
            return _msgpack.unpack(data, self.decode_default)
        except (ValueError, TypeError) as error:
            raise FrameError(f"header of {memoryview(data).nbytes} bytes is not msgpack: {error}") from error

    def encode_default(self, obj: Any) -> Any:
        """Mark what msgpack does not know but the wire format does: sets, enums of allowed modules."""
        if isinstance(obj, set):
            return {"__Set__": True, "as-list": list(obj)}
        if isinstance(obj, Enum) and self.import_allowed(type(obj).__module__):
            return {
                "__Enum__": True,
                "name": obj.name,
                "__module__": type(obj).__module__,
                "__name__": type(obj).__name__,
            }
        return obj

    def decode_default(self, obj: dict[Any, Any]) -> Any:
        """Undo `encode_default`."""
        if "__Set__" in obj and obj.keys() == {"__Set__", "as-list"}:
            items = _field(obj, "as-list", (list, tuple))
            try:
                return set(items)
            except TypeError as error:
                raise FrameError(f"as-list: expected hashable items: {error}") from None
        if "__Enum__" in obj and obj.keys() == {"__Enum__", "name", "__module__", "__name__"}:
            module = self.import_module(_field(obj, "__module__", (str,)))
            name, member = _field(obj, "__name__", (str,)), _field(obj, "name", (str,))
            cls = getattr(module, name, None)
            if not isinstance(cls, type) or not issubclass(cls, Enum) or member not in cls.__members__:
                raise FrameError(f"{module.__name__} has no enum {name!r} with a member {member!r}")
            return cls[member]
        return obj

    def import_allowed(self, name: str) -> bool:
        """Tell whether a message may make its reader import the module *name*."""
        return name.partition(".")[0] in ALLOWED_IMPORTS

    def import_module(self, name: str) -> Any:
        if not self.import_allowed(name):
            raise DispatchError(f"importing {name!r} on the word of a message is not allowed")
        try:
            return importlib.import_module(name)
        except ImportError as error:
            raise FrameError(f"cannot import {name!r}, which a message names: {error}") from error

    # ---- families

    def dask_dumps(self, x: object, context: dict[str, Any] | None = None) -> Any:
        """Write *x* by the handler of its type; NotImplemented if it has none."""
        handler = self.find_handler(type(x))
        if handler is None:
            return NotImplemented
        sub_header, frames = (
            handler(x, context=context) if has_keyword(handler, "context") else handler(x)
        )
        return {
            "sub-header": sub_header,
            "type": f"{type(x).__module__}.{type(x).__qualname__}".removeprefix("builtins."),
            "type-serialized": self.pickle_type(type(x)),
            "serializer": "dask",
        }, frames

    def dask_loads(self, header: Header, frames: Frames) -> Any:
        """Read by the handler of the type that the header names."""
        cls = fast_pickle.loads(_field(header, "type-serialized", (bytes,)))
        if not isinstance(cls, type):
            raise FrameError(f"type-serialized: expected a type, got {cls!r:.100}")
        handler = self.dask_deserialize.dispatch(cls)
        return handler(_field(header, "sub-header", (dict,)), frames)

    def find_handler(self, cls: type) -> Callable[..., Any] | None:
        """Return the handler that writes objects of *cls*, or None."""
        return self.dask_serialize.find(cls)

    def pickle_type(self, cls: type) -> bytes:
        """Return the pickle of a class, kept if it goes by reference."""
        if not _pickler.is_referable(cls):
            return fast_pickle.dumps(cls)
        pickled = self._pickled_types.get(cls)
        if pickled is None:
            if len(self._pickled_types) >= dispatch.CACHE_LIMIT:
                self._pickled_types.clear()
            pickled = self._pickled_types[cls] = fast_pickle.dumps(cls)
        return pickled

    def pickle_dumps(self, x: object, context: dict[str, Any] | None = None) -> tuple[Header, Frames]:
        """Compile *x* to a program and buffers.

        It is protocol 5 whatever ``context["pickle-protocol"]`` says: schedulers ask for 4 on the connections
        that carry results, as a heritage, and every process of a cluster reads 5.  If that fails, a second
        try lets every handler of the dask family write what is inside of *x*.
        """
        return self.two_tries(lambda find_reducer: self._compile(x, find_reducer))

    def two_tries(self, write: Callable[[Callable[[type], Any]], T]) -> T:
        """Call *write* with `find_reducer`; if that fails, with `find_any_reducer`, whose error is dropped.

        Where a handler of a try calls for another dump, that one is part of the same try.
        """
        nesting = self._nesting
        if nesting.find_reducer is not None:
            return write(nesting.find_reducer)
        try:
            nesting.find_reducer = self.find_reducer
            return write(self.find_reducer)
        except (RecursionError, MemoryError):
            raise
        except Exception as error:
            nesting.find_reducer = self.find_any_reducer
            try:
                return write(self.find_any_reducer)
            except Exception:
                raise error from None
        finally:
            nesting.find_reducer = None

    def _compile(self, x: Any, find_reducer: Callable[[type], Any]) -> tuple[Header, Frames]:
        # A mark inside of other data is unwrapped; one that is itself the data, as old releases of
        # distributed send their graphs, arrives as a mark.
        if isinstance(x, self.wrappers.to_pickle):
            x = Call(type(x), x.data)
        elif isinstance(x, self.wrappers.pickled):
            x = Call(type(x), x.header, x.frames)
        frames: Frames = [None]
        writeable: list[bool] = []

        def keep(buffer: PickleBuffer) -> bool:
            view = buffer.raw()
            if view.nbytes < _pickler.IN_BAND:
                return True
            frames.append(view)
            writeable.append(not view.readonly)
            return False

        frames[0] = _pickler.dumps(x, buffer_callback=keep, find_reducer=find_reducer)
        return {"serializer": "pickle", "writeable": tuple(writeable)}, frames

    def pickle_loads(self, header: Header, frames: Frames) -> Any:
        """Run a program on its buffers."""
        flags = _field(header, "writeable", (list, tuple))
        if len(frames) != len(flags) + 1:
            raise FrameError(f"expected a program and {len(flags)} buffers, got {len(frames)} frames")
        buffers = [_with_flag(frame, flag) for frame, flag in zip(frames[1:], flags, strict=True)]
        return fast_pickle.loads(frames[0], buffers=buffers)

    def find_reducer(self, cls: type) -> Callable[[Any], Any] | None:
        """Return how the pickler shall write objects of exactly *cls*; None for their own way.

        Handlers that users registered count inside of programs too; those that come with fastser or
        distributed do not, since what they handle has a pickle as good.
        """
        return self._find_reducer(cls, BUILTIN_HANDLERS)

    def find_any_reducer(self, cls: type) -> Callable[[Any], Any] | None:
        """Like `find_reducer`, with the handlers that come with fastser or distributed too."""
        return self._find_reducer(cls, ())

    def _find_reducer(self, cls: type, left_out: tuple[str, ...]) -> Callable[[Any], Any] | None:
        """Return the reducer of *cls*, or one by its handler unless that is of a package *left_out*."""
        reducer = self.reducers.find(cls) or dispatch.reducers.find(cls)
        if reducer is not None:
            return reducer
        handler = self.find_handler(cls)
        module = getattr(handler, "__module__", None) or ""
        if handler is None or f"{module}.".startswith(left_out):
            return None
        return self._reducer_by_handler(cls, handler)

    def _reducer_by_handler(self, cls: type, handler: Callable[..., Any]) -> Callable[[Any], Any] | None:
        try:
            reader = self.dask_deserialize.dispatch(cls)
        except TypeError:
            return None
        wants_context = has_keyword(handler, "context")

        def reduce(obj: Any) -> Any:
            try:
                header, frames = handler(obj, context=None) if wants_context else handler(obj)
            except NotImplementedError:
                return NotImplemented
            return reader, (header, [_viewed(frame) for frame in frames])

        reduce.__module__ = handler.__module__  # the pickler asks who wrote a reducer
        return reduce

    def _reduce_mark(self, x: Any) -> Any:
        return (x.data,)

    def _reduce_serialized(self, x: Any) -> Any:
        """Write a `Serialized` as a call that gives its object, so that twice the same stays one object."""
        header, frames = self._joined(x.header, x.frames)
        if header.get("is-collection"):
            return self._reduce_collection(header, frames)
        flags: Any = header.get("writeable")
        is_program = header.get("serializer") == "pickle" and isinstance(flags, (list, tuple))
        if is_program and len(frames) == len(flags) + 1:
            return self._reduce_program(frames[0], map(_with_flag, frames[1:], flags))
        return self.reduce_part(header, frames)

    def _reduce_collection(self, header: Header, frames: Frames) -> Any:
        cls, parts = _parts_of_collection(header, frames)
        marks = [self.wrappers.serialized(*part) for part in parts]
        if cls is dict:
            marks = [(_field(mark.header, "key", (object,)), mark) for mark in marks]
        return cls, (marks,)

    def _reduce_pickled(self, x: Any) -> Any:
        header, frames = self._joined(x.header, x.frames)
        return self._reduce_program(_field(header, "pickled-obj", (bytes,)), frames)

    def _reduce_program(self, program: Any, buffers: Iterable[Any]) -> Any:
        # stock Python can run it: functools.partial(pickle.loads, buffers=...)(program)
        newobj_ex = copyreg.__newobj_ex__  # type: ignore[attr-defined]
        keywords = {"buffers": [PickleBuffer(buffer) for buffer in buffers]}
        return Call(newobj_ex, functools.partial, (pickle.loads,), keywords), (PickleBuffer(program),)

    def reduce_part(self, header: Header, frames: Frames) -> Any:
        """Write what is no pickle: as its object if it can be had here, which needs no fastser to be read."""
        try:
            return operator.getitem, ([self._decode(header, frames, None)], 0)
        except Exception:  # whatever keeps it from being read here, the reader may do better
            return deserialize_part, (header, [PickleBuffer(frame) for frame in frames])


_TRAVEL_KEYS = frozenset({"compression", "split-num-sub-frames", "split-offsets", "num-sub-frames", "count"})


class _Failed(Exception):
    """Carries the object that no family could write, and why, up to where on_error is known."""

    def __init__(self, obj: object, cause: BaseException):
        self.obj = obj
        self.cause = cause


def _apart(buffer: PickleBuffer) -> bool:
    """Let a buffer travel out-of-band, to nowhere."""
    return False


def _members(x: Any) -> Iterator[tuple[str, Any]]:
    """Yield what *x* holds, each with the text that would follow *x* to reach it."""
    if isinstance(x, (list, tuple)):
        yield from ((f"[{i}]", item) for i, item in enumerate(x))
    elif isinstance(x, dict):
        for key, value in x.items():
            text = reprlib.repr(key)
            yield f"[{text}]", value
            yield f", key {text}", key
    elif isinstance(x, (set, frozenset)):
        yield from ((f", member {reprlib.repr(item)}", item) for item in x)
    if isinstance(getattr(x, "__dict__", None), dict) and not isinstance(x, (type, ModuleType)):
        yield from ((f".{name}", value) for name, value in x.__dict__.items())


def _merged(header: Header, frames: Frames) -> Frames:
    counts = _field(header, "split-num-sub-frames", (list, tuple))
    offsets = _field(header, "split-offsets", (list, tuple))
    if len(counts) != len(offsets):
        raise FrameError(f"{len(counts)} split-num-sub-frames, but {len(offsets)} split-offsets")
    merged = []
    expected = 0
    for i, (count, offset) in enumerate(zip(counts, offsets, strict=True)):
        if type(count) is not int or count < 1 or offset != expected:
            raise FrameError(f"frame {i}: expected pieces from {expected} on, got {count!r} from {offset!r}")
        expected += count
        merged.append(_frames.merge_frames(frames[offset:expected]))
    if expected != len(frames):
        raise FrameError(f"expected {expected} pieces of {len(counts)} frames, got {len(frames)}")
    return merged


def _parts_of_collection(header: Header, frames: Frames) -> tuple[Any, list[tuple[Header, Frames]]]:
    """Return the class of a collection, and the header and frames of each element."""
    sub_headers = _field(header, "sub-headers", (list, tuple))
    lengths = _field(header, "frame-lengths", (list, tuple))
    name = _field(header, "type-serialized", (str,))
    cls = COLLECTION_NAMES.get(name)
    if cls is None:
        raise FrameError(f"type-serialized: expected one of {list(COLLECTION_NAMES)}, got {name!r}")
    if len(sub_headers) != len(lengths):
        raise FrameError(f"{len(sub_headers)} sub-headers, but {len(lengths)} frame-lengths")
    if not all(type(n) is int and n >= 0 for n in lengths) or sum(lengths) != len(frames):
        raise FrameError(f"frame-lengths must add up to {len(frames)} frames, got {list(lengths)[:20]}")
    stops = list(itertools.accumulate(lengths))
    return cls, [
        (sub_header, frames[stop - n : stop])
        for sub_header, n, stop in zip(sub_headers, lengths, stops, strict=True)
    ]


def _field(header: Any, name: str, types: tuple[type, ...]) -> Any:
    try:
        value = header[name]
    except (KeyError, TypeError, IndexError):
        raise FrameError(f"header lacks {name!r}: {header!r:.200}") from None
    if not isinstance(value, types):
        expected = " or ".join(t.__name__ for t in types)
        raise FrameError(f"{name}: expected {expected}, got {type(value).__name__}")
    return value


def _viewed(frame: Any) -> Any:
    """Return *frame* as bytes; inside a program it may be any object, as with distributed."""
    try:
        return _frames.ensure_memoryview(frame)
    except TypeError:
        return frame


def _with_flag(frame: Any, writeable: bool) -> memoryview:
    view = _frames.ensure_memoryview(frame)
    if writeable and view.readonly:
        return memoryview(bytearray(view))  # the sender's memory was writeable: only a copy can be
    return view if writeable else view.toreadonly()


def msgpack_dumps(x: object) -> tuple[Header, Frames]:
    """Write *x* as msgpack if that keeps its types, lists apart."""
    try:
        return {"serializer": "msgpack"}, [msgpack.packb(x, use_bin_type=True)]
    except Exception as error:
        raise DispatchError(f"msgpack does not take it: {error}") from error


def msgpack_loads(header: Header, frames: Frames) -> Any:
    """Read msgpack."""
    try:
        return msgpack.unpackb(b"".join(frames), use_list=False, raw=False, strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise FrameError(f"not msgpack: {error}") from error


def error_loads(header: Header, frames: Frames) -> Any:
    """Raise what kept the sender from serializing."""
    raise SerializationError("\n".join(bytes(frame).decode(errors="replace") for frame in frames))


codec = Codec(WRAPPERS, dispatch.dask_serialize, dispatch.dask_deserialize, dispatch.families)
dispatch.register_serialization_family("dask", codec.dask_dumps, codec.dask_loads)
dispatch.register_serialization_family("pickle", codec.pickle_dumps, codec.pickle_loads)
dispatch.register_serialization_family("msgpack", msgpack_dumps, msgpack_loads)
dispatch.register_serialization_family("error", None, error_loads)


def deserialize_part(header: Header, frames: Frames) -> Any:
    """Read a `Serialized` that was part of an object; programs name this function."""
    return codec.deserialize(header, frames)


serialize = codec.serialize
deserialize = codec.deserialize
serialize_and_split = codec.serialize_and_split
merge_and_deserialize = codec.merge_and_deserialize
serialize_bytelist = codec.serialize_bytelist
serialize_bytes = codec.serialize_bytes
deserialize_bytes = codec.deserialize_bytes


def infer_if_recurse_to_serialize_list(x: list[Any]) -> bool:
    """Tell whether `serialize` would give each element of the list *x* a header and frames of its own.

    Lists of what host memory holds travel as one program, so the answer is False for them; it is True
    where an element lives on a device.

    Examples
    --------
    >>> infer_if_recurse_to_serialize_list([1.5, "a", [2]])
    False
    """
    return travels_apart(x, DEFAULT_SERIALIZERS)
