"""What an object is, told in plain data; as a program: read objects by stock distributed, without fastser.

The program reads a pickled list of ``(header, frames)`` from stdin and writes their descriptions.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from array import array
from typing import Any

PLAIN = (type(None), bool, int, float, complex, str, bytes)


def describe(x: Any) -> Any:
    """Tell all that a trip must keep of *x*: exact types, flags and bytes."""
    typ = f"{type(x).__module__}.{type(x).__qualname__}"
    library = typ.partition(".")[0]
    if type(x) in PLAIN:
        return typ, repr(x)
    if isinstance(x, dict) and library == "builtins":
        return typ, [(describe(k), describe(v)) for k, v in x.items()]
    if isinstance(x, (list, tuple)):
        return typ, [describe(v) for v in x]
    if isinstance(x, (bytearray, array)):
        return typ, getattr(x, "typecode", ""), bytes(memoryview(x).cast("B"))
    if isinstance(x, memoryview):
        return typ, x.format, x.itemsize, x.shape, x.readonly, x.tobytes()
    if isinstance(x, BaseException):
        return typ, describe(x.args), describe(x.__dict__)
    if library == "numpy":
        return typ, _describe_numpy(x)
    if library == "scipy":
        items = sorted((str(k), describe(v)) for k, v in x.items()) if isinstance(x, dict) else None
        return typ, sorted((k, describe(v)) for k, v in x.__dict__.items()), items
    if library == "pyarrow":
        return typ, _describe_arrow(x)
    if hasattr(x, "fill_value"):  # sparse
        return typ, describe(x.coords), describe(x.data), x.shape, describe(x.fill_value)
    return typ, repr(x)


def _describe_numpy(x: Any) -> Any:
    import numpy as np

    if isinstance(x, np.dtype):
        return repr(x), x.str, x.itemsize, x.isalignedstruct, repr(x.metadata), repr(x.fields)
    if x is np.ma.masked:
        return "masked"
    if isinstance(x, np.ma.MaskedArray):
        mask = None if x.mask is np.ma.nomask else describe(np.asarray(x.mask))
        fill = None if x._fill_value is None else describe(np.asarray(x._fill_value))
        return describe(x.data), mask, fill, x.hardmask
    if isinstance(x, np.generic):
        return describe(x.dtype), x.tobytes()
    plain = x.tolist() if x.dtype.hasobject or x.dtype.kind == "T" else raw(x)
    flags = x.flags
    layout = flags.c_contiguous, flags.f_contiguous, flags.writeable
    repeats = [s == 0 and n > 1 for n, s in zip(x.shape, x.strides, strict=True) if x.size]
    return describe(x.dtype), x.shape, layout, repeats, plain


def raw(x: Any) -> bytes:
    """Return the bytes of an array in C order, padding between fields too."""
    data: bytes = (x.view(f"V{x.itemsize}") if x.dtype.fields and x.itemsize else x).tobytes()
    return data


def _describe_arrow(x: Any) -> Any:
    if hasattr(x, "mtime_ns"):
        return x.path, x.type, x.size, x.mtime_ns
    if hasattr(x, "schema"):
        return repr(x.schema), repr(x.schema.metadata), x.num_rows, x.to_pylist()
    return repr(x.type), x.to_pylist()


def pack(header: Any) -> Any:
    """Send a header through msgpack, as messages do."""
    import msgpack

    return msgpack.unpackb(msgpack.packb(header), use_list=False, strict_map_key=True)


def read_by_stock(encoded: list[tuple[Any, list[Any]]], in_writeable: bool = True) -> list[Any]:
    """Return the descriptions that another process, which has no fastser, makes of *encoded*."""
    kind = bytearray if in_writeable else bytes
    data = pickle.dumps([(pack(h), [kind(memoryview(f)) for f in frames]) for h, frames in encoded])
    done = subprocess.run([sys.executable, __file__], input=data, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return pickle.loads(done.stdout)


def main() -> None:
    """Read, describe, write."""
    sys.modules["fastser"] = None  # type: ignore[assignment]
    from distributed.protocol import deserialize

    out = [describe(deserialize(header, frames)) for header, frames in pickle.load(sys.stdin.buffer)]
    assert not [name for name in sys.modules if name.startswith("fastser.")]
    sys.stdout.buffer.write(pickle.dumps(out))


if __name__ == "__main__":
    main()
