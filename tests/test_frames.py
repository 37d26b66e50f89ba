"""Frames: against their plain twin, against distributed, and against bad bytes."""

from __future__ import annotations

import array
import gc
import itertools
import mmap
import pickle
import struct
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import reference
from distributed.protocol import utils as stock
from hypothesis import given
from hypothesis import strategies as st

from fastser import _frames
from fastser._frames import (
    BIG_BYTES_SHARD_SIZE,
    ensure_memoryview,
    frame_split_size,
    host_array,
    merge_frames,
    merge_memoryviews,
    nbytes,
    pack_frames,
    pack_frames_prelude,
    unpack_frames,
)
from fastser.errors import FrameError

KINDS: dict[str, Callable[[bytes], Any]] = {
    "bytes": bytes,
    "bytearray": bytearray,
    "memoryview": memoryview,
    "array": lambda data: array.array("B", data),
    "numpy": lambda data: np.frombuffer(data, "u1"),
    "PickleBuffer": pickle.PickleBuffer,
}
frames_of_bytes = st.lists(st.binary(max_size=40), max_size=8)


def grid(order: str = "C", dtype: str = "i4") -> np.ndarray[Any, Any]:
    return np.array(np.arange(12).reshape(3, 4), dtype=dtype, order=order)


BUFFERS = {
    "bytes": b"abcdef",
    "bytearray": bytearray(b"abcdef"),
    "array": array.array("d", [1.5, -2.5]),
    "PickleBuffer": pickle.PickleBuffer(b"abc"),
    "PickleBuffer 2-D": pickle.PickleBuffer(grid()),
    "2-D": grid(),
    "2-D view": memoryview(grid()),
    "Fortran": grid("F"),
    "Fortran view": memoryview(grid("F")),
    "rows": grid()[::2],
    "columns": grid()[:, ::2],
    "backwards": grid()[::-1, ::-1],
    "3-D transposed": np.arange(24, dtype="f8").reshape(2, 3, 4).transpose(1, 0, 2),
    "broadcast": np.broadcast_to(np.array([1, 2], "i2"), (3, 2)),
    "0-d": np.array(7.5),
    "big-endian": grid(dtype=">i4"),
    "big-endian columns": grid(dtype=">i4")[:, 1:3],
    "struct": np.array([(1, 2.5), (3, 4.5)], [("a", "i2"), ("b", "f8")]),
    "bool": np.array([True, False]),
    "signed": memoryview(b"abc").cast("b"),
    "char": memoryview(b"abc").cast("c"),
    "strided bytes": memoryview(b"abcdef")[::2],
    "one item, strided": memoryview(b"abcdef")[::6],
    "complex": np.array([1 + 2j]),
    "empty": b"",
    "empty bytearray": bytearray(),
    "no rows": np.empty((0, 3)),
    "no columns": memoryview(np.empty((2, 0))),
    "empty strided": memoryview(b"")[::2],
}


def logical(obj: Any) -> bytes:
    """The bytes of *obj*, elements in C order."""
    return memoryview(obj).tobytes()


def test_host_array() -> None:
    view = host_array(5)
    assert (view.nbytes, view.format, view.ndim, view.readonly) == (5, "B", 1, False)
    view[:] = b"abcde"
    assert bytes(view) == b"abcde"
    assert host_array(0).nbytes == 0
    with pytest.raises(ValueError, match="-1 bytes"):
        host_array(-1)


@pytest.mark.parametrize("obj", BUFFERS.values(), ids=BUFFERS)
def test_ensure_memoryview(obj: Any) -> None:
    view = ensure_memoryview(obj)
    assert type(view) is memoryview
    assert (view.ndim, view.format, view.itemsize, view.c_contiguous) == (1, "B", 1, True)
    assert view.tobytes() == logical(obj)
    whole = memoryview(obj)
    if whole.c_contiguous or not whole.nbytes:
        assert view.readonly == whole.readonly
    else:
        assert not view.readonly
    assert ensure_memoryview(view) is view or not view.nbytes


@pytest.mark.parametrize("obj", BUFFERS.values(), ids=BUFFERS)
def test_nbytes(obj: Any) -> None:
    assert nbytes(obj) == len(logical(obj))


def test_nbytes_of_other_memory() -> None:
    class Device:
        nbytes = 12

    assert nbytes(Device()) == 12
    assert nbytes(host_array(3)) == 3
    with pytest.raises(TypeError, match="int"):
        nbytes(3)
    with pytest.raises(TypeError, match="list"):
        nbytes([1, 2])


def test_ensure_memoryview_copies_nothing_contiguous() -> None:
    for base in (bytearray(b"abcdefgh"), np.zeros(4, "i2"), np.zeros((2, 2), ">i2"), array.array("d", [0.0])):
        view = ensure_memoryview(base)
        view[0] = 77
        assert logical(base)[0] == 77
    base = np.zeros((2, 2))
    view = ensure_memoryview(memoryview(base))
    assert view.obj is base
    assert ensure_memoryview(np.zeros((2, 3), order="F")).nbytes == 48


def test_ensure_memoryview_of_a_map() -> None:
    with mmap.mmap(-1, 8) as room:
        room[:3] = b"abc"
        view = ensure_memoryview(room)
        assert bytes(view[:3]) == b"abc" and not view.readonly
        view.release()


def test_an_empty_view_does_not_keep_its_object() -> None:
    base = np.empty((0, 3))
    gone = weakref.ref(base)
    view = ensure_memoryview(base)
    del base
    assert gone() is None and view.nbytes == 0


@pytest.mark.parametrize("obj", [None, 3, "text", [1], object()])
def test_no_buffer(obj: Any) -> None:
    name = type(obj).__name__
    for call in (ensure_memoryview, frame_split_size, unpack_frames):
        with pytest.raises(TypeError, match=name):
            call(obj)
    with pytest.raises(TypeError, match=name):
        pack_frames([b"a", obj])
    with pytest.raises(TypeError, match=name):
        pack_frames_prelude([b"a", obj])
    with pytest.raises(TypeError, match=name):
        merge_frames([b"a", obj])


def test_a_released_view_is_refused() -> None:
    view = memoryview(bytearray(b"abc"))
    view.release()
    calls: list[Callable[[], Any]] = [
        lambda: ensure_memoryview(view),
        lambda: nbytes(view),
        lambda: frame_split_size(view),
        lambda: merge_frames([view, b"a"]),
        lambda: merge_memoryviews([memoryview(b"a"), view]),
        lambda: pack_frames([view]),
        lambda: unpack_frames(view),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="released"):
            call()


def test_a_buffer_that_is_not_handed_out() -> None:
    with pytest.raises((ValueError, BufferError)):
        ensure_memoryview(np.array(["2020-01-01"], "M8[D]"))


@given(st.binary(max_size=200), st.integers(1, 64), st.sampled_from(sorted(KINDS)))
def test_split_matches_reference(data: bytes, limit: int, kind: str) -> None:
    views = frame_split_size(KINDS[kind](data), limit)
    assert [bytes(view) for view in views] == reference.split(data, limit)


@given(st.binary(max_size=200), st.integers(1, 64))
def test_split_matches_distributed(data: bytes, limit: int) -> None:
    assert frame_split_size(data, limit) == stock.frame_split_size(data, limit)


@pytest.mark.parametrize("limit", [1, 3, 8, 10, 1000])
@pytest.mark.parametrize("obj", BUFFERS.values(), ids=BUFFERS)
def test_split_cuts_bytes_of_any_buffer(obj: Any, limit: int) -> None:
    views = frame_split_size(obj, limit)
    assert [bytes(view) for view in views] == reference.split(logical(obj), limit)
    assert {(view.ndim, view.format) for view in views} == {(1, "B")}
    assert len({id(view.obj) for view in views}) == 1
    assert bytes(merge_frames(views)) == logical(obj)


def test_split_is_a_view() -> None:
    base = bytearray(10)
    views = frame_split_size(base, 4)
    base[9] = 5
    assert views[2][1] == 5
    assert frame_split_size(memoryview(b"abc"))[0].readonly


def test_split_limits() -> None:
    assert BIG_BYTES_SHARD_SIZE == stock.BIG_BYTES_SHARD_SIZE == 2**26
    base = np.zeros(2**26 + 1, "u1")
    for views in (frame_split_size(base), frame_split_size(base, None), frame_split_size(base, 0)):
        assert [view.nbytes for view in views] == [2**26, 1]
    assert len(frame_split_size(b"abc", 2**200)) == 1
    with pytest.raises(ValueError, match="-5 bytes"):
        frame_split_size(b"abc", -5)
    with pytest.raises(TypeError):
        frame_split_size(b"abc", "3")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        frame_split_size(b"abc", 1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("writeable", [False, True])
@given(data=st.data())
def test_merge_memoryviews_matches_distributed(writeable: bool, data: st.DataObject) -> None:
    base = bytearray(range(24)) if writeable else bytes(range(24))
    whole = memoryview(base).cast(data.draw(st.sampled_from("BbHI")))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), min_size=2, max_size=6)))
    pieces = [whole[a:b] for a, b in itertools.pairwise(cuts)]
    if data.draw(st.booleans()):
        pieces = data.draw(st.permutations(pieces))
    try:
        expected = stock.merge_memoryviews(pieces)
    except ValueError:
        with pytest.raises(ValueError, match="does not start where the previous ends"):
            merge_memoryviews(pieces)
    else:
        merged = merge_memoryviews(pieces)
        assert merged == expected and merged.tobytes() == expected.tobytes()
        assert (merged.format, merged.readonly) == (expected.format, expected.readonly)
        if merged.nbytes:
            assert merged.obj is base


def test_merge_memoryviews_of_few() -> None:
    assert merge_memoryviews([]).nbytes == 0
    one = memoryview(b"abc")
    assert merge_memoryviews([one]) is one
    none = memoryview(b"")
    assert merge_memoryviews([none, none]) is none
    assert bytes(merge_memoryviews(iter([one[:1], one[1:]]))) == b"abc"


def test_merge_memoryviews_lets_empty_pieces_stand_anywhere() -> None:
    whole = memoryview(b"abcdef")
    pieces = [memoryview(b"")[:], whole[1:3], memoryview(bytearray()), whole[3:4], memoryview(b"")]
    assert bytes(merge_memoryviews(pieces)) == b"bcd"


def test_merge_memoryviews_stays_read_only() -> None:
    whole = memoryview(bytearray(b"abcdef"))
    assert not merge_memoryviews([whole[:2], whole[2:]]).readonly
    assert merge_memoryviews([whole[:2], whole[2:].toreadonly()]).readonly
    assert merge_frames([whole[:2].toreadonly(), whole[2:]]).readonly


@pytest.mark.parametrize(
    ("pieces", "error", "match"),
    [
        ([b"ab", memoryview(b"c")], TypeError, "piece 0: Expected memoryview, got bytes"),
        ([memoryview(b"ab"), b"c"], TypeError, "piece 1: expected memoryview, got bytes"),
        ([memoryview(b"ab"), memoryview(b"cd")], ValueError, "piece 1: different buffer"),
        ([memoryview(grid())[:], memoryview(grid())], ValueError, "piece 0 has 2 dimensions, not 1"),
        ([memoryview(b"abcd")[::2], memoryview(b"x")], ValueError, "piece 0: .*non-contiguous"),
    ],
)
def test_merge_memoryviews_refuses(pieces: list[Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        merge_memoryviews(pieces)
    with pytest.raises(error):
        stock.merge_memoryviews(pieces)


def test_merge_memoryviews_says_how_far_off() -> None:
    base = bytes(range(16))
    whole = memoryview(base)
    with pytest.raises(ValueError, match=r"piece 1 does not start where the previous ends.*found 2"):
        merge_memoryviews([whole[:3], whole[5:]])
    with pytest.raises(ValueError, match="found -1"):
        merge_memoryviews([whole[:3], whole[2:]])
    with pytest.raises(ValueError, match="inconsistent format: I vs B"):
        merge_memoryviews([whole[:4], whole[4:].cast("I")])


def test_merge_of_an_owner_that_is_not_flat() -> None:
    for owner in (grid(), grid("F"), grid(dtype=">i4")):
        whole = pickle.PickleBuffer(owner).raw()
        assert bytes(merge_memoryviews([whole[:5], whole[5:9]])) == bytes(whole[:9])
        assert bytes(merge_frames([whole[:5], whole[5:9]])) == bytes(whole[:9])
    strided = np.arange(8, dtype="u1")[::2]
    one, two = memoryview(strided)[:1], memoryview(strided)[1:2]
    assert bytes(merge_frames([one, two])) == b"\x00\x02"
    with pytest.raises(ValueError, match="does not start"):
        merge_memoryviews([one, two])
    with pytest.raises(ValueError, match="one contiguous buffer"):
        merge_memoryviews([one, memoryview(b"")])
    assert bytes(merge_frames([one, b""])) == b"\x00"


@given(st.lists(st.tuples(st.binary(max_size=30), st.sampled_from(sorted(KINDS))), max_size=6))
def test_merge_frames_joins_anything(parts: list[tuple[bytes, str]]) -> None:
    merged = merge_frames([KINDS[kind](data) for data, kind in parts])
    assert bytes(merged) == b"".join(data for data, _ in parts)


@given(st.binary(max_size=200), st.integers(1, 64))
def test_merge_frames_undoes_split_without_a_copy(data: bytes, limit: int) -> None:
    merged = merge_frames(frame_split_size(data, limit))
    assert merged == data
    if data:
        assert merged.obj is data


def test_merge_frames_copies_once_and_large() -> None:
    parts = [np.full(2**20 + 3, i, "u1") for i in range(3)]
    merged = merge_frames(parts)
    assert merged.tobytes() == b"".join(part.tobytes() for part in parts)
    assert not merged.readonly
    one = np.ones(3)
    assert merge_frames([one]) is one
    assert merge_frames([]).nbytes == 0
    apart = memoryview(b"abcdef")
    assert bytes(merge_frames([apart[3:], apart[:3]])) == b"defabc"


@given(frames_of_bytes, st.sampled_from(sorted(KINDS)))
def test_pack_matches_reference_and_distributed(frames: list[bytes], kind: str) -> None:
    given = [KINDS[kind](frame) for frame in frames]
    assert pack_frames(given) == pack_frames(iter(given)) == stock.pack_frames(frames)
    assert pack_frames(given) == reference.pack(frames)
    assert pack_frames_prelude(given) == stock.pack_frames_prelude(frames)
    assert stock.unpack_frames(pack_frames(given)) == frames


@pytest.mark.parametrize("obj", BUFFERS.values(), ids=BUFFERS)
def test_pack_any_buffer(obj: Any) -> None:
    assert pack_frames([obj, b"x"]) == reference.pack([logical(obj), b"x"])


def outcome(call: Callable[[], Any]) -> Any:
    """What *call* returns, as bytes, or that it refused."""
    try:
        out = call()
    except (FrameError, reference.Bad, struct.error, AssertionError):
        return "refused"
    if isinstance(out, tuple):
        return [bytes(frame) for frame in out[0]], out[1]
    return [bytes(frame) for frame in out]


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("remainder", [False, True])
@given(frames=frames_of_bytes, tail=st.binary(max_size=10), cut=st.integers(0, 100))
def test_unpack_matches_reference_and_distributed(
    remainder: bool, partial: bool, frames: list[bytes], tail: bytes, cut: int
) -> None:
    options: dict[str, Any] = {"remainder": remainder, "partial": partial}
    packed = reference.pack(frames) + tail
    for data in (packed, packed[: len(packed) - cut]):
        ours = outcome(lambda data=data: unpack_frames(data, **options))
        assert ours == outcome(lambda data=data: reference.unpack(data, **options))
        assert ours == outcome(lambda data=data: stock.unpack_frames(data, **options))


@given(st.binary(max_size=64), st.booleans(), st.booleans())
def test_unpack_of_anything(data: bytes, remainder: bool, partial: bool) -> None:
    ours = outcome(lambda: unpack_frames(data, remainder=remainder, partial=partial))
    assert ours == outcome(lambda: reference.unpack(data, remainder, partial))


@pytest.mark.parametrize("partial", [False, True])
def test_truncated_at_every_offset(partial: bool) -> None:
    frames = [b"abc", b"", b"defgh", b"i"]
    packed = pack_frames(frames)
    for cut in range(len(packed)):
        ours = outcome(lambda cut=cut: unpack_frames(packed[:cut], partial=partial))
        assert ours == outcome(lambda cut=cut: reference.unpack(packed[:cut], partial=partial))
        assert partial or ours == "refused"


def test_every_flipped_bit_of_the_prelude() -> None:
    packed = pack_frames([b"abc", b"", b"defgh", b"i"])
    for bit in range(8 * len(pack_frames_prelude([b""] * 4))):
        bad = bytearray(packed)
        bad[bit // 8] ^= 1 << bit % 8
        for options in itertools.product([False, True], repeat=2):
            ours = outcome(lambda bad=bad, o=options: unpack_frames(bad, remainder=o[0], partial=o[1]))
            assert ours == outcome(lambda bad=bad, o=options: reference.unpack(bytes(bad), *o))


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "prelude at byte offset 0: expected 8 bytes, found 0"),
        (b"1234567", "prelude at byte offset 0: expected 8 bytes, found 7"),
        (struct.pack("<QQ", 2, 0), "prelude at byte offset 8: expected 16 bytes, found 8"),
        (struct.pack("<Q", 2**61), f"expected {2**64} bytes, found 0"),
        (struct.pack("<Q", 2**64 - 1) + bytes(64), f"expected {(2**64 - 1) * 8} bytes, found 64"),
        (struct.pack("<3Q", 2, 1, 9) + b"abcd", "frame 1 at byte offset 25: expected 9 bytes, found 3"),
        (struct.pack("<3Q", 2, 1, 2**64 - 1) + b"abcd", f"frame 1 .*expected {2**64 - 1} bytes, found 3"),
        (struct.pack("<3Q", 2, 2**63, 2**63), f"frame 0 .*expected {2**63} bytes, found 0"),
    ],
)
def test_lies_are_named(data: bytes, match: str) -> None:
    with pytest.raises(FrameError, match=match):
        unpack_frames(data)


def test_unpack_gives_views() -> None:
    base = bytearray(pack_frames([b"abc", b"de"]))
    frames = unpack_frames(base)
    base[24] = ord("z")
    assert bytes(frames[0]) == b"zbc" and frames[0].obj is base
    assert all(frame.readonly for frame in unpack_frames(bytes(base)))
    wide = np.frombuffer(pack_frames([b"abcd", b"efgh"]), "i4")
    assert [bytes(frame) for frame in unpack_frames(wide)] == [b"abcd", b"efgh"]


def test_unpack_a_stream() -> None:
    stream: Any = pack_frames([b"a", b"b"]) + pack_frames([]) + pack_frames([b"c"])
    found = []
    while len(stream):
        *frames, stream = unpack_frames(stream, remainder=True)
        found.append([bytes(frame) for frame in frames])
    assert found == [[b"a", b"b"], [], [b"c"]]


def test_partial_counts_an_empty_frame_at_the_end_as_missing() -> None:
    packed = pack_frames([b"a", b"", b""])
    assert unpack_frames(packed, partial=True) == stock.unpack_frames(packed, partial=True)
    assert unpack_frames(packed, partial=True)[1] == [0, 0]


def exercise() -> None:
    """Every function once or more, on good arguments and on bad ones."""
    base = bytearray(64)
    views = frame_split_size(base, 7)
    merge_memoryviews(views)
    merge_frames(views)
    merge_frames([b"abc", base, np.zeros(3)])
    packed = pack_frames([base, b"abc", memoryview(base)[::2]])
    unpack_frames(packed, remainder=True)
    unpack_frames(packed[: 32 + 64], partial=True)
    ensure_memoryview(np.zeros((2, 2), ">i4"))
    ensure_memoryview(np.zeros((2, 2), order="F"))
    nbytes(np.zeros(3))
    failing: list[Callable[[], Any]] = [
        lambda: unpack_frames(packed[:-1]),
        lambda: unpack_frames(packed[:20]),
        lambda: merge_memoryviews([views[0], memoryview(b"abc")]),
        lambda: merge_memoryviews([views[0], views[2]]),
        lambda: merge_memoryviews([views[0], b"abc"]),  # type: ignore[list-item]
        lambda: merge_frames([b"abc", 3]),
        lambda: pack_frames([b"abc", 3]),  # type: ignore[list-item]
        lambda: ensure_memoryview(3),  # type: ignore[arg-type]
        lambda: frame_split_size(base, -1),
        lambda: nbytes(3),
        lambda: host_array(-1),
    ]
    for call in failing:
        with pytest.raises((TypeError, ValueError)):
            call()


def test_nothing_leaks() -> None:
    for _ in range(50):
        exercise()
    gc.collect()
    before = sys.getallocatedblocks()
    for _ in range(2000):
        exercise()
    gc.collect()
    assert abs(sys.getallocatedblocks() - before) < 200


def test_buffers_and_references_are_given_back() -> None:
    base = bytearray(64)
    count = sys.getrefcount(base)
    views = frame_split_size(base, 7)
    merged = [merge_memoryviews(views), merge_frames(views)]
    with pytest.raises(FrameError):
        unpack_frames(base[:3])
    with pytest.raises(BufferError):
        base.append(1)
    del views, merged
    assert sys.getrefcount(base) == count
    base.append(1)  # no export is left


def test_threads() -> None:
    frames = [np.full(2**20, i, "u1") for i in range(4)]
    expected = b"".join(frame.tobytes() for frame in frames)
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(10):
            if merge_frames(frames) != expected or unpack_frames(pack_frames(frames))[i] != frames[i]:
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_every_function_is_documented() -> None:
    for name in _frames.__dict__:
        function = getattr(_frames, name)
        if getattr(function, "__module__", "") == "fastser._frames" and callable(function):
            assert ">>> " in function.__doc__, name
