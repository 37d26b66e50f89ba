"""Objects to programs: a pickler that compiles what repeats into a few calls on buffers.

The output is protocol 5 of PEP 574, with the opcodes of CPython's pickletools; the standard unpickler
reads it.  Three things make it fast:

- A memo only where it can matter.  An object with one reference is reached one way.  `dumps` starts
  without memo entries for such objects, and starts over with entries for every mutable object before it
  calls code that could hand out part of a container that is written already, or when it finds a cycle
  that only a tuple closes.
- Typed blocks.  A long list of numbers becomes one buffer and ``memoryview.cast(...).tolist()``.
- A kept scratch buffer, so that writing meets no page faults.
"""

import copyreg
import io
import pickle
import sys
from enum import Enum
from fractions import Fraction
from pathlib import PurePath
from pickle import PickleBuffer, PicklingError
from types import FunctionType, GetSetDescriptorType, MemberDescriptorType, MethodType
from uuid import UUID

import cloudpickle

cimport cython
from cpython.buffer cimport PyBuffer_IsContiguous
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.mem cimport PyMem_RawCalloc, PyMem_RawFree, PyMem_RawRealloc
from cpython.object cimport PyObject
from cpython.tuple cimport PyTuple_GET_SIZE
from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memcpy, memmove, memset

from fastser.dispatch import Call, reducers

from fastser._lists cimport (
    BOOL,
    FLOAT64,
    INT8,
    INT16,
    INT32,
    INT64,
    MIXED,
    UINT8,
    UINT64,
    Kind,
    array_of,
    fill,
    guess,
    same_object,
    scan,
    width,
)
from fastser._utf8 cimport put_char

cdef extern from "Python.h":
    ctypedef struct PyTypeObject:
        unsigned int tp_version_tag
    PyTypeObject PyFloat_Type, PyLong_Type, PyBool_Type, PyUnicode_Type, PyBytes_Type, PyTuple_Type
    PyTypeObject PyList_Type, PyDict_Type, PySet_Type, PyFrozenSet_Type, PyByteArray_Type, PyType_Type
    PyTypeObject PyFunction_Type, PyPickleBuffer_Type
    PyTypeObject* type_of "Py_TYPE"(PyObject*) noexcept
    Py_ssize_t refcount "Py_REFCNT"(PyObject*) noexcept
    PyObject* none "Py_None"
    PyObject* true "Py_True"
    PyObject* ellipsis "Py_Ellipsis"
    PyObject* not_implemented "Py_NotImplemented"
    double float_value "PyFloat_AS_DOUBLE"(PyObject*) noexcept
    long long PyLong_AsLongLongAndOverflow(PyObject*, int*) noexcept
    PyObject** PySequence_Fast_ITEMS(object)
    PyObject** items_of "PySequence_Fast_ITEMS"(PyObject*) noexcept
    Py_ssize_t list_size "PyList_GET_SIZE"(PyObject*) noexcept
    Py_ssize_t tuple_size "PyTuple_GET_SIZE"(PyObject*) noexcept
    Py_ssize_t dict_size "PyDict_GET_SIZE"(PyObject*) noexcept
    bint dict_next "PyDict_Next"(PyObject*, Py_ssize_t*, PyObject**, PyObject**) noexcept
    char* bytes_data "PyBytes_AS_STRING"(PyObject*) noexcept
    Py_ssize_t bytes_size "PyBytes_GET_SIZE"(PyObject*) noexcept
    char* bytearray_data "PyByteArray_AS_STRING"(PyObject*) noexcept
    Py_ssize_t bytearray_size "PyByteArray_GET_SIZE"(PyObject*) noexcept
    bint is_ascii "PyUnicode_IS_ASCII"(PyObject*) noexcept
    void* str_data "PyUnicode_DATA"(PyObject*) noexcept
    int str_kind "PyUnicode_KIND"(PyObject*) noexcept
    Py_ssize_t str_length "PyUnicode_GET_LENGTH"(PyObject*) noexcept
    uint32_t str_read "PyUnicode_READ"(int, void*, Py_ssize_t) noexcept
    int PyUnicode_READY(PyObject*) except -1
    const Py_buffer* PyPickleBuffer_GetBuffer(object) except NULL
    int _PyBytes_Resize(PyObject**, Py_ssize_t) except -1
    void xdecref "Py_XDECREF"(PyObject*) noexcept
    void incref "Py_INCREF"(PyObject*) noexcept

cdef extern from *:
    """
    #if defined(_MSC_VER)
    static __declspec(thread) int fastser_depth = 0;
    #else
    static __thread int fastser_depth = 0;
    #endif
    #define fastser_set_depth(n) (fastser_depth = (n))
    """
    # Levels of nesting that are being written in this thread, by dumps inside of dumps too: C has such
    # variables, Cython has not.
    int depth "fastser_depth"
    void set_depth "fastser_set_depth"(int) noexcept

cdef extern from *:
    # Cython's own names for the layout of small ints, which changed with CPython 3.12.
    bint is_compact "__Pyx_PyLong_IsCompact"(PyObject*) noexcept
    Py_ssize_t compact_value "__Pyx_PyLong_CompactValue"(PyObject*) noexcept

cdef enum:
    MAX_DEPTH = 3200  # levels of nesting, each of at most 500 bytes of C stack
    BATCH = 1000  # items between two marks, which bounds the stack of the unpickler
    OUT_OF_BAND = 65536  # bytes; what is smaller costs less inside the program than as its own frame
    MIN_UINT8 = 12  # items of a list that is worth a block; docs/thresholds.md has the measurement
    MIN_WIDE = 24
    MIN_FLOATS = 48
    MIN_OTHERS = 64
    MIN_REPEATS = 32
    SCRATCH = 4096  # bytes of a new buffer
    KEPT = 16777216  # bytes of the greatest buffer that is kept for the next dump
    ATOM = 272  # bytes that are enough for a small atom
    HEAD = 160  # bytes that are enough for the opcodes before the data of a block
    PENDING = -2  # in the memo: a tuple whose items are being written
    ABSENT = -1
    MAX_WAYS = 4096  # classes; those made at run time must not pile up
    FIRST = 16  # slots of the memo inside the writer, enough for small objects

cdef enum Known:  # globals that programs of blocks call
    TOLIST, CAST, MEMORYVIEW, LIST, TUPLE, BYTES, BYTEARRAY, UNPACK, MUL, N_KNOWN

cdef enum Way:  # how the general objects of a class can be written
    UNKNOWN, FOREIGN, STRUCTURAL, PLAIN_INSTANCE

# Python code of the standard library that hands out new or own parts only
HARMLESS = frozenset(
    [Enum.__reduce_ex__, Fraction.__reduce__, PurePath.__reduce__, UUID.__getstate__]
)
REDUCTION_NAMES = ("__reduce_ex__", "__reduce__", "__getstate__", "__getnewargs_ex__", "__getnewargs__")
C_FUNCTIONS = frozenset(
    [
        type(object.__reduce__),
        type(object.__repr__),
        type(len),
        type(dict.__dict__["fromkeys"]),
        type([].__len__),
    ]
)
EXTENSIONS = copyreg._extension_registry
OBJECT_REDUCE_EX = object.__reduce_ex__
OBJECT_REDUCE = object.__reduce__
OBJECT_GETSTATE = getattr(object, "__getstate__", None)
BY_VALUE_TABLES = tuple(cloudpickle.Pickler.dispatch_table.maps)
BY_VALUE_MODULES = cloudpickle.list_registry_pickle_by_value

IN_BAND = <int>OUT_OF_BAND  # for those who decide about the buffers of objects
NOTHING = object()  # where None would be a value
find_reducer = reducers.find
WAYS = {}  # class -> its version tag when it was judged, and how

cdef unsigned char* spare = NULL  # the kept buffer, when no dump is using it
cdef Py_ssize_t spare_size = 0


class _Restart(Exception):
    """What is met needs memo entries that were not made."""


cdef struct Entry:
    PyObject* key
    Py_ssize_t index


@cython.final
@cython.freelist(4)
@cython.auto_pickle(False)
cdef class Writer:
    """One program in the making: its output, its memo, and how each kind of object is written."""

    cdef unsigned char* out
    cdef Py_ssize_t pos, size
    cdef PyObject* big  # a bytes object that holds the buffer, once it is greater than what is kept
    cdef Entry* memo
    cdef Entry first[FIRST]  # what memo points to, until it grows
    cdef int shift  # 64 less the bits of a slot number
    cdef Py_ssize_t mask, used, next_index
    cdef Py_ssize_t known[<int>N_KNOWN]
    cdef int base  # depth of the calls around this dump
    cdef bint full  # every mutable object is in the memo, not only those reached twice
    cdef bint memoless  # nothing is
    cdef bint running  # a dump is being made
    cdef bint watched  # each object is offered to *watch* first
    cdef bint by_value
    cdef object buffer_callback, find_reducer
    cdef object watch  # persistent_id, or None
    cdef object override, table  # reducer_override and dispatch_table, or NOTHING
    cdef object cloud  # a cloudpickle.Pickler, whose globals functions share within a dump
    cdef dict ways, reducers  # by class, for one dump
    cdef list sent
    cdef Py_ssize_t n_sent

    def __cinit__(self):
        self.out = NULL
        self.big = NULL
        self.pos = self.size = 0
        self.empty_memo()
        self.override = self.table = NOTHING

    def __dealloc__(self):
        self.free_buffer()
        self.free_memo()

    # ---- one dump

    cdef bytes compile(self, obj):
        """Return the program of *obj*."""
        cdef Py_ssize_t start = self.next_index
        if self.running:
            raise RuntimeError("this Pickler is in the middle of a dump")
        self.running = True
        self.base = depth
        self.n_sent = 0
        self.watched = self.watch is not None
        try:
            self.begin()
            try:
                self.save(<PyObject*>obj, True)
            except _Restart:
                self.full = True
                self.n_sent = 0
                self.cloud = None
                self.free_memo()
                self.begin()
                self.save(<PyObject*>obj, True)
            self.put(b'.')
            return self.finish()
        except BaseException:
            self.forget(start)  # what is not in the output must not be referred to later
            raise
        finally:
            self.running = False
            set_depth(self.base)
            self.free_buffer()
            self.sent = self.cloud = self.ways = self.reducers = None

    cdef int begin(self) except -1:
        set_depth(self.base)
        self.pos = 0
        self.room(16)
        self.out[0] = 0x80
        self.out[1] = 5
        self.pos = 2
        return 0

    cdef bytes finish(self):
        """Return the output as bytes of exactly its size."""
        cdef PyObject* big
        if self.big is NULL:
            return PyBytes_FromStringAndSize(<char*>self.out, self.pos)
        big = self.big
        self.big = NULL
        self.out = NULL
        self.size = 0
        _PyBytes_Resize(&big, self.pos)  # on failure it has freed big
        result = <bytes>big
        xdecref(big)
        return result

    # ---- the output buffer

    cdef inline int room(self, Py_ssize_t n) except -1:
        """Make room for *n* more bytes."""
        if n > self.size - self.pos:
            self.grow(n)
        return 0

    cdef int grow(self, Py_ssize_t n) except -1:
        global spare, spare_size
        cdef Py_ssize_t size
        cdef unsigned char* out
        cdef PyObject* big
        if self.out is NULL and spare is not NULL and spare_size >= n:
            self.out = spare
            self.size = spare_size
            spare = NULL
            return 0
        if n > (<Py_ssize_t>1 << 62) - self.pos:
            raise MemoryError
        size = max(self.pos + n, <Py_ssize_t>SCRATCH)
        if size <= KEPT:
            size = min(max(size, self.size * 2), <Py_ssize_t>KEPT)
            out = <unsigned char*>PyMem_RawRealloc(self.out, size)
            if out is NULL:
                raise MemoryError
            self.out = out
            self.size = size
            return 0
        # Large output grows inside the bytes object that is returned, which moves pages, not bytes.
        size += size // 4
        if self.big is NULL:
            big = _new_bytes(size)
            memcpy(bytes_data(big), self.out, self.pos)
            self.free_buffer()
            self.big = big
        else:
            _PyBytes_Resize(&self.big, size)
        self.out = <unsigned char*>bytes_data(self.big)
        self.size = size
        return 0

    cdef void free_buffer(self) noexcept:
        """Keep the buffer for the next dump, or free it."""
        global spare, spare_size
        if self.big is not NULL:
            xdecref(self.big)
            self.big = NULL
        elif self.out is not NULL:
            if spare is NULL or spare_size < self.size:
                PyMem_RawFree(spare)
                spare = self.out
                spare_size = self.size
            else:
                PyMem_RawFree(self.out)
        self.out = NULL
        self.size = 0

    cdef inline int put(self, unsigned char op) except -1:
        self.room(1)
        self.out[self.pos] = op
        self.pos += 1
        return 0

    cdef inline int put2(self, unsigned char op, unsigned char arg) except -1:
        self.room(2)
        self.out[self.pos] = op
        self.out[self.pos + 1] = arg
        self.pos += 2
        return 0

    cdef inline int put_size(self, unsigned char op, uint64_t value, int nbytes) except -1:
        """Write an opcode and its little-endian argument of *nbytes*."""
        cdef int i
        self.room(1 + nbytes)
        self.out[self.pos] = op
        for i in range(nbytes):
            self.out[self.pos + 1 + i] = <unsigned char>(value >> (8 * i))
        self.pos += 1 + nbytes
        return 0

    cdef inline int put_data(self, const void* data, Py_ssize_t n) except -1:
        self.room(n)
        memcpy(self.out + self.pos, data, n)
        self.pos += n
        return 0

    # ---- the memo: a hash table of objects, each held; open addressing, Fibonacci hashing

    cdef inline Entry* entry(self, PyObject* key) noexcept:
        """Return the entry of *key*, or the free one where it belongs."""
        cdef size_t i = <size_t>((<uint64_t><size_t>key >> 4) * <uint64_t>0x9E3779B97F4A7C15 >> self.shift)
        while self.memo[i].key is not key and self.memo[i].key is not NULL:
            i = (i + 1) & self.mask
        return &self.memo[i]

    cdef inline Py_ssize_t memo_find(self, PyObject* key) noexcept:
        cdef Entry* entry = self.entry(key)
        return ABSENT if entry.key is NULL else entry.index

    cdef int memo_set(self, PyObject* key, Py_ssize_t index) except -1:
        cdef Entry* entry
        if self.used * 2 > self.mask:
            self.memo_grow()
        entry = self.entry(key)
        if entry.key is NULL:
            incref(key)
            entry.key = key
            self.used += 1
        entry.index = index
        return 0

    cdef int memo_grow(self) except -1:
        cdef Entry* old = self.memo
        cdef Py_ssize_t i, n = self.mask + 1
        cdef int bits = 2 if n < 100_000 else 1
        cdef Entry* memo = <Entry*>PyMem_RawCalloc(n << bits, sizeof(Entry))
        if memo is NULL:
            raise MemoryError
        self.memo = memo
        self.mask = (n << bits) - 1
        self.shift -= bits
        for i in range(n):
            if old[i].key is not NULL:
                self.entry(old[i].key)[0] = old[i]
        if old is not self.first:
            PyMem_RawFree(old)
        return 0

    cdef void empty_memo(self) noexcept:
        """Start with the small table."""
        cdef int i
        memset(self.first, 0, sizeof(self.first))
        self.memo = self.first
        self.mask = FIRST - 1
        self.shift = 60
        self.used = self.next_index = 0
        for i in range(<int>N_KNOWN):
            self.known[i] = ABSENT

    cdef void free_memo(self) noexcept:
        cdef Entry* memo = self.memo
        cdef Entry first[FIRST]
        cdef Py_ssize_t i, n = self.mask + 1
        if self.next_index == 0 and self.used == 0:
            return
        if memo is self.first:
            memcpy(first, memo, sizeof(first))
            memo = first
        self.empty_memo()
        for i in range(n):  # last: dropping an object may run code that uses this pickler
            xdecref(memo[i].key)
        if memo is not first:
            PyMem_RawFree(memo)

    cdef int forget(self, Py_ssize_t start) except -1:
        """Drop what was remembered since the next index was *start*."""
        cdef Py_ssize_t i
        kept = {key: entry for key, entry in self.memo_copy().items() if entry[0] < start}
        known = [self.known[i] for i in range(<int>N_KNOWN)]
        self.memo_replace(kept)
        self.next_index = start
        for i in range(<int>N_KNOWN):
            self.known[i] = known[i] if known[i] < start else ABSENT
        return 0

    cdef dict memo_copy(self):
        cdef Py_ssize_t i
        copy = {}
        for i in range(self.mask + 1):
            if self.memo[i].key is not NULL and self.memo[i].index >= 0:
                copy[<size_t>self.memo[i].key] = (self.memo[i].index, <object>self.memo[i].key)
        return copy

    cdef int memo_replace(self, dict memo) except -1:
        self.free_memo()
        for index, obj in memo.values():
            self.memo_set(<PyObject*>obj, index)
            self.next_index = max(self.next_index, index + 1)
        return 0

    cdef inline int memoize(self, PyObject* obj) except -1:
        """Remember the object whose opcodes were just written."""
        if not self.memoless:
            self.memo_set(obj, self.next_index)
            self.next_index += 1
            self.put(0x94)
        return 0

    cdef inline int get(self, Py_ssize_t index) except -1:
        if index < 256:
            return self.put2(b'h', <unsigned char>index)
        return self.put_size(b'j', index, 4)

    cdef inline bint got(self, PyObject* obj) except -1:
        """Write a reference to *obj*, if it was written before."""
        cdef Py_ssize_t index = self.memo_find(obj)
        if index == ABSENT:
            return False
        if index == PENDING:
            raise _Restart  # a cycle; with all mutable objects in the memo it closes
        self.get(index)
        return True

    cdef inline bint remembers(self, bint shared) noexcept:
        """Tell whether a mutable object must be in the memo."""
        return (shared or self.full) and not self.memoless

    # ---- atoms

    cdef inline bint saved_atom(self, PyObject* obj) except -1:
        """Write a small object that holds no other; False for what needs more work.

        No Python code runs here, so *obj* may be borrowed.
        """
        cdef PyTypeObject* cls = type_of(obj)
        cdef unsigned char* out
        cdef Entry* entry
        cdef Py_ssize_t n
        if self.size - self.pos < ATOM:
            self.grow(ATOM)
        out = self.out + self.pos
        if cls is &PyFloat_Type:
            _put_double(out, float_value(obj))
            self.pos += 9
        elif cls is &PyUnicode_Type:
            entry = NULL
            if refcount(obj) > 1 and not self.memoless:
                entry = self.entry(obj)
                if entry.key is not NULL:
                    if entry.index > 0xff:
                        return False
                    out[0] = b'h'
                    out[1] = <unsigned char>entry.index
                    self.pos += 2
                    return True
                if self.used * 2 > self.mask:
                    return False
            n = str_length(obj)
            if n > 0xff or not is_ascii(obj):
                return False
            out[0] = 0x8c
            out[1] = <unsigned char>n
            memmove(out + 2, str_data(obj), n)  # gcc makes a slow loop of a short memcpy
            self.pos += 2 + n
            if entry is not NULL:
                incref(obj)
                entry.key = obj
                entry.index = self.next_index
                self.next_index += 1
                self.used += 1
                out[2 + n] = 0x94
                self.pos += 1
        elif cls is &PyLong_Type:
            if not is_compact(obj):
                return False
            n = compact_value(obj)
            if 0 <= n <= 0xff:
                out[0] = b'K'
                out[1] = <unsigned char>n
                self.pos += 2
            elif 0 <= n <= 0xffff:
                out[0] = b'M'
                out[1] = <unsigned char>n
                out[2] = <unsigned char>(n >> 8)
                self.pos += 3
            elif -0x80000000 <= n <= 0x7fffffff:
                out[0] = b'J'
                out[1] = <unsigned char>n
                out[2] = <unsigned char>(n >> 8)
                out[3] = <unsigned char>(n >> 16)
                out[4] = <unsigned char>(n >> 24)
                self.pos += 5
            else:
                return False
        elif obj is none:
            out[0] = b'N'
            self.pos += 1
        elif cls is &PyBool_Type:
            out[0] = 0x88 if obj is true else 0x89
            self.pos += 1
        elif cls is &PyBytes_Type:
            n = bytes_size(obj)
            if n > 0xff or refcount(obj) > 1:
                return False
            out[0] = b'C'
            out[1] = <unsigned char>n
            memmove(out + 2, bytes_data(obj), n)
            self.pos += 2 + n
        else:
            return False
        return True

    cdef int save_float(self, PyObject* obj) except -1:
        self.room(9)
        _put_double(self.out + self.pos, float_value(obj))
        self.pos += 9
        return 0

    cdef int save_int(self, PyObject* obj) except -1:
        cdef int overflow = 0
        cdef int n = 5
        cdef long long value
        if is_compact(obj):
            value = compact_value(obj)
        else:
            value = PyLong_AsLongLongAndOverflow(obj, &overflow)
        if overflow:
            return self.save_long(<object>obj)
        if 0 <= value <= 0xff:
            return self.put2(b'K', <unsigned char>value)
        if 0 <= value <= 0xffff:
            return self.put_size(b'M', value, 2)
        if -0x80000000 <= value <= 0x7fffffff:
            return self.put_size(b'J', <uint64_t>value, 4)
        while n < 8 and not -(1LL << (8 * n - 1)) <= value < (1LL << (8 * n - 1)):
            n += 1
        self.put(0x8a)
        return self.put_size(<unsigned char>n, <uint64_t>value, n)

    cdef int save_long(self, obj) except -1:
        """Write an int that 64 bits do not hold."""
        cdef Py_ssize_t n = obj.bit_length() // 8 + 1
        cdef bytes data = obj.to_bytes(n, "little", signed=True)
        if data[n - 1] == 0xff and data[n - 2] & 0x80:  # one byte more than two's complement needs
            n -= 1
        if n < 256:
            self.put2(0x8a, <unsigned char>n)
        elif n <= 0x7fffffff:
            self.put_size(0x8b, n, 4)
        else:
            raise OverflowError(f"int of {n} bytes is too large to pickle")
        return self.put_data(PyBytes_AS_STRING(data), n)

    cdef int save_str(self, PyObject* obj, bint shared) except -1:
        cdef Py_ssize_t n
        if shared and self.got(obj):
            return 0
        PyUnicode_READY(obj)
        if is_ascii(obj):
            n = str_length(obj)
            self.put_str_head(n)
            self.put_data(str_data(obj), n)
        else:
            self.put_utf8(obj)
        return self.memoize(obj) if shared else 0

    cdef inline int put_str_head(self, Py_ssize_t n) except -1:
        if n < 256:
            return self.put2(0x8c, <unsigned char>n)
        if n <= 0xffffffffLL:
            return self.put_size(b'X', n, 4)
        return self.put_size(0x8d, n, 8)

    cdef int put_utf8(self, PyObject* obj) except -1:
        """Write a str that is not ASCII; lone surrogates as three bytes, as ``surrogatepass`` does."""
        cdef Py_ssize_t i, n = 0, length = str_length(obj)
        cdef int kind = str_kind(obj)
        cdef void* data = str_data(obj)
        cdef uint32_t c
        cdef unsigned char* out
        for i in range(length):
            c = str_read(kind, data, i)
            n += 1 if c < 0x80 else 2 if c < 0x800 else 3 if c < 0x10000 else 4
        self.put_str_head(n)
        self.room(n)
        out = self.out + self.pos
        self.pos += n
        for i in range(length):
            out += put_char(out, str_read(kind, data, i))
        return 0

    cdef inline int put_bytes_head(self, Py_ssize_t n) except -1:
        if n < 256:
            return self.put2(b'C', <unsigned char>n)
        if n <= 0xffffffffLL:
            return self.put_size(b'B', n, 4)
        return self.put_size(0x8e, n, 8)

    cdef int put_bytes(self, const void* data, Py_ssize_t n) except -1:
        self.put_bytes_head(n)
        return self.put_data(data, n)

    cdef int put_bytearray(self, const void* data, Py_ssize_t n) except -1:
        self.put_size(0x96, n, 8)
        return self.put_data(data, n)

    cdef int save_bytes(self, PyObject* obj, bint shared) except -1:
        if shared and self.got(obj):
            return 0
        if not self.sent_apart(obj, bytes_size(obj), BYTES):
            self.put_bytes(bytes_data(obj), bytes_size(obj))
        return self.memoize(obj) if shared else 0

    cdef int save_bytearray(self, PyObject* obj, bint shared) except -1:
        if shared and self.got(obj):
            return 0
        if not self.sent_apart(obj, bytearray_size(obj), BYTEARRAY):
            self.put_bytearray(bytearray_data(obj), bytearray_size(obj))
        return self.memoize(obj) if self.remembers(shared) else 0

    cdef bint sent_apart(self, PyObject* obj, Py_ssize_t n, int known) except -1:
        """Write a large bytes or bytearray as a call on an out-of-band buffer, if there is a way out."""
        if n < OUT_OF_BAND or self.buffer_callback is None or self.memoless:
            return False
        if self.in_band(PickleBuffer(<object>obj)):
            return False
        self.put_known(known)
        self.put(0x97)
        self.put2(0x85, b'R')
        return True

    cdef bint in_band(self, buffer) except -1:
        """Ask where *buffer* shall go.

        A dump that starts over meets the same buffers in the same order, if as other objects: a reduction
        may make new ones, of the same bytes.  It goes by the answers it had.
        """
        cdef Py_ssize_t nbytes = PyPickleBuffer_GetBuffer(buffer).len
        cdef Py_ssize_t n = self.n_sent
        if self.buffer_callback is None:
            return True
        self.n_sent += 1
        if self.sent is None:
            self.sent = []
        if n < len(self.sent):
            known_nbytes, answer = self.sent[n]
            if known_nbytes != nbytes:
                raise RuntimeError("an object changed while it was pickled")
            return answer
        answer = bool(self.buffer_callback(buffer))
        self.sent.append((nbytes, answer))
        return answer

    cdef int put_known(self, int known) except -1:
        """Write one of the globals that programs of blocks call."""
        if self.known[known] != ABSENT:
            return self.get(self.known[known])
        module, name = KNOWN_NAMES[known]
        self.put_ascii(module)
        self.put_ascii(name)
        self.put(0x93)
        if not self.memoless:
            self.known[known] = self.next_index
            self.next_index += 1
            self.put(0x94)
        return 0

    cdef int put_ascii(self, bytes text) except -1:
        self.put2(0x8c, <unsigned char>PyBytes_GET_SIZE(text))
        return self.put_data(PyBytes_AS_STRING(text), PyBytes_GET_SIZE(text))

    # ---- dispatch

    cdef inline int save_item(self, PyObject* obj) except -1:
        """Write what a container holds; *obj* is borrowed from it."""
        if not self.watched and self.saved_atom(obj):
            return 0
        return self.save(obj, refcount(obj) > 1)

    cdef int save(self, PyObject* ptr, bint shared) except -1:
        """Write any object; *shared* unless it is known to be reached one way only."""
        cdef object obj = <object>ptr  # held: from here on Python code may run
        cdef PyTypeObject* cls = type_of(ptr)
        if self.watched and self.saved_id(obj):
            return 0
        if self.memoless:
            shared = False
        if ptr is none:
            return self.put(b'N')
        if cls is &PyBool_Type:
            return self.put(0x88 if ptr is true else 0x89)
        if cls is &PyLong_Type:
            return self.save_int(ptr)
        if cls is &PyFloat_Type:
            return self.save_float(ptr)
        if cls is &PyUnicode_Type:
            return self.save_str(ptr, shared)
        if cls is &PyBytes_Type:
            return self.save_bytes(ptr, shared)
        if depth >= MAX_DEPTH:
            raise RecursionError(f"maximum nesting of {MAX_DEPTH} levels exceeded while pickling an object")
        set_depth(depth + 1)
        if cls is &PyTuple_Type:
            self.save_tuple(ptr, shared)
        elif cls is &PyList_Type:
            self.save_list(ptr, shared)
        elif cls is &PyDict_Type:
            self.save_dict(ptr, shared)
        elif cls is &PySet_Type:
            self.save_set(obj, shared)
        elif cls is &PyFrozenSet_Type:
            self.save_frozenset(obj, shared)
        elif cls is &PyByteArray_Type:
            self.save_bytearray(ptr, shared)
        else:
            self.save_general(obj, shared)
        set_depth(depth - 1)
        return 0

    cdef bint saved_id(self, obj) except -1:
        pid = self.watch(obj)
        if pid is None:
            return False
        # as in pickle, the id itself is not offered for replacement
        self.watched = False
        self.save(<PyObject*>pid, True)
        self.watched = True
        self.put(b'Q')
        return True

    # ---- containers

    cdef int save_list(self, PyObject* obj, bint shared) except -1:
        cdef Py_ssize_t i = 0, stop, n = list_size(obj)
        cdef bint remember = self.remembers(shared)
        if shared and self.got(obj):
            return 0
        if n >= MIN_UINT8 and self.saved_block(obj, n, False):
            return self.memoize(obj) if remember else 0
        if not remember and 0 < n <= BATCH:
            self.put(b'(')
            while i < list_size(obj):
                self.save_item(items_of(obj)[i])
                i += 1
            return self.put(b'l')
        self.put(b']')
        if remember:
            self.memoize(obj)
        while i < list_size(obj):
            if i == list_size(obj) - 1:
                self.save_item(items_of(obj)[i])
                self.put(b'a')
                i += 1
                continue
            self.put(b'(')
            stop = i + BATCH
            while i < stop and i < list_size(obj):
                self.save_item(items_of(obj)[i])
                i += 1
            self.put(b'e')
        return 0

    cdef int save_tuple(self, PyObject* obj, bint shared) except -1:
        cdef Py_ssize_t i, index, n = tuple_size(obj)
        cdef PyObject** items = items_of(obj)
        cdef bint pending = not shared or self.full  # no mark needed
        if n == 0:
            return self.put(b')')
        if shared and self.got(obj):
            return 0
        if n >= MIN_UINT8 and self.saved_block(obj, n, True):
            return self.memoize(obj) if shared else 0
        if n > 3:
            self.put(b'(')
        for i in range(n):
            if not pending and not _is_atom(items[i]):
                pending = True
                self.memo_set(obj, PENDING)
            self.save_item(items[i])
        if shared:
            index = self.memo_find(obj)
            if index >= 0:  # written by its own items, in a cycle
                if n > 3:
                    self.put(b'1')
                else:
                    for i in range(n):
                        self.put(b'0')
                return self.get(index)
        self.put(b't' if n > 3 else <unsigned char>(0x84 + n))
        return self.memoize(obj) if shared else 0

    cdef int save_dict(self, PyObject* obj, bint shared) except -1:
        cdef Py_ssize_t n = dict_size(obj)
        cdef bint remember = self.remembers(shared)
        if shared and self.got(obj):
            return 0
        if not remember and 0 < n <= BATCH:
            self.put(b'(')
            self.save_pairs(obj, False)
            return self.put(b'd')
        self.put(b'}')
        if remember:
            self.memoize(obj)
        return self.save_pairs(obj, True)

    cdef int save_pairs(self, PyObject* obj, bint set_items) except -1:
        """Write keys and values, in batches that set them if *set_items*."""
        cdef Py_ssize_t at = 0, in_batch = 0, n = dict_size(obj)
        cdef PyObject* key = NULL
        cdef PyObject* value = NULL
        while dict_next(obj, &at, &key, &value):
            if set_items and in_batch == 0:
                self.put(b'(')
            if type_of(key) is &PyUnicode_Type and not self.watched:
                if not self.saved_atom(key):
                    self.save_str(key, refcount(key) > 1)  # runs no Python code
                self.save_item(value)
            else:
                self.save_pair(key, value)
            if dict_size(obj) != n:
                raise RuntimeError("dictionary changed size during iteration")
            in_batch += 1
            if set_items and in_batch == BATCH:
                self.put(b'u')
                in_batch = 0
        if set_items and in_batch:
            self.put(b'u')
        return 0

    cdef int save_pair(self, PyObject* key, PyObject* value) except -1:
        """Write a key and its value, both held here, since writing the key may run Python code."""
        cdef object held_key = <object>key
        cdef object held_value = <object>value
        self.save(<PyObject*>held_key, refcount(<PyObject*>held_key) > 2)
        return self.save(<PyObject*>held_value, refcount(<PyObject*>held_value) > 2)

    cdef int save_set(self, obj, bint shared) except -1:
        if shared and self.got(<PyObject*>obj):
            return 0
        self.put(0x8f)
        if self.remembers(shared):
            self.memoize(<PyObject*>obj)
        return self.save_batches(obj, 0x90, False)

    cdef int save_batches(self, iterable, unsigned char op, bint shared) except -1:
        """Write items in marked batches, each added to the object before by *op*; *shared*, if all are."""
        cdef Py_ssize_t in_batch = 0
        for item in iterable:
            if in_batch == 0:
                self.put(b'(')
            # the container and this function hold it
            self.save(<PyObject*>item, shared or refcount(<PyObject*>item) > 2)
            in_batch += 1
            if in_batch == BATCH:
                self.put(op)
                in_batch = 0
        return self.put(op) if in_batch else 0

    cdef int save_frozenset(self, obj, bint shared) except -1:
        cdef Py_ssize_t index
        if shared:
            if self.got(<PyObject*>obj):
                return 0
            if not self.full:
                self.memo_set(<PyObject*>obj, PENDING)
        self.put(b'(')
        for item in obj:  # the set and this function hold it
            self.save(<PyObject*>item, refcount(<PyObject*>item) > 2)
        if shared:
            index = self.memo_find(<PyObject*>obj)
            if index >= 0:  # written by its own items, in a cycle
                self.put(b'1')
                return self.get(index)
        self.put(0x91)
        return self.memoize(<PyObject*>obj) if shared else 0

    # ---- typed blocks

    cdef bint saved_block(self, PyObject* obj, Py_ssize_t n, bint is_tuple) except -1:
        """Write a list or tuple of numbers as one buffer, or of one object as a product."""
        cdef PyObject** items = items_of(obj)
        cdef PyTypeObject* cls = type_of(items[0])
        cdef Kind kind
        if self.watched or self.memoless:
            return False
        if items[0] is items[n - 1] and n >= MIN_REPEATS and _is_atom(items[0]):
            if same_object(items, n):
                return self.save_product(items[0], n, is_tuple)
        if type_of(items[n - 1]) is not cls or type_of(items[n // 2]) is not cls:
            return False
        kind = guess(items, n)
        if kind == MIXED or n < _enough(kind):
            return False
        if self.saved_block_of(obj, kind, n, is_tuple):
            return True
        if kind == FLOAT64 or kind == BOOL:
            return False  # the guess was the only kind possible
        kind = scan(items_of(obj), n)
        return kind != MIXED and n >= _enough(kind) and self.saved_block_of(obj, kind, n, is_tuple)

    cdef bint saved_block_of(self, PyObject* obj, Kind kind, Py_ssize_t n, bint is_tuple) except -1:
        if self.buffer_callback is not None and n * width(kind) >= OUT_OF_BAND:
            return self.saved_block_apart(<object>obj, kind, n, is_tuple)
        return self.saved_block_here(items_of(obj), kind, n, is_tuple)

    cdef bint save_product(self, PyObject* item, Py_ssize_t n, bint is_tuple) except -1:
        self.put_known(MUL)
        if is_tuple:
            self.save(item, True)
            self.put(0x85)
        else:
            self.put(b']')
            self.save(item, True)
            self.put(b'a')
        self.put_number(n)
        self.put2(0x86, b'R')
        return True

    cdef int put_number(self, Py_ssize_t n) except -1:
        if n <= 0x7fffffff:
            return self.put_size(b'J', n, 4)
        return self.save_long(n)

    cdef bint saved_block_here(self, PyObject** items, Kind kind, Py_ssize_t n, bint is_tuple) except -1:
        cdef Py_ssize_t nbytes = n * width(kind)
        cdef Py_ssize_t start
        self.room(HEAD + 8 + nbytes + 16)
        start = self.pos + HEAD
        start += -<Py_ssize_t>(<size_t>(self.out + start)) & 7  # aligned for the typed loop
        if not fill(kind, items, n, self.out + start):
            return False
        self.put_block_head(kind, n, is_tuple)
        self.put_bytes_head(nbytes)
        memmove(self.out + self.pos, self.out + start, nbytes)
        self.pos += nbytes
        self.put_block_tail(kind, is_tuple)
        return True

    cdef bint saved_block_apart(self, obj, Kind kind, Py_ssize_t n, bint is_tuple) except -1:
        array = array_of(kind, obj)
        if array is None:
            return False
        # bytes, since a program casts them; not memoryviews, which CPython 3.11 may crash on in garbage cycles
        data = array.view("u1")
        data.flags.writeable = False
        in_band = self.in_band(PickleBuffer(data))
        self.put_block_head(kind, n, is_tuple)
        if in_band:
            self.put_view(data)
        elif kind == UINT8:  # list(bytes) is twice as fast as list(memoryview)
            self.put_known(BYTES)
            self.put(0x97)
            self.put2(0x85, b'R')
        else:
            self.put(0x97)
        self.put_block_tail(kind, is_tuple)
        return True

    cdef int put_view(self, const unsigned char[::1] data) except -1:
        return self.put_bytes(&data[0], data.shape[0])

    cdef int put_block_head(self, Kind kind, Py_ssize_t n, bint is_tuple) except -1:
        """Write what comes before the data: at most HEAD bytes."""
        if kind == UINT8:
            return self.put_known(TUPLE if is_tuple else LIST)
        if is_tuple:
            self.put_known(UNPACK)
            return self.put_ascii(b"%d%c" % (n, _format(kind)))
        self.put_known(TOLIST)
        self.put_known(CAST)
        return self.put_known(MEMORYVIEW)

    cdef int put_block_tail(self, Kind kind, bint is_tuple) except -1:
        if kind == UINT8:
            return self.put2(0x85, b'R')
        if is_tuple:
            return self.put2(0x86, b'R')
        self.put2(0x85, b'R')
        self.put2(0x8c, 1)
        self.put(_format(kind))
        self.put2(0x86, b'R')
        return self.put2(0x85, b'R')

    # ---- everything else

    cdef int save_general(self, obj, bint shared) except -1:
        cdef PyObject* ptr = <PyObject*>obj
        cdef PyTypeObject* cls = type_of(ptr)
        cdef int way
        if shared and self.got(ptr):
            return 0
        if cls is &PyPickleBuffer_Type:
            return self.save_buffer(obj, shared)
        if ptr is ellipsis or ptr is not_implemented:
            return self.save_global(obj, "Ellipsis" if ptr is ellipsis else "NotImplemented")
        if self.override is not NOTHING:
            value = self.override(obj)
            if value is not NotImplemented:
                return self.save_reduction(obj, value, shared)
        if self.ways is None:
            self.ways = {}
        way = self.ways.get(type(obj), UNKNOWN)
        if way == PLAIN_INSTANCE:
            return self.save_instance(obj, shared)
        if self.find_reducer is not None and cls is not &PyType_Type and cls is not &PyFunction_Type:
            reducer = self.reducer(type(obj))
            if reducer is not None:
                self.needs_full(reducer)
                value = reducer(obj)
                if value is not NotImplemented:
                    return self.save_reduction(obj, value, shared)
        if cls is &PyFunction_Type or cls is &PyType_Type:
            return self.save_named(obj, shared)
        reduction = self.table_entry(obj, type(obj))
        if reduction is not NOTHING:
            return self.save_reduction(obj, reduction(obj), shared)
        if isinstance(obj, type):
            return self.save_named(obj, shared)
        if way == UNKNOWN:
            way = self.ways[type(obj)] = _way(type(obj))
            if way == PLAIN_INSTANCE:
                return self.save_instance(obj, shared)
        if not self.full and (way == FOREIGN or _has_own_reduction(obj)):
            raise _Restart
        value = _reduce(obj)
        if way == STRUCTURAL and _is_plain(obj, value):
            self.ways[type(obj)] = <int>PLAIN_INSTANCE
            _remember_way(type(obj), PLAIN_INSTANCE)
        return self.save_reduction(obj, value, shared)

    cdef reducer(self, cls):
        """Return what find_reducer answers for *cls*, asked once a dump."""
        if self.reducers is None:
            self.reducers = {}
        try:
            return self.reducers[cls]
        except KeyError:
            reducer = self.reducers[cls] = self.find_reducer(cls)
            return reducer

    cdef int needs_full(self, function) except -1:
        """Before foreign Python code runs: it may hand out any part of what is written already."""
        if not self.full and not (getattr(function, "__module__", None) or "").startswith("fastser."):
            raise _Restart
        return 0

    cdef table_entry(self, obj, cls):
        """Return the reduction that a dispatch table has for *cls*, or NOTHING."""
        entry = NOTHING
        if self.table is not NOTHING:
            try:
                return self.table[cls]
            except LookupError:
                return NOTHING
        if not self.by_value:
            entry = copyreg.dispatch_table.get(cls, NOTHING)
        elif cls is not MethodType or not _is_bound(obj):
            for table in BY_VALUE_TABLES:
                entry = table.get(cls, NOTHING)
                if entry is not NOTHING:
                    break
        if entry is not NOTHING and not self.full and cls is not complex:
            if getattr(entry, "__module__", "").partition(".")[0] != "cloudpickle":
                raise _Restart
        return entry

    cdef int save_instance(self, obj, bint shared) except -1:
        """Write an instance that is its class and its __dict__, as object.__reduce_ex__ would."""
        cdef object state = obj.__dict__
        cdef bint own
        if _has_own_reduction(obj):
            if not self.full:
                raise _Restart
            return self.save_reduction(obj, _reduce(obj), shared)
        self.save(<PyObject*>type_of(<PyObject*>obj), True)
        self.put2(b')', 0x81)
        if self.remembers(shared):
            self.memoize(<PyObject*>obj)
        if state:
            # the instance and this function hold it; who else does could hand it out
            own = refcount(<PyObject*>state) <= 2
            self.save(<PyObject*>state, not own)
            self.put(b'b')
        return 0

    cdef int save_named(self, obj, bint shared) except -1:
        """Write a function or class by reference, or by value where cloudpickle would."""
        if self.by_value and not is_referable(obj):
            if self.cloud is None:
                self.cloud = cloudpickle.Pickler(io.BytesIO(), protocol=5)
            value = self.cloud.reducer_override(obj)
            if value is not NotImplemented:
                return self.save_reduction(obj, value, shared)
        elif self.by_value:
            return self.put_reference(obj, obj.__module__, obj.__qualname__)
        for cls, value in SPECIAL_TYPES:
            if obj is cls:
                return self.save_reduction(obj, (type, (value,)), shared)
        return self.save_global(obj, None)

    cdef int save_global(self, obj, name) except -1:
        if name is None:
            name = getattr(obj, "__qualname__", None)
            if name is None:
                name = obj.__name__
        module_name = _module_of(obj, name)
        found = _lookup(module_name, name, obj)
        if found is not obj:
            raise PicklingError(
                f"Can't pickle {obj!r}: it's not the same object as {module_name}.{name}"
            )
        return self.put_reference(obj, module_name, name)

    cdef int put_reference(self, obj, module_name, name) except -1:
        """Write the module and the name of *obj*, or their code in the extension registry."""
        code = EXTENSIONS.get((module_name, name)) if EXTENSIONS else None
        if code is not None:
            if code <= 0xff:
                self.put2(0x82, code)
            elif code <= 0xffff:
                self.put_size(0x83, code, 2)
            else:
                self.put_size(0x84, code, 4)
            return 0  # as in pickle, codes are not remembered: they are as short as references
        self.save_name(module_name)
        self.save_name(name)
        self.put(0x93)
        return self.memoize(<PyObject*>obj)

    cdef int save_name(self, name) except -1:
        if type(name) is not str:
            name = str(name)
        return self.save_str(<PyObject*>name, not self.memoless)

    cdef int save_buffer(self, obj, bint shared) except -1:
        cdef const Py_buffer* view = PyPickleBuffer_GetBuffer(obj)
        cdef bint in_band
        if view.suboffsets is not NULL or not PyBuffer_IsContiguous(view, b'A'):
            raise PicklingError("PickleBuffer can not be pickled when pointing to a non-contiguous buffer")
        in_band = self.in_band(obj)
        view = PyPickleBuffer_GetBuffer(obj)  # the callback may have released it
        if not in_band:
            self.put(0x97)
            return self.put(0x98) if view.readonly else 0
        if view.readonly:
            self.put_bytes(view.buf, view.len)
        else:
            self.put_bytearray(view.buf, view.len)
        return self.memoize(<PyObject*>obj) if self.remembers(shared) else 0

    cdef int save_reduction(self, obj, value, bint shared) except -1:
        """Write what a reduction answered for *obj*."""
        cdef Py_ssize_t n
        cdef PyObject** parts
        cdef Py_ssize_t index
        if isinstance(value, str):
            return self.save_global(obj, value)
        if not isinstance(value, tuple):
            raise PicklingError(f"__reduce__ must return a string or tuple, got {type(value).__name__}")
        n = PyTuple_GET_SIZE(value)
        parts = PySequence_Fast_ITEMS(value)
        if n == 1:  # a reducer's "write this in its place"
            self.save(parts[0], True)
            return 0
        if not 2 <= n <= 6:
            raise PicklingError("tuple returned by __reduce__ must contain 2 through 6 elements")
        func = <object>parts[0]
        args = <object>parts[1]
        state = <object>parts[2] if n > 2 else None
        list_items = <object>parts[3] if n > 3 else None
        dict_items = <object>parts[4] if n > 4 else None
        setter = <object>parts[5] if n > 5 else None
        if not callable(func):
            raise PicklingError(
                f"first item of the tuple returned by __reduce__ must be callable, not {type(func).__name__}"
            )
        if not isinstance(args, tuple):
            raise PicklingError(
                f"second item of the tuple returned by __reduce__ must be a tuple, not {type(args).__name__}"
            )
        if list_items is not None and not hasattr(list_items, "__next__"):
            raise PicklingError(
                "fourth element of the tuple returned by __reduce__ must be an iterator, "
                f"not {type(list_items).__name__}"
            )
        if dict_items is not None and not hasattr(dict_items, "__next__"):
            raise PicklingError(
                "fifth element of the tuple returned by __reduce__ must be an iterator, "
                f"not {type(dict_items).__name__}"
            )
        if setter is not None and not callable(setter):
            raise PicklingError(
                f"sixth element of the tuple returned by __reduce__ must be a function, not {type(setter).__name__}"
            )
        name = None if isinstance(func, type) else getattr(func, "__name__", None)
        if name == "__newobj__":
            self.save_newobj(obj, args, shared)
        elif name == "__newobj_ex__":
            self.save_newobj_ex(obj, args)
        else:
            self.save(parts[0], True)
            # the reduction and this function hold it; who else does could hand it out
            self.save(parts[1], refcount(parts[1]) > 2)
            self.put(b'R')
        if self.remembers(shared) or setter is not None:
            index = self.memo_find(<PyObject*>obj)
            if index >= 0:  # its own arguments lead back to it and wrote it already
                self.put(b'0')
                self.get(index)
            else:
                self.memoize(<PyObject*>obj)
        if list_items is not None:
            self.save_batches(list_items, b'e', True)
        if dict_items is not None:
            self.save_set_items(dict_items)
        if state is not None:
            if setter is None:
                self.save(parts[2], refcount(parts[2]) > 2)
                self.put(b'b')
            else:
                self.save(parts[5], True)
                self.save(<PyObject*>obj, True)
                self.save(parts[2], refcount(parts[2]) > 2)
                self.put(0x86)
                self.put2(b'R', b'0')
        return 0

    cdef int save_newobj(self, obj, args, bint shared) except -1:
        cdef Py_ssize_t i, n = PyTuple_GET_SIZE(args)
        if n == 0:
            raise PicklingError("__newobj__ arglist is empty")
        cls = args[0]
        if not hasattr(cls, "__new__"):
            raise PicklingError("args[0] from __newobj__ args has no __new__")
        if obj is not None and getattr(obj, "__class__", None) is not cls:
            raise PicklingError("args[0] from __newobj__ args has the wrong class")
        self.save(<PyObject*>cls, True)
        if n > 4:
            self.put(b'(')
        for i in range(1, n):
            self.save_item(PySequence_Fast_ITEMS(args)[i])
        self.put(b')' if n == 1 else b't' if n > 4 else <unsigned char>(0x83 + n))
        return self.put(0x81)

    cdef int save_newobj_ex(self, obj, args) except -1:
        if len(args) != 3:
            raise PicklingError(f"length of the __newobj_ex__ argument tuple must be exactly 3, not {len(args)}")
        cls, positional, keywords = args
        if not hasattr(cls, "__new__"):
            raise PicklingError("first item from __newobj_ex__ argument tuple must be a class with __new__")
        if not isinstance(positional, tuple):
            raise PicklingError("second item from __newobj_ex__ argument tuple must be a tuple")
        if not isinstance(keywords, dict):
            raise PicklingError("third item from __newobj_ex__ argument tuple must be a dict")
        self.save(<PyObject*>cls, True)
        self.save(<PyObject*>positional, True)
        self.save(<PyObject*>keywords, True)
        return self.put(0x92)

    cdef int save_set_items(self, iterator) except -1:
        cdef Py_ssize_t in_batch = 0
        for pair in iterator:
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise TypeError("dict items iterator must return 2-tuples")
            if in_batch == 0:
                self.put(b'(')
            key, value = pair
            self.save(<PyObject*>key, True)
            self.save(<PyObject*>value, True)
            in_batch += 1
            if in_batch == BATCH:
                self.put(b'u')
                in_batch = 0
        return self.put(b'u') if in_batch else 0


@cython.auto_pickle(False)
cdef class Pickler:
    """Write objects as protocol-5 pickles that the standard unpickler reads.

    Parameters
    ----------
    file : object with a ``write`` method
        Gets one bytes object per dump.
    protocol : int, optional
        5 by default; 0 to 4 are left to the standard pickler.
    fix_imports : bool
        For the standard pickler at protocols 0 to 2.
    buffer_callback : callable, optional
        Called with a PickleBuffer for each buffer that may travel out-of-band: those of the objects
        themselves, and typed blocks, bytes and bytearrays of 64 KiB and more.  The buffers are views of
        the memory of the objects, new memory for typed blocks.  If it returns true the buffer is written
        in-band.

    Raises
    ------
    ValueError
        If *protocol* is above 5, or *buffer_callback* is given with a lower one.
    TypeError
        If *file* has no ``write``.

    Examples
    --------
    >>> import io, pickle
    >>> file = io.BytesIO()
    >>> Pickler(file).dump([1.5, "a"])
    >>> pickle.loads(file.getvalue())
    [1.5, 'a']
    """

    cdef Writer writer
    cdef object write, standard
    cdef object _persistent_id, _dispatch_table
    cdef readonly int protocol
    cdef public bint fast
    cdef public bint bin

    def __cinit__(self, *args, **kwargs):
        self.writer = Writer.__new__(Writer)

    def __init__(self, file, protocol=None, *, fix_imports=True, buffer_callback=None):
        protocol = _checked_protocol(protocol, buffer_callback)
        try:
            self.write = file.write
        except AttributeError:
            raise TypeError("file must have a 'write' attribute") from None
        self.protocol = protocol
        self.bin = protocol > 0
        self.writer.buffer_callback = buffer_callback
        self.writer.full = True  # whoever holds a Pickler may dump parts of what it wrote
        self.standard = None
        if protocol < 5:
            self.standard = _Standard(file, protocol, fix_imports=fix_imports)

    # ---- the public face

    def dump(self, obj):
        """Write a pickle of *obj* to the file.

        Raises
        ------
        PicklingError, TypeError, RecursionError
            And whatever the reductions of the objects raise; then nothing was written.
        """
        if self.write is None:
            raise PicklingError(f"Pickler.__init__() was not called by {type(self).__name__}.__init__()")
        if self.standard is not None:
            return self.standard.dump_for(self, obj)
        cdef Writer writer = self.writer
        pid = self.persistent_id
        writer.watch = None if pid is _no_persistent_id else pid
        writer.override = getattr(self, "reducer_override", NOTHING)
        writer.table = getattr(self, "dispatch_table", NOTHING)
        writer.memoless = self.fast
        try:
            program = writer.compile(obj)
        finally:
            writer.watch = None  # methods of self: no reference cycle stays
            writer.override = writer.table = NOTHING
        self.write(program)

    def clear_memo(self):
        """Forget the objects seen, so that the next dump writes all anew."""
        if self.writer.running:
            raise RuntimeError("this Pickler is in the middle of a dump")
        if self.standard is not None:
            self.standard.clear_memo()
        self.writer.free_memo()

    @property
    def memo(self):
        """The objects seen: a new dict of ``id(obj) -> (index, obj)``; can be set to one."""
        if self.standard is not None:
            return self.standard.memo
        return self.writer.memo_copy()

    @memo.setter
    def memo(self, memo):
        if self.standard is not None:
            self.standard.memo = memo
            return
        if not isinstance(memo, dict):
            raise TypeError(f"'memo' attribute must be a dict, not {type(memo).__name__}")
        if self.writer.running:
            raise RuntimeError("this Pickler is in the middle of a dump")
        self.writer.memo_replace(memo)

    @property
    def persistent_id(self):
        """Called with each object; what is not None is written in its place."""
        return _no_persistent_id if self._persistent_id is None else self._persistent_id

    @persistent_id.setter
    def persistent_id(self, function):
        self._persistent_id = function

    @property
    def dispatch_table(self):
        """Reduction functions by class, in place of ``copyreg.dispatch_table``."""
        if self._dispatch_table is None:
            raise AttributeError("dispatch_table")
        return self._dispatch_table

    @dispatch_table.setter
    def dispatch_table(self, table):
        self._dispatch_table = table

    @dispatch_table.deleter
    def dispatch_table(self):
        self._dispatch_table = None


cdef inline bint _is_atom(PyObject* obj) noexcept:
    """Tell whether *obj* holds no other object."""
    cdef PyTypeObject* cls = type_of(obj)
    return (
        cls is &PyUnicode_Type or cls is &PyLong_Type or cls is &PyFloat_Type
        or obj is none or cls is &PyBool_Type or cls is &PyBytes_Type
    )


cdef inline void _put_double(unsigned char* out, double value) noexcept:
    """Write an opcode and a double, big-endian."""
    cdef uint64_t bits = 0
    memcpy(&bits, &value, 8)
    out[0] = b'G'
    out[1] = <unsigned char>(bits >> 56)
    out[2] = <unsigned char>(bits >> 48)
    out[3] = <unsigned char>(bits >> 40)
    out[4] = <unsigned char>(bits >> 32)
    out[5] = <unsigned char>(bits >> 24)
    out[6] = <unsigned char>(bits >> 16)
    out[7] = <unsigned char>(bits >> 8)
    out[8] = <unsigned char>bits


cdef Py_ssize_t _enough(Kind kind) noexcept:
    """Return the number of items that are worth a block."""
    if kind == UINT8:
        return MIN_UINT8
    if kind == INT64 or kind == UINT64:
        return MIN_WIDE
    return MIN_FLOATS if kind == FLOAT64 else MIN_OTHERS


cdef unsigned char _format(Kind kind) noexcept:
    """Return the code of the struct module for the items of a block."""
    if kind == FLOAT64:
        return b'd'
    if kind == BOOL:
        return b'?'
    if kind == INT8:
        return b'b'
    if kind == INT16:
        return b'h'
    if kind == INT32:
        return b'i'
    if kind == INT64:
        return b'q'
    return b'Q'


cdef PyObject* _new_bytes(Py_ssize_t size) except NULL:
    cdef object new = PyBytes_FromStringAndSize(NULL, size)
    incref(<PyObject*>new)
    return <PyObject*>new


cdef int _checked_protocol(protocol, buffer_callback) except -1:
    """Return the protocol that is meant: 5 for None, the highest for a negative one."""
    if protocol is None:
        return 5
    if protocol < 0:
        protocol = pickle.HIGHEST_PROTOCOL
    if protocol > pickle.HIGHEST_PROTOCOL:
        raise ValueError(f"pickle protocol must be <= {pickle.HIGHEST_PROTOCOL}, got {protocol}")
    if buffer_callback is not None and protocol < 5:
        raise ValueError("buffer_callback needs protocol >= 5")
    return protocol


def _no_persistent_id(obj):
    return None


def _reduce(obj):
    reduce_ex = getattr(obj, "__reduce_ex__", None)
    if reduce_ex is not None:
        return reduce_ex(5)
    reduce = getattr(obj, "__reduce__", None)
    if reduce is None:
        raise PicklingError(f"Can't pickle {type(obj).__name__!r} object: {obj!r}")
    return reduce()


cdef int _way(cls) except -1:
    """Judge the reduction of objects of *cls* by who wrote it; kept as long as the class is not changed."""
    cdef unsigned int tag = (<PyTypeObject*><PyObject*>cls).tp_version_tag
    entry = WAYS.get(cls)
    if entry is not None and tag != 0 and entry[0] == tag:
        return entry[1]
    way = <int>(FOREIGN if _is_foreign(cls) else STRUCTURAL)
    _remember_way(cls, way)
    return way


cdef int _remember_way(cls, int way) except -1:
    if len(WAYS) >= MAX_WAYS:
        WAYS.clear()
    WAYS[cls] = (<unsigned int>(<PyTypeObject*><PyObject*>cls).tp_version_tag, way)
    return 0


def _is_foreign(cls):
    """Tell whether a reduction of *cls* may run Python code that hands out parts of other objects."""
    if cls.__module__.startswith("fastser."):
        return False
    if cls.__getattribute__ is not object.__getattribute__ or hasattr(cls, "__getattr__"):
        return True
    for name in REDUCTION_NAMES:
        function = getattr(cls, name, None)
        if function is not None and type(function) not in C_FUNCTIONS:
            if not isinstance(function, FunctionType) or function not in HARMLESS:
                return True
    for base in cls.__mro__:  # the state is read through these
        if type(base.__dict__.get("__dict__", GetSetDescriptorType)) not in (GetSetDescriptorType, type):
            return True
    return any([type(getattr(cls, name, None)) is not MemberDescriptorType for name in copyreg._slotnames(cls)])


cdef bint _has_own_reduction(obj) except -1:
    """Tell whether the instance itself has an attribute that pickle would use instead of its class's."""
    state = getattr(obj, "__dict__", None)
    return type(state) is dict and any([name in <dict>state for name in REDUCTION_NAMES])


def _is_plain(obj, value):
    """Tell whether the reduction of *obj* is its class and its __dict__, by object.__reduce_ex__."""
    cls = type(obj)
    return (
        cls.__reduce_ex__ is OBJECT_REDUCE_EX
        and cls.__reduce__ is OBJECT_REDUCE
        and getattr(cls, "__getstate__", None) is OBJECT_GETSTATE
        and isinstance(value, tuple)
        and len(value) == 5
        and value[0] is copyreg.__newobj__
        and value[1] == (cls,)
        and value[2] is getattr(obj, "__dict__", value)
        and value[3] is value[4] is None
    )


def _is_bound(method):
    """Tell whether the method is an attribute of its object, as which pickle writes it."""
    return getattr(method.__self__, method.__func__.__name__, None) == method


def is_referable(obj):
    """Tell whether pickle by reference is what cloudpickle would do, in the plain cases."""
    if BY_VALUE_MODULES():
        return False
    module_name = getattr(obj, "__module__", None)
    if type(module_name) is not str or module_name == "__main__":
        return False
    module = sys.modules.get(module_name)
    return module is not None and getattr(module, obj.__qualname__, None) is obj


def _module_of(obj, name):
    module_name = getattr(obj, "__module__", None)
    return pickle.whichmodule(obj, name) if module_name is None else module_name


def _lookup(module_name, name, obj):
    """Return what the module has under a dotted name."""
    try:
        module = sys.modules.get(module_name)
        if module is None:
            __import__(module_name, level=0)
            module = sys.modules[module_name]
        found = module
        for part in name.split("."):
            if part == "<locals>":
                raise PicklingError(f"Can't pickle local object {obj!r}")
            found = getattr(found, part)
    except (ImportError, KeyError, AttributeError, TypeError, ValueError):
        raise PicklingError(f"Can't pickle {obj!r}: it's not found as {module_name}.{name}") from None
    return found


class _Standard(pickle.Pickler):
    """The standard pickler, for protocols below 5, with the hooks of the pickler it stands in for."""

    front = None

    def dump_for(self, front, obj):
        self.front = front
        self.fast = front.fast
        table = getattr(front, "dispatch_table", None)
        if table is not None:
            self.dispatch_table = table
        try:
            return super().dump(obj)
        finally:
            self.front = None

    def persistent_id(self, obj):
        return self.front.persistent_id(obj)

    def reducer_override(self, obj):
        override = getattr(self.front, "reducer_override", NOTHING)
        return NotImplemented if override is NOTHING else override(obj)


SPECIAL_TYPES = ((type(None), None), (type(NotImplemented), NotImplemented), (type(...), ...))
KNOWN_NAMES = {
    <int>TOLIST: (b"builtins", b"memoryview.tolist"),
    <int>CAST: (b"builtins", b"memoryview.cast"),
    <int>MEMORYVIEW: (b"builtins", b"memoryview"),
    <int>LIST: (b"builtins", b"list"),
    <int>TUPLE: (b"builtins", b"tuple"),
    <int>BYTES: (b"builtins", b"bytes"),
    <int>BYTEARRAY: (b"builtins", b"bytearray"),
    <int>UNPACK: (b"struct", b"unpack"),
    <int>MUL: (b"operator", b"mul"),
}


def dumps(obj, protocol=None, *, fix_imports=True, buffer_callback=None, find_reducer=find_reducer):
    """Return a pickle of *obj*; functions and classes go by value where cloudpickle would do so.

    Parameters
    ----------
    obj : object
        Only read.
    protocol : int, optional
        5 by default; 0 to 4 are left to cloudpickle.
    fix_imports : bool
        Taken as pickle takes it; cloudpickle always does it, for protocols 0 to 2.
    buffer_callback : callable, optional
        Called with a PickleBuffer for each buffer that may travel out-of-band: those of the objects
        themselves, and typed blocks, bytes and bytearrays of 64 KiB and more.  The buffers are views of
        the memory of *obj*, new memory for typed blocks.  If it returns true the buffer is written
        in-band.
    find_reducer : callable, optional
        Called with a class, returns the reducer of its objects or None; those that are registered in
        `fastser.dispatch.reducers` by default.

    Returns
    -------
    bytes
        What ``pickle.loads(data, buffers=...)`` reads, without fastser.

    Raises
    ------
    PicklingError, TypeError, RecursionError
        And whatever the reductions of the objects raise.
    ValueError
        If *protocol* is above 5, or *buffer_callback* is given with a lower one.

    Examples
    --------
    >>> import pickle
    >>> buffers = []
    >>> data = dumps([i / 2 for i in range(100_000)], buffer_callback=buffers.append)
    >>> len(data) < 200, [buffer.raw().nbytes for buffer in buffers]
    (True, [800000])
    >>> pickle.loads(data, buffers=buffers)[:3]
    [0.0, 0.5, 1.0]
    """
    cdef Writer writer
    cdef int checked = _checked_protocol(protocol, buffer_callback)
    if checked < 5:
        return _dumps_standard(obj, checked, find_reducer)
    writer = Writer.__new__(Writer)
    writer.buffer_callback = buffer_callback
    writer.find_reducer = find_reducer
    writer.by_value = True
    return writer.compile(obj)


class _StandardByValue(cloudpickle.Pickler):
    """cloudpickle, for protocols below 5, with fastser's reducers."""

    find_reducer = None

    def reducer_override(self, obj):
        reducer = self.find_reducer and self.find_reducer(type(obj))
        if reducer is not None:
            value = reducer(obj)
            if isinstance(value, tuple) and len(value) == 1:  # "write this in its place"
                return next, (iter([value[0]]),)
            if isinstance(value, tuple):
                return value[0], _in_band(value[1]), *value[2:]
            if value is not NotImplemented:
                return value
        if isinstance(obj, Call):
            return obj.func, _in_band(obj.args)
        return super().reducer_override(obj)


def _in_band(args):
    """Return *args* with bytes or a bytearray for each buffer: these protocols have no buffers."""
    return tuple([
        (bytes if arg.raw().readonly else bytearray)(arg.raw()) if isinstance(arg, PickleBuffer) else arg
        for arg in args
    ])


def _dumps_standard(obj, protocol, find_reducer):
    file = io.BytesIO()
    pickler = _StandardByValue(file, protocol=protocol)
    pickler.find_reducer = find_reducer
    pickler.dump(obj)
    return file.getvalue()
