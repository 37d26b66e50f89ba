from cpython.object cimport PyObject

cdef enum Kind:
    MIXED  # not ours
    FLOAT64
    BOOL
    UINT8
    INT8
    INT16
    INT32
    INT64
    UINT64

cdef bint same_object(PyObject** items, Py_ssize_t n) noexcept
cdef Kind scan(PyObject** items, Py_ssize_t n) noexcept
cdef Kind guess(PyObject** items, Py_ssize_t n) noexcept
cdef int width(Kind kind) noexcept
cdef bint fill(Kind kind, PyObject** items, Py_ssize_t n, void* out) noexcept
cdef array_of(Kind kind, x)
