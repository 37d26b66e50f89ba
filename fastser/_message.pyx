"""Messages to frames and back: msgpack, with placeholders for what travels in frames of its own.

Frame 0 is msgpack.  ``{"__Serialized__": n}`` and ``{"__Pickled__": n}`` in it stand for the object whose
header is frame n, followed by its own frames; the format is that of distributed.protocol.core.
"""

cimport cython

from fastser._msgpack import pack, unpack
from fastser.core import codec
from fastser.errors import FrameError


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
        cdef _Writer writer = _Writer.__new__(_Writer)
        writer.codec = self.codec
        writer.serializers = serializers
        writer.on_error = on_error
        writer.context = context
        writer.frame_split_size = frame_split_size
        writer.frames = [None]
        writer.frames[0] = pack(msg, writer)
        return writer.frames

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
        cdef _Reader reader = _Reader.__new__(_Reader)
        reader.codec = self.codec
        reader.frames = list(frames)
        reader.deserialize = deserialize
        reader.deserializers = deserializers
        if not reader.frames:
            raise FrameError("expected a message frame, got no frames")
        return unpack(reader.frames[0], reader)


@cython.final
@cython.freelist(4)
@cython.auto_pickle(False)
cdef class _Writer:
    """The frames of one message in the making; called with each object that msgpack does not hold."""

    cdef object codec, serializers, on_error, context, frame_split_size
    cdef list frames

    def __call__(self, obj):
        wrappers = self.codec.wrappers
        if isinstance(obj, (wrappers.serialize, wrappers.serialized)):
            header, frames = self.serialized(obj)
            return {"__Serialized__": self.add(header, frames)}
        if not isinstance(obj, (wrappers.to_pickle, wrappers.pickled)):
            encoded = self.codec.encode_default(obj)
            if isinstance(encoded, tuple(wrappers)):  # another set of wrappers, which this codec takes too
                return self(encoded)
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
        if isinstance(obj, self.codec.wrappers.serialized):
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
        if isinstance(obj, self.codec.wrappers.pickled):
            return obj.header, obj.frames
        header, frames = self.codec.pickle_dumps(obj.data)
        header = {"pickled-obj": frames[0], "writeable": header["writeable"]}
        return self.codec.compress_frames(header, frames[1:], self.compression())

    cdef compression(self):
        return self.context.get("compression", "auto") if self.context else "auto"


@cython.final
@cython.freelist(4)
@cython.auto_pickle(False)
cdef class _Reader:
    """The frames of one message; called with each dict that may be a placeholder."""

    cdef object codec, deserializers
    cdef list frames
    cdef bint deserialize

    def __call__(self, dict obj):
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


messages = Messages(codec)
dumps = messages.dumps
loads = messages.loads
