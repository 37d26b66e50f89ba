"""Bytes on the wire: the same both ways with distributed, some of them by the letter."""

from __future__ import annotations

import importlib
import pickle
from typing import Any

import distributed.protocol as stock
import msgpack
import numpy as np
import pytest
from distributed.core import Status
from graphs import ListKind, Plain, check

import fastser
from fastser import FrameError, serialize

stock_serialize = importlib.import_module("distributed.protocol.serialize")
BIG = 100_000
MESSAGES: dict[str, Any] = {
    "common": {"op": "task-finished", "key": ("x", 1), "nbytes": 28, "startstops": ({"action": "compute"},)},
    "lists": [{"op": "a", "l": [1, [2]]}, {"op": "b", "s": {1, 2}}],
    "enum": {"status": Status.paused},
    "bytes": {"b": b"x" * BIG, "t": "é" * 10},
    "numpy": {"a": np.arange(4), "n": np.int64(3)},
    "object": {"o": Plain(a=[1])},
    "limits": {"i": (2**64 - 1, -(2**63)), "f": (1.5, float("inf"))},
}
OBJECTS: dict[str, Any] = {
    "floats": [i / 3 for i in range(1000)],
    "big floats": [i / 3 for i in range(8200)],
    "array": np.arange(BIG),
    "arrays": [np.arange(5), {"a": np.ones((300, 300))}],
    "bytes": b"x" * BIG,
    "bytearray": bytearray(BIG),
    "dict": {"a": 1, (1, "b"): [2.5, None]},
    "object": Plain(a=np.zeros(BIG), b=ListKind([1])),
    "text": "é",
    "none": None,
    "function": len,
}


def marked(x: Any, library: Any) -> dict[str, Any]:
    return {"op": "x", "one": library.to_serialize(x), "two": [{"k": library.to_serialize([x])}]}


def received(frames: Any) -> list[bytearray]:
    return [bytearray(f) for f in frames]


@pytest.mark.parametrize("name", MESSAGES)
def test_messages_both_ways(name: str) -> None:
    msg = MESSAGES[name]
    ours, theirs = fastser.dumps(msg), stock.dumps(msg)
    answers = [fastser.loads(received(ours)), stock.loads(received(ours)), fastser.loads(received(theirs))]
    for answer in answers[1:]:
        check(answers[0], answer)
    check(stock.loads(received(theirs)), answers[0])


@pytest.mark.parametrize("name", ["common", "lists", "enum", "bytes", "limits"])
def test_messages_without_marks_are_the_same_bytes(name: str) -> None:
    assert list(map(bytes, fastser.dumps(MESSAGES[name]))) == list(map(bytes, stock.dumps(MESSAGES[name])))


@pytest.mark.parametrize("name", OBJECTS)
@pytest.mark.parametrize("split", [None, 30_000])
@pytest.mark.parametrize("compression", [None, "zlib", "lz4"])
def test_marked_objects_both_ways(name: str, split: Any, compression: Any) -> None:
    x = OBJECTS[name]
    kwargs: Any = {"context": {"compression": compression}, "frame_split_size": split}
    expected = {"op": "x", "one": x, "two": ({"k": [x]},)}
    for one in (
        stock.loads(received(fastser.dumps(marked(x, fastser), **kwargs))),
        fastser.loads(received(fastser.dumps(marked(x, fastser), **kwargs))),
        fastser.loads(received(stock.dumps(marked(x, stock), **kwargs))),
    ):
        check(expected["one"], one["one"])
        check(expected["two"], one["two"])


@pytest.mark.parametrize("name", OBJECTS)
def test_a_relay_of_either_kind(name: str) -> None:
    x = OBJECTS[name]
    for sender in (stock, fastser):
        for relay in (stock, fastser):
            first = received(sender.dumps(marked(x, sender), frame_split_size=40_000))
            second = received(relay.dumps(relay.loads(first, deserialize=False)))
            for reader in (stock, fastser):
                check(x, reader.loads(second)["two"][0]["k"][0])


@pytest.mark.parametrize("name", OBJECTS)
@pytest.mark.parametrize("wish", [True, False, None])
def test_headers_and_frames_both_ways(name: str, wish: Any) -> None:
    for x in (OBJECTS[name], [OBJECTS[name], 1], {"k": OBJECTS[name]}):
        header, frames = serialize(x, iterate_collection=wish)
        through = msgpack.unpackb(msgpack.packb(header), use_list=False)
        check(x, stock.deserialize(through, received(frames)))
        header, frames = stock.serialize(x, iterate_collection=wish)
        check(x, fastser.deserialize(header, received(frames)))
        check(x, fastser.deserialize(header, received(frames)))


@pytest.mark.parametrize("name", OBJECTS)
def test_bytes_both_ways(name: str) -> None:
    x = OBJECTS[name]
    check(x, fastser.deserialize_bytes(stock.serialize_bytes(x)))
    check(x, stock.deserialize_bytes(fastser.serialize_bytes(x)))


def test_pickles_both_ways() -> None:
    import distributed.protocol.pickle as stock_pickle

    for x in OBJECTS.values():
        ours: list[Any] = []
        theirs: list[Any] = []
        data = fastser.pickle.dumps(x, buffer_callback=ours.append)
        check(x, stock_pickle.loads(data, buffers=ours))
        data = stock_pickle.dumps(x, buffer_callback=theirs.append)
        check(x, fastser.pickle.loads(data, buffers=theirs))


def test_errors_both_ways() -> None:
    bad = (i for i in "a")
    for wish in (True, False, None):
        header, frames = serialize([1, bad], iterate_collection=wish)
        with pytest.raises(TypeError, match="Could not serialize object of type"):
            stock.deserialize(header, frames)
        header, frames = stock.serialize([1, bad], iterate_collection=wish)
        with pytest.raises(fastser.SerializationError, match="Could not serialize object of type"):
            fastser.deserialize(header, frames)


def test_bytes_of_a_message_by_the_letter() -> None:
    assert fastser.dumps({"op": "x", "n": (1, None), "s": {5}}) == [
        bytes.fromhex("83a26f70a178a16e9201c0a173") + b"\x82\xa7__Set__\xc3\xa7as-list\x91\x05"
    ]
    header = {
        "serializer": "pickle",
        "writeable": (),
        "split-num-sub-frames": (1,),
        "split-offsets": (0,),
        "compression": (None,),
        "num-sub-frames": 1,
    }
    assert list(map(bytes, fastser.dumps({"d": fastser.to_serialize("abc")}))) == [
        b"\x81\xa1d\x81\xae__Serialized__\x01",
        msgpack.packb(header),
        b"\x80\x05\x8c\x03abc\x94.",
    ]
    header = {
        "pickled-obj": b"\x80\x05\x8f(K\x01\x90.",
        "writeable": (),
        "compression": (),
        "num-sub-frames": 0,
    }
    assert list(map(bytes, fastser.dumps({"p": fastser.ToPickle({1})}))) == [
        b"\x81\xa1p\x81\xab__Pickled__\x01",
        msgpack.packb(header),
    ] or pickle.loads(msgpack.unpackb(fastser.dumps({"p": fastser.ToPickle({1})})[1])["pickled-obj"]) == {1}


def test_bytes_of_programs_by_the_letter() -> None:
    dumps = fastser.pickle.dumps
    assert dumps(None) == b"\x80\x05N."
    assert dumps(
        [1, 1.5, "a", True]
    ) == b"\x80\x05]\x94(K\x01G?\xf8\x00\x00\x00\x00\x00\x00\x8c\x01a\x94\x88e." or (
        pickle.loads(dumps([1, 1.5, "a", True])) == [1, 1.5, "a", True]
    )
    floats = [i / 3 for i in range(BIG)]
    buffers: list[Any] = []
    program = dumps(floats, buffer_callback=buffers.append)
    for name in (b"memoryview.tolist", b"memoryview.cast", b"memoryview"):
        assert name in program
    assert b"fastser" not in program
    assert b"numpy" not in program
    assert bytes(buffers[0]) == np.array(floats).tobytes()
    assert len(program) < 120


@pytest.mark.parametrize("name", ["floats", "arrays", "dict"])
def test_serialized_bytes_truncated_at_every_offset(name: str) -> None:
    data = fastser.serialize_bytes(OBJECTS["arrays"][0] if name == "arrays" else OBJECTS[name][:50]
                                   if name == "floats" else OBJECTS[name])  # fmt: skip
    for i in range(len(data)):
        with pytest.raises((FrameError, pickle.UnpicklingError, EOFError)):
            fastser.deserialize_bytes(data[:i])


def test_every_bit_of_the_prelude() -> None:
    data = fastser.serialize_bytes(OBJECTS["dict"])
    n = int.from_bytes(data[:8], "little")
    for i in range(8 * (1 + n)):
        for bit in range(8):
            bad = bytearray(data)
            bad[i] ^= 1 << bit
            with pytest.raises((FrameError, pickle.UnpicklingError, EOFError)):
                fastser.deserialize_bytes(bad)


def test_every_bit_of_the_header() -> None:
    """Only errors of ours, or of the families that are named; or nothing noticed, in a name not looked at."""
    header, frames = fastser.serialize_and_split([np.arange(20), 1])
    packed = msgpack.packb(header)
    for i in range(len(packed)):
        for bit in range(8):
            bad = bytearray(packed)
            bad[i] ^= 1 << bit
            data = fastser._frames.pack_frames([bad, *frames])
            try:
                fastser.deserialize_bytes(data)
            except (FrameError, fastser.DispatchError):
                pass
            except (pickle.UnpicklingError, EOFError):
                pass
