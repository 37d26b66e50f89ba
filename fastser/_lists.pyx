"""Lists of numbers to ndarrays and back: one scan names the kind, one typed loop fills the array.

Exact types only: True is not 1, 1 is not 1.0, a subclass is nobody's, and one stranger anywhere makes
the whole list "not ours".
"""

from cpython.buffer cimport PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.object cimport PyObject
from libc.stdint cimport int8_t, int16_t, int32_t, int64_t, uint8_t, uint32_t, uint64_t

import numpy as np

cdef extern from "Python.h":
    PyObject** PySequence_Fast_ITEMS(object)
    ctypedef struct PyTypeObject:
        pass
    PyTypeObject PyFloat_Type, PyLong_Type, PyBool_Type
    PyTypeObject* type_of "Py_TYPE"(PyObject*) noexcept
    PyObject* Py_True
    double float_value "PyFloat_AS_DOUBLE"(PyObject*) noexcept
    long long PyLong_AsLongLongAndOverflow(PyObject*, int*) noexcept
    unsigned long long PyLong_AsUnsignedLongLong(PyObject*) noexcept
    PyObject* PyErr_Occurred() noexcept
    void PyErr_Clear() noexcept

cdef extern from *:
    # Cython's own names for the layout of small ints, which changed with CPython 3.12.
    bint is_compact "__Pyx_PyLong_IsCompact"(PyObject*) noexcept
    Py_ssize_t compact_value "__Pyx_PyLong_CompactValue"(PyObject*) noexcept
    Py_ssize_t digit_count "__Pyx_PyLong_DigitCount"(PyObject*) noexcept
    const uint32_t* digits "__Pyx_PyLong_Digits"(PyObject*) noexcept
    bint is_negative "__Pyx_PyLong_IsNeg"(PyObject*) noexcept
    Py_ssize_t signed_size "Py_SIZE"(PyObject*) noexcept
    enum:
        DIGIT_BITS "PyLong_SHIFT"
        PY_VERSION_HEX

DTYPES = {  # Kind -> dtype
    <int>FLOAT64: "float64", <int>BOOL: "bool", <int>UINT8: "uint8", <int>INT8: "int8",
    <int>INT16: "int16", <int>INT32: "int32", <int>INT64: "int64", <int>UINT64: "uint64",
}


cdef bint same_object(PyObject** items, Py_ssize_t n) noexcept:
    """Tell whether all items are one object."""
    cdef Py_ssize_t i
    cdef PyObject* first = items[0]
    if items[n - 1] is not first or items[n // 2] is not first:
        return False
    for i in range(n):
        if items[i] is not first:
            return False
    return True


cdef int width(Kind kind) noexcept:
    """Return the bytes of one item."""
    if kind == BOOL or kind == UINT8 or kind == INT8:
        return 1
    if kind == INT16:
        return 2
    if kind == INT32:
        return 4
    return 8


cdef Kind scan(PyObject** items, Py_ssize_t n) noexcept:
    """Name the kind that all items have."""
    cdef PyTypeObject* first = type_of(items[0])
    cdef Py_ssize_t i
    if first is &PyLong_Type:
        return scan_ints(items, n)
    if first is not &PyFloat_Type and first is not &PyBool_Type:
        return MIXED
    for i in range(n):
        if type_of(items[i]) is not first:
            return MIXED
    return FLOAT64 if first is &PyFloat_Type else BOOL


cdef inline bint read_int(PyObject* item, long long* value, uint64_t* above) noexcept:
    """Read an exact int; False if 64 bits do not hold it.

    What int64 does not hold goes to *above*, which is 0 otherwise.
    """
    cdef Py_ssize_t n
    cdef const uint32_t* d
    cdef uint64_t magnitude
    cdef int overflow = 0
    above[0] = 0
    if is_compact(item):
        if PY_VERSION_HEX < 0x030C0000:
            value[0] = signed_size(item) * <long long>digits(item)[0]  # no branch on random signs
        else:
            value[0] = compact_value(item)
        return True
    if DIGIT_BITS == 30:
        n = digit_count(item)
        d = digits(item)
        if n > 3 or n == 3 and d[2] >= 16:
            return False
        magnitude = d[0] | <uint64_t>d[1] << 30
        if n == 3:
            magnitude |= <uint64_t>d[2] << 60
        if magnitude <= <uint64_t>0x7fffffffffffffff:
            value[0] = -<long long>magnitude if is_negative(item) else <long long>magnitude
            return True
        if is_negative(item):
            value[0] = <long long>magnitude  # as two's complement
            return magnitude == <uint64_t>1 << 63
        above[0] = magnitude
        return True
    value[0] = PyLong_AsLongLongAndOverflow(item, &overflow)
    if overflow > 0:
        above[0] = PyLong_AsUnsignedLongLong(item)
        if PyErr_Occurred() is not NULL:
            PyErr_Clear()
            return False
    return overflow >= 0


cdef Kind narrowest(long long low, long long high) noexcept:
    """Return the narrowest kind that holds *low* to *high*."""
    if low >= 0 and high <= 255:
        return UINT8
    if low >= -128 and high <= 127:
        return INT8
    if low >= -32768 and high <= 32767:
        return INT16
    if low >= -2147483648 and high <= 2147483647:
        return INT32
    return INT64


cdef Kind scan_ints(PyObject** items, Py_ssize_t n) noexcept:
    cdef long long low = 0, high = 0, value = 0
    cdef uint64_t above = 0, most = 0
    cdef Py_ssize_t i
    for i in range(n):
        if type_of(items[i]) is not &PyLong_Type or not read_int(items[i], &value, &above):
            return MIXED
        if above:
            most = above
        elif value < low:
            low = value
        elif value > high:
            high = value
    if most:
        return UINT64 if low == 0 else MIXED
    return narrowest(low, high)


cdef Kind guess(PyObject** items, Py_ssize_t n) noexcept:
    """Name the kind that a few items have: if `fill` takes it for all, it is the one `scan` names."""
    cdef PyTypeObject* first = type_of(items[0])
    cdef PyObject* item
    cdef long long low = 0, high = 0, value = 0
    cdef uint64_t above = 0
    cdef int i
    if first is &PyFloat_Type:
        return FLOAT64
    if first is &PyBool_Type:
        return BOOL
    if first is not &PyLong_Type:
        return MIXED
    for i in range(4):
        item = items[(n - 1) * i // 3]
        if type_of(item) is not &PyLong_Type or not read_int(item, &value, &above):
            return MIXED
        if above:
            return UINT64
        low = min(low, value)
        high = max(high, value)
    return narrowest(low, high)


cdef inline long long int_value(PyObject* item, bint* wrong) noexcept:
    cdef long long value = 0
    cdef uint64_t above = 0
    if type_of(item) is not &PyLong_Type or not read_int(item, &value, &above) or above:
        wrong[0] = True
    return value


cdef bint fill(Kind kind, PyObject** items, Py_ssize_t n, void* out) noexcept:
    """Write the values of all items to *out*, aligned for the kind; False if some item is not of it.

    The check makes one pass enough for floats, and lists that change after their scan harmless.
    """
    cdef Py_ssize_t i
    cdef long long value = 0
    cdef uint64_t above = 0
    cdef bint wrong = False
    if kind == FLOAT64:
        for i in range(n):
            if type_of(items[i]) is not &PyFloat_Type:
                return False
            (<double*>out)[i] = float_value(items[i])
    elif kind == BOOL:
        for i in range(n):
            if type_of(items[i]) is not &PyBool_Type:
                return False
            (<uint8_t*>out)[i] = items[i] is Py_True
    elif kind == UINT8:
        for i in range(n):
            value = int_value(items[i], &wrong)
            wrong |= value < 0 or value > 255
            (<uint8_t*>out)[i] = <uint8_t>value
    elif kind == INT8:
        for i in range(n):
            value = int_value(items[i], &wrong)
            wrong |= value < -128 or value > 127
            (<int8_t*>out)[i] = <int8_t>value
    elif kind == INT16:
        for i in range(n):
            value = int_value(items[i], &wrong)
            wrong |= value < -32768 or value > 32767
            (<int16_t*>out)[i] = <int16_t>value
    elif kind == INT32:
        for i in range(n):
            value = int_value(items[i], &wrong)
            wrong |= value < -2147483648 or value > 2147483647
            (<int32_t*>out)[i] = <int32_t>value
    elif kind == INT64:
        for i in range(n):
            (<int64_t*>out)[i] = int_value(items[i], &wrong)
    else:
        for i in range(n):
            if type_of(items[i]) is not &PyLong_Type or not read_int(items[i], &value, &above):
                return False
            wrong |= not above and value < 0
            (<uint64_t*>out)[i] = above if above else <uint64_t>value
    return not wrong


cdef array_of(Kind kind, x):
    """Return a new ndarray of the items of the list or tuple *x*, or None if not all are of *kind*."""
    cdef Py_buffer view
    cdef bint filled
    cdef Py_ssize_t n = len(x)
    array = np.empty(n, DTYPES[<int>kind])  # may run Python code, which may change the list
    if len(x) != n:
        return None
    PyObject_GetBuffer(array, &view, PyBUF_WRITABLE)
    try:
        filled = fill(kind, PySequence_Fast_ITEMS(x), n, view.buf)
    finally:
        PyBuffer_Release(&view)
    return array if filled else None


def kind(x):
    """Name what all items of a list or tuple are.

    Parameters
    ----------
    x : list or tuple
        Exact types only; only read.

    Returns
    -------
    str or None
        "float64", "bool", the narrowest of "uint8", "int8", "int16", "int32", "int64", "uint64" that
        holds all ints, "same" for one object repeated (two items at least), or None for "not mine".

    Raises
    ------
    TypeError
        If *x* is neither a list nor a tuple.

    Examples
    --------
    >>> kind([1.5, -0.0]), kind((1, 300)), kind([True, 1]), kind(["a"] * 3)
    ('float64', 'int16', None, 'same')
    """
    if not isinstance(x, (list, tuple)):
        raise TypeError(f"expected a list or tuple, got {type(x).__name__}")
    cdef Py_ssize_t n = len(x)
    if type(x) not in (list, tuple) or n == 0:
        return None
    cdef PyObject** items = PySequence_Fast_ITEMS(x)
    if n > 1 and same_object(items, n):
        return "same"
    return DTYPES.get(<int>scan(items, n))


def to_ndarray(x):
    """Turn a list or tuple of numbers into a new 1-D ndarray, if that loses nothing.

    ``to_ndarray(x).tolist()`` gives back the values bit by bit, with their types.

    Parameters
    ----------
    x : list or tuple
        Only read; the array owns its memory.

    Returns
    -------
    ndarray or None
        Of the dtype that `kind` names; None for what is not all of one exact type: float, bool, or int
        that 64 bits hold.

    Raises
    ------
    TypeError
        If *x* is neither a list nor a tuple.

    Examples
    --------
    >>> to_ndarray([1, 2, 300])
    array([  1,   2, 300], dtype=int16)
    >>> to_ndarray([1, 2.0]) is None
    True
    """
    if not isinstance(x, (list, tuple)):
        raise TypeError(f"expected a list or tuple, got {type(x).__name__}")
    cdef Py_ssize_t n = len(x)
    if type(x) not in (list, tuple) or n == 0:
        return None
    cdef Kind found = guess(PySequence_Fast_ITEMS(x), n)
    array = None if found == MIXED else array_of(found, x)
    if array is None:
        found = scan(PySequence_Fast_ITEMS(x), len(x))
        array = None if found == MIXED else array_of(found, x)
    return array
