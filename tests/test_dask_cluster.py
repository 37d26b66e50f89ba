"""fastser in real clusters: separate processes, TCP, some of them without fastser."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import distributed
import numpy as np
import pytest
from distributed import Actor, Client, LocalCluster, Queue, Variable, wait
from stock_reader import describe

import fastser
import fastser.dask

# a busy machine is no failure
pytestmark = pytest.mark.filterwarnings("ignore:Creating scratch directories:UserWarning")

ROOT = str(Path(fastser.__file__).parent.parent)
TIMEOUT = 60  # seconds, for what takes milliseconds


def builders():
    """Functions that make values, by name; local ones, so that they travel by value to any process."""

    def rows():
        return [(i, i / 3, f"row {i}", None if i % 7 else True) for i in range(50_000)]

    def records():
        return [{"id": i, "name": f"name {i % 100}", "score": i / 3} for i in range(50_000)]

    def integers():
        return [*range(-(2**15), 2**15), 2**63 - 1, -(2**63), 2**64, 2**200]

    def texts():
        return [f"{i}\u00e9\U0001f600" for i in range(50_000)] + ["\udc80"]

    def shared():
        import numpy

        a = numpy.arange(100_000.0)
        return [a, a]

    def cyclic():
        import numpy

        x = [numpy.arange(3)]
        x.append(x)
        return x

    def fortran_view():
        import numpy

        return memoryview(numpy.asfortranarray(numpy.arange(12, dtype="i4").reshape(3, 4)))

    def odd_sparse():
        import scipy.sparse

        x = scipy.sparse.csr_matrix([[0, 1.5], [2, 0]])
        x.big = 2**80
        x.items = [1, [2]]
        return x

    def masked():
        import numpy

        return numpy.ma.masked_array(numpy.arange(5, dtype="u1"), mask=[0, 1, 0, 0, 1], hard_mask=True)

    def odd_keys():
        import signal
        import time

        import numpy

        return {signal.SIGINT: numpy.arange(3), time.gmtime(0): numpy.arange(4), (1, "a"): numpy.arange(5)}

    def recarray():
        import numpy

        return numpy.rec.array([(1, 2.5), (3, 4.5)], dtype=[("a", "i4"), ("b", "f8")])

    def metadata():
        import numpy

        return numpy.arange(3).astype(numpy.dtype("i8", metadata={"unit": "m"}))

    def numpy_scalars():
        import numpy

        return [numpy.bytes_(b"ab"), numpy.float64(1.5), numpy.True_, 1, True, 1.0]

    def nested():
        import numpy

        return {"a": [numpy.arange(10), {"b": (1, [2.5] * 1000, {3})}], 2: bytearray(100_000), None: b"x"}

    def frame():
        import pandas

        return pandas.DataFrame({"x": range(1000), "y": [f"{i}" for i in range(1000)], "z": 0.5})

    return {
        "floats": lambda: [i / 3 for i in range(1_000_000)],
        "one float": lambda: [1.5] * 1_000_000,
        "array": lambda: __import__("numpy").arange(1_000_000.0),
        **{func.__name__: func for func in (
            rows, records, integers, texts, shared, cyclic, fortran_view, odd_sparse, masked, odd_keys,
            recarray, metadata, numpy_scalars, nested, frame,
        )},
    }  # fmt: skip


BUILDERS = builders()


def check(name: str, x: object) -> None:
    """Check that *x* is exactly what the builder called *name* makes."""
    y = BUILDERS[name]()
    assert type(x) is type(y)
    if name == "cyclic":
        assert x[1] is x
        assert x[0].tolist() == [0, 1, 2]
    elif name == "frame":
        assert x.equals(y)
        assert (x.dtypes == y.dtypes).all()
    elif isinstance(x, list) and len(x) > 100_000:
        assert x == y
        assert set(map(type, x)) == {float}
    else:
        assert describe(x) == describe(y)
    if name == "shared":
        assert x[0] is x[1]
    if name == "masked":
        assert x.hardmask
    if name == "odd_keys":
        assert list(map(type, x)) == list(map(type, y))


@pytest.fixture(scope="module")
def cluster():
    with LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0", memory_limit="2 GiB"
    ) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def client(cluster):
    with Client(cluster) as client:
        fastser.dask.install(client)
        yield client
        fastser.dask.uninstall(client)


@pytest.fixture(scope="module")
def addresses(client):
    """Addresses of the two workers of the cluster."""
    return sorted(client.scheduler_info(n_workers=-1)["workers"])[:2]


def states(client) -> Counter:
    report = fastser.dask.status(client)
    return Counter(worker["state"] for worker in report["workers"].values())


# ---- processes without fastser


@pytest.fixture(scope="module")
def without_fastser(tmp_path_factory):
    """Environment of a process that cannot import fastser, even where it is installed."""
    path = tmp_path_factory.mktemp("without")
    (path / "sitecustomize.py").write_text("import sys\nsys.modules['fastser'] = None\n")
    return {**os.environ, "PYTHONPATH": str(path), "DASK_DISTRIBUTED__WORKER__DAEMON": "True"}


def with_fastser() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": ROOT}


@contextlib.contextmanager
def process(*args: str, env: dict[str, str], log: Path):
    with log.open("wb") as out:
        child = subprocess.Popen(
            [sys.executable, "-m", *args], env=env, stdout=out, stderr=out, cwd=log.parent
        )
        try:
            yield child
        finally:
            child.send_signal(signal.SIGINT)
            try:
                child.wait(20)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def worker(address: str, name: str, *args: str, env: dict[str, str], log: Path):
    return process(
        "distributed.cli.dask_worker", address, "--no-nanny", "--no-dashboard", "--nthreads", "1",
        "--name", name, *args, env=env, log=log,
    )  # fmt: skip


def address_of(client, name: str) -> str:
    """Wait for the worker *name* and return its address."""
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        for address, info in client.scheduler_info(n_workers=-1)["workers"].items():
            if info["name"] == name:
                return address
        time.sleep(0.05)
    raise TimeoutError(name)


# ---- one cluster with fastser everywhere


def test_installed_everywhere(client):
    report = fastser.dask.status(client)
    assert report["client"] == report["scheduler"]
    assert report["client"]["state"] == "rebound"
    assert states(client) == {"rebound": 2}


@pytest.mark.parametrize("name", BUILDERS)
def test_results_are_exact(client, name):
    check(name, client.submit(BUILDERS[name], pure=False).result(timeout=TIMEOUT))


def test_functions_by_value(client):
    factor = 3

    class Scale:
        def __init__(self, by):
            self.by = by

        def __call__(self, x):
            return x * self.by

    assert client.submit(lambda x: x * factor, 2, pure=False).result(timeout=TIMEOUT) == 6
    assert client.submit(Scale, 5, pure=False).result(timeout=TIMEOUT)(2) == 10
    assert client.gather(client.map(Scale(2), range(20))) == list(range(0, 40, 2))


@pytest.mark.parametrize("options", [{}, {"direct": True}, {"broadcast": True}], ids=str)
@pytest.mark.parametrize("name", ["floats", "nested"])
def test_scatter(client, name, options):
    [future] = client.scatter([BUILDERS[name]()], hash=False, **options)
    check(name, client.submit(lambda x: x, future, pure=False).result(timeout=TIMEOUT))


@pytest.mark.parametrize("name", ["floats", "shared", "cyclic", "nested", "odd_keys"])
def test_worker_to_worker(client, addresses, name):
    first, second = addresses
    made = client.submit(BUILDERS[name], pure=False, workers=[first])
    moved = client.submit(lambda x: x, made, pure=False, workers=[second])
    check(name, moved.result(timeout=TIMEOUT))
    assert set(client.who_has(moved)[moved.key]) == {second}


def test_exceptions_come_back(client):
    class Failed(ValueError):
        def __init__(self, code, detail):
            super().__init__(code, detail)
            self.detail = detail

    def fail():
        raise Failed(7, {"where": [1, 2]})

    with pytest.raises(ValueError, match="where") as info:
        client.submit(fail, pure=False).result(timeout=TIMEOUT)
    assert type(info.value).__name__ == "Failed"
    assert info.value.detail == {"where": [1, 2]}


def test_what_cannot_be_serialized_raises(client):
    def unpicklable():
        import threading

        return ["fine", {"deep": threading.Lock()}]

    def bomb():
        class Bomb:
            def __reduce__(self):
                return int, ("not a number",)

        return Bomb()

    with pytest.raises(TypeError, match="lock"):
        client.submit(unpicklable, pure=False).result(timeout=TIMEOUT)
    with pytest.raises(ValueError, match="not a number"):
        client.submit(bomb, pure=False).result(timeout=TIMEOUT)
    assert client.submit(lambda: 1, pure=False).result(timeout=TIMEOUT) == 1


def test_marks_inside_values_are_unwrapped(client):
    marked = distributed.protocol.Serialize([1, 2])
    args = {"a": [marked, fastser.Serialize((3, 4))]}
    assert client.submit(lambda x: x, args, pure=False).result(timeout=TIMEOUT) == {"a": [[1, 2], (3, 4)]}


def test_publish_variable_and_queue(client):
    client.publish_dataset(numbers=[1.5] * 1000)
    assert client.get_dataset("numbers") == [1.5] * 1000
    client.unpublish_dataset("numbers")

    variable = Variable("fastser", client=client)
    variable.set(client.submit(lambda: [1, 2], pure=False))
    assert variable.get(timeout=TIMEOUT).result(timeout=TIMEOUT) == [1, 2]
    variable.set({"a": 1, "b": "text"})
    assert variable.get(timeout=TIMEOUT) == {"a": 1, "b": "text"}
    variable.delete()

    queue = Queue("fastser", client=client)
    queue.put({"key": [1, 2.5, None]})
    assert queue.get(timeout=TIMEOUT) == {"key": (1, 2.5, None)}  # messages make lists tuples
    queue.close()


def test_actors(client):
    class Store:
        def __init__(self):
            self.items = []

        def add(self, x):
            self.items.append(x)
            return self.items

    actor = client.submit(Store, actor=True, pure=False).result(timeout=TIMEOUT)
    assert isinstance(actor, Actor)
    actor.add([1.5] * 1000).result(timeout=TIMEOUT)
    items = actor.add({"a": np.arange(3)}).result(timeout=TIMEOUT)
    assert items[0] == [1.5] * 1000
    assert items[1]["a"].tolist() == [0, 1, 2]


def test_user_handlers_win(client):
    """A handler that a user registers with distributed is used, inside collections too."""

    def register():
        import builtins

        from distributed.protocol import dask_deserialize, dask_serialize

        @dask_serialize.register(builtins.slice)
        def _(x):
            return {"by": "user"}, [repr(x.stop).encode()]

        @dask_deserialize.register(builtins.slice)
        def _(header, frames):
            return slice(header["by"], int(bytes(frames[0])))

    def unregister():
        import builtins

        from distributed.protocol import dask_deserialize, dask_serialize

        dask_serialize._lookup.pop(builtins.slice, None)
        dask_deserialize._lookup.pop(builtins.slice, None)

    register()
    client.run(register)
    try:
        assert client.submit(lambda: slice(7), pure=False).result(timeout=TIMEOUT) == slice("user", 7)
        assert client.submit(lambda: [slice(7)], pure=False).result(timeout=TIMEOUT) == [slice("user", 7)]
    finally:
        unregister()
        client.run(unregister)
    assert client.submit(lambda: [slice(7)], pure=False).result(timeout=TIMEOUT) == [slice(7)]


def test_fine_metrics_flow(client, addresses):
    first, second = addresses
    made = client.submit(lambda: [i / 3 for i in range(200_000)], pure=False, workers=[first])
    client.submit(len, made, pure=False, workers=[second]).result(timeout=TIMEOUT)
    made.result(timeout=TIMEOUT)
    deadline = time.monotonic() + TIMEOUT
    while True:
        metrics = client.run_on_scheduler(
            lambda dask_scheduler: dict(dask_scheduler.cumulative_worker_metrics)
        )
        seconds = {}
        for key, value in metrics.items():
            if isinstance(key, tuple) and key[-1] == "seconds":
                seconds[key[0], key[-2]] = seconds.get((key[0], key[-2]), 0) + value
        if (
            seconds.get(("gather-dep", "deserialize"), 0) > 0
            and seconds.get(("get-data", "serialize"), 0) > 0
        ):
            break
        assert time.monotonic() < deadline, seconds
        time.sleep(0.1)
    assert ("get-data", "compress") in seconds
    assert ("gather-dep", "decompress") in seconds


def test_spill_to_disk_and_back(client, addresses):
    def evict(dask_worker):
        while dask_worker.data.fast:
            dask_worker.data.evict()
        data = dask_worker.data.slow.data  # behind a cache
        return len(dask_worker.data.slow), data.dump.func.__code__.co_filename, data.load.__code__.co_filename

    names = ["floats", "shared", "cyclic", "nested"]
    futures = [client.submit(BUILDERS[name], pure=False, workers=[addresses[0]]) for name in names]
    wait(futures)
    spilled, *files = client.run(evict, workers=[addresses[0]])[addresses[0]]
    assert spilled >= len(names)
    assert all(file.endswith("rebinding.py") for file in files)  # also in workers that were running before
    for name, future in zip(names, futures, strict=True):
        check(name, client.submit(lambda x: x, future, pure=False).result(timeout=TIMEOUT))


def test_p2p_shuffle(client):
    pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    import dask
    import pandas as pd
    from dask import dataframe as dd

    df = pd.DataFrame(
        {"k": np.arange(10_000) % 97, "v": np.arange(10_000.0), "s": [f"{i}" for i in range(10_000)]}
    )
    with dask.config.set({"dataframe.shuffle.method": "p2p"}):
        shuffled = dd.from_pandas(df, npartitions=8).shuffle("k").compute()
    assert shuffled.sort_values("v").v.tolist() == df.v.tolist()
    assert dict(shuffled.groupby("k").v.sum()) == dict(df.groupby("k").v.sum())


def test_chosen_serializers(cluster, client):
    with Client(
        cluster,
        serializers=["dask", "pickle"],
        deserializers=["dask", "pickle", "error"],
        set_as_default=False,
    ) as other:
        check("nested", other.submit(BUILDERS["nested"], pure=False).result(timeout=TIMEOUT))
    with Client(
        cluster,
        serializers=["dask", "msgpack"],
        deserializers=["dask", "msgpack", "error"],
        set_as_default=False,
    ) as other:
        x = other.submit(lambda: [1, "a", None], pure=False).result(timeout=TIMEOUT)
        assert list(x) == [1, "a", None]


# ---- processes that come, restart, or have no fastser


def test_later_workers_install(cluster, client, tmp_path):
    with worker(cluster.scheduler_address, "late", env=with_fastser(), log=tmp_path / "log"):
        late = address_of(client, "late")
        assert fastser.dask.status(client)["workers"][late]["state"] == "rebound"
        check("floats", client.submit(BUILDERS["floats"], pure=False, workers=[late]).result(timeout=TIMEOUT))


@pytest.fixture(scope="module")
def stock_worker(cluster, client, without_fastser, tmp_path_factory):
    """Address of a worker, and its log, in the cluster, which cannot import fastser."""
    log = tmp_path_factory.mktemp("stock") / "log"
    with worker(cluster.scheduler_address, "stock", env=without_fastser, log=log):
        yield address_of(client, "stock"), log


def test_a_stock_worker_only_warns(client, stock_worker):
    address, log = stock_worker
    fastser.dask.install(client)  # once more: nothing changes
    assert fastser.dask.status(client)["workers"][address]["state"] == "missing"
    assert states(client) == {"rebound": 2, "missing": 1}
    assert log.read_text().count("fastser cannot be imported") == 1


@pytest.mark.parametrize(
    "name", ["floats", "rows", "records", "texts", "shared", "cyclic", "nested", "recarray"]
)
def test_fastser_to_stock_worker(client, addresses, stock_worker, name):
    made = client.submit(BUILDERS[name], pure=False, workers=[addresses[0]])

    def test(x, kind):
        return type(x).__name__ == kind and (not isinstance(x, list) or len(x))

    kind = type(BUILDERS[name]()).__name__
    assert client.submit(test, made, kind, pure=False, workers=[stock_worker[0]]).result(timeout=TIMEOUT)


def test_stock_worker_to_fastser(client, addresses, stock_worker):
    made = client.submit(BUILDERS["array"], pure=False, workers=[stock_worker[0]])
    moved = client.submit(lambda x: x, made, pure=False, workers=[addresses[0]])
    check("array", moved.result(timeout=TIMEOUT))
    check("array", made.result(timeout=TIMEOUT))
    made = client.submit(lambda: [{"a": 1.5}, (1, "b"), {2}] * 100, pure=False, workers=[stock_worker[0]])
    assert made.result(timeout=TIMEOUT) == [{"a": 1.5}, (1, "b"), {2}] * 100


CLIENT = """
import sys
from distributed import Client

if __name__ == "__main__":
    assert sys.modules["fastser"] is None
    class Local:
        x = 1
    with Client(sys.argv[1], set_as_default=False) as client:
        workers = sys.argv[2:]
        run = lambda f, *args: client.submit(f, *args, pure=False, workers=workers).result(timeout=60)
        assert run(lambda: [1.5] * 300_000) == [1.5] * 300_000
        assert run(lambda: [{"i": i, "s": str(i)} for i in range(10_000)])[-1] == {"i": 9999, "s": "9999"}
        a, b = run(lambda: (lambda a: [a, a])([1, 2]))
        assert a is b
        assert run(lambda: Local().x) == 1
        assert run(lambda: Local)().x == 1
        assert run(len, client.scatter({"k": [1.5] * 100})["k"]) == 100
        try:
            run(lambda: 1 / 0)
        except ZeroDivisionError:
            print("all well")
"""


def test_a_stock_client_of_fastser_workers(cluster, addresses, without_fastser, tmp_path):
    script = tmp_path / "client.py"
    script.write_text(CLIENT)
    done = subprocess.run(
        [sys.executable, str(script), cluster.scheduler_address, *addresses],
        env=without_fastser, capture_output=True, text=True, timeout=TIMEOUT, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert done.stdout == "all well\n", done.stderr


def test_a_stock_scheduler(without_fastser, tmp_path):
    """The scheduler cannot import fastser; a worker preloads it, another one not."""
    file = tmp_path / "scheduler.json"
    with process(
        "distributed.cli.dask_scheduler", "--port", "0", "--no-dashboard", "--scheduler-file", str(file),
        env=without_fastser, log=tmp_path / "scheduler.log",
    ):  # fmt: skip
        deadline = time.monotonic() + TIMEOUT
        while not file.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        with Client(scheduler_file=str(file), set_as_default=False) as client:
            address = client.scheduler.address
            with (
                worker(
                    address, "fast", "--preload", "fastser.dask.preload",
                    env=with_fastser(), log=tmp_path / "fast.log",
                ),
                worker(address, "stock", env=without_fastser, log=tmp_path / "stock.log"),
            ):  # fmt: skip
                fast, stock = address_of(client, "fast"), address_of(client, "stock")
                report = fastser.dask.status(client)
                assert report["scheduler"]["state"] == report["workers"][stock]["state"] == "missing"
                assert report["workers"][fast]["state"] == "rebound"
                made = client.submit(BUILDERS["floats"], pure=False, workers=[fast])
                check("floats", made.result(timeout=TIMEOUT))
                assert (
                    client.submit(len, made, pure=False, workers=[stock]).result(timeout=TIMEOUT) == 1_000_000
                )
                fastser.dask.install(client)
                fastser.dask.uninstall(client)
                assert fastser.dask.status(client)["workers"][fast]["state"] == "absent"


def test_restarted_workers_install(client, addresses):
    workers = client.scheduler_info(n_workers=-1)["workers"]
    names = [workers[address]["name"] for address in addresses]
    client.restart_workers(addresses, timeout=TIMEOUT)
    restarted = [address_of(client, name) for name in names]
    assert not set(restarted) & set(addresses)
    report = fastser.dask.status(client)["workers"]
    assert [report[address]["state"] for address in restarted] == ["rebound"] * 2
    check("nested", client.submit(BUILDERS["nested"], pure=False, workers=restarted).result(timeout=TIMEOUT))


MAIN = """
import fastser.dask
from distributed import Client, LocalCluster

class Local:
    def __init__(self, x): self.x = x

def make(n): return [Local(i) for i in range(n)]

if __name__ == "__main__":
    options = {"n_workers": 1, "threads_per_worker": 1, "dashboard_address": ":0"}
    with LocalCluster(**options) as cluster, Client(cluster) as client:
        fastser.dask.install(client)
        made = client.submit(make, 1000).result(timeout=60)
        assert type(made[0]) is Local and [x.x for x in made] == list(range(1000))
        assert client.submit(lambda xs: sum(x.x for x in xs), made).result(timeout=60) == 499500
    print("all well")
"""


def test_a_script(tmp_path):
    script = tmp_path / "main.py"
    script.write_text(MAIN)
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        env=with_fastser(), capture_output=True, text=True, timeout=TIMEOUT, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert done.stdout == "all well\n", done.stderr


# ---- uninstall


def finder():
    """Return a function that finds what fastser has bound in its process."""

    def ours(dask_worker=None):
        import sys

        found = [
            f"{name}.{attribute}"
            for name, module in list(sys.modules.items())
            if name.partition(".")[0] in ("dask", "distributed")
            for attribute, value in list(getattr(module, "__dict__", {}).items())
            if getattr(getattr(value, "__code__", None), "co_filename", "").endswith("dask/rebinding.py")
        ]
        data = getattr(getattr(dask_worker, "data", None), "slow", None)
        if data is not None and data.data.load.__code__.co_filename.endswith("dask/rebinding.py"):
            found.append("data.slow")
        return found

    return ours


def test_uninstalled_everywhere_and_again(client):
    ours = finder()
    assert sum(map(bool, client.run(ours).values())) == 2
    fastser.dask.uninstall(client)
    report = fastser.dask.status(client)
    assert report["client"]["state"] == report["scheduler"]["state"] == "absent"
    assert states(client)["rebound"] == 0
    assert not ours()
    assert not client.run_on_scheduler(lambda dask_scheduler: ours())
    assert not any(client.run(ours).values())
    assert client.submit(lambda: [1, 2, 3], pure=False).result(timeout=TIMEOUT) == [1, 2, 3]
    fastser.dask.uninstall(client)  # once more: nothing to undo

    fastser.dask.install(client)
    assert states(client)["rebound"] >= 2
    workers = fastser.dask.status(client)["workers"]  # a stock one may be among them
    fast = [address for address, report in workers.items() if report["state"] == "rebound"]
    check("floats", client.submit(BUILDERS["floats"], pure=False, workers=fast).result(timeout=TIMEOUT))
