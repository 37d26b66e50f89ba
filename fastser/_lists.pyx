"""Lists of numbers to ndarrays and back: one scan names the kind, one typed loop fills the array.

Exact types only: True is not 1, 1 is not 1.0, a subclass is nobody's, and one stranger anywhere makes
the whole list "not ours".
"""

from cpython.buffer cimport PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.object cimport PyObject
from libc.stdint cimport int8_t, int16_t, int32_t, int64_t, uint8_t, uint64_t

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


cdef Kind scan_ints(PyObject** items, Py_ssize_t n) noexcept:
    cdef long long low = 0, high = 0, value
    cdef bint above = False  # some are above int64
    cdef int overflow = 0
    cdef Py_ssize_t i
    for i in range(n):
        if type_of(items[i]) is not &PyLong_Type:
            return MIXED
        if is_compact(items[i]):
            value = compact_value(items[i])
        else:
            value = PyLong_AsLongLongAndOverflow(items[i], &overflow)
            if overflow < 0:
                return MIXED
            if overflow > 0:
                PyLong_AsUnsignedLongLong(items[i])
                if PyErr_Occurred() is not NULL:
                    PyErr_Clear()
                    return MIXED
                above = True
                continue
        if value < low:
            low = value
        elif value > high:
            high = value
    if above:
        return UINT64 if low == 0 else MIXED
    if low >= 0 and high <= 255:
        return UINT8
    if low >= -128 and high <= 127:
        return INT8
    if low >= -32768 and high <= 32767:
        return INT16
    if low >= -2147483648 and high <= 2147483647:
        return INT32
    return INT64


cdef inline long long int_value(PyObject* item, bint* wrong) noexcept:
    cdef int overflow = 0
    cdef long long value
    if type_of(item) is not &PyLong_Type:
        wrong[0] = True
        return 0
    if is_compact(item):
        return compact_value(item)
    value = PyLong_AsLongLongAndOverflow(item, &overflow)
    if overflow:
        wrong[0] = True
    return value


cdef bint fill(Kind kind, PyObject** items, Py_ssize_t n, void* out) noexcept:
    """Write the values of all items to *out*, aligned for the kind; False if some item is not of it.

    The check makes one pass enough for floats, and lists that change after their scan harmless.
    """
    cdef Py_ssize_t i
    cdef long long value
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
            if type_of(items[i]) is not &PyLong_Type:
                return False
            (<uint64_t*>out)[i] = PyLong_AsUnsignedLongLong(items[i])
            if PyErr_Occurred() is not NULL:
                PyErr_Clear()
                return False
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
    cdef Kind found = scan(PySequence_Fast_ITEMS(x), n)
    return None if found == MIXED else array_of(found, x)
