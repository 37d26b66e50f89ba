"""Messages to frames and back: msgpack, with placeholders for what travels in frames of its own.

Frame 0 is msgpack.  ``{"__Serialized__": n}`` and ``{"__Pickled__": n}`` in it stand for the object whose
header is frame n, followed by its own frames; the format is that of distributed.protocol.core.
"""

import msgpack

from fastser.core import codec
from fastser.errors import FrameError

RESERVED = ("__Serialized__", "__Pickled__", "__Set__", "__Enum__")
cdef enum:
    MAX_DEPTH = 400  # msgpack-python packs 511 levels, and a mark below them needs some


class Messages:
    """Messages of one codec, on its wrappers and families."""

    def __init__(self, codec):
        self.codec = codec

    def dumps(self, msg, serializers=None, on_error="message", context=None, frame_split_size=None):
        """Turn a message into frames.

        Parameters
        ----------
        msg : object
            Plain data of dicts, lists, tuples, sets, strings, bytes and numbers, with `Serialize` and
            `ToPickle` marks at any depth.  Lists arrive as tuples.  Whatever msgpack does not know, or
            would change into something unreadable, is pickled as if marked `ToPickle`.
        serializers : collection of str, optional
            Families for the objects marked `Serialize`.
        on_error : {"message", "raise"}
            For the objects marked `Serialize`, as in `serialize`.
        context : dict, optional
            Passed to families; ``context["compression"]`` names the codec for large frames.
        frame_split_size : int, optional
            Greatest size of a frame in bytes, 64 MiB by default.

        Returns
        -------
        list of bytes-like
            Frame 0 is msgpack; others are views of the memory of marked objects, or copies.

        Raises
        ------
        SerializationError
            For a marked object, with ``on_error="raise"``.
        Exception
            Whatever pickle raises for an unmarked object that it cannot write.

        Examples
        --------
        >>> from fastser import loads, to_serialize
        >>> loads(dumps({"op": "update", "data": to_serialize([1.5, 2.5])}))
        {'op': 'update', 'data': [1.5, 2.5]}
        """
        writer = _Writer(self.codec, serializers, on_error, context, frame_split_size)
        try:
            return writer.write(msg)
        except (UnicodeEncodeError, _Reserved):
            pass
        except ValueError as error:
            if writer.failed is error:  # raised for an object in the message, not by msgpack
                raise
        # msgpack is not able to hold the message as it is: nested too deep, strings that are not
        # UTF-8, dicts that would be taken for placeholders.  Those parts are pickled.
        writer = _Writer(self.codec, serializers, on_error, context, frame_split_size)
        return writer.write(_escaped(msg, self.codec.wrappers.to_pickle, 0), check=False)

    def loads(self, frames, deserialize=True, deserializers=None):
        """Turn frames back into a message.

        Parameters
        ----------
        frames : sequence of bytes-like
            Only read.  Large buffers of the result are views of them.
        deserialize : bool
            False keeps objects that were marked `Serialize` as `Serialized`, as a relay needs them.
        deserializers : collection of str, optional
            Names of the families that may be used for them; all by default.

        Raises
        ------
        FrameError
            If the frames do not hold what they say.
        DispatchError
            If an object was written by a family that may not be used.
        SerializationError
            If the sender could not serialize an object.
        Exception
            Whatever unpickling an object raises.

        Examples
        --------
        >>> loads(dumps({"a": [1, 2]}))
        {'a': (1, 2)}
        >>> loads([])
        Traceback (most recent call last):
        ...
        fastser.errors.FrameError: expected a message frame, got no frames
        """
        return _Reader(self.codec, frames, deserialize, deserializers).read()


class _Reserved(Exception):
    """The message holds a dict that looks like a placeholder."""


cdef class _Writer:
    cdef object codec, wrappers, serializers, on_error, context, frame_split_size
    cdef list frames
    cdef Py_ssize_t marks
    cdef readonly object failed

    def __init__(self, codec, serializers, on_error, context, frame_split_size):
        self.codec = codec
        self.wrappers = codec.wrappers
        self.serializers = serializers
        self.on_error = on_error
        self.context = context
        self.frame_split_size = frame_split_size
        self.frames = [None]
        self.marks = 0
        self.failed = None

    def write(self, msg, *, check=True):
        cdef bytes first = msgpack.packb(msg, default=self._encode_default, use_bin_type=True)
        if check and sum([first.count(name.encode()) for name in RESERVED]) != self.marks:
            raise _Reserved
        self.frames[0] = first
        return self.frames

    def _encode_default(self, obj):
        """Answer msgpack, which met an object that it does not know."""
        try:
            return self.encode(obj)
        except Exception as error:
            self.failed = error
            raise

    cdef encode(self, obj):
        wrappers = self.wrappers
        self.marks += 1
        if isinstance(obj, (wrappers.serialize, wrappers.serialized)):
            header, frames = self.serialized(obj)
            return {"__Serialized__": self.add(header, frames)}
        if not isinstance(obj, (wrappers.to_pickle, wrappers.pickled)):
            encoded = self.codec.encode_default(obj)
            if isinstance(encoded, tuple(wrappers)):  # another set of wrappers, which this codec takes too
                self.marks -= 1
                return self.encode(encoded)
            if encoded is not obj:
                return encoded
            obj = wrappers.to_pickle(obj)
        header, frames = self.pickled(obj)
        return {"__Pickled__": self.add(header, frames)}

    cdef add(self, header, frames):
        cdef Py_ssize_t offset = len(self.frames)
        self.frames.append(self.codec.pack_header({**header, "num-sub-frames": len(frames)}))
        self.frames.extend(frames)
        return offset

    cdef tuple serialized(self, obj):
        if isinstance(obj, self.wrappers.serialized):
            return obj.header, obj.frames
        header, frames = self.codec.serialize_and_split(
            obj,
            serializers=self.serializers,
            on_error=self.on_error,
            context=self.context,
            size=self.frame_split_size,
        )
        return self.codec.compress_frames(header, frames, self.compression())

    cdef tuple pickled(self, obj):
        if isinstance(obj, self.wrappers.pickled):
            return obj.header, obj.frames
        header, frames = self.codec.pickle_dumps(obj.data)
        header = {"pickled-obj": frames[0], "writeable": header["writeable"]}
        return self.codec.compress_frames(header, frames[1:], self.compression())

    cdef compression(self):
        return self.context.get("compression", "auto") if self.context else "auto"


cdef class _Reader:
    cdef object codec, deserializers, failed
    cdef list frames
    cdef bint deserialize

    def __init__(self, codec, frames, deserialize, deserializers):
        self.codec = codec
        self.frames = list(frames)
        self.deserialize = deserialize
        self.deserializers = deserializers
        self.failed = None

    def read(self):
        if not self.frames:
            raise FrameError("expected a message frame, got no frames")
        try:
            return msgpack.unpackb(
                self.frames[0],
                object_hook=self._decode_default,
                use_list=False,
                raw=False,
                strict_map_key=False,
            )
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            if error is self.failed:
                raise
            nbytes = memoryview(self.frames[0]).nbytes
            raise FrameError(f"message frame of {nbytes} bytes is not msgpack: {error}") from error

    def _decode_default(self, dict obj):
        """Answer msgpack, which read a dict that may be a placeholder."""
        try:
            return self.decode(obj)
        except Exception as error:
            self.failed = error
            raise

    cdef decode(self, dict obj):
        if len(obj) == 1:
            offset = obj.get("__Serialized__")
            if type(offset) is int and offset > 0:
                header, frames = self.part(offset)
                return self.serialized(header, frames)
            offset = obj.get("__Pickled__")
            if type(offset) is int and offset > 0:
                header, frames = self.part(offset)
                return self.pickled(header, frames)
            return obj
        return self.codec.decode_default(obj)

    cdef tuple part(self, offset):
        """Return the header at frame *offset* and the frames that follow it."""
        if offset >= len(self.frames):
            raise FrameError(f"placeholder: expected a header in frame {offset} of {len(self.frames)}")
        header = self.codec.unpack_header(self.frames[offset])
        # it counts frames of this message, which is not for the reader of the header to know
        count = header.pop("num-sub-frames", None) if isinstance(header, dict) else None
        if type(count) is not int or not 0 <= count < len(self.frames) - offset:
            raise FrameError(
                f"header in frame {offset}: expected num-sub-frames of at most "
                f"{len(self.frames) - offset - 1}, got {count!r:.100}"
            )
        return header, self.frames[offset + 1:offset + 1 + count]

    cdef serialized(self, header, frames):
        if not self.deserialize:
            return self.codec.wrappers.serialized(header, frames)
        if "compression" in header:
            frames = self.codec.decompress(header, frames)
        return self.codec.merge_and_deserialize(header, frames, deserializers=self.deserializers)

    cdef pickled(self, header, frames):
        if "compression" in header:
            frames = self.codec.decompress(header, frames)
        program = header.get("pickled-obj")
        if type(program) is not bytes:
            raise FrameError(f"pickled-obj: expected bytes, got {type(program).__name__}")
        # stock senders keep no flags: take the buffers as they come
        flags = header.get("writeable", [not memoryview(frame).readonly for frame in frames])
        return self.codec.pickle_loads({"writeable": flags}, [program, *frames])


cdef _escaped(obj, to_pickle, Py_ssize_t depth):
    """Return *obj* with the parts that msgpack cannot hold marked to be pickled."""
    cls = type(obj)
    if cls is str:
        return obj if _encodes(obj) else to_pickle(obj)
    if depth == MAX_DEPTH and isinstance(obj, (dict, list, tuple)):
        return to_pickle(obj)
    if isinstance(obj, dict):
        if any([key in RESERVED or not _plain_key(key) for key in obj]):
            return to_pickle(obj)
        return {key: _escaped(value, to_pickle, depth + 1) for key, value in obj.items()}
    if isinstance(obj, (list, tuple)):
        return tuple([_escaped(item, to_pickle, depth + 1) for item in obj])
    if cls is set and not all(map(_plain_key, obj)):
        return to_pickle(obj)
    return obj


cdef bint _encodes(str text) except -1:
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate
        return False
    return True


def _plain_key(key):
    if type(key) is str:
        return _encodes(key)
    if type(key) is tuple:
        return all(map(_plain_key, key))
    return True


messages = Messages(codec)
dumps = messages.dumps
loads = messages.loads
