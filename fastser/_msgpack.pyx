"""Plain data to msgpack and back: the bytes of msgpack-python, in one walk each way.

Both walks keep to a few rules.  Out: exact builtin types go straight into a kept scratch buffer; references
are borrowed while no Python code can run, and held where it can.  In: all reads go through one cursor, and a
collection is made only if the bytes left can hold its items and those that outer collections still wait for,
so that lying lengths take no memory.

Four keys mark placeholders in messages.  A dict of the user that holds one is given to *default*; one that
is read is given to *hook*; nothing else is known about them here.
"""

from msgpack import ExtType, Timestamp

cimport cython
from cpython.buffer cimport (
    PyBUF_FULL_RO,
    PyBuffer_IsContiguous,
    PyBuffer_Release,
    PyObject_GetBuffer,
)
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.dict cimport PyDict_SetItem
from cpython.exc cimport PyErr_Clear
from cpython.float cimport PyFloat_FromDouble
from cpython.list cimport PyList_New
from cpython.long cimport PyLong_FromLong, PyLong_FromLongLong, PyLong_FromUnsignedLongLong
from cpython.mem cimport PyMem_RawFree, PyMem_RawRealloc
from cpython.object cimport PyObject
from cpython.tuple cimport PyTuple_New
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdint cimport int16_t, int32_t, int64_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy

from fastser.errors import FrameError

from fastser._utf8 cimport put_char

cdef extern from "Python.h":
    ctypedef struct PyTypeObject:
        pass
    PyTypeObject PyFloat_Type, PyLong_Type, PyBool_Type, PyUnicode_Type, PyBytes_Type, PyTuple_Type
    PyTypeObject PyList_Type, PyDict_Type
    PyTypeObject* type_of "Py_TYPE"(PyObject*) noexcept
    PyObject* none "Py_None"
    PyObject* true "Py_True"
    double float_value "PyFloat_AS_DOUBLE"(PyObject*) noexcept
    long long PyLong_AsLongLongAndOverflow(PyObject*, int*) noexcept
    unsigned long long PyLong_AsUnsignedLongLong(PyObject*) noexcept
    PyObject* PyErr_Occurred() noexcept
    PyObject** items_of "PySequence_Fast_ITEMS"(PyObject*) noexcept
    Py_ssize_t list_size "PyList_GET_SIZE"(PyObject*) noexcept
    Py_ssize_t tuple_size "PyTuple_GET_SIZE"(PyObject*) noexcept
    Py_ssize_t dict_size "PyDict_GET_SIZE"(PyObject*) noexcept
    bint dict_next "PyDict_Next"(PyObject*, Py_ssize_t*, PyObject**, PyObject**) noexcept
    char* bytes_data "PyBytes_AS_STRING"(PyObject*) noexcept
    Py_ssize_t bytes_size "PyBytes_GET_SIZE"(PyObject*) noexcept
    char* bytearray_data "PyByteArray_AS_STRING"(PyObject*) noexcept
    Py_ssize_t bytearray_size "PyByteArray_GET_SIZE"(PyObject*) noexcept
    bint is_str "PyUnicode_Check"(PyObject*) noexcept
    bint is_ascii "PyUnicode_IS_ASCII"(PyObject*) noexcept
    void* str_data "PyUnicode_DATA"(PyObject*) noexcept
    int str_kind "PyUnicode_KIND"(PyObject*) noexcept
    Py_ssize_t str_length "PyUnicode_GET_LENGTH"(PyObject*) noexcept
    uint32_t str_read "PyUnicode_READ"(int, void*, Py_ssize_t) noexcept
    int PyUnicode_READY(PyObject*) except -1
    str PyUnicode_New(Py_ssize_t, uint32_t)
    PyObject* decode_utf8 "PyUnicode_DecodeUTF8"(const char*, Py_ssize_t, const char*) noexcept
    void tuple_set "PyTuple_SET_ITEM"(PyObject*, Py_ssize_t, PyObject*) noexcept  # takes the reference
    void list_set "PyList_SET_ITEM"(PyObject*, Py_ssize_t, PyObject*) noexcept  # takes the reference
    void track "PyObject_GC_Track"(PyObject*) noexcept
    void untrack "PyObject_GC_UnTrack"(PyObject*) noexcept
    int _PyBytes_Resize(PyObject**, Py_ssize_t) except -1
    void xdecref "Py_XDECREF"(PyObject*) noexcept
    void incref "Py_INCREF"(PyObject*) noexcept

cdef extern from *:
    # Cython's own names for the layout of small ints, which changed with CPython 3.12.
    bint is_compact "__Pyx_PyLong_IsCompact"(PyObject*) noexcept
    Py_ssize_t compact_value "__Pyx_PyLong_CompactValue"(PyObject*) noexcept

cdef enum:
    MAX_DEPTH = 400  # levels written, below those at which msgpack-python gives up: answers need some
    DEEPEST = 500  # levels with answers
    MAX_READ_DEPTH = 1024  # levels read, as many as msgpack-python reads
    SCRATCH = 4096  # bytes of a new buffer
    KEPT = 16777216  # bytes of the greatest buffer that is kept for the next call
    ATOM = 64  # bytes that are enough for a number or a short str
    SHORT = 31  # bytes of a str that one byte can head, and that a cache may keep
    SLOTS = 1024  # of a cache
    SLOT_SHIFT = 54  # 64 less the bits of a slot number

cdef unsigned char* spare = NULL  # the kept buffer, when no call is using it
cdef Py_ssize_t spare_size = 0
cdef PyObject* KEYS[SLOTS]  # short strs that were keys of maps, by a hash of their bytes
cdef PyObject* VALUES[SLOTS]  # and those that were not


# ---- the reserved keys


cdef bint names_placeholder(const void* data, Py_ssize_t n) noexcept:
    """Tell whether an ASCII str is a key that marks placeholders."""
    if n == 7:
        return memcmp(data, b"__Set__", 7) == 0
    if n == 8:
        return memcmp(data, b"__Enum__", 8) == 0
    if n == 11:
        return memcmp(data, b"__Pickled__", 11) == 0
    return n == 14 and memcmp(data, b"__Serialized__", 14) == 0


cdef inline bint is_reserved(const void* data, Py_ssize_t n) noexcept:
    cdef const unsigned char* p = <const unsigned char*>data
    return n >= 7 and p[0] == b'_' and p[1] == b'_' and names_placeholder(data, n)


# ---- short runs of bytes: at most 31, where calls of memcpy and memcmp cost more than they do


cdef inline uint64_t word(const void* p) noexcept:
    cdef uint64_t value = 0
    memcpy(&value, p, 8)
    return value


cdef inline uint32_t half(const void* p) noexcept:
    cdef uint32_t value = 0
    memcpy(&value, p, 4)
    return value


cdef inline void copy_short(unsigned char* out, const unsigned char* data, Py_ssize_t n) noexcept:
    if n >= 16:
        memcpy(out, data, 16)
        memcpy(out + n - 16, data + n - 16, 16)
    elif n >= 8:
        memcpy(out, data, 8)
        memcpy(out + n - 8, data + n - 8, 8)
    elif n >= 4:
        memcpy(out, data, 4)
        memcpy(out + n - 4, data + n - 4, 4)
    elif n > 0:
        out[0] = data[0]
        out[n >> 1] = data[n >> 1]
        out[n - 1] = data[n - 1]


cdef inline bint same_short(const unsigned char* a, const unsigned char* b, Py_ssize_t n) noexcept:
    """Compare at least two bytes."""
    if n >= 16:
        return (
            word(a) == word(b) and word(a + 8) == word(b + 8)
            and word(a + n - 16) == word(b + n - 16) and word(a + n - 8) == word(b + n - 8)
        )
    if n >= 8:
        return word(a) == word(b) and word(a + n - 8) == word(b + n - 8)
    if n >= 4:
        return half(a) == half(b) and half(a + n - 4) == half(b + n - 4)
    return a[0] == b[0] and a[1] == b[1] and a[n - 1] == b[n - 1]


cdef inline bint is_ascii_short(const unsigned char* p, Py_ssize_t n) noexcept:
    """Look at bytes, of which there are at least two."""
    cdef uint64_t bits
    if n >= 8:
        bits = word(p) | word(p + n - 8)
        if n > 16:
            bits |= word(p + 8) | word(p + n - 16)
    elif n >= 4:
        bits = half(p) | half(p + n - 4)
    else:
        bits = p[0] | p[1] | p[n - 1]
    return bits & <uint64_t>0x8080808080808080 == 0


cdef inline size_t slot_of(const unsigned char* p, Py_ssize_t n) noexcept:
    """Return where in a cache a str of at least two bytes belongs."""
    cdef uint64_t a, b
    if n >= 8:
        a = word(p)
        b = word(p + n - 8)
        if n > 16:
            a += word(p + 8) * <uint64_t>0xD6E8FEB86659FD93
            b += word(p + n - 16) * <uint64_t>0xD6E8FEB86659FD93
    elif n >= 4:
        a = half(p)
        b = half(p + n - 4)
    else:
        a = p[0]
        b = <uint64_t>p[1] << 8 | p[n - 1]
    a = (a ^ <uint64_t>n) * <uint64_t>0x9E3779B97F4A7C15 + b
    a ^= a >> 32
    return <size_t>(a * <uint64_t>0xD6E8FEB86659FD93 >> SLOT_SHIFT)


# ---- big-endian words at any alignment


cdef inline void store16(unsigned char* p, uint32_t value) noexcept:
    p[0] = <unsigned char>(value >> 8)
    p[1] = <unsigned char>value


cdef inline void store32(unsigned char* p, uint32_t value) noexcept:
    p[0] = <unsigned char>(value >> 24)
    p[1] = <unsigned char>(value >> 16)
    p[2] = <unsigned char>(value >> 8)
    p[3] = <unsigned char>value


cdef inline void store64(unsigned char* p, uint64_t value) noexcept:
    p[0] = <unsigned char>(value >> 56)
    p[1] = <unsigned char>(value >> 48)
    p[2] = <unsigned char>(value >> 40)
    p[3] = <unsigned char>(value >> 32)
    p[4] = <unsigned char>(value >> 24)
    p[5] = <unsigned char>(value >> 16)
    p[6] = <unsigned char>(value >> 8)
    p[7] = <unsigned char>value


cdef inline uint32_t load16(const unsigned char* p) noexcept:
    return <uint32_t>p[0] << 8 | p[1]


cdef inline uint32_t load32(const unsigned char* p) noexcept:
    return <uint32_t>p[0] << 24 | <uint32_t>p[1] << 16 | <uint32_t>p[2] << 8 | p[3]


cdef inline uint64_t load64(const unsigned char* p) noexcept:
    return (
        <uint64_t>p[0] << 56 | <uint64_t>p[1] << 48 | <uint64_t>p[2] << 40 | <uint64_t>p[3] << 32
        | <uint64_t>p[4] << 24 | <uint64_t>p[5] << 16 | <uint64_t>p[6] << 8 | p[7]
    )


# ---- the output buffer


cdef struct Out:
    unsigned char* start
    unsigned char* at   # next free byte
    unsigned char* end
    PyObject* big       # a bytes object that holds the buffer, once it is greater than what is kept
    PyObject* default   # borrowed from the caller
    Py_ssize_t asked    # calls of default so far


cdef inline int room(Out* out, Py_ssize_t n) except -1:
    """Make room for *n* more bytes."""
    if cython.unlikely(n > out.end - out.at):
        grow(out, n)
    return 0


cdef int grow(Out* out, Py_ssize_t n) except -1:
    global spare, spare_size
    cdef Py_ssize_t pos = out.at - out.start
    cdef Py_ssize_t size
    cdef unsigned char* start
    if out.start is NULL and spare is not NULL and spare_size >= n:
        out.start = out.at = spare
        out.end = spare + spare_size
        spare = NULL
        return 0
    if n > (<Py_ssize_t>1 << 62) - pos:
        raise MemoryError
    size = max(pos + n, <Py_ssize_t>SCRATCH)
    if size <= KEPT:
        size = min(max(size, (out.end - out.start) * 2), <Py_ssize_t>KEPT)
        start = <unsigned char*>PyMem_RawRealloc(out.start, size)
        if start is NULL:
            raise MemoryError
    else:
        # Large output grows inside the bytes object that is returned, which moves pages, not bytes.
        size += size // 4
        start = grow_big(out, pos, size)
    out.start = start
    out.at = start + pos
    out.end = start + size
    return 0


cdef unsigned char* grow_big(Out* out, Py_ssize_t pos, Py_ssize_t size) except NULL:
    cdef PyObject* big
    if out.big is NULL:
        big = new_bytes(size)
        if pos:
            memcpy(bytes_data(big), out.start, pos)
        free_buffer(out)
        out.big = big
    else:
        out.start = out.at = out.end = NULL
        _PyBytes_Resize(&out.big, size)
    return <unsigned char*>bytes_data(out.big)


cdef PyObject* new_bytes(Py_ssize_t size) except NULL:
    cdef object new = PyBytes_FromStringAndSize(NULL, size)
    incref(<PyObject*>new)
    return <PyObject*>new


cdef bytes finish(Out* out):
    """Return the output as bytes of exactly its size."""
    cdef Py_ssize_t size = out.at - out.start
    cdef PyObject* big = out.big
    if big is NULL:
        return PyBytes_FromStringAndSize(<char*>out.start, size)
    out.big = NULL
    out.start = out.at = out.end = NULL
    _PyBytes_Resize(&big, size)  # on failure it has freed big
    result = <bytes>big
    xdecref(big)
    return result


cdef void free_buffer(Out* out) noexcept:
    """Keep the buffer for the next call, or free it."""
    global spare, spare_size
    if out.big is not NULL:
        xdecref(out.big)
        out.big = NULL
    elif out.start is not NULL:
        if spare is NULL or spare_size < out.end - out.start:
            PyMem_RawFree(spare)
            spare = out.start
            spare_size = out.end - out.start
        else:
            PyMem_RawFree(out.start)
    out.start = out.at = out.end = NULL


# ---- writing atoms: what holds no other object


cdef inline int put_head(Out* out, Py_ssize_t n, unsigned char fix, Py_ssize_t n_fix,
                         unsigned char long_form, bint has_8) except -1:
    """Write the type and length of what follows: *fix* up to *n_fix*, or *long_form* and a length."""
    cdef unsigned char* at
    room(out, 5)
    at = out.at
    if n <= n_fix:
        at[0] = fix | <unsigned char>n
        out.at += 1
    elif has_8 and n <= 0xff:
        at[0] = long_form
        at[1] = <unsigned char>n
        out.at += 2
    elif n <= 0xffff:
        at[0] = long_form + has_8
        store16(at + 1, <uint32_t>n)
        out.at += 3
    else:
        at[0] = long_form + has_8 + 1
        store32(at + 1, <uint32_t>n)
        out.at += 5
    return 0


cdef int put_data(Out* out, const void* data, Py_ssize_t n) except -1:
    if n:  # the data of an empty buffer may be NULL
        room(out, n)
        memcpy(out.at, data, n)
        out.at += n
    return 0


cdef bint put_bin(Out* out, const void* data, Py_ssize_t n) except -1:
    if n > 0xffffffffLL:
        return False
    put_head(out, n, 0, -1, 0xc4, True)
    put_data(out, data, n)
    return True


cdef inline void put_small_int(Out* out, int64_t value) noexcept:
    """Write an int, for which there is room."""
    cdef unsigned char* at = out.at
    if value >= -32:
        if value < 0x80:
            at[0] = <unsigned char>value
            out.at += 1
        elif value <= 0xff:
            at[0] = 0xcc
            at[1] = <unsigned char>value
            out.at += 2
        elif value <= 0xffff:
            at[0] = 0xcd
            store16(at + 1, <uint32_t>value)
            out.at += 3
        elif value <= 0xffffffffLL:
            at[0] = 0xce
            store32(at + 1, <uint32_t>value)
            out.at += 5
        else:
            at[0] = 0xcf
            store64(at + 1, <uint64_t>value)
            out.at += 9
    elif value >= -0x80:
        at[0] = 0xd0
        at[1] = <unsigned char>value
        out.at += 2
    elif value >= -0x8000:
        at[0] = 0xd1
        store16(at + 1, <uint32_t>value)
        out.at += 3
    elif value >= -0x80000000LL:
        at[0] = 0xd2
        store32(at + 1, <uint32_t>value)
        out.at += 5
    else:
        at[0] = 0xd3
        store64(at + 1, <uint64_t>value)
        out.at += 9


cdef bint put_int(Out* out, PyObject* obj) except -1:
    """Write an int, if 64 bits hold it."""
    cdef int overflow = 0
    cdef long long value
    cdef unsigned long long big
    room(out, 9)
    if is_compact(obj):
        put_small_int(out, compact_value(obj))
        return True
    value = PyLong_AsLongLongAndOverflow(obj, &overflow)
    if overflow == 0:
        put_small_int(out, value)
        return True
    if overflow < 0:
        return False
    big = PyLong_AsUnsignedLongLong(obj)
    if big == <unsigned long long>-1 and PyErr_Occurred() is not NULL:
        PyErr_Clear()
        return False
    out.at[0] = 0xcf
    store64(out.at + 1, big)
    out.at += 9
    return True


cdef int put_float(Out* out, PyObject* obj) except -1:
    cdef double value = float_value(obj)
    room(out, 9)
    out.at[0] = 0xcb
    store64(out.at + 1, word(&value))
    out.at += 9
    return 0


cdef bint put_str(Out* out, PyObject* obj) except -1:
    """Write a str of any length, if it has no lone surrogates."""
    cdef Py_ssize_t n
    PyUnicode_READY(obj)
    if not is_ascii(obj):
        return put_utf8(out, obj)
    n = str_length(obj)
    if n > 0xffffffffLL:
        return False
    put_head(out, n, 0xa0, SHORT, 0xd9, True)
    put_data(out, str_data(obj), n)
    return True


cdef Py_ssize_t utf8_size(PyObject* obj) noexcept:
    """Count the bytes of a str as UTF-8; -1 if it has lone surrogates."""
    cdef Py_ssize_t i, length = str_length(obj), n = length
    cdef int kind = str_kind(obj)
    cdef void* data = str_data(obj)
    cdef uint32_t c
    if kind == 1:
        for i in range(length):
            n += (<unsigned char*>data)[i] >> 7
        return n
    for i in range(length):
        c = str_read(kind, data, i)
        if c >= 0x80:
            n += 1 if c < 0x800 else 2 if c < 0x10000 else 3
            if 0xd800 <= c <= 0xdfff:
                return -1
    return n


cdef bint put_utf8(Out* out, PyObject* obj) except -1:
    cdef Py_ssize_t i, n = utf8_size(obj), length = str_length(obj)
    cdef int kind = str_kind(obj)
    cdef void* data = str_data(obj)
    cdef unsigned char* at
    if not 0 <= n <= 0xffffffffLL:
        return False
    put_head(out, n, 0xa0, SHORT, 0xd9, True)
    room(out, n)
    at = out.at
    out.at += n
    if kind == 1:
        for i in range(length):
            at += put_char(at, (<unsigned char*>data)[i])
    else:
        for i in range(length):
            at += put_char(at, str_read(kind, data, i))
    return True


cdef inline bint put_atom(Out* out, PyObject* obj) except -1:
    """Write an atom of an exact builtin type; False for what needs more work.

    No Python code runs here, so *obj* may be borrowed.
    """
    cdef PyTypeObject* cls = type_of(obj)
    cdef Py_ssize_t n
    cdef double value
    room(out, ATOM)
    if cls is &PyUnicode_Type:
        n = str_length(obj)
        if n > SHORT or not is_ascii(obj):
            return put_str(out, obj)
        out.at[0] = 0xa0 | <unsigned char>n
        copy_short(out.at + 1, <unsigned char*>str_data(obj), n)
        out.at += 1 + n
    elif cls is &PyLong_Type:
        if not is_compact(obj):
            return put_int(out, obj)
        put_small_int(out, compact_value(obj))
    elif cls is &PyFloat_Type:
        value = float_value(obj)
        out.at[0] = 0xcb
        store64(out.at + 1, word(&value))
        out.at += 9
    elif obj is none:
        out.at[0] = 0xc0
        out.at += 1
    elif cls is &PyBool_Type:
        out.at[0] = 0xc3 if obj is true else 0xc2
        out.at += 1
    elif cls is &PyBytes_Type:
        return put_bin(out, bytes_data(obj), bytes_size(obj))
    else:
        return False
    return True


# ---- writing collections, and what default answers


cdef int write(Out* out, obj, int depth) except -1:
    """Write any object, which the caller holds."""
    if not put_atom(out, <PyObject*>obj):
        write_more(out, <PyObject*>obj, depth)
    return 0


cdef int write_more(Out* out, PyObject* obj, int depth) except -1:
    """Write what is not an atom, and what its collection may let go of meanwhile."""
    cdef object held = <object>obj
    if cython.unlikely(not written(out, obj, depth, False)):
        write_answer(out, held, depth)
    return 0


cdef int write_answer(Out* out, obj, int depth) except -1:
    """Write what default answers for an object."""
    if <object>out.default is None:
        raise TypeError(f"cannot pack an object of type {type(obj).__name__}")
    out.asked += 1
    answer = (<object>out.default)(obj)
    if answer is obj or not (
        put_atom(out, <PyObject*>answer) or written(out, <PyObject*>answer, depth, True)
    ):
        raise TypeError(
            f"cannot pack an object of type {type(obj).__name__}: "
            f"default answered an object of type {type(answer).__name__}"
        )
    return 0


cdef bint written(Out* out, PyObject* obj, int depth, bint is_answer) except -1:
    """Write an object that is not an exact atom, if msgpack can hold it as it is."""
    cdef PyTypeObject* cls = type_of(obj)
    if cls is &PyDict_Type:
        return not too_deep(depth, is_answer) and written_dict(out, obj, depth, is_answer)
    if cls is &PyList_Type:
        return not too_deep(depth, is_answer) and written_list(out, obj, depth)
    if cython.unlikely(cls is not &PyTuple_Type):
        return written_other(out, <object>obj, depth, is_answer)
    return not too_deep(depth, is_answer) and written_tuple(out, obj, depth)


cdef bint written_other(Out* out, obj, int depth, bint is_answer) except -1:
    """Write what is not of an exact type: of a subclass, or one of the rarer types."""
    cdef PyObject* ptr = <PyObject*>obj
    if isinstance(obj, int):
        return put_int(out, ptr)
    if isinstance(obj, float):
        put_float(out, ptr)
        return True
    if isinstance(obj, bytes):
        return put_bin(out, bytes_data(ptr), bytes_size(ptr))
    if isinstance(obj, bytearray):
        return put_bin(out, bytearray_data(ptr), bytearray_size(ptr))
    if isinstance(obj, str):
        return put_str(out, ptr)
    if isinstance(obj, dict):
        return not too_deep(depth, is_answer) and written_pairs(out, obj, depth, is_answer)
    if isinstance(obj, ExtType):  # a tuple too
        return put_ext(out, obj.code, obj.data)
    if isinstance(obj, (list, tuple)):
        return not too_deep(depth, is_answer) and written_items(out, obj, depth)
    if type(obj) is Timestamp:
        return put_ext(out, -1, obj.to_bytes())
    if isinstance(obj, memoryview):
        return put_view(out, obj)
    return False


cdef inline bint too_deep(int depth, bint is_answer) except -1:
    if cython.unlikely(depth >= MAX_DEPTH):
        return deep_for(depth, is_answer)
    return False


cdef bint deep_for(int depth, bint is_answer) except -1:
    if depth >= DEEPEST:
        raise RecursionError(f"maximum nesting of {DEEPEST} levels exceeded while packing answers of default")
    return not is_answer


cdef bint is_plain_key(PyObject* key) except -1:
    """Tell whether a dict with this key needs no help of default."""
    if not is_str(key):
        return True
    PyUnicode_READY(key)
    if is_ascii(key):
        return not is_reserved(str_data(key), str_length(key))
    return utf8_size(key) >= 0


cdef bint has_plain_keys(PyObject* obj, Py_ssize_t at) except -1:
    """Tell the same of the keys of a dict from position *at* on."""
    cdef PyObject* key = NULL
    cdef PyObject* value = NULL
    while dict_next(obj, &at, &key, &value):
        if not is_plain_key(key):
            return False
    return True


cdef int write_pair(Out* out, PyObject* key, PyObject* value, int depth) except -1:
    """Write a key that is not an atom, and its value."""
    cdef object held_key = <object>key
    cdef object held_value = <object>value
    write_more(out, <PyObject*>held_key, depth)
    return write(out, held_value, depth)


cdef bint written_dict(Out* out, PyObject* obj, int depth, bint is_answer) except -1:
    """Write an exact dict; False, and nothing is written, for one that needs default.

    The keys are looked at as they are written.  Before anything may call default, which cannot be taken
    back, the rest of them is.
    """
    cdef Py_ssize_t at = 0, n = dict_size(obj), left = n, length
    cdef Py_ssize_t start = out.at - out.start, asked = out.asked
    cdef PyObject* key = NULL
    cdef PyObject* value = NULL
    cdef bint checked = is_answer
    if n > 0xffffffffLL:
        return False
    put_head(out, n, 0x80, 15, 0xde, False)
    while dict_next(obj, &at, &key, &value):
        left -= 1
        if left < 0:
            break
        if type_of(key) is &PyUnicode_Type and is_ascii(key):
            length = str_length(key)
            if not is_answer and is_reserved(str_data(key), length):
                return taken_back(out, start, asked)
            if length <= SHORT:
                room(out, ATOM)
                out.at[0] = 0xa0 | <unsigned char>length
                copy_short(out.at + 1, <unsigned char*>str_data(key), length)
                out.at += 1 + length
            elif not put_str(out, key):
                return taken_back(out, start, asked)
            if put_atom(out, value):
                continue
        else:
            if not is_answer and not is_plain_key(key):
                return taken_back(out, start, asked)
            if put_atom(out, key):
                if put_atom(out, value):
                    continue
            else:
                if not checked and not has_plain_keys(obj, at):
                    return taken_back(out, start, asked)
                checked = True
                write_pair(out, key, value, depth + 1)
                if dict_size(obj) != n:
                    break
                continue
        if not checked and not has_plain_keys(obj, at):
            return taken_back(out, start, asked)
        checked = True
        write_more(out, value, depth + 1)
        if dict_size(obj) != n:
            break
    if left != 0 or dict_size(obj) != n:
        raise RuntimeError("dictionary changed while it was packed")
    return True


cdef bint taken_back(Out* out, Py_ssize_t start, Py_ssize_t asked) except -1:
    """Drop what was written of a dict; False, for one that needs default."""
    if out.asked != asked:  # its keys were others before
        raise RuntimeError("dictionary changed while it was packed")
    out.at = out.start + start
    return False


cdef bint written_list(Out* out, PyObject* obj, int depth) except -1:
    """Write an exact list, unless it is too long."""
    cdef Py_ssize_t i, n = list_size(obj)
    if n > 0xffffffffLL:
        return False
    put_head(out, n, 0x90, 15, 0xdc, False)
    for i in range(n):
        if put_atom(out, items_of(obj)[i]):
            continue
        write_more(out, items_of(obj)[i], depth + 1)
        if list_size(obj) != n:
            raise RuntimeError("list changed size while it was packed")
    return True


cdef bint written_tuple(Out* out, PyObject* obj, int depth) except -1:
    """Write an exact tuple, unless it is too long."""
    cdef Py_ssize_t i, n = tuple_size(obj)
    if n > 0xffffffffLL:
        return False
    put_head(out, n, 0x90, 15, 0xdc, False)
    for i in range(n):
        if not put_atom(out, items_of(obj)[i]):
            write_more(out, items_of(obj)[i], depth + 1)
    return True


cdef bint written_pairs(Out* out, obj, int depth, bint is_answer) except -1:
    """Write an object of a subclass of dict by what its items() gives."""
    cdef Py_ssize_t n = dict_size(<PyObject*>obj)
    cdef list pairs = list(obj.items())
    if len(pairs) > 0xffffffffLL:
        return False
    if not is_answer:
        for key, _ in pairs:
            if not is_plain_key(<PyObject*>key):
                return False
    put_head(out, len(pairs), 0x80, 15, 0xde, False)
    for key, value in pairs:
        write(out, key, depth + 1)
        write(out, value, depth + 1)
    if dict_size(<PyObject*>obj) != n:
        raise RuntimeError("dictionary changed while it was packed")
    return True


cdef bint written_items(Out* out, obj, int depth) except -1:
    """Write an object of a subclass of list or tuple by what its iterator gives."""
    cdef list items = list(obj)
    if not written_list(out, <PyObject*>items, depth):
        return False
    if isinstance(obj, list) and list_size(<PyObject*>obj) != len(items):
        raise RuntimeError("list changed size while it was packed")
    return True


cdef bint put_ext(Out* out, int code, bytes data) except -1:
    cdef Py_ssize_t n = PyBytes_GET_SIZE(data)
    if n > 0xffffffffLL:
        return False
    room(out, 6)
    if n == 1 or n == 2 or n == 4 or n == 8 or n == 16:
        out.at[0] = 0xd4
        while n > 1 << (out.at[0] - 0xd4):
            out.at[0] += 1
        out.at += 1
    else:
        put_head(out, n, 0, -1, 0xc7, True)
    room(out, 1)
    out.at[0] = <unsigned char>code
    out.at += 1
    put_data(out, PyBytes_AS_STRING(data), n)
    return True


cdef bint put_view(Out* out, view) except -1:
    """Write the bytes of a memoryview, if they are contiguous."""
    cdef Py_buffer buffer
    PyObject_GetBuffer(view, &buffer, PyBUF_FULL_RO)
    try:
        return PyBuffer_IsContiguous(&buffer, b"C") and put_bin(out, buffer.buf, buffer.len)
    finally:
        PyBuffer_Release(&buffer)


def pack(obj, default=None):
    """Turn an object into msgpack, as ``msgpack.packb(obj, default=default)`` does.

    Parameters
    ----------
    obj : object
        Only read.  None, bool, int, float, str, bytes, bytearray, memoryview, list, tuple, dict, objects of
        their subclasses, as if of the builtin class, and what `msgpack.ExtType` and `msgpack.Timestamp` hold.
    default : callable, optional
        Called with every other object; what it answers is written in its place.  Also called with ints that
        64 bits do not hold, strs with lone surrogates, what is longer than msgpack can say, memoryviews
        that are not contiguous, collections inside 400 others, and dicts that have a key with lone
        surrogates or one of ``__Serialized__``, ``__Pickled__``, ``__Set__``, ``__Enum__``.  A dict that
        it answers may have these.

    Returns
    -------
    bytes

    Raises
    ------
    TypeError
        If there is no default, or it answers the object itself or another one that needs default.
    RuntimeError
        If a collection changes while it is packed.
    RecursionError
        If the answers of default nest without end.
    Exception
        Whatever default raises.

    Examples
    --------
    >>> pack({"op": "add", "keys": ["x", 1.5]}, repr)
    b'\\x82\\xa2op\\xa3add\\xa4keys\\x92\\xa1x\\xcb?\\xf8\\x00\\x00\\x00\\x00\\x00\\x00'
    >>> pack({2**70, None}, len)
    b'\\x02'
    """
    cdef Out out
    out.start = out.at = out.end = NULL
    out.big = NULL
    out.default = <PyObject*>default
    out.asked = 0
    try:
        write(&out, obj, 0)
        return finish(&out)
    finally:
        free_buffer(&out)


# ---- the cursor


cdef struct Cursor:
    const unsigned char* start
    const unsigned char* at   # next unread byte
    const unsigned char* end
    PyObject* hook            # borrowed from the caller
    bint tuples


cdef inline const unsigned char* take(Cursor* cur, Py_ssize_t n) except NULL:
    """Advance over *n* bytes and return where they start; the only bounds check of bytes."""
    cdef const unsigned char* start = cur.at
    if n > cur.end - start:
        too_short(cur, n)
    cur.at = start + n
    return start


cdef int too_short(Cursor* cur, Py_ssize_t n) except -1:
    raise failure(cur, cur.at, f"{n} more bytes", cur.end - cur.at)


cdef failure(Cursor* cur, const unsigned char* at, expected, found):
    """Return the error for what is at a place of the input."""
    return FrameError(f"msgpack at byte offset {at - cur.start}: expected {expected}, found {found}")


# ---- reading atoms


cdef str read_str(Cursor* cur, Py_ssize_t n, PyObject** cache):
    """Read the bytes of a str, those of a short one through *cache*."""
    cdef const unsigned char* p = take(cur, n)
    cdef PyObject** slot
    cdef PyObject* found
    cdef str new
    if n > SHORT or n < 2:
        return new_str(cur, p, n)
    slot = &cache[slot_of(p, n)]
    found = slot[0]
    if found is not NULL and str_length(found) == n and same_short(<unsigned char*>str_data(found), p, n):
        return <str>found
    if not is_ascii_short(p, n):
        return new_str(cur, p, n)
    new = PyUnicode_New(n, 127)
    copy_short(<unsigned char*>str_data(<PyObject*>new), p, n)
    incref(<PyObject*>new)
    slot[0] = <PyObject*>new
    xdecref(found)
    return new


cdef str new_str(Cursor* cur, const unsigned char* p, Py_ssize_t n):
    cdef PyObject* text = decode_utf8(<const char*>p, n, NULL)
    if text is NULL:
        return not_a_str(cur, p, n)
    new = <str>text
    xdecref(text)
    return new


cdef not_a_str(Cursor* cur, const unsigned char* p, Py_ssize_t n):
    """Decode again, for the error."""
    PyErr_Clear()
    try:
        return PyUnicode_DecodeUTF8(<const char*>p, n, NULL)
    except UnicodeDecodeError as error:
        at = error.start
        raise failure(cur, p + <Py_ssize_t>at, "UTF-8", f"byte {p[<Py_ssize_t>at]:#x}") from error


cdef bytes read_bin(Cursor* cur, Py_ssize_t n):
    return PyBytes_FromStringAndSize(<const char*>take(cur, n), n)


cdef read_ext(Cursor* cur, Py_ssize_t n):
    """Read the code and the *n* bytes of an extension type."""
    cdef const unsigned char* start = cur.at
    cdef int code = <signed char>take(cur, 1)[0]
    data = read_bin(cur, n)
    try:
        return Timestamp.from_bytes(data) if code == -1 else ExtType(code, data)
    except ValueError as error:
        raise failure(cur, start, "an extension type", f"code {code} with {n} bytes") from error


cdef read_long_form(Cursor* cur, unsigned char kind, Py_ssize_t owed, int depth, PyObject** cache):
    """Read what begins with a byte from 0xc0 to 0xdf."""
    cdef float single = 0
    cdef double value = 0
    cdef uint32_t bits
    cdef uint64_t long_bits
    cdef const unsigned char* p
    if kind == 0xc0:
        return None
    if kind == 0xc2:
        return False
    if kind == 0xc3:
        return True
    if kind == 0xcb:
        long_bits = load64(take(cur, 8))
        memcpy(&value, &long_bits, 8)
        return PyFloat_FromDouble(value)
    if kind == 0xcc:
        return PyLong_FromLong(take(cur, 1)[0])
    if kind == 0xcd:
        return PyLong_FromLong(load16(take(cur, 2)))
    if kind == 0xce:
        return PyLong_FromLongLong(load32(take(cur, 4)))
    if kind == 0xcf:
        return PyLong_FromUnsignedLongLong(load64(take(cur, 8)))
    if kind == 0xd9:
        return read_str(cur, take(cur, 1)[0], cache)
    if kind == 0xda:
        return read_str(cur, load16(take(cur, 2)), cache)
    if kind == 0xdb:
        return read_str(cur, load32(take(cur, 4)), cache)
    if kind == 0xc4:
        return read_bin(cur, take(cur, 1)[0])
    if kind == 0xc5:
        return read_bin(cur, load16(take(cur, 2)))
    if kind == 0xc6:
        return read_bin(cur, load32(take(cur, 4)))
    if kind == 0xd0:
        return PyLong_FromLong(<signed char>take(cur, 1)[0])
    if kind == 0xd1:
        return PyLong_FromLong(<int16_t>load16(take(cur, 2)))
    if kind == 0xd2:
        return PyLong_FromLong(<int32_t>load32(take(cur, 4)))
    if kind == 0xd3:
        return PyLong_FromLongLong(<int64_t>load64(take(cur, 8)))
    if kind == 0xdc:
        return read_array(cur, load16(take(cur, 2)), owed, depth)
    if kind == 0xdd:
        return read_array(cur, load32(take(cur, 4)), owed, depth)
    if kind == 0xde:
        return read_map(cur, load16(take(cur, 2)), owed, depth)
    if kind == 0xdf:
        return read_map(cur, load32(take(cur, 4)), owed, depth)
    if kind == 0xca:
        bits = load32(take(cur, 4))
        memcpy(&single, &bits, 4)
        return PyFloat_FromDouble(single)
    if kind == 0xc7:
        return read_ext(cur, take(cur, 1)[0])
    if kind == 0xc8:
        return read_ext(cur, load16(take(cur, 2)))
    if kind == 0xc9:
        return read_ext(cur, load32(take(cur, 4)))
    if 0xd4 <= kind <= 0xd8:
        return read_ext(cur, 1 << (kind - 0xd4))
    p = cur.at - 1
    raise failure(cur, p, "the first byte of an object", f"{kind:#x}")


# ---- reading collections


cdef read(Cursor* cur, Py_ssize_t owed, int depth, PyObject** cache):
    """Read an object; outer collections wait for *owed* more, each of at least one byte."""
    cdef unsigned char kind = take(cur, 1)[0]
    if 0xa0 <= kind <= 0xbf:
        return read_str(cur, kind & 0x1f, cache)
    if kind < 0x80:
        return PyLong_FromLong(kind)
    if kind >= 0xe0:
        return PyLong_FromLong(<signed char>kind)
    if kind >= 0xc0:
        return read_long_form(cur, kind, owed, depth, cache)
    if kind >= 0x90:
        return read_array(cur, kind & 0x0f, owed, depth)
    return read_map(cur, kind & 0x0f, owed, depth)


cdef inline int enter(Cursor* cur, Py_ssize_t n, Py_ssize_t owed, int depth) except -1:
    """Check that a collection that needs at least *n* bytes can be read."""
    if n > cur.end - cur.at - owed or depth >= MAX_READ_DEPTH:
        no_entry(cur, n + owed)
    return 0


cdef int no_entry(Cursor* cur, Py_ssize_t n) except -1:
    if n > cur.end - cur.at:
        raise failure(cur, cur.at, f"{n} more bytes for collections", cur.end - cur.at)
    raise failure(cur, cur.at, f"at most {MAX_READ_DEPTH} levels of nesting", "more")


cdef read_array(Cursor* cur, Py_ssize_t n, Py_ssize_t owed, int depth):
    cdef tuple result
    cdef Py_ssize_t i
    enter(cur, n, owed, depth)
    if not cur.tuples:
        return read_list(cur, n, owed, depth)
    result = PyTuple_New(n)
    if n == 0:
        return result
    untrack(<PyObject*>result)  # nobody shall find it before it is filled
    for i in range(n):
        item = read(cur, owed + n - 1 - i, depth + 1, VALUES)
        incref(<PyObject*>item)
        tuple_set(<PyObject*>result, i, <PyObject*>item)
    track(<PyObject*>result)
    return result


cdef list read_list(Cursor* cur, Py_ssize_t n, Py_ssize_t owed, int depth):
    cdef list result = PyList_New(n)
    cdef Py_ssize_t i
    untrack(<PyObject*>result)
    for i in range(n):
        item = read(cur, owed + n - 1 - i, depth + 1, VALUES)
        incref(<PyObject*>item)
        list_set(<PyObject*>result, i, <PyObject*>item)
    track(<PyObject*>result)
    return result


cdef read_map(Cursor* cur, Py_ssize_t n, Py_ssize_t owed, int depth):
    cdef dict result = {}
    cdef bint is_placeholder = False
    cdef const unsigned char* start
    enter(cur, 2 * n, owed, depth)
    owed += 2 * n
    while n > 0:
        n -= 1
        start = cur.at
        key = read(cur, owed - 1, depth + 1, KEYS)
        owed -= 2
        value = read(cur, owed, depth + 1, VALUES)
        if type_of(<PyObject*>key) is &PyUnicode_Type:
            if is_reserved(str_data(<PyObject*>key), str_length(<PyObject*>key)):
                is_placeholder = True
        elif not isinstance(key, (int, bytes)):
            check_key(cur, start, key)
        PyDict_SetItem(result, key, value)
    if is_placeholder and <object>cur.hook is not None:
        return (<object>cur.hook)(result)
    return result


cdef int check_key(Cursor* cur, const unsigned char* start, key) except -1:
    try:
        hash(key)
    except TypeError as error:
        raise failure(cur, start, "a hashable key of a map", f"a {type(key).__name__}") from error
    return 0


cdef read_all(Cursor* cur):
    result = read(cur, 0, 0, VALUES)
    if cur.at != cur.end:
        raise failure(cur, cur.at, "the end", f"{cur.end - cur.at} more bytes")
    return result


def unpack(data, hook=None, bint tuples=True):
    """Turn msgpack back into an object, as ``msgpack.unpackb(data, object_hook=hook, use_list=False,
    strict_map_key=False)`` does for a hook that answers other dicts as they are.

    Parameters
    ----------
    data : bytes-like
        One object; only read, and copied.
    hook : callable, optional
        Called with each dict that has one of the keys ``__Serialized__``, ``__Pickled__``, ``__Set__``,
        ``__Enum__``; what it answers takes its place.
    tuples : bool
        Whether arrays become tuples; lists if not.

    Returns
    -------
    object

    Raises
    ------
    FrameError
        If *data* is not one object of msgpack.
    Exception
        Whatever the hook raises.

    Examples
    --------
    >>> unpack(pack({"op": "add", "keys": ["x", 1.5]}))
    {'op': 'add', 'keys': ('x', 1.5)}
    >>> unpack(pack({2**70}, lambda obj: {"__Set__": True, "as-list": [1]}), lambda obj: set(obj["as-list"]))
    {1}
    >>> unpack(b"\\x92\\x01")
    Traceback (most recent call last):
    ...
    fastser.errors.FrameError: msgpack at byte offset 1: expected 2 more bytes for collections, found 1
    """
    cdef Cursor cur
    cdef Py_buffer view
    cur.hook = <PyObject*>hook
    cur.tuples = tuples
    if type(data) is bytes:
        cur.start = cur.at = <const unsigned char*>PyBytes_AS_STRING(data)
        cur.end = cur.start + PyBytes_GET_SIZE(data)
        return read_all(&cur)
    PyObject_GetBuffer(data, &view, PyBUF_FULL_RO)
    try:
        if not PyBuffer_IsContiguous(&view, b"C"):
            return unpack(memoryview(data).tobytes(), hook, tuples)
        cur.start = cur.at = <const unsigned char*>view.buf
        cur.end = cur.start + view.len
        return read_all(&cur)
    finally:
        PyBuffer_Release(&view)
