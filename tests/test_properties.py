"""Random graphs come back as the same graphs: exact types, bits, sharing and cycles; read by stock pickle."""

from __future__ import annotations

import io
import pickle
import random
import struct
from typing import Any

import numpy as np
import pytest
from graphs import DictKind, ListKind, Peek, PeekItems, PeekState, Plain, Slotted, check, difference
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fastser
import fastser.pickle

LEAVES = ("atom", "block", "ints", "bytearray", "big", "array", "repeat")
GROWING = ("list", "dict", "set", "plain", "slotted", "listkind", "dictkind")
MADE = ("tuple", "frozenset", "peek", "peekstate", "peekitems", "sharedtuple")
INTS = [0, 1, -1, 255, 256, 2**31, -(2**31) - 1, 2**63 - 1, 2**63, -(2**63) - 1, 2**64, 10**30]
TEXTS = ["", "a", "\udcff", "é" * 3, "ab" * 200, b"", b"x" * 300]
SPECIAL = st.sampled_from([*INTS, *TEXTS, True, False, None, 0.0, -0.0, 1.0, float("inf")])
ATOMS = (
    SPECIAL | st.integers() | st.text(max_size=5) | st.binary(max_size=5) | st.floats() | st.complex_numbers()
)


@st.composite
def graphs(draw: Any) -> Any:
    """Return a function that builds one graph, so that nobody but the graph holds its parts."""
    n = draw(st.integers(1, 14))
    plan = [
        (
            draw(st.sampled_from(LEAVES + GROWING * 2 + MADE)),
            [draw(st.integers(0, 1000)) for _ in range(draw(st.integers(0, 4)))],
            draw(ATOMS),
        )
        for _ in range(n)
    ]
    return Maker(plan)


class Maker:
    """Builds the same graph at each call."""

    def __init__(self, plan: list[Any]):
        self.plan = plan

    def __repr__(self) -> str:
        return repr(self.plan)

    def __call__(self) -> Any:
        return build(self.plan)


def build(plan: list[Any]) -> Any:
    nodes: list[Any] = []
    hashable: list[bool] = []
    for i, (kind, edges, atom) in enumerate(plan):
        inner = [e % i for e in edges] if i else []
        node: Any
        good = kind in ("atom", "plain", "slotted", "peek", "peekstate", "peekitems")
        if kind == "atom":
            node = atom
        elif kind == "block":
            node = [j / 7 for j in range(60 + len(edges))]
        elif kind == "ints":
            node = list(range(-5, 70))
        elif kind == "bytearray":
            node = bytearray(b"abc" * len(edges))
        elif kind == "big":
            node = bytearray(bytes([i]) * 66_000)
        elif kind == "array":
            node = np.full(3 if len(edges) % 2 else 9000, float(i))
        elif kind == "repeat":
            node = [atom] * 40
        elif kind in ("tuple", "sharedtuple"):
            node = tuple([nodes[j] for j in inner] * (1 if kind == "tuple" else 2))
            good = all(hashable[j] for j in inner)
        elif kind == "frozenset":
            node = frozenset([nodes[j] for j in inner if hashable[j]])
            good = True
        elif kind.startswith("peek"):
            node = {"peek": Peek, "peekstate": PeekState, "peekitems": PeekItems}[kind](
                nodes[inner[0]] if inner else None
            )
        else:
            node = {"list": list, "dict": dict, "set": set, "plain": Plain, "slotted": Slotted,
                    "listkind": ListKind, "dictkind": DictKind}[kind]()  # fmt: skip
        if kind in ("plain", "slotted") or kind.startswith("peek"):
            node.tag = i
        nodes.append(node)
        hashable.append(good)
    for i, (kind, edges, _) in enumerate(plan):
        node = nodes[i]
        inner = [e % len(nodes) for e in edges]
        if kind in ("list", "listkind"):
            node.extend(nodes[j] for j in inner)
        elif kind in ("dict", "dictkind"):
            for k, j in enumerate(inner):
                node[nodes[j] if hashable[j] and k % 2 else f"k{k}"] = nodes[inner[0]]
        elif kind == "set":
            node.update(nodes[j] for j in inner if hashable[j])
        elif kind == "plain":
            for k, j in enumerate(inner):
                setattr(node, f"a{k}", nodes[j])
        elif kind == "slotted" and inner:
            node.part = nodes[inner[0]]
        if kind == "listkind" and len(inner) > 2:
            node.attribute = nodes[inner[2]]
    top = [nodes[e % len(nodes)] for e in plan[-1][1]]
    return [top, nodes[-1]] if len(top) != 1 else nodes[-1]


def through_dumps(x: Any) -> Any:
    return pickle.loads(fastser.pickle.dumps(x))


def through_buffers(x: Any) -> Any:
    buffers: list[Any] = []
    data = fastser.pickle.dumps(x, buffer_callback=buffers.append)
    return pickle.loads(data, buffers=buffers)


def through_some_buffers(x: Any) -> Any:
    """Every second buffer goes in-band."""
    buffers: list[Any] = []
    calls: list[Any] = []

    def keep(buffer: Any) -> bool:
        calls.append(buffer)
        if len(calls) % 2:
            buffers.append(buffer)
        return not len(calls) % 2

    data = fastser.pickle.dumps(x, buffer_callback=keep)
    return pickle.loads(data, buffers=buffers)


def through_pickler(x: Any) -> Any:
    file = io.BytesIO()
    fastser.pickle.Pickler(file).dump(x)
    return pickle.loads(file.getvalue())


def through_serialize(x: Any) -> Any:
    header, frames = fastser.serialize(x, on_error="raise")
    if header["serializer"] != "pickle":
        return fastser.deserialize(header, frames)
    return pickle.loads(frames[0], buffers=frames[1:])


def through_message(x: Any) -> Any:
    return fastser.loads(fastser.dumps({"x": fastser.to_serialize(x)}, on_error="raise"))["x"]


WAYS = [
    through_dumps,
    through_buffers,
    through_some_buffers,
    through_pickler,
    through_serialize,
    through_message,
]
relaxed = settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=150)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@relaxed
@given(make=graphs())
def test_graphs_come_back_as_they_were(way: Any, make: Any) -> None:
    x = make()
    check(x, way(x))


@relaxed
@given(make=graphs())
def test_the_standard_pickler_agrees(make: Any) -> None:
    """The comparison itself is judged by a pickler that is known to be right."""
    x = make()
    check(x, pickle.loads(pickle.dumps(x, protocol=5)))


@relaxed
@given(make=graphs())
def test_a_dump_leaves_the_graph_alone(make: Any) -> None:
    x = make()
    fastser.pickle.dumps(x)
    fastser.serialize(x)
    check(make(), x)


@relaxed
@given(make=graphs(), other=graphs())
def test_a_pickler_remembers_between_dumps(make: Any, other: Any) -> None:
    x, y = make(), other()
    file = io.BytesIO()
    pickler = fastser.pickle.Pickler(file)
    for obj in (x, y, x, [y, x]):
        pickler.dump(obj)
    file.seek(0)
    unpickler = pickle.Unpickler(file)
    check([x, y, x, [y, x]], [unpickler.load() for _ in range(4)])


def test_the_comparison_sees_what_it_must() -> None:
    shared: list[Any] = []
    ring: list[Any] = []
    ring.append(ring)
    nan = struct.unpack("<d", struct.pack("<Q", 0x7FF8_0000_0000_0001))[0]
    for a, b in [
        ([shared, shared], [[], []]),
        ([[], []], [shared, shared]),
        (ring, [ring]),
        ([1], [True]),
        ([1], [1.0]),
        ([0.0], [-0.0]),
        ([nan], [float("nan")]),
        ([np.float64(1)], [1.0]),
        ({1: 2, 3: 4}, {3: 4, 1: 2}),
        ([1], (1,)),
        (Plain(a=1), Plain(a=2)),
        (Plain(a=1), Plain(b=1)),
        (ListKind([1]), [1]),
        ({(1, "a")}, {(1, "b")}),
        (bytearray(b"a"), bytearray(b"b")),
        (Peek([1]), Peek([2])),
    ]:
        assert difference(a, b), (a, b)


NUMBERS = [
    st.integers(),
    st.integers(-300, 300),
    st.integers(2**62, 2**65),
    st.integers(-(2**64), -(2**62)),
    st.floats(),
    st.booleans(),
    st.sampled_from([True, 1, 1.0, np.int64(1), np.float64(1), np.bool_(True), None]),
]


@relaxed
@given(data=st.data())
def test_lists_of_numbers_keep_each_bit(data: Any) -> None:
    kind = data.draw(st.sampled_from(NUMBERS))
    x: list[Any] = data.draw(st.lists(kind, max_size=20)) * data.draw(st.sampled_from([1, 1, 9]))
    if x and data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(x) - 1))
        x[at] = data.draw(st.sampled_from([None, True, 0, -0.0, 2**64, 2**63, -1, np.float64(2), "a"]))
    for y in (x, tuple(x), [x, x], {"k": (x, tuple(x))}):
        for way in (through_dumps, through_serialize):
            check(y, way(y))


@relaxed
@given(st.lists(st.integers(0, 2**32), min_size=200, max_size=200), st.randoms(use_true_random=False))
def test_long_lists_of_one_width(values: list[int], rng: random.Random) -> None:
    """Widths on both sides of each limit, the odd one anywhere."""
    for limit in (2**7, 2**8, 2**15, 2**31, 2**63, 2**64):
        x = [v % limit for v in values]
        for odd in (limit - 1, limit, -limit, -limit - 1):
            x[rng.randrange(len(x))] = odd
            check(x, through_dumps(x))
            check(tuple(x), through_buffers(tuple(x)))


keys = (
    st.integers() | st.text() | st.binary(max_size=9) | st.none() | st.booleans() | st.floats(allow_nan=False)
)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4).map(tuple) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=25,
)


@relaxed
@given(values)
def test_messages_come_back_as_they_were(msg: Any) -> None:
    check(msg, fastser.loads([bytes(f) for f in fastser.dumps(msg)]))


wild = st.recursive(
    st.integers()
    | st.text(st.characters())
    | st.sampled_from(["__Set__", "__Serialized__", "\udc80", 2**70]),
    lambda inner: (
        st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(
            st.sampled_from(
                ["__Serialized__", "__Pickled__", "__Set__", "__Enum__", "as-list", "a", "\udcff"]
            )
            | st.integers(-(2**70), 2**70),
            inner,
            max_size=3,
        )
        | st.sets(st.integers() | st.text(st.characters(), max_size=2), max_size=3)
        | inner.map(fastser.to_serialize)
    ),
    max_leaves=15,
)


@relaxed
@given(wild)
def test_messages_with_what_msgpack_cannot_hold(msg: Any) -> None:
    check(unmarked(msg), fastser.loads([bytes(f) for f in fastser.dumps(msg)]))


def unmarked(x: Any) -> Any:
    if isinstance(x, fastser.Serialize):
        return unmarked(x.data)
    if isinstance(x, tuple):
        return tuple(map(unmarked, x))
    if isinstance(x, dict):
        return {k: unmarked(v) for k, v in x.items()}
    return x
