"""Ways of an object out and back, for the tests of handlers."""

from __future__ import annotations

from typing import Any

from distributed.protocol import deserialize as stock_deserialize
from stock_reader import pack

import fastser


def trip(x: Any) -> Any:
    header, frames = fastser.serialize(x, on_error="raise")
    return fastser.deserialize(pack(header), [bytearray(f) for f in frames])


def nested(x: Any) -> Any:
    return trip({"a": [x]})["a"][0]


def stock(x: Any) -> Any:
    header, frames = fastser.serialize(x, on_error="raise")
    return stock_deserialize(pack(header), [bytearray(f) for f in frames])
