"""What install binds in one process, the codec behind it, and that uninstall puts back what was there."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import pickle
import sys
import threading
from array import array

import distributed
import numpy as np
import pytest
from distributed import Client, LocalCluster
from distributed.metrics import context_meter
from distributed.protocol import (
    Serialize,
    Serialized,
    ToPickle,
    dask_deserialize,
    dask_serialize,
    to_serialize,
)
from distributed.protocol.serialize import families, register_serialization_family
from stock_reader import describe

import fastser
import fastser.dask
from fastser.dask.codec import DaskCodec, codec
from fastser.dask.rebinding import CLOSED_LIST, Name, Rebinding, rebinding

pytestmark = pytest.mark.filterwarnings("ignore:Creating scratch directories:UserWarning")
stock = importlib.import_module("distributed.protocol.serialize")
PICKLE = importlib.import_module("distributed.protocol.pickle")


def bound() -> dict[tuple[str, str], object]:
    """Return every function in the modules of dask and distributed."""
    return {
        (name, attribute): value
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in ("dask", "distributed")
        for attribute, value in list(vars(module).items())
        if inspect.isfunction(value)
    }


@pytest.fixture
def installed():
    fastser.dask.install()
    yield
    fastser.dask.uninstall()
    assert fastser.dask.status()["state"] == "absent"


# ---- names


def test_install_binds_every_copy_and_uninstall_puts_all_back():
    importlib.import_module("distributed.spill")
    before = bound()
    kept = [stock.Serialize, stock.Serialized, stock.ToPickle, stock.Pickled, dask_serialize, dict(families)]
    fastser.dask.install()
    try:
        during = bound()
        changed = {place for place in before if during[place] is not before[place]}
        assert {
            ("distributed.protocol", "serialize"),
            ("distributed.protocol.serialize", "serialize"),
        } <= changed
        assert {("distributed.client", "dumps"), ("distributed.spill", "serialize_bytelist")} <= changed
        assert len(changed) > 25
        theirs = {id(before[name.module, name.attribute]) for name in CLOSED_LIST}
        assert all(id(before[place]) in theirs for place in changed)  # nothing else
        assert not any(id(value) in theirs for value in during.values())  # no copy is left
        assert kept == [
            stock.Serialize, stock.Serialized, stock.ToPickle, stock.Pickled, dask_serialize, dict(families),
        ]  # fmt: skip
    finally:
        fastser.dask.uninstall()
    after = bound()
    assert [place for place in before if after[place] is not before[place]] == []


def test_copies_made_while_installed_are_put_back(installed):
    module = type(sys)("distributed._copy")
    module.mine = stock.serialize
    sys.modules[module.__name__] = module
    try:
        fastser.dask.uninstall()
        assert module.mine is stock.serialize
        assert module.mine.__code__.co_filename.endswith("serialize.py")
    finally:
        del sys.modules[module.__name__]


def test_what_others_rebind_is_left_alone(installed):
    def another(*args, **kwargs): ...

    distributed.scheduler.serialize = another
    try:
        fastser.dask.uninstall()
        assert distributed.scheduler.serialize is another
    finally:
        distributed.scheduler.serialize = stock.serialize  # distributed's own, since ours is gone


def test_functions_keep_name_and_signature(installed):
    for name in CLOSED_LIST:
        func = getattr(sys.modules[name.module], name.attribute)
        assert (func.__module__, func.__qualname__) == (name.module, name.attribute)
        assert " ".join(inspect.signature(func).parameters) == name.parameters
        assert pickle.loads(pickle.dumps(func)) is func


def test_install_twice_uninstall_once():
    before = bound()
    fastser.dask.install()
    during = bound()
    fastser.dask.install()
    assert bound() == during
    fastser.dask.uninstall()
    assert bound() == before
    fastser.dask.uninstall()
    assert bound() == before


def test_the_last_owner_puts_back():
    fastser.dask.install()
    rebinding.acquire("another")
    fastser.dask.uninstall()
    assert fastser.dask.status()["state"] == "rebound"
    rebinding.release("another")
    assert fastser.dask.status()["state"] == "absent"


def test_many_threads():
    before = bound()
    errors = []

    def work(i):
        try:
            for _ in range(10):
                rebinding.acquire(f"thread {i}")
                header, frames = stock.serialize(to_serialize([1.5, i]))
                assert stock.deserialize(header, frames) == [1.5, i]
                rebinding.release(f"thread {i}")
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert bound() == before


@pytest.mark.parametrize(
    "unknown",
    [
        Name("distributed.protocol.core", "dumps", "msg other", codec.messages.dumps),
        Name("distributed.protocol.core", "no_such_function", "x", codec.serialize),
        Name("distributed.no_such_module", "dumps", "x", codec.serialize),
    ],
    ids=lambda name: name.attribute,
)
def test_an_unknown_distributed_gets_families_only(unknown):
    before = bound()
    old = dict(families)
    limited = Rebinding((*CLOSED_LIST, unknown))
    with pytest.warns(UserWarning, match=rf"not known to fastser.*{unknown.attribute}") as warned:
        limited.acquire("test")
    try:
        assert len(warned) == 1
        assert limited.state == "registered"
        assert bound() == before
        assert {name for name in families if families[name] is not old[name]} == {"dask", "pickle"}
        header, frames = stock.serialize([1.5] * 1000)
        assert len(frames[0]) + sum(memoryview(frame).nbytes for frame in frames[1:]) < 9000
        assert stock.deserialize(header, frames) == [1.5] * 1000
        limited.acquire("another")  # does not warn again
        limited.release("another")
    finally:
        limited.release("test")
    assert families == old
    assert limited.state == "absent"


def test_a_family_registered_meanwhile_stays():
    old = families["pickle"]
    limited = Rebinding((Name("distributed.protocol.core", "dumps", "other", codec.messages.dumps),))
    with pytest.warns(UserWarning, match="not known"):
        limited.acquire("test")
    try:
        register_serialization_family("pickle", stock.pickle_dumps, stock.pickle_loads)
        mine = families["pickle"]
        limited.release("test")
        assert families["pickle"] is mine
    finally:
        families["pickle"] = old


def test_failures_are_logged_as_before(installed, caplog):
    with pytest.raises(TypeError):
        distributed.protocol.dumps({"x": to_serialize(threading.Lock())}, on_error="raise")
    assert [(r.name, r.levelname, r.getMessage()) for r in caplog.records] == [
        ("distributed.protocol.core", "CRITICAL", "Failed to Serialize")
    ]


# ---- the codec


VALUES = [
    [1.5] * 1000,
    {"a": (1, [2]), None: {3}},
    b"bytes",
    bytearray(100_000),
    array("d", [1.5, 2.5]),
    memoryview(b"1234").cast("H"),
    np.arange(10),
    np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    np.arange(3)[:, None],
    np.float32(1.5),
    [np.arange(20_000), {"x": np.datetime64("2020-01-01")}],
    ValueError("a", 1),
]


@pytest.mark.parametrize("x", VALUES, ids=lambda x: type(x).__name__)
def test_each_reads_what_the_other_wrote(x):
    header, frames = codec.serialize(to_serialize(x))
    assert describe(stock.deserialize(header, frames)) == describe(x)
    header, frames = stock.serialize(to_serialize(x))
    assert describe(codec.deserialize(header, list(map(bytes, frames)))) == describe(x)

    message = {"op": "test", "data": to_serialize(x), "more": ToPickle(x)}
    back = distributed.protocol.loads([bytes(frame) for frame in codec.messages.dumps(message)])
    assert describe(back["data"]) == describe(back["more"]) == describe(x)
    back = codec.messages.loads([bytes(frame) for frame in distributed.protocol.dumps(message)])
    assert describe(back["data"]) == describe(x)  # distributed keeps no flags of ToPickle

    assert describe(stock.deserialize_bytes(codec.serialize_bytes(x))) == describe(x)
    assert describe(codec.deserialize_bytes(stock.serialize_bytes(x))) == describe(x)


def test_a_relay_stays_blind():
    frames = codec.messages.dumps({"x": to_serialize(np.arange(10))})
    message = distributed.protocol.loads(frames, deserialize=False)
    assert type(message["x"]) is Serialized
    again = codec.messages.loads(codec.messages.dumps(message), deserialize=False)
    assert type(again["x"]) is Serialized
    assert codec.messages.loads(distributed.protocol.dumps(again))["x"].tolist() == list(range(10))


def test_both_kinds_of_wrappers():
    serialized = fastser.Serialized(*fastser.serialize({"k": 1}))
    message = {
        "a": fastser.Serialize([1, 2]),
        "b": fastser.ToPickle((3,)),
        "c": serialized,
        "d": Serialize([fastser.Serialize([4]), Serialize([5]), serialized]),
        "e": [6],
    }
    back = codec.messages.loads(codec.messages.dumps(message))
    assert back == {"a": [1, 2], "b": (3,), "c": {"k": 1}, "d": [[4], [5], {"k": 1}], "e": (6,)}
    assert codec.deserialize(*codec.serialize(fastser.Serialize({7}))) == {7}


@pytest.fixture
def registry():
    """Forget the handlers that a test registers with distributed."""
    old = dict(dask_serialize._lookup), dict(dask_deserialize._lookup)
    yield
    for dispatch, lookup in zip((dask_serialize, dask_deserialize), old, strict=True):
        dispatch._lookup.clear()
        dispatch._lookup.update(lookup)


class Human:
    def __init__(self, name):
        self.name = name


def write_human(x):
    return {"writer": "user"}, [x.name.encode()]


def read_human(header, frames):
    return Human(bytes(frames[0]).decode() + " by " + header["writer"])


def test_handlers_of_users_are_seen_whenever_they_come(registry):
    def name(x):
        return codec.deserialize(*codec.serialize(x)).name

    assert name(Human("Alice")) == "Alice"  # by pickle
    distributed.protocol.register_serialization(Human, write_human, read_human)
    assert name(Human("Alice")) == "Alice by user"
    assert codec.deserialize(*codec.serialize([Human("Alice")]))[0].name == "Alice by user"
    assert stock.deserialize(*codec.serialize([1, {"k": Human("Bob")}]))[1]["k"].name == "Bob by user"

    def write_again(x):
        return {"writer": "another"}, [x.name.encode()]

    dask_serialize.register(Human, write_again)
    assert name(Human("Alice")) == "Alice by another"

    def passes(x):
        raise NotImplementedError

    dask_serialize.register(Human, passes)
    assert name(Human("Alice")) == "Alice"
    assert codec.deserialize(*codec.serialize([Human("Alice")]))[0].name == "Alice"


def test_handlers_of_users_replace_those_of_fastser(registry):
    assert codec.find_handler(np.ndarray).__module__ == "fastser.handlers.numpy"

    def write(x):
        return {"mine": True}, [x.tobytes()]

    dask_serialize.register(np.ndarray, write)
    assert codec.find_handler(np.ndarray) is write
    assert codec.serialize(np.arange(3))[0]["sub-header"] == {"mine": True}


def test_handlers_are_found_lazily(registry):
    class Lazy: ...

    Lazy.__module__ = "lazy_module.inner"
    assert codec.find_handler(Lazy) is None

    @dask_serialize.register_lazy("lazy_module")
    def load():
        dask_serialize.register(Lazy, write_human)

    assert codec.find_handler(Lazy) is write_human


class Unpicklable:
    def __init__(self, x):
        self.x = x

    def __reduce__(self):
        raise TypeError("not by pickle")


def test_register_generic_helps_inside_programs(registry):
    stock.register_generic(Unpicklable)
    x = codec.deserialize(*codec.serialize({"k": [Unpicklable(np.arange(3))]}))["k"][0]
    assert x.x.tolist() == [0, 1, 2]
    x = stock.deserialize(*codec.serialize(Unpicklable([1])))
    assert x.x == [1]


def test_families_of_users_win():
    old = families["pickle"]
    register_serialization_family(
        "pickle", lambda x: ({"by": "user"}, [b"x"]), lambda header, frames: header["by"]
    )
    try:
        assert codec.deserialize(*codec.serialize([1])) == "user"
    finally:
        families["pickle"] = old
    assert codec.deserialize(*codec.serialize([1])) == [1]


def test_frames_compressed_by_a_family_are_left_alone():
    device = [memoryview(bytes(50_000))]
    register_serialization_family(
        "device",
        lambda x: ({"compression": (False,)}, device),
        lambda header, frames: (header["compression"], [frame.nbytes for frame in frames]),
    )
    try:
        for x in (1, [1, 2]):
            header, frames = codec.serialize_and_split(x, serializers=("device",), size=1000)
            header, frames = codec.compress_frames(header, frames, "zlib")
            assert [frame.nbytes for frame in frames] == [50_000] * len(frames)
    finally:
        del families["device"]


def test_distributed_writes_what_fastser_leaves_to_pickle():
    class Sub(np.ndarray): ...

    x = np.arange(3).view(Sub)
    assert codec.serialize(x)[0]["serializer"] == "pickle"
    header, frames = codec.serialize(x, serializers=["dask"])
    assert header["serializer"] == "dask"  # the class is lost, as with distributed
    assert codec.deserialize(header, frames).tolist() == [0, 1, 2]


def test_on_error_may_be_none():
    """As comm.ws has it."""
    header, _ = codec.serialize(threading.Lock(), on_error=None)
    assert header["serializer"] == "error"


@pytest.mark.parametrize("protocol", [4, 5])
def test_pickle_protocol_of_the_context(protocol):
    x = np.arange(100_000.0), [1.5] * 100_000
    header, frames = codec.serialize(x, context={"pickle-protocol": protocol})
    assert frames[0][:2] == b"\x80\x05"  # schedulers ask for 4 where results travel, but read 5
    assert len(frames) == 2 and frames[1].nbytes == 800_000
    assert describe(stock.deserialize(header, frames)) == describe(x)


def test_pickle_module(installed):
    buffers = []
    data = PICKLE.dumps(np.arange(10), buffer_callback=buffers.append)
    assert type(buffers[0]) is pickle.PickleBuffer
    assert pickle.loads(data, buffers=buffers).tolist() == list(range(10))
    assert PICKLE.loads(data, buffers=buffers).tolist() == list(range(10))
    assert PICKLE.loads(PICKLE.dumps(np.arange(10), protocol=4)).tolist() == list(range(10))
    buffers.clear()
    with pytest.raises(TypeError, match="lock"):
        PICKLE.dumps([np.arange(10), threading.Lock()], buffer_callback=buffers.append)
    assert buffers == []


@pytest.mark.parametrize("x", [{"k": [1]}, np.arange(3)], ids=["pickle", "dask"])
def test_serialized_data_inside_programs_is_read_by_stock(installed, x):
    inner = Serialized(*codec.serialize(x))
    header, frames = codec.serialize([inner])
    assert b"fastser" not in b"".join(frames)
    assert describe(codec.deserialize(header, frames)) == describe([x])
    fastser.dask.uninstall()
    assert describe(stock.deserialize(header, frames)) == describe([x])


def test_the_same_metrics_as_distributed():
    def labels(dumps, loads, spill, unspill):
        seen = []
        with context_meter.add_callback(lambda label, value, unit: seen.append((label, unit))):
            frames = dumps(
                {"x": to_serialize(np.zeros(100_000)), "y": ToPickle([1])}, context={"compression": "zlib"}
            )
            loads(frames)
            unspill(b"".join(spill([1.5] * 100_000, compression="zlib")))
        return set(seen)

    assert labels(
        codec.messages.dumps, codec.messages.loads, codec.serialize_bytelist, codec.deserialize_bytes
    ) == labels(
        distributed.protocol.dumps,
        distributed.protocol.loads,
        stock.serialize_bytelist,
        stock.deserialize_bytes,
    )


def test_codecs_of_users_are_used():
    from distributed.protocol.compression import Compression, compressions

    compressions["mine"] = Compression(
        "mine", lambda data: b"!" + bytes(data[:10]), lambda data: b"0" * 20_000
    )
    try:
        name, data = codec.maybe_compress(bytes(20_000), compression="mine")
        assert (name, bytes(data[:1])) == ("mine", b"!")
        assert codec.decompress({"compression": ["mine"]}, [data]) == [b"0" * 20_000]
    finally:
        del compressions["mine"]


def test_errors_can_travel_to_stock_processes():
    with pytest.raises(TypeError, match="object of type lock") as info:
        codec.serialize(threading.Lock(), on_error="raise")
    assert type(info.value) is TypeError
    assert info.value.__context__ is None  # tblib would pickle it
    assert "pickle" in str(info.value.__cause__)
    for error in (fastser.FrameError("a"), fastser.DispatchError("b"), fastser.SerializationError("c")):
        data = codec.dumps_pickle([error])
        assert str(error) in str(pickle.loads(data)[0])
        assert type(pickle.loads(data)[0]).__module__ == "builtins"


def test_large_messages_are_written_in_a_thread(installed):
    from distributed.comm.utils import OFFLOAD_THRESHOLD, to_frames

    class Spy:
        def __reduce__(self):
            threads.append(threading.current_thread().name)
            return int, (1,)

    async def write(*others):
        return await to_frames([ToPickle(Spy()), *others])

    threads = []
    small = {"a": [1.5, "x" * 1000, None], "b": Serialize(np.arange(100))}
    assert distributed.protocol.loads(asyncio.run(write(small)))[1]["b"].tolist() == list(range(100))
    large = np.random.default_rng(0).random(OFFLOAD_THRESHOLD // 8 + 1)
    assert asyncio.run(write(Serialize(large)))[-1].nbytes > OFFLOAD_THRESHOLD
    asyncio.run(write(*[{"k": "v" * 1000}] * (OFFLOAD_THRESHOLD // 1000 + 1)))
    inner = threading.current_thread().name
    assert threads[0] == inner
    assert len(threads) == 3
    assert all("ffload" in name for name in threads[1:])


def test_allowed_imports():
    import dask
    from distributed.core import Status

    assert codec.messages.loads(codec.messages.dumps({"s": Status.running})) == {"s": Status.running}
    frames = codec.messages.dumps({"s": Status.running})
    with (
        dask.config.set({"distributed.scheduler.allowed-imports": ["dask"]}),
        pytest.raises(TypeError, match="allowed"),
    ):
        codec.messages.loads(frames)


def test_nothing_needs_installing():
    assert fastser.dask.status()["state"] == "absent"
    mine = DaskCodec()
    assert mine.deserialize(*mine.serialize(to_serialize({"a": [1.5] * 100}))) == {"a": [1.5] * 100}


# ---- clusters in this process


def test_threads_only():
    before = bound()
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        fastser.dask.install(client)
        report = fastser.dask.status(client)
        assert [worker["state"] for worker in report["workers"].values()] == ["rebound"] * 2
        assert client.submit(lambda: [1.5] * 1000, pure=False).result(timeout=60) == [1.5] * 1000
        fastser.dask.uninstall()  # the cluster in this process still wants it
        assert fastser.dask.status()["state"] == "rebound"
        fastser.dask.uninstall(client)
        assert fastser.dask.status()["state"] == "absent"
        assert client.submit(lambda: 1, pure=False).result(timeout=60) == 1
        fastser.dask.install(client)
    fastser.dask.uninstall()
    assert fastser.dask.status()["state"] == "absent"  # a closed cluster wants nothing
    after = bound()
    assert [place for place in before if after[place] is not before[place]] == []


def test_websockets():
    with (
        LocalCluster(
            n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0", protocol="ws://"
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        fastser.dask.install(client)
        x = {"k": [1.5] * 100_000, "a": np.arange(100_000)}
        assert describe(client.submit(lambda x: x, x, pure=False).result(timeout=60)) == describe(x)
        fastser.dask.uninstall(client)


def test_asynchronous_client():
    async def main():
        async with (
            LocalCluster(n_workers=1, processes=False, dashboard_address=":0", asynchronous=True) as cluster,
            Client(cluster, asynchronous=True, set_as_default=False) as client,
        ):
            await fastser.dask.install(client)
            report = await fastser.dask.status(client)
            assert [worker["state"] for worker in report["workers"].values()] == ["rebound"]
            assert await client.submit(lambda: {"k": (1, [2])}, pure=False) == {"k": (1, [2])}
            await fastser.dask.uninstall(client)
            assert (await fastser.dask.status(client))["client"]["state"] == "absent"

    asyncio.run(asyncio.wait_for(main(), 60))
