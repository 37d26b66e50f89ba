"""Lists of numbers to arrays and back: exact types, or nobody's."""

from __future__ import annotations

import enum
import struct
import sys
from typing import Any

import numpy as np
import pytest
from graphs import check
from hypothesis import given, settings
from hypothesis import strategies as st

from fastser._lists import kind, to_ndarray

LIMITS = {
    "uint8": (0, 2**8 - 1),
    "int8": (-(2**7), 2**7 - 1),
    "int16": (-(2**15), 2**15 - 1),
    "int32": (-(2**31), 2**31 - 1),
    "int64": (-(2**63), 2**63 - 1),
    "uint64": (0, 2**64 - 1),
}


class Number(int):
    pass


class Real(float):
    pass


class Colour(enum.IntEnum):
    RED = 1


def plain_kind(x: Any) -> str | None:
    """The slow, obvious twin."""
    if not x:
        return None
    if len(x) > 1 and all(item is x[0] for item in x):
        return "same"
    types = set(map(type, x))
    if types == {float}:
        return "float64"
    if types == {bool}:
        return "bool"
    if types != {int}:
        return None
    for name, (low, high) in LIMITS.items():
        if min(x) >= low and max(x) <= high:
            return name
    return None


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("make", [list, tuple])
@pytest.mark.parametrize("size", [2, 3, 4, 5, 100])
def test_the_narrowest_width_that_holds_all(name: str, make: Any, size: int) -> None:
    low, high = LIMITS[name]
    for at in {0, 1, size // 2, size - 1}:
        for value in (low, high):
            x = [1] * size
            x[at] = value
            x[at - 1] = 3
            x = make(x)
            assert kind(x) == plain_kind(x)
            array = to_ndarray(x)
            assert array is not None
            assert array.dtype == plain_kind(x)
            assert array.tolist() == list(x)
            for odd in (low - 1, high + 1):
                y = list(x)
                y[at] = odd
                assert kind(make(y)) == plain_kind(y)
                wider = to_ndarray(make(y))
                assert wider is None if plain_kind(y) is None else wider.tolist() == y


@pytest.mark.parametrize(
    "stranger",
    [True, 1, 1.0, None, "1", Number(1), Real(1), Colour.RED, np.int64(1), np.float64(1), np.bool_(True),
     2**64, -(2**63) - 1, -(10**40), [1], 1j],
)  # fmt: skip
def test_one_stranger_anywhere_makes_it_nobodys(stranger: Any) -> None:
    for base in ([0.5, 1.5] * 40, [2, 3] * 40, [True, False] * 40, [300, -5] * 40, [2**63, 5] * 40):
        for at in (0, 1, 39, 78, 79):
            x = list(base)
            x[at] = stranger
            assert kind(x) == plain_kind(x)
            array = to_ndarray(x)
            if plain_kind(x) is None:
                assert array is None
            else:
                check(x, array.tolist())


def test_mixed_signs_beyond_int64_are_nobodys() -> None:
    for x in ([2**63, -1], [-1, 2**63], [-1, *[5] * 50, 2**64 - 1]):
        assert kind(x) is None
        assert to_ndarray(x) is None


def test_what_is_no_list() -> None:
    for x in (3, "ab", {1}, np.arange(3), b"ab", None):
        with pytest.raises(TypeError, match=f"expected a list or tuple, got {type(x).__name__}"):
            kind(x)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="expected a list or tuple"):
            to_ndarray(x)  # type: ignore[arg-type]

    class Mine(list):  # type: ignore[type-arg]
        pass

    assert kind(Mine([1, 2])) is None
    assert to_ndarray(Mine([1, 2])) is None
    assert kind([]) is None
    assert to_ndarray(()) is None


def test_same() -> None:
    text = "".join(["a", "b"])
    assert kind([text] * 5) == "same"
    assert kind([1.5]) == "float64"
    assert kind([[]] * 2) == "same"
    assert kind([[], []]) is None
    repeated = 2.5
    assert to_ndarray([repeated] * 3).tolist() == [2.5] * 3


def test_bits_of_floats() -> None:
    bits = [0, 1, 1 << 63, 0x7FF0000000000001, 0x7FF8DEADBEEF0001, 0xFFF8000000000000, 0x7FF0000000000000]
    x = [struct.unpack("<d", struct.pack("<Q", b))[0] for b in bits]
    array = to_ndarray(x)
    assert array is not None
    assert array.view("u8").tolist() == bits


def test_the_array_owns_its_memory() -> None:
    x = [1.5, 2.5]
    array = to_ndarray(x)
    assert array is not None
    assert array.flags.owndata
    assert array.flags.writeable
    array[0] = 9
    assert x == [1.5, 2.5]


numbers = (
    st.lists(st.integers(-200, 300))
    | st.lists(st.integers())
    | st.lists(st.integers(2**62, 2**65))
    | st.lists(st.floats())
    | st.lists(st.booleans())
    | st.lists(st.booleans() | st.integers(0, 3) | st.floats() | st.none())
)


@settings(deadline=None, max_examples=300)
@given(numbers)
def test_matches_the_plain_twin(x: list[Any]) -> None:
    assert kind(x) == kind(tuple(x)) == plain_kind(x)
    array = to_ndarray(x)
    expected = plain_kind([*x, *x[:1]]) if plain_kind(x) == "same" else plain_kind(x)
    if expected == "same":
        expected = plain_kind(x[:1])
    if expected is None:
        assert array is None
    else:
        assert array is not None
        assert array.dtype == expected
        check(x, array.tolist())


def test_references_are_left_alone() -> None:
    x = [10**i for i in range(19)] + [1000 + i for i in range(50)]
    before = [sys.getrefcount(item) for item in x]
    for _ in range(1000):
        to_ndarray(x)
        kind(x)
        to_ndarray([*x, None])
    assert [sys.getrefcount(item) for item in x] == before
