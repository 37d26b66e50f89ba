"""Frames: views, splitting, merging, and the framing of distributed. Bytes only, no objects."""

from cpython.buffer cimport (
    PyBUF_FULL_RO,
    PyBUF_SIMPLE,
    PyBuffer_IsContiguous,
    PyBuffer_Release,
    PyObject_CheckBuffer,
    PyObject_GetBuffer,
)
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.memoryview cimport PyMemoryView_Check, PyMemoryView_GET_BUFFER
from libc.stdint cimport uint64_t, uintptr_t
from libc.string cimport memcpy, strcmp

from pickle import PickleBuffer

from numpy import empty

from fastser.errors import FrameError

BIG_BYTES_SHARD_SIZE = 64 * 1024 * 1024  # bytes; distributed's default for distributed.comm.shard

cdef enum:
    WORD = 8  # bytes of a count or a length on the wire
    NOGIL_COPY = 1024 * 1024  # bytes from which a copy lets other threads run
    PRELUDE = -1  # in place of a frame index


cdef struct Cursor:
    Py_ssize_t at    # offset of the next unread byte
    Py_ssize_t left  # bytes still readable


cdef Py_ssize_t take(Cursor* cur, uint64_t n, Py_ssize_t size, Py_ssize_t frame) except -1:
    """Advance over *n* items of *size* bytes and return where they start; the only bounds check."""
    if n > <uint64_t>(cur.left // size):
        where = "prelude" if frame == PRELUDE else f"frame {frame}"
        raise FrameError(
            f"{where} at byte offset {cur.at}: expected {int(n) * size} bytes, found {cur.left}"
        )
    cdef Py_ssize_t start = cur.at
    cur.at += <Py_ssize_t>n * size
    cur.left -= <Py_ssize_t>n * size
    return start


cdef uint64_t load(const unsigned char* p) noexcept nogil:
    """Read a little-endian word at any alignment."""
    cdef uint64_t word = 0
    cdef int i
    for i in range(WORD):
        word |= <uint64_t>p[i] << (8 * i)
    return word


cdef void store(unsigned char* p, uint64_t word) noexcept nogil:
    """Write a little-endian word at any alignment."""
    cdef int i
    for i in range(WORD):
        p[i] = <unsigned char>(word >> (8 * i) & 0xFF)


def host_array(Py_ssize_t n):
    """Allocate *n* bytes of host memory.

    Parameters
    ----------
    n : int
        Size in bytes.

    Returns
    -------
    memoryview
        Writable, not initialised, 1-D of format ``"B"``; owns its memory.

    Raises
    ------
    ValueError
        If *n* is negative.
    MemoryError
        If there is not that much memory.

    Examples
    --------
    >>> view = host_array(3)
    >>> view[:] = b"abc"
    >>> bytes(view)
    b'abc'
    """
    if n < 0:
        raise ValueError(f"size must not be negative, got {n} bytes")
    return empty((n,), "u1").data


def nbytes(frame):
    """Count the bytes of *frame*.

    Parameters
    ----------
    frame : buffer
        Any object with a buffer, of any format and shape, or device memory that has ``nbytes``.

    Returns
    -------
    int
        Size in bytes.

    Raises
    ------
    TypeError
        If *frame* has neither a buffer nor ``nbytes``.

    Examples
    --------
    >>> from array import array
    >>> nbytes(array("d", [1.5, 2.5]))
    16
    """
    cdef Py_buffer buf
    cdef Py_ssize_t n
    if isinstance(frame, (bytes, bytearray)):
        return len(frame)
    if not PyObject_CheckBuffer(frame):
        try:
            return frame.nbytes
        except AttributeError:
            raise TypeError(f"expected an object with a buffer or nbytes, got {named(frame)}") from None
    PyObject_GetBuffer(frame, &buf, PyBUF_FULL_RO)
    n = buf.len
    PyBuffer_Release(&buf)
    return n


def ensure_memoryview(obj):
    """View *obj* as contiguous unsigned bytes.

    Parameters
    ----------
    obj : buffer
        Any object with a buffer, of any format, shape and order.

    Returns
    -------
    memoryview
        1-D, contiguous, of format ``"B"``. A view of the memory of *obj*, read-only if that is, where
        the elements lie in C order; else a writable copy of them in C order. An empty buffer gives an
        empty view that does not keep *obj* alive.

    Raises
    ------
    TypeError
        If *obj* has no buffer.
    ValueError, BufferError
        If *obj* does not hand out its buffer: a released memoryview, an array of datetime64.

    Examples
    --------
    >>> from array import array
    >>> ensure_memoryview(array("h", [1, 2])).nbytes
    4
    >>> ensure_memoryview(b"abc").readonly
    True
    """
    if not PyObject_CheckBuffer(obj):
        raise TypeError(f"expected an object with a buffer (bytes-like), got {named(obj)}")
    view = obj if PyMemoryView_Check(obj) else memoryview(obj)
    if not view.nbytes:
        return memoryview(b"") if view.readonly else memoryview(bytearray())
    cdef Py_buffer* buf = PyMemoryView_GET_BUFFER(view)
    if not PyBuffer_IsContiguous(buf, b"C"):
        return memoryview(bytearray(view))
    if buf.ndim == 1 and strcmp(buf.format, b"B") == 0:
        return view
    try:
        return view.cast("B")
    except TypeError:  # the format is not one native character; .obj of raw() is the view, not its owner
        return PickleBuffer(view).raw()


def frame_split_size(frame, n=BIG_BYTES_SHARD_SIZE):
    """Cut *frame* into consecutive views of at most *n* bytes.

    Parameters
    ----------
    frame : buffer
        Any object with a buffer.
    n : int, optional
        Limit in bytes; None or 0 stand for 64 MiB.

    Returns
    -------
    list of memoryview
        Unsigned bytes, in order; one empty view for an empty frame. Views of *frame* where its elements
        lie in C order, else of one copy.

    Raises
    ------
    ValueError
        If *n* is negative.
    TypeError
        If *frame* has no buffer.

    Examples
    --------
    >>> [bytes(view) for view in frame_split_size(b"12345", 3)]
    [b'123', b'45']
    """
    n = n or BIG_BYTES_SHARD_SIZE
    if n < 0:
        raise ValueError(f"limit must not be negative, got {n} bytes")
    view = ensure_memoryview(frame)
    cdef Py_ssize_t total = view.nbytes
    if total <= n:
        return [view]
    cdef Py_ssize_t limit = n
    cdef Py_ssize_t at = 0
    cdef list views = []
    while total - at > limit:
        views.append(view[at : at + limit])
        at += limit
    views.append(view[at:])
    return views


def merge_memoryviews(mvs):
    """Concatenate memoryviews that are neighbours in one buffer, without a copy.

    Parameters
    ----------
    mvs : sequence of memoryview
        Pieces of one buffer (``.obj``), 1-D, contiguous, of one format, each beginning where the one
        before it ends. Empty pieces may stand anywhere.

    Returns
    -------
    memoryview
        A view of the shared buffer, in the format of the pieces and read-only if one of them is; a single
        piece itself; an empty view for no pieces.

    Raises
    ------
    TypeError
        If a piece is not a memoryview.
    ValueError
        If the pieces are not neighbours in one buffer.

    Examples
    --------
    >>> whole = memoryview(b"abcdef")
    >>> bytes(merge_memoryviews([whole[1:3], whole[3:5]]))
    b'bcde'
    """
    cdef list pieces = list(mvs)
    cdef Py_buffer* buf
    cdef Py_buffer* first = NULL
    cdef const char* end = NULL
    cdef Py_ssize_t total = 0
    cdef bint readonly = False
    cdef Py_ssize_t i
    if not pieces:
        return memoryview(bytearray())
    if len(pieces) == 1:
        return pieces[0]
    for i, piece in enumerate(pieces):
        if not PyMemoryView_Check(piece):
            expected = "expected memoryview" if i else "Expected memoryview"
            raise TypeError(f"piece {i}: {expected}, got {named(piece)}")
        if not piece.nbytes:
            continue
        buf = PyMemoryView_GET_BUFFER(piece)
        if first == NULL:
            first = buf
        if owner(buf) != owner(first):
            raise ValueError(
                f"piece {i}: different buffer, expected a part of {owner_name(first)}, got {owner_name(buf)}"
            )
        if not PyBuffer_IsContiguous(buf, b"A"):
            raise ValueError(f"piece {i}: expected contiguous bytes, got a non-contiguous view")
        if buf.ndim != 1:
            raise ValueError(f"piece {i} has {buf.ndim} dimensions, not 1")
        if strcmp(buf.format, first.format) != 0:
            raise ValueError(f"piece {i}: inconsistent format: {piece.format} vs {first.format.decode()}")
        if end != NULL and buf.buf != end:
            raise ValueError(
                f"piece {i} does not start where the previous ends: "
                f"expected 0 bytes between them, found {<Py_ssize_t>(<uintptr_t>buf.buf - <uintptr_t>end)}"
            )
        end = <const char*>buf.buf + buf.len
        total += buf.len
        readonly |= buf.readonly
    if first == NULL:
        return pieces[0]
    format = first.format.decode()
    merged = span(first, total, readonly)
    if merged is None:
        raise ValueError(f"piece 0: expected a part of one contiguous buffer, got {owner_name(first)}")
    return merged if format == "B" else merged.cast(format)


def merge_frames(frames):
    """Join the pieces of one split frame.

    Parameters
    ----------
    frames : iterable of buffer
        Consecutive pieces, as :func:`frame_split_size` made them or as they arrived.

    Returns
    -------
    memoryview
        Unsigned bytes: a view where the pieces are neighbours in one buffer, read-only if one of them is,
        else one writable copy; an empty view for no pieces. A single piece is returned as it is, of
        whatever type.

    Raises
    ------
    TypeError
        If one of several pieces has no buffer.
    MemoryError
        If there is no memory for the copy.

    Examples
    --------
    >>> bytes(merge_frames([b"abc", bytearray(b"de")]))
    b'abcde'
    """
    cdef list pieces = list(frames)
    if len(pieces) == 1:
        return pieces[0]
    cdef list views = [ensure_memoryview(piece) for piece in pieces]
    merged = neighbours(views)
    if merged is not None:
        return merged
    cdef Py_ssize_t total = 0
    for view in views:
        total += PyMemoryView_GET_BUFFER(view).len
    out = host_array(total)
    cdef char* to = <char*>PyMemoryView_GET_BUFFER(out).buf
    for view in views:
        to += copy_into(to, view)
    return out


def pack_frames_prelude(frames):
    """Write the count and the lengths of *frames*, as :func:`pack_frames` puts them first.

    Parameters
    ----------
    frames : iterable of buffer
        Any objects with a buffer.

    Returns
    -------
    bytes
        Little-endian 64-bit words: the count, then each length in bytes.

    Raises
    ------
    TypeError
        If a frame has neither a buffer nor ``nbytes``.

    Examples
    --------
    >>> pack_frames_prelude([b"abc"]).hex()
    '01000000000000000300000000000000'
    """
    cdef list listed = list(frames)
    cdef Py_ssize_t count = len(listed)
    cdef bytes prelude = PyBytes_FromStringAndSize(NULL, WORD * (count + 1))
    cdef unsigned char* to = <unsigned char*>PyBytes_AS_STRING(prelude)
    store(to, count)
    for frame in listed:
        to += WORD
        store(to, nbytes(frame))
    return prelude


def pack_frames(frames):
    """Pack *frames* into one run of bytes, which :func:`unpack_frames` takes apart.

    Parameters
    ----------
    frames : iterable of buffer
        Any objects with a buffer.

    Returns
    -------
    bytes
        The prelude, then a copy of each frame.

    Raises
    ------
    TypeError
        If a frame has no buffer.

    Examples
    --------
    >>> [bytes(frame) for frame in unpack_frames(pack_frames([b"abc", b""]))]
    [b'abc', b'']
    """
    # bytes and views cannot change their size before they are joined
    listed = [frame if type(frame) is bytes else ensure_memoryview(frame) for frame in frames]
    return b"".join([pack_frames_prelude(listed), *listed])


def unpack_frames(b, *, bint remainder=False, bint partial=False):
    """Take apart what :func:`pack_frames` packed.

    Parameters
    ----------
    b : buffer
        Packed frames; bytes behind the last frame are ignored without *remainder*.
    remainder : bool
        Append one more frame with all that follows the last one; it is empty at the end of a stream.
    partial : bool
        Let *b* end before the first byte of any frame.

    Returns
    -------
    list of memoryview
        Views of *b* as unsigned bytes.
    tuple of (list of memoryview, list of int)
        With *partial*: the frames, and the lengths in bytes of those that begin at the end of *b*. An empty
        frame there counts as missing, as in distributed.

    Raises
    ------
    FrameError
        If *b* ends inside the prelude or inside a frame, or, without *partial*, before the last frame.
    TypeError
        If *b* has no buffer.

    Examples
    --------
    >>> packed = pack_frames([b"abc", b"de"])
    >>> [bytes(frame) for frame in unpack_frames(packed + b"rest", remainder=True)]
    [b'abc', b'de', b'rest']
    >>> frames, missing = unpack_frames(packed[:27], partial=True)
    >>> [bytes(frame) for frame in frames], missing
    ([b'abc'], [2])
    """
    cdef Py_buffer buf
    cdef Cursor cur
    cdef const unsigned char* base
    cdef const unsigned char* lengths
    cdef uint64_t count
    cdef Py_ssize_t i, start
    cdef list frames = []
    cdef list missing = []
    view = ensure_memoryview(b)
    PyObject_GetBuffer(view, &buf, PyBUF_SIMPLE)
    try:
        base = <const unsigned char*>buf.buf
        cur = Cursor(at=0, left=buf.len)
        start = take(&cur, 1, WORD, PRELUDE)
        count = load(base + start)
        lengths = base + take(&cur, count, WORD, PRELUDE)
        for i in range(<Py_ssize_t>count):
            if partial and cur.left == 0:
                missing = [load(lengths + WORD * i) for i in range(i, <Py_ssize_t>count)]
                break
            start = take(&cur, load(lengths + WORD * i), 1, i)
            frames.append(view[start : cur.at])
    finally:
        PyBuffer_Release(&buf)
    if remainder:
        frames.append(view[cur.at :])
    return (frames, missing) if partial else frames


cdef object named(obj):
    """The type of *obj* for a message."""
    return f"{type(obj).__module__}.{type(obj).__qualname__}".removeprefix("builtins.")


cdef const void* owner(const Py_buffer* buf) noexcept:
    """The ``.obj`` of a memoryview, borrowed; NULL for memory without an owner."""
    return <const void*>buf.obj


cdef object owner_name(const Py_buffer* buf):
    """The owner of a buffer for a message."""
    if owner(buf) == NULL:
        return "memory without an owner"
    return f"{named(buf.obj)} at {<uintptr_t>owner(buf):#x}"


cdef object span(Py_buffer* first, Py_ssize_t total, bint readonly):
    """View *total* bytes of the owner of *first* from its first byte on; None if it gives no such view."""
    cdef uintptr_t start = <uintptr_t>first.buf
    if owner(first) == NULL:
        return None
    try:
        base = PickleBuffer(first.obj).raw()
    except BufferError:
        return None
    cdef Py_buffer* buf = PyMemoryView_GET_BUFFER(base)
    cdef uintptr_t low = <uintptr_t>buf.buf
    if start < low or start - low > <size_t>buf.len or total > buf.len - <Py_ssize_t>(start - low):
        return None
    merged = base[start - low : start - low + total]
    return merged.toreadonly() if readonly else merged


cdef object neighbours(list views):
    """Merge views of unsigned bytes that follow one another in one buffer, or return None."""
    cdef Py_buffer* buf
    cdef Py_buffer* first = NULL
    cdef const char* end = NULL
    cdef Py_ssize_t total = 0
    cdef bint readonly = False
    for view in views:
        buf = PyMemoryView_GET_BUFFER(view)
        if buf.len == 0:
            continue
        if first == NULL:
            first = buf
        elif owner(buf) != owner(first) or buf.buf != end:
            return None
        end = <const char*>buf.buf + buf.len
        total += buf.len
        readonly |= buf.readonly
    if first == NULL:
        return memoryview(bytearray())
    return span(first, total, readonly)


cdef Py_ssize_t copy_into(char* to, view) except -1:
    """Copy the bytes of *view* and return how many."""
    cdef Py_buffer buf
    PyObject_GetBuffer(view, &buf, PyBUF_SIMPLE)
    try:
        if buf.len < NOGIL_COPY:
            memcpy(to, buf.buf, buf.len)
        else:
            with nogil:
                memcpy(to, buf.buf, buf.len)
        return buf.len
    finally:
        PyBuffer_Release(&buf)
