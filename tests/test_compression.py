"""Codecs: with distributed both ways, sampling, and bad bytes."""

from __future__ import annotations

import gc
import itertools
import os
import random
import subprocess
import sys
import threading
import tracemalloc
import zlib
from typing import Any

import lz4.block
import numpy as np
import pytest
import zstandard
from distributed.protocol import compression as stock
from hypothesis import given
from hypothesis import strategies as st

from fastser import compression
from fastser.compression import Compression, compressions, decompress, maybe_compress
from fastser.errors import FrameError

NAMES = ["zlib", "lz4", "zstd", "snappy"]
names = pytest.mark.parametrize("name", NAMES)
DATA = np.arange(5000, dtype="i4").tobytes()
NOISE = random.Random(1).randbytes(50_000)


def undo(name: str, data: Any) -> Any:
    return decompress({"compression": [name]}, [data])[0]


def varint(n: int) -> bytes:
    out = bytearray()
    while n >= 0x80:
        out.append(n & 0x7F | 0x80)
        n >>= 7
    return bytes([*out, n])


def test_all_are_here() -> None:
    assert set(compressions) == set(stock.compressions) == {None, False, "auto", *NAMES}
    assert compressions["auto"].name == stock.compressions["auto"].name == "lz4"
    assert all(compressions[name].name == name for name in NAMES)


@names
@given(st.binary(max_size=300) | st.builds(bytes.__mul__, st.binary(max_size=5), st.integers(0, 5000)))
def test_distributed_reads_ours_and_we_read_its(name: str, data: bytes) -> None:
    assert bytes(stock.compressions[name].decompress(compressions[name].compress(data))) == data
    assert bytes(undo(name, stock.compressions[name].compress(data))) == data


@names
def test_any_buffer(name: str) -> None:
    array = np.arange(20_000).reshape(2, -1)
    for payload in (array, memoryview(array), array[:, ::2], np.asfortranarray(array), bytearray(array)):
        found, data = maybe_compress(payload, compression=name, min_ratio=1)
        assert found == name
        assert bytes(undo(name, data)) == memoryview(payload).tobytes()
        assert bytes(undo(name, bytearray(data))) == memoryview(payload).tobytes()


def test_what_is_writable() -> None:
    for name in ("lz4", "zstd"):
        assert not memoryview(undo(name, compressions[name].compress(DATA))).readonly


@pytest.mark.parametrize("name", [None, False])
def test_no_codec(name: Any) -> None:
    payload = bytes(20_000)
    assert maybe_compress(payload, compression=name) == (None, payload)
    assert decompress({"compression": (name,)}, [payload])[0] is payload
    device = object()
    assert decompress({"compression": (name,)}, iter([device]))[0] is device


@names
def test_it_pays_or_it_does_not(name: str) -> None:
    zeros = bytes(100_000)
    found, data = maybe_compress(zeros, compression=name)
    assert found == name and len(data) < 10_000
    none, same = maybe_compress(NOISE, compression=name)
    assert none is None and same is NOISE
    small = bytes(9_999)
    assert maybe_compress(small, compression=name)[1] is small
    assert maybe_compress(small, compression=name, min_size=100)[0] == name


def test_auto() -> None:
    assert maybe_compress(bytes(20_000))[0] == "lz4"


@given(
    st.integers(0, 40_000),
    st.integers(0, 40_000),
    st.sampled_from(NAMES),
    st.sampled_from([0, 100, 10_000]),
)
def test_the_same_decision_as_distributed(zeros: int, noise: int, name: str, min_size: int) -> None:
    """Where the sample is the whole, both must decide alike."""
    payload = bytes(zeros) + NOISE[:noise]
    ours = maybe_compress(payload, compression=name, min_size=min_size, sample_size=len(payload), nsamples=1)
    its = stock.maybe_compress(
        payload, compression=name, min_size=min_size, sample_size=len(payload), nsamples=1
    )
    assert ours == its


def counting(sizes: list[int]) -> Compression:
    def compress(data: Any) -> bytes:
        sizes.append(len(data))
        return zlib.compress(data)

    return Compression("counted", compress, zlib.decompress)


def test_sample_first(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    monkeypatch.setitem(compressions, "counted", counting(sizes))
    maybe_compress(bytes(200_000), compression="counted")
    assert sizes == [50_000, 200_000]
    sizes.clear()
    maybe_compress(NOISE * 4, compression="counted")
    assert sizes == [50_000]
    sizes.clear()
    assert maybe_compress(bytes(20_000), compression="counted")[0] == "counted"
    assert sizes == [20_000]  # the sample is the whole: once is enough
    sizes.clear()
    half = NOISE + bytes(100_000) + NOISE  # the sample pays, the whole does not
    found, _ = maybe_compress(half, compression="counted", nsamples=1, sample_size=90_000, min_ratio=0.3)
    assert found is None and sizes == [90_000, 200_000]


@pytest.mark.parametrize(("sample_size", "nsamples"), [(0, 5), (10, 0), (0, 0)])
def test_no_sample_no_compression(sample_size: int, nsamples: int) -> None:
    assert maybe_compress(bytes(20_000), sample_size=sample_size, nsamples=nsamples)[0] is None


@given(st.integers(1, 2000), st.integers(1, 300), st.integers(1, 9))
def test_sample_is_spread(total: int, size: int, n: int) -> None:
    view = memoryview((bytes(range(250)) * 8)[:total])
    sample = compression._sample(view, size, n)
    if size * n >= total:
        assert sample is view
    else:
        assert len(sample) == size * n
        for i in range(n):
            assert bytes(sample[size * i : size * (i + 1)]) in bytes(view)


def test_the_sample_is_the_same_every_time_and_leaves_random_alone() -> None:
    payload = NOISE[:20_000] + bytes(60_000) + NOISE
    state = random.getstate()
    assert len({maybe_compress(payload, compression=name, nsamples=3)[0] for name in ["zlib"] * 20}) == 1
    assert random.getstate() == state


def test_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compression.MAX_SIZE == 2**31
    monkeypatch.setattr(compression, "MAX_SIZE", 30_000)
    assert maybe_compress(bytes(30_000))[0] == "lz4"
    payload = bytes(30_001)
    assert maybe_compress(payload)[1] is payload


def test_bad_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ValueError, match="unknown codec 'brotli', expected one of None, False, 'auto', 'zlib'"
    ):
        maybe_compress(b"abc", compression="brotli")
    with pytest.raises(ValueError, match="negative, got 5 of -1 bytes"):
        maybe_compress(b"abc", sample_size=-1)
    with pytest.raises(ValueError, match="negative, got -2 of"):
        maybe_compress(b"abc", nsamples=-2)
    with pytest.raises(TypeError, match="list"):
        maybe_compress([1])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="int"):
        undo("zlib", 3)
    monkeypatch.delitem(compressions, "zstd")
    with pytest.raises(ValueError, match="install zstandard"):
        maybe_compress(b"abc", compression="zstd")


def test_bad_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    for header in ({}, {"compression": None}, {"compression": "zlib"}, {"compression": {"zlib": 1}}):
        with pytest.raises(FrameError, match="expected a list of codecs"):
            decompress(header, [b"abc"])
    for codecs in ([], [None, None]):
        with pytest.raises(FrameError, match=f"each of 1 frames, found {len(codecs)}"):
            decompress({"compression": codecs}, [b"abc"])
    for bad in ("brotli", "auto", 3, 0, True, [], b"zlib", ("zlib",)):
        with pytest.raises(FrameError, match=r"frame 1: unknown codec .*'zlib'"):
            decompress({"compression": [None, bad]}, [b"abc", b"abc"])
    monkeypatch.delitem(compressions, "snappy")
    with pytest.raises(FrameError, match=r"unknown codec 'snappy'.*install python-snappy"):
        undo("snappy", b"abc")


def test_arguments_are_left_alone() -> None:
    header = {"compression": ("zlib", None)}
    frames = [zlib.compress(b"abc"), b"de"]
    kept = list(frames)
    for _ in range(2):
        assert decompress(header, frames) == [b"abc", b"de"]
    assert frames == kept and header == {"compression": ("zlib", None)}


@names
def test_truncated_at_every_offset(name: str) -> None:
    data = bytes(compressions[name].compress(DATA[:300]))
    for cut in range(len(data)):
        with pytest.raises(FrameError, match=f"frame 0: .*{name}"):
            undo(name, data[:cut])


@names
def test_more_behind_the_end(name: str) -> None:
    data = bytes(compressions[name].compress(DATA[:300]))
    for more in (b"junk", data):
        with pytest.raises(FrameError, match=f"frame 0: .*{name}"):
            undo(name, data + more)


@names
def test_every_flipped_bit(name: str) -> None:
    data = bytes(compressions[name].compress(DATA[:300]))
    for bit in range(8 * len(data)):
        bad = bytearray(data)
        bad[bit // 8] ^= 1 << bit % 8
        try:
            undo(name, bad)
        except FrameError as error:
            assert str(error).startswith("frame 0: ")


@names
@given(st.binary(max_size=60))
def test_anything(name: str, data: bytes) -> None:
    try:
        undo(name, data)
    except FrameError as error:
        assert error.__cause__ is not None


def test_the_error_of_the_codec_is_the_cause() -> None:
    with pytest.raises(FrameError, match=r"frame 1: .*zlib") as caught:
        decompress({"compression": [None, "zlib"]}, [b"", b"not zlib"])
    assert isinstance(caught.value.__cause__, zlib.error)


def test_no_memory_failure_is_called_bad_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(data: Any) -> Any:
        raise MemoryError

    monkeypatch.setitem(compressions, "zlib", Compression("zlib", zlib.compress, fail))
    with pytest.raises(MemoryError):
        undo("zlib", b"abc")


@pytest.mark.parametrize(
    ("name", "lie"),
    [
        ("lz4", (2**31 - 1).to_bytes(4, "little") + lz4.block.compress(DATA)[4:1000]),
        ("lz4", b"\xff\xff\xff\xff" + bytes(20)),
        ("snappy", varint(2**32 - 1) + bytes(20)),
        ("snappy", b"\xff" * 20),
        ("zstd", b"\x28\xb5\x2f\xfd\xe0" + (2**40).to_bytes(8, "little") + bytes(20)),
        ("zstd", b"\x28\xb5\x2f\xfd\xe0" + (2**64 - 3).to_bytes(8, "little") + bytes(20)),
    ],
)
def test_no_memory_on_the_word_of_a_size_field(name: str, lie: bytes) -> None:
    undo(name, compressions[name].compress(DATA))
    tracemalloc.start()
    try:
        with pytest.raises(FrameError, match=f"frame 0: .*{name}.*size field"):
            undo(name, lie)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@names
def test_the_ratio_bound_is_no_limit_for_honest_data(name: str) -> None:
    for size in (0, 1, 1000, 2**17, 2**24):
        assert bytes(undo(name, compressions[name].compress(bytes(size)))) == bytes(size)


def test_zstd_at_its_best_ratio() -> None:
    size = 2**28  # runs of 128 KiB
    data = zstandard.ZstdCompressor(level=19).compress(bytearray(size))
    assert undo("zstd", data).nbytes == size


def test_zstd_frame_without_a_size() -> None:
    data = zstandard.ZstdCompressor(write_content_size=False).compress(DATA)
    with pytest.raises(FrameError, match="zstd: expected a size field, found none"):
        undo("zstd", data)


def test_a_codec_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    def mirror(data: Any) -> bytes:
        return bytes(data)[::-1]

    monkeypatch.setitem(compressions, "mirror", Compression("mirror", mirror, mirror))
    assert maybe_compress(NOISE, compression="mirror", min_ratio=1) == ("mirror", NOISE[::-1])
    assert undo("mirror", b"abc") == b"cba"


def test_without_the_packages() -> None:
    program = (
        "import sys; sys.modules.update({'lz4.block': None, 'snappy': None, 'zstandard': None})\n"
        "from fastser.compression import compressions, maybe_compress\n"
        "assert list(compressions) == [None, False, 'auto', 'zlib'], compressions\n"
        "assert maybe_compress(bytes(20_000))[0] is None\n"
        "assert maybe_compress(bytes(20_000), compression='zlib')[0] == 'zlib'\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)


def test_threads() -> None:
    wrong: list[str] = []

    def work(name: str) -> None:
        for _ in range(20):
            if bytes(undo(name, compressions[name].compress(DATA))) != DATA:
                wrong.append(name)

    threads = [threading.Thread(target=work, args=(name,)) for name in NAMES * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@names
def test_nothing_leaks(name: str) -> None:
    data = compressions[name].compress(DATA[:300])
    bad = bytes(data)[:-1]

    def exercise() -> None:
        maybe_compress(DATA, compression=name)
        undo(name, data)
        for call in itertools.repeat(lambda: undo(name, bad), 2):
            with pytest.raises(FrameError):
                call()

    for _ in range(20):
        exercise()
    gc.collect()
    before = sys.getallocatedblocks()
    for _ in range(2000):
        exercise()
    gc.collect()
    assert abs(sys.getallocatedblocks() - before) < 200
