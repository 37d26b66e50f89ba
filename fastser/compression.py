"""Codecs by name, and compression only where it pays."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from fastser._frames import ensure_memoryview, host_array, nbytes
from fastser.errors import FrameError

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAX_SIZE = 2**31  # bytes; libraries of codecs often fail beyond, and distributed stops here too
PACKAGES = {"lz4": "lz4", "snappy": "python-snappy", "zstd": "zstandard"}  # codec -> package to install
ZSTD_LEVEL = 3

# Most output bytes per input byte that the format can express: what a size field may claim at most.
LZ4_RATIO = 255  # one more length byte makes a match 255 longer
SNAPPY_RATIO = 22  # a copy of 64 bytes takes 3
ZSTD_RATIO = 2**15  # a run of 128 KiB takes 4


class Compression(NamedTuple):
    """A codec: its name on the wire, and two functions from a buffer to a buffer."""

    name: str | None
    compress: Callable[[Any], Any]
    decompress: Callable[[Any], Any]


def _identity(data: Any) -> Any:
    return data


def _check_size(codec: str, claimed: int, found: int, ratio: int) -> None:
    """Refuse a size field that *found* bytes of the codec cannot hold, before memory is taken for it."""
    if claimed > found * ratio:
        raise FrameError(
            f"{codec}: size field claims {claimed} bytes, "
            f"expected at most {found * ratio} from {found} compressed bytes"
        )


def _zlib() -> Compression:
    def decompress(data: Buffer) -> bytes:
        inflater = zlib.decompressobj()  # takes memory as data appears
        out = inflater.decompress(data)
        if not inflater.eof:
            raise FrameError("zlib: expected an end of stream, found none")
        if inflater.unused_data:
            raise FrameError(
                f"zlib: expected nothing behind the end, found {len(inflater.unused_data)} bytes"
            )
        return out

    return Compression("zlib", zlib.compress, decompress)


def _lz4(block: ModuleType) -> Compression:
    def decompress(data: Buffer) -> bytearray:
        view = ensure_memoryview(data)
        if len(view) < 4:
            raise FrameError(f"lz4: expected a size field of 4 bytes, found {len(view)}")
        _check_size("lz4", int.from_bytes(view[:4], "little"), len(view) - 4, LZ4_RATIO)
        out: bytearray = block.decompress(view, return_bytearray=True)
        return out

    return Compression("lz4", block.compress, decompress)


def _snappy(snappy: ModuleType) -> Compression:
    def decompress(data: Buffer) -> bytes:
        view = ensure_memoryview(data)
        claimed = 0
        for i, byte in enumerate(view[:5]):
            claimed |= (byte & 0x7F) << (7 * i)
            if byte < 0x80:
                break
        else:
            raise FrameError(f"snappy: expected a size field of up to 5 bytes, found {bytes(view[:5])!r}")
        _check_size("snappy", claimed, len(view), SNAPPY_RATIO)
        out: bytes = snappy.decompress(view)
        return out

    return Compression("snappy", snappy.compress, decompress)


def _zstd(zstandard: ModuleType) -> Compression:
    # zstandard's objects are not thread-safe: one per call

    def compress(data: Buffer) -> bytes:
        out: bytes = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(data)
        return out

    def decompress(data: Buffer) -> memoryview:
        view = ensure_memoryview(data)
        claimed = zstandard.frame_content_size(view)
        if claimed < 0:
            raise FrameError(f"zstd: expected a size field, found none in {len(view)} bytes")
        _check_size("zstd", claimed, len(view), ZSTD_RATIO)
        out = host_array(claimed)
        # reading on behind the end shows whether more follows: data, or bytes that are no frame
        with zstandard.ZstdDecompressor().stream_reader(view, read_across_frames=True) as reader:
            found = reader.readinto(out) + len(reader.read(1))
        if found != claimed:
            more = " or more" if found > claimed else ""
            raise FrameError(f"zstd: size field claims {claimed} bytes, found {found}{more}")
        return out

    return Compression("zstd", compress, decompress)


compressions: dict[str | Literal[False] | None, Compression] = {
    None: Compression(None, _identity, _identity),
    False: Compression(None, _identity, _identity),
    "auto": Compression(None, _identity, _identity),
    "zlib": _zlib(),
}
for _module, _make in (("zstandard", _zstd), ("snappy", _snappy), ("lz4.block", _lz4)):
    try:
        _codec = _make(import_module(_module))
    except ImportError:
        continue
    compressions[_codec.name] = _codec
compressions["auto"] = compressions.get("lz4") or compressions.get("snappy") or compressions[None]


def _unknown(name: object) -> str:
    """Say that there is no codec *name*, which there are, and what to install."""
    hint = f"; install {PACKAGES[name]}" if isinstance(name, str) and name in PACKAGES else ""
    return f"unknown codec {name!r}, expected one of {', '.join(map(repr, compressions))}{hint}"


def _sample(view: memoryview, size: int, n: int) -> memoryview:
    """Take *n* stretches of *size* bytes, evenly spread over *view*, or all of it if that is less."""
    if size * n >= len(view):
        return view
    starts = ((len(view) - size) * (2 * i + 1) // (2 * n) for i in range(n))
    return memoryview(b"".join([view[start : start + size] for start in starts]))


def maybe_compress(
    payload: Buffer,
    *,
    min_size: int = 10_000,
    sample_size: int = 10_000,
    nsamples: int = 5,
    min_ratio: float = 0.7,
    compression: str | Literal[False] | None = "auto",
) -> tuple[str | None, Any]:
    """Compress *payload* if a sample of it shows that it pays.

    Parameters
    ----------
    payload : buffer
        Any object with a buffer.
    min_size : int
        Bytes below which nothing is compressed; nothing is above 2 GiB either.
    sample_size : int
        Bytes of each stretch of the sample. The places depend on the size of *payload* only.
    nsamples : int
        Number of stretches; with none, or of no size, nothing is compressed.
    min_ratio : float
        Largest size, compressed over plain, that pays: of the sample, then of the whole.
    compression : str, False or None
        A key of ``compressions``.

    Returns
    -------
    tuple of (str or None, buffer)
        The name of the codec and a compressed copy, or None and *payload* itself.

    Raises
    ------
    ValueError
        If there is no such codec here, or a size or number is negative.
    TypeError
        If *payload* has no buffer.

    Examples
    --------
    >>> name, data = maybe_compress(bytes(20_000), compression="zlib")
    >>> name, len(data) < 100
    ('zlib', True)
    >>> maybe_compress(b"short", compression="zlib")
    (None, b'short')
    """
    codec = compressions.get(compression)
    if codec is None:
        raise ValueError(_unknown(compression))
    if sample_size < 0 or nsamples < 0:
        raise ValueError(f"sample must not be negative, got {nsamples} of {sample_size} bytes")
    if not codec.name or not min_size <= nbytes(payload) <= MAX_SIZE:
        return None, payload
    view = ensure_memoryview(payload)
    sample = _sample(view, sample_size, nsamples)
    compressed = codec.compress(sample)
    if not len(sample) or len(compressed) > min_ratio * len(sample):
        return None, payload
    if sample is not view:
        compressed = codec.compress(view)
        if len(compressed) > min_ratio * len(view):
            return None, payload
    return codec.name, compressed


def decompress(header: dict[str, Any], frames: Iterable[Any]) -> list[Any]:
    """Decompress each frame with the codec that *header* names for it.

    Parameters
    ----------
    header : dict
        ``header["compression"]`` is a list or tuple of names of codecs, None or False for a plain frame.
    frames : iterable of buffer
        As many frames as names.

    Returns
    -------
    list of buffer
        Plain frames as they are, the others as new memory: writable from lz4 and zstd, else bytes.

    Raises
    ------
    FrameError
        If the header has no such list, names and frames are not equally many, a codec is not known here, or
        a frame does not hold what its codec or its size field says. A size that the frame cannot hold is
        refused before memory is taken for it.
    TypeError
        If a compressed frame has no buffer.

    Examples
    --------
    >>> import zlib
    >>> decompress({"compression": ["zlib", None]}, [zlib.compress(b"abc"), b"de"])
    [b'abc', b'de']
    """
    names = header.get("compression")
    if not isinstance(names, (list, tuple)):
        raise FrameError(f"header: expected a list of codecs under 'compression', found {names!r}")
    frames = list(frames)
    if len(names) != len(frames):
        raise FrameError(f"header: expected a codec for each of {len(frames)} frames, found {len(names)}")
    return [_decompress(i, name, frame) for i, (name, frame) in enumerate(zip(names, frames, strict=True))]


def _decompress(i: int, name: object, frame: Any) -> Any:
    """Decompress frame *i*."""
    if name is None or name is False:
        return frame
    codec = compressions.get(name) if isinstance(name, str) and name != "auto" else None
    if codec is None:
        raise FrameError(f"frame {i}: {_unknown(name)}")
    view = ensure_memoryview(frame)
    try:
        return codec.decompress(view)
    except MemoryError:
        raise
    except Exception as error:  # each codec has its own
        cause = str(error) or type(error).__name__
        raise FrameError(f"frame {i}: {len(view)} bytes are not {name} data: {cause}") from error
