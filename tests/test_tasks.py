"""Tasks: functions by caches that are never stale, arguments with warnings, the task family."""

from __future__ import annotations

import functools
import gc
import json
import operator
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import types
import warnings
from typing import Any

import cloudpickle
import msgpack
import numpy as np
import pytest
from dask._task_spec import Alias, DataNode, List, Task, TaskRef
from dask.utils import apply
from hypothesis import given, settings
from hypothesis import strategies as st

from fastser import core, deserialize, serialize, tasks
from fastser.errors import DispatchError, FrameError
from fastser.tasks import (
    ENTRY,
    ByteLRU,
    Tasks,
    dumps_function,
    dumps_task,
    execute_task,
    loads_function,
    loads_task,
    warn_dumps,
)
from fastser.wrappers import Serialize, Serialized, to_serialize


@pytest.fixture(autouse=True)
def empty_caches(monkeypatch):
    monkeypatch.setattr(tasks.tasks, "_warned", tasks._Warned())
    tasks.clear_caches()
    yield
    tasks.clear_caches()


def interactive(source: str, **names: Any) -> dict[str, Any]:
    """Run *source* as if it were typed into a session, whose functions go by value."""
    namespace: dict[str, Any] = {"__name__": "__main__", **names}
    exec(textwrap.dedent(source), namespace)
    return namespace


def run(task: Any) -> Any:
    func, args, kwargs = loads_task(task)
    return func(*args, **kwargs)


def shipped(func: Any) -> Any:
    """Return what a receiver without our caches gets."""
    return pickle.loads(dumps_function(func))


def is_kept(func: Any) -> bool:
    return dumps_function(func) is dumps_function(func)


# ---- the cache


def test_lru_honours_its_budget():
    cache = ByteLRU(10 * ENTRY, share=1)
    for i in range(100):
        assert cache.put(i, str(i), nbytes=0) == str(i)
        assert cache.nbytes <= cache.budget
    assert len(cache) == 10
    assert [cache.get(i) for i in range(90, 100)] == [str(i) for i in range(90, 100)]
    assert cache.get(89) is None


def test_lru_drops_what_was_used_longest_ago():
    cache = ByteLRU(2 * ENTRY, share=2)
    cache.put("a", 1, 0)
    cache.put("b", 2, 0)
    cache.get("a")
    cache.put("c", 3, 0)
    assert (cache.get("a"), cache.get("b"), cache.get("c")) == (1, None, 3)


def test_lru_keeps_no_entry_above_its_share():
    cache = ByteLRU(16_000, share=4)
    assert cache.put("large", 1, 4001 - ENTRY) == 1
    assert cache.get("large") is None and cache.nbytes == 0
    cache.put("fits", 2, 4000 - ENTRY)
    assert cache.get("fits") == 2
    cache.put("fits", 3, 4001 - ENTRY)  # what was there is old
    assert cache.get("fits") is None and cache.nbytes == 0


def test_lru_first_value_stays_if_asked():
    cache = ByteLRU(16_000, share=1)
    assert cache.put("a", 1, 0, replace=False) == 1
    assert cache.put("a", 2, 0, replace=False) == 1
    assert cache.put("a", 3, 0) == 3
    cache.clear()
    assert len(cache) == 0 and cache.nbytes == 0 and cache.get("a") is None


@given(
    st.integers(0, 8 * ENTRY),
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2 * ENTRY)), max_size=60),
)
def test_lru_matches_a_list(budget: int, share: int, puts: list[tuple[int, int]]):
    cache = ByteLRU(budget, share)
    model: list[tuple[int, int, int]] = []  # key, value, size; last used last
    for value, (key, nbytes) in enumerate(puts):
        cache.put(key, value, nbytes)
        model = [entry for entry in model if entry[0] != key]
        if (nbytes + ENTRY) * share <= budget:
            model.append((key, value, nbytes + ENTRY))
        while sum(size for _, _, size in model) > budget:
            model.pop(0)
    assert cache.nbytes == sum(size for _, _, size in model) <= budget
    assert {key: cache.get(key) for key in range(6)} == {
        **dict.fromkeys(range(6)),
        **{key: value for key, value, _ in model},
    }


# ---- functions: what is kept


@pytest.mark.parametrize(
    "func",
    [json.dumps, operator.add, len, int, np.ndarray, functools.partial(json.dumps, indent=1)],
    ids=repr,
)
def test_functions_by_reference_are_kept(func):
    assert is_kept(func)
    other = shipped(func)
    assert other is func or (other.func is func.func and other.keywords == func.keywords)


@pytest.mark.parametrize(
    "source",
    [
        "f = lambda: 1",
        "def f(x=1, *, y=(1, 'a', None)):\n    'doc'\n    return x",
        "n = 3\ndef f():\n    return n",
        "import math\nf = lambda: math.pi",
        "from math import sin\nfrom fractions import Fraction\nf = lambda: sin(Fraction(1))",
        "def g(): return 2\ndef f(): return g()",
        "def f(n=3): return n and f(n - 1)",
        "def make(k):\n    def f(): return k\n    return f\nf = make(frozenset([1]))",
        "import functools\ndef g(x): return x\n@functools.wraps(g)\ndef f(x=1): return g(x)",
        "def f(x: list[int] = 1, y: int | None = None) -> 'int': return x",
        "import functools\nf = functools.partial(lambda x: x, x=1)",
        "import os\nf = lambda: os.path.join('a', 'b')",
    ],
)
def test_functions_by_value_that_hold_plain_data_are_kept(source):
    f = interactive(source)["f"]
    assert is_kept(f)
    assert shipped(f)() == f()


@pytest.mark.parametrize(
    "source",
    [
        "box = []\nf = lambda: box",
        "def make(k):\n    def f(): return k\n    return f\nf = make({})",
        "def f(x=[]): return x",
        "def f(*, x=bytearray()): return x",
        "class C: pass\nf = lambda: C",
        "t = ([],)\nf = lambda: t",
        "def g(x=[]): return x\nf = lambda: g()",
        "def f(): pass\nf.x = []",
        "import functools\nf = functools.partial(lambda x: x, x=[])",
        "class C:\n    def __call__(self): return 1\nf = C()",
        "class C:\n    def m(self): return 1\nf = C().m",
        "class D(dict): pass\nf = lambda d=D(): d",
        "f = [].append",
        "import random\nf = random.Random(0).random",
        "import types\nm = types.ModuleType('m')\nm.x = 1\nf = lambda: m.x",
    ],
)
def test_functions_that_hold_what_may_change_are_pickled_anew(source):
    assert not is_kept(interactive(source)["f"])


def test_unhashable_callables_go():
    class Caller:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self):
            return 5

    assert shipped(Caller())() == 5


def test_bytes_pass_and_other_objects_do_not():
    data = b"anything"
    assert dumps_function(data) is data
    with pytest.raises(TypeError, match="expected a callable, or its pickle as bytes, got int"):
        dumps_function(3)  # type: ignore[arg-type]


def test_equal_functions_are_not_taken_for_each_other():
    made = [interactive(f"f = lambda: {i}")["f"] for i in range(50)]
    assert [shipped(f)() for f in made + made] == 2 * list(range(50))


def test_a_function_at_the_address_of_a_dead_one_is_another():
    for i in range(300):
        assert shipped(interactive(f"f = lambda: {i}")["f"])() == i


def test_pickles_of_functions_stay_within_the_budget():
    room = Tasks(core.codec, budget=64 * 1024)
    made = [interactive(f"f = lambda: {str(i) * 300!r}")["f"] for i in range(200)]
    for i, f in enumerate(made):
        assert pickle.loads(room.dumps_function(f))() == str(i) * 300
    assert 10 < len(room._dumped) < 100 and room._dumped.nbytes <= 64 * 1024
    large = interactive(f"f = lambda: {'x' * 8000!r}")["f"]  # more than a share
    assert room.dumps_function(large) is not room.dumps_function(large)


def test_a_function_with_very_many_parts_is_pickled_anew():
    f = interactive("f = lambda: t", t=tuple(range(100_000)))["f"]
    assert not is_kept(f)
    assert shipped(f)() == f()


# ---- functions: never stale


def change_global(ns):
    ns["n"] = 7


def delete_global(ns):
    del ns["n"]


def change_attribute_of_function(ns):
    ns["f"].n = 7


def change_default(ns):
    ns["f"].__defaults__ = (7,)


def change_keyword_default(ns):
    ns["f"].__kwdefaults__["n"] = 7


def change_code(ns):
    ns["f"].__code__ = (lambda: 7).__code__


def change_helper(ns):
    ns["g"] = interactive("def g(): return 7")["g"]


def change_global_of_helper(ns):
    ns["g"].__globals__["n"] = 7


def mutate(ns):
    ns["box"].append(7)


def change_partial(ns):
    ns["f"].keywords["n"] = 7


def set_cell(ns):
    ns["set_n"](7)


CLOSURE = """
def make(n):
    def f(): return n
    def set_n(m):
        nonlocal n
        n = m
    return f, set_n
f, set_n = make(1)
"""
IN_TUPLE = "box = [1]\nt = (1, (box,))\nf = lambda: list(t[1][0])"


@pytest.mark.parametrize(
    ("source", "change"),
    [
        ("n = 1\nf = lambda: n", change_global),
        ("n = 'a'\nf = lambda: [n for _ in 'a'][0]", change_global),
        ("n = 1\nf = lambda: (lambda: (lambda: n)())()", change_global),
        ("n = 1\ndef f():\n    class C:\n        def m(self): return n\n    return C().m()", change_global),
        ("f = lambda: n if 'n' in globals() else 0", change_global),
        ("n = 1\nf = lambda: 'n' in globals() and n", delete_global),
        ("import functools\nf = functools.partial(lambda n: n, n=1)", change_partial),
        ("def f(n=1): return n", change_default),
        ("def f(*, n=1): return n", change_keyword_default),
        ("f = lambda: 1", change_code),
        ("def g(): return 1\nf = lambda: g()", change_helper),
        ("n = 1\ndef g(): return n\nf = lambda: g()", change_global_of_helper),
        ("n = 1\ndef g(): return n\nf = lambda g=g: g()", change_global_of_helper),
        ("n = 1\ndef g(): return n\nt = (g,)\nf = lambda: t[0]()", change_global_of_helper),
        ("n = 1\ndef g(): return n\ndef f(): return g()\nf.g = g", change_global_of_helper),
        ("box = [1]\nf = lambda: list(box)", mutate),
        ("box = [1]\nf = lambda box=box: list(box)", mutate),
        ("box = [1]\ndef f(*, box=box): return list(box)", mutate),
        ("box = [1]\ndef make(b): return lambda: list(b)\nf = make(box)", mutate),
        ("box = [1]\ndef g(): return box\nf = lambda: list(g())", mutate),
        (IN_TUPLE, mutate),
        (CLOSURE, set_cell),
    ],
)
def test_a_changed_function_is_pickled_anew(source, change):
    ns = interactive(source)
    f = ns["f"]
    before = f()
    assert shipped(f)() == shipped(f)() == before
    change(ns)
    after = f()
    assert after != before
    assert shipped(f)() == shipped(f)() == after


def test_attributes_of_functions_are_not_stale():
    f = interactive("def f(): pass\nf.n = 1")["f"]
    assert is_kept(f) and shipped(f).n == 1
    f.n = 2
    assert shipped(f).n == 2
    f.m = 3
    assert vars(shipped(f)) == {"n": 2, "m": 3}
    f.__doc__, f.__name__, f.__qualname__ = "doc", "name", "qualname"
    other = shipped(f)
    assert (other.__doc__, other.__name__, other.__qualname__) == ("doc", "name", "qualname")
    f.__annotations__["x"] = int
    assert shipped(f).__annotations__ == {"x": int}


def test_a_global_that_hides_a_builtin_counts():
    ns = interactive("f = lambda: len('abc')")
    assert is_kept(ns["f"]) and shipped(ns["f"])() == 3
    ns["len"] = interactive("def len(x): return 'mine'")["len"]
    assert shipped(ns["f"])() == "mine"


def test_an_empty_cell_that_is_filled_counts():
    ns = interactive(
        """
        def make():
            def f(): return n
            def fill(m):
                nonlocal n
                n = m
            if False: n = 0
            return f, fill
        f, fill = make()
        """
    )
    assert is_kept(ns["f"])
    with pytest.raises(NameError):
        shipped(ns["f"])()
    ns["fill"](5)
    assert shipped(ns["f"])() == 5


def test_submodules_that_are_loaded_later_are_named(monkeypatch):
    package, module = types.ModuleType("fs_package"), types.ModuleType("fs_package.part")
    package.__package__, package.__path__ = "fs_package", []  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fs_package", package)
    f = interactive("f = lambda: package.part", package=package)["f"]
    assert is_kept(f) and b"fs_package.part" not in dumps_function(f)
    monkeypatch.setitem(sys.modules, "fs_package.part", module)
    package.part = module  # type: ignore[attr-defined]
    assert is_kept(f) and b"fs_package.part" in dumps_function(f)


@pytest.fixture
def module(monkeypatch):
    module = types.ModuleType("fs_module")
    exec("n = 1\ndef f(): return n\nclass C: pass", module.__dict__)
    monkeypatch.setitem(sys.modules, "fs_module", module)
    return module


def test_a_function_that_left_its_module_goes_by_value(module):
    f = module.f
    assert is_kept(f) and shipped(f) is f
    exec("def f(): return 'new'", module.__dict__)
    other = shipped(f)
    assert other is not module.f and other() == 1
    assert shipped(module.f) is module.f
    module.f = f
    assert shipped(f) is f


def test_a_function_without_a_module_is_pickled_anew(module):
    f = module.f
    f.__module__ = None
    assert shipped(f) is f or shipped(f)() == 1
    del module.f
    assert shipped(f)() == 1 and not is_kept(f)


def test_registered_by_value_counts(module):
    f = module.f
    g = interactive("g = lambda: f()", f=f)["g"]
    assert is_kept(f) and shipped(f) is f
    assert is_kept(g) and b"fs_module" in dumps_function(g)
    cloudpickle.register_pickle_by_value(module)
    try:
        other = shipped(f)
        assert other is not f and other() == 1
        assert is_kept(f)
        module.n = 2
        assert shipped(f)() == 2
        data = dumps_function(g)
        del sys.modules["fs_module"]
        assert pickle.loads(data)() == 2
        sys.modules["fs_module"] = module
    finally:
        cloudpickle.unregister_pickle_by_value(module)
    assert shipped(f) is f


def test_functions_of_main_in_another_process(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import pickle, subprocess, sys
            from fastser.tasks import dumps_function, dumps_task
            assert not any(name.partition(".")[0] in ("dask", "distributed") for name in sys.modules)
            factor = 2
            def helper(x): return x * factor
            def double(x): return helper(x)
            def ask(data):
                program = "import sys, pickle; print(pickle.load(sys.stdin.buffer)(21))"
                child = subprocess.run([sys.executable, "-c", program], input=data, stdout=-1, check=True)
                return child.stdout.decode().strip()
            print(ask(dumps_function(double)), dumps_function(double) is dumps_function(double))
            factor = 3
            print(ask(dumps_function(double)))
            """
        )
    )
    out = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, env=os.environ)
    assert out.stdout.split() == ["42", "True", "63"]


# ---- functions on the receiver


def test_loaded_functions_keep_their_identity():
    data = dumps_function(interactive("f = lambda x: x + 1")["f"])
    f = loads_function(data)
    assert f(1) == 2
    assert loads_function(bytes(bytearray(data))) is f
    assert loads_function(bytearray(data)) is f
    assert loads_function(memoryview(data)) is f
    tasks.clear_caches()
    assert loads_function(data) is not f


def test_loaded_callable_instances_keep_their_identity():
    data = cloudpickle.dumps(functools.partial(interactive("f = lambda x: x")["f"], 1))
    assert loads_function(data) is loads_function(data)


def test_large_functions_are_loaded_plainly():
    data = dumps_function(interactive("f = lambda: x", x="x" * (tasks.BUDGET // tasks.SHARE))["f"])
    assert loads_function(data) is not loads_function(data)
    assert loads_function(data)() == "x" * (tasks.BUDGET // tasks.SHARE)


def test_a_function_by_reference_is_what_the_module_holds(module):
    data = dumps_function(module.f)
    assert loads_function(data) is module.f
    exec("def f(): return 'new'", module.__dict__)
    assert loads_function(data)() == "new"
    assert loads_function(data) is module.f
    module.f = functools.partial(len, "abc")
    assert loads_function(data) is module.f


def test_bad_functions_get_an_answer():
    with pytest.raises(FrameError, match="expected the pickle of a callable, got one of int"):
        loads_function(pickle.dumps(3))
    with pytest.raises((pickle.UnpicklingError, EOFError)):
        loads_function(b"")
    with pytest.raises((pickle.UnpicklingError, EOFError)):
        loads_function(dumps_function(json.dumps)[:-3])


# ---- tasks


def plain(x, *more, factor=1):
    return [x, *more] * factor


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=10,
)


@given(st.lists(PLAIN, min_size=1, max_size=4))
def test_plain_tasks(args):
    dumped = dumps_task((plain, *args))
    assert dumped.keys() == {"function", "args"}
    assert all(type(part) is bytes for part in dumped.values())
    assert msgpack.unpackb(msgpack.packb(dumped)) == dumped
    assert loads_task(dumped) == (plain, tuple(args), {})
    assert run(dumped) == args


@given(st.lists(PLAIN, min_size=1, max_size=4), st.integers(0, 3))
def test_apply_tasks(args, factor):
    assert loads_task(dumps_task((apply, plain, args))) == (plain, args, {})
    dumped = dumps_task((apply, plain, tuple(args), {"factor": factor}))
    assert dumped.keys() == {"function", "args", "kwargs"}
    assert loads_task(dumped) == (plain, tuple(args), {"factor": factor})
    assert loads_task(dumps_task((apply, plain, args, None))) == (plain, args, {})


@pytest.mark.parametrize(
    ("task", "result"),
    [
        ((sum, [1, (max, 2, 3)]), 4),
        ((max, 1, (abs, -2)), 2),
        ((plain, (plain, [(abs, -1)])), [[[1]]]),
        ((apply, plain, (list, [1, 2])), [1, 2]),
        ((apply, plain, [1], (dict, [["factor", 2]])), [1, 1]),
        ([(abs, -1), 2], [1, 2]),
        ("data", "data"),
        ((), ()),
        (("key", 1), ("key", 1)),
    ],
)
def test_what_is_no_plain_call_is_marked_whole(task, result):
    dumped = dumps_task(task)
    assert type(dumped) is Serialize and dumped.data is task
    assert run(dumped) == run(Serialized(*serialize(task))) == run(task) == execute_task(task) == result


def test_tasks_in_dicts_make_no_plain_call():
    assert type(dumps_task((len, {"a": [(abs, 1)]}))) is Serialize
    assert type(dumps_task((len, {"a": ((abs, 1),)}))) is dict  # nobody looks for tasks inside of tuples


def test_odd_apply_tasks_are_calls_of_apply():
    assert loads_task(dumps_task((apply, plain))) == (apply, (plain,), {})
    assert loads_task(dumps_task((apply, plain, "text"))) == (apply, (plain, "text"), {})


def test_cyclic_and_long_arguments():
    cyclic: list[Any] = [1]
    cyclic.append(cyclic)
    _, (back,), _ = loads_task(dumps_task((len, cyclic)))
    assert back[1] is back
    floats = [1.5] * 2000 + [2.5]
    assert loads_task(dumps_task((sum, floats))) == (sum, (floats,), {})


def test_marks_pass():
    mark = to_serialize(1)
    assert dumps_task(mark) is mark
    relayed = Serialized(*serialize((max, 1, 2)))
    assert dumps_task(relayed) is relayed
    assert run(to_serialize(to_serialize((max, 1, 2)))) == 2


def test_functions_may_be_pickled_already():
    assert run({"function": dumps_function(max), "args": (1, 2)}) == 2
    assert run({"function": max, "args": [1, 2], "kwargs": {}}) == 2
    assert run({"function": memoryview(dumps_function(dict)), "kwargs": pickle.dumps({"a": 1})}) == {"a": 1}


@pytest.mark.parametrize(
    ("dumped", "message"),
    [
        ({}, r"expected function, args and kwargs, got \[\]"),
        ({"function": b"", "task": 1}, "expected function, args and kwargs"),
        ({"function": 3}, "function: expected bytes, got int"),
        ({"function": max, "args": pickle.dumps(3)}, "args: expected tuple, got int"),
        ({"function": max, "args": {}}, "args: expected tuple, got dict"),
        ({"function": max, "kwargs": [1]}, "kwargs: expected dict, got list"),
        ({"function": pickle.dumps(3)}, "expected the pickle of a callable"),
    ],
)
def test_bad_tasks_get_an_answer(dumped, message):
    with pytest.raises(FrameError, match=message):
        loads_task(dumped)


def framed(x, split=None, compressed=False):
    header, frames = core.serialize_and_split(x, size=split)
    if compressed:
        header, frames = core.codec.compress_frames(header, frames, "zlib")
        assert "zlib" in header["compression"]
    return Serialized(header, frames)


@pytest.mark.parametrize("split", [None, 20_000])
@pytest.mark.parametrize("compressed", [False, True])
def test_wrapped_arguments_arrive_unwrapped_at_any_depth(split, compressed):
    array = np.zeros(20_000)
    args = (
        framed(array, split, compressed),
        [{"a": (to_serialize([1]), framed(array, split, compressed))}],
        framed([to_serialize({"b": 1})]),
    )
    for task in ((plain, *args), (apply, plain, list(args)), (apply, plain, (), {"x": args})):
        func, got, kwargs = loads_task(dumps_task(task))
        assert func is plain
        first, [nested], last = kwargs["x"] if kwargs else got
        np.testing.assert_array_equal(first, array)
        assert nested["a"][0] == [1]
        np.testing.assert_array_equal(nested["a"][1], array)
        assert last == [{"b": 1}]


def test_wrapped_data_in_a_function_arrives_unwrapped():
    func = functools.partial(plain, framed([1]), factor=2)
    assert run(dumps_task((func,))) == [[1], [1]]
    assert shipped(interactive("f = lambda: x", x=to_serialize([1]))["f"])() == [1]


# ---- dask tasks


def test_dask_tasks_without_dependencies_are_calls():
    dumped = dumps_task(Task("key", plain, 1, [2], factor=2))
    assert loads_task(dumped) == (plain, (1, [2]), {"factor": 2})
    assert run(dumps_task(Task("key", plain, 1))) == [1]


@pytest.mark.parametrize(
    "task",
    [
        Task("key", plain, TaskRef("x")),
        Task("key", plain, 1, factor=Alias("x")),
        Task("key", plain, DataNode("d", 5)),
        Task("key", plain, Task("inner", plain, 1)),
        List(1, Task("inner", plain, 2)),
        Alias("key", "x"),
        DataNode("key", [1]),
    ],
    ids=repr,
)
def test_other_dask_tasks_are_marked_whole(task):
    dumped = dumps_task(task)
    assert type(dumped) is Serialize and dumped.data is task
    for family in ("pickle", "task"):
        other = deserialize(*serialize(task, serializers=[family]))
        assert type(other) is type(task) and other == task and other.key == task.key
        values = {"x": 3}
        assert other(values) == task(values)
    if not task.dependencies:
        assert run(dumped) == task()


def test_dask_tasks_with_wrapped_arguments():
    func, args, _ = loads_task(dumps_task(Task("key", plain, framed([1]))))
    assert (func, args) == (plain, ([1],))


# ---- the family

SERIALIZERS = ("task", "dask", "pickle")


def trip(task):
    header, frames = serialize(task, serializers=SERIALIZERS, on_error="raise")
    header = msgpack.unpackb(msgpack.packb(header), use_list=False)
    kept = msgpack.packb(header)
    back = deserialize(header, [bytes(frame) for frame in frames])
    assert msgpack.packb(header) == kept
    return back


@given(st.lists(PLAIN, max_size=4))
@settings(max_examples=50)
def test_the_family_gives_equal_tasks(args):
    assert trip((plain, *args)) == (plain, *args)
    assert trip((apply, plain, args)) == (apply, plain, args)
    assert trip((apply, plain, args, {"factor": 2})) == (apply, plain, args, {"factor": 2})
    assert trip(Task("key", plain, *args, factor=2)) == Task("key", plain, *args, factor=2)


@pytest.mark.parametrize(
    "task",
    [
        (plain,),
        (plain, (plain, 1), [(max, 1, 2)]),
        (apply, plain),
        (apply, plain, (list, [1])),
        (apply, plain, [1], None),
        (apply, plain, [1], {}, "more"),
        (int, 3),
    ],
)
def test_odd_tasks_come_back(task):
    assert trip(task) == task


def test_the_function_has_a_frame_of_its_own_and_keeps_its_identity():
    f = interactive("f = lambda *args: args")["f"]
    header, frames = serialize((f, 1), serializers=SERIALIZERS)
    assert header == {"serializer": "task", "form": "call", "writeable": ()}
    assert frames[0] is dumps_function(f) and len(frames) == 2
    first = trip((f, 1))
    assert first[0] is trip((f, 2))[0] is trip((apply, f, [3]))[1] is trip(Task("k", f, 4)).func
    assert first[0] is loads_function(dumps_function(f))
    assert trip((apply, f, [3]))[0] is apply
    assert first[0](*first[1:]) == (1,)


def test_functions_of_dask_tasks_inside_keep_their_identity():
    f = interactive("f = lambda x: x + 1")["f"]
    here = loads_function(dumps_function(f))
    inner = trip(Task("outer", plain, Task("inner", f, 1), [Task("other", f, 2)]))
    assert inner.args[0].func is inner.args[1][0].func is here
    assert inner() == [2, inner.args[1]]
    assert trip(List(Task("inner", f, 1))).args[0].func is here
    fused = Task.fuse(Task("a", f, 1), Task("b", f, TaskRef("a")), key="b")
    back = trip(fused)
    assert back == fused and back() == 3
    assert {node.func for node in back.args[0].values()} == {here}


def test_what_functions_of_inner_tasks_share_stays_shared():
    box: list[int] = []
    f = interactive("f = lambda: box", box=box)["f"]
    back = trip(List(Task("inner", f), box))
    assert back.args[0].func() is back.args[1]


def test_buffers_travel_apart():
    array = np.arange(100_000.0)
    for task in (
        (plain, array),
        (apply, plain, [], {"x": array}),
        Task("k", plain, array),
        DataNode("k", array),
    ):
        header, frames = serialize(task, serializers=SERIALIZERS)
        assert max(memoryview(frame).nbytes for frame in frames) == array.nbytes
        assert np.shares_memory(np.frombuffer(frames[-1]), array)
        back = deserialize(header, frames)
        got = (
            back.args[0] if isinstance(back, Task) else back.value if isinstance(back, DataNode) else back[-1]
        )
        got = got["x"] if isinstance(got, dict) else got
        assert np.shares_memory(got, array)
        np.testing.assert_array_equal(got, array)


def test_tasks_of_the_family_travel_split_and_compressed():
    array = np.zeros(50_000)
    f = interactive("f = lambda *args: args")["f"]
    data = core.serialize_bytes((f, array, "x"), serializers=SERIALIZERS, size=1000)
    func, got, text = core.deserialize_bytes(data)
    assert func is loads_function(dumps_function(f)) and text == "x"
    np.testing.assert_array_equal(got, array)


@pytest.mark.parametrize("x", [3, "text", (), (1, len), [len, 1], {"a": len}, len, np.ones(3)], ids=repr)
def test_what_is_no_task_goes_by_another_family(x):
    with pytest.raises(DispatchError, match="not a task"):
        tasks.tasks.task_dumps(x)
    header, frames = serialize(x, serializers=SERIALIZERS)
    assert header["serializer"] in ("dask", "pickle")
    np.testing.assert_array_equal(deserialize(header, frames), x)


def test_namedtuples_are_no_tasks():
    from collections import namedtuple

    pair = namedtuple("pair", "a b")
    with pytest.raises(DispatchError):
        tasks.tasks.task_dumps(pair(len, 1))


def test_bad_headers_and_frames_get_an_answer():
    header, frames = serialize((plain, np.zeros(20_000)), serializers=SERIALIZERS)
    assert len(frames) == 3

    def read(frames=frames, **changes):
        return deserialize({k: v for k, v in {**header, **changes}.items() if v is not None}, frames)

    assert read()[0] is plain
    with pytest.raises(FrameError, match=r"form: expected one of \['call', .*\], got None"):
        read(form=None)
    with pytest.raises(FrameError, match=r"form: expected one of .*, got 3"):
        read(form=3)
    with pytest.raises(FrameError, match="form: expected one of"):
        read(form=["call"])
    with pytest.raises(FrameError, match="header lacks 'writeable'"):
        read(writeable=None)
    with pytest.raises(FrameError, match="expected frames of a function and a program, got 1"):
        read(frames[:1])
    with pytest.raises(FrameError, match="expected a program and 1 buffers, got 1 frames"):
        read(frames[:2])
    with pytest.raises(FrameError, match="expected a tuple, the rest of a task of form 'call'"):
        read([frames[0], pickle.dumps(3)], writeable=())
    with pytest.raises(FrameError, match="expected a tuple, the rest of a task of form 'node'"):
        read([frames[0], pickle.dumps((1,))], writeable=(), form="node")
    with pytest.raises(FrameError, match="expected the class and state of a dask task, got 1"):
        read([frames[0], pickle.dumps((1, ()))], writeable=(), form="node")
    with pytest.raises(FrameError, match="expected the pickle of a callable"):
        read([pickle.dumps(1), *frames[1:]])


def test_node_states_that_do_not_fit_get_an_answer():
    header, frames = serialize(Task("k", plain, 1), serializers=SERIALIZERS)
    for state in (None, (), (1, 2), [1] * 50):
        with pytest.raises(FrameError, match="expected the class and state of a dask task"):
            deserialize(header, [frames[0], pickle.dumps((Task, state))])


def test_errors_of_arguments_are_told():
    with pytest.raises(core.SerializationError, match="lock"):
        serialize((plain, threading.Lock()), serializers=["task"], iterate_collection=False, on_error="raise")


# ---- warnings


def warned(obj, **kwargs):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        data = warn_dumps(obj, **kwargs)
    assert type(data) is bytes
    assert all(w.category is UserWarning and w.filename == __file__ for w in caught)
    return [str(w.message) for w in caught]


class Model:
    def __init__(self, weights):
        self.weights = weights


def test_small_objects_are_not_warned_about():
    assert pickle.loads(warn_dumps((1, "a"))) == (1, "a")
    array = np.zeros(100_000)
    assert warned((array,)) == []
    assert warned((array,), limit=10_000_000) == []


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda big: (big,), "args[0]"),
        (lambda big: ({"weights": big},), "args[0]['weights']"),
        (lambda big: (1, [2, (3, {4: big})]), "args[1][1][1][4]"),
        (lambda big: ("a" * 1000, Model(big)), "args[1].weights"),
        (lambda big: (Model({"x": [Model(big)]}),), "args[0].weights['x'][0].weights"),
        (lambda big: (functools.partial(plain, 1, factor=big),), "args[0].keywords['factor']"),
        (lambda big: big, "args"),
    ],
)
@pytest.mark.parametrize("kind", ["array", "list", "bytes", "set"])
def test_the_warning_names_the_path(make, path, kind):
    big = {
        "array": lambda: np.ones(200_000),
        "list": lambda: [i / 7 for i in range(200_000)],
        "bytes": lambda: os.urandom(1_600_000),
        "set": lambda: set(range(400_000)),
    }[kind]()
    obj = make(big)
    [message] = warned(obj)
    assert message.startswith("Large object of size 1.")
    assert f" MiB in a task, at {path}: " in message
    assert "client.scatter" in message
    assert len(message) < 400


def test_serialized_objects_are_large_as_they_are():
    wrapped = framed(np.ones(200_000))
    [message] = warned(([1, wrapped],))
    assert "at args[0][1].frames[0]: <" in message


def test_several_large_objects_are_named_by_size():
    args = tuple(np.ones(150_000 + 1000 * i) for i in range(5))
    [message] = warned(args, name="kwargs")
    places = [line.split(":")[0].rpartition(" ")[2] for line in message.splitlines()[:3]]
    assert places == ["kwargs[4]", "kwargs[3]", "kwargs[2]"]
    assert "and 2 more" in message
    assert warned(args) == []


def test_many_small_things_are_large_as_a_whole():
    [message] = warned((["a" * 1000 + str(i) for i in range(1200)],))
    assert "at args[0]: ['aaa" in message


def test_each_object_is_warned_about_once():
    for make in (
        lambda: np.ones(200_000),
        lambda: [i / 7 for i in range(200_000)],
        lambda: Model(bytes(2_000_000)),
    ):
        big = make()
        assert len(warned((big,))) == 1
        assert warned((big,)) == []
        assert warned(([big], 1)) == []
        other = make()
        assert len(warned((big, other))) == 1


def test_an_object_at_the_address_of_a_dead_one_is_warned_about():
    seen = set()
    for _ in range(20):
        big = np.ones(200_000)
        seen.add(id(big))
        assert len(warned((big,))) == 1
        del big
        gc.collect()
    assert len(seen) < 20, "addresses were not used again: the test shows nothing"


def test_memory_of_warnings_is_bounded():
    memory = tasks._Warned()
    arrays = [np.ones(1) for _ in range(3 * tasks.WARNED)]
    assert all(memory.is_new(array, 8) for array in arrays)
    assert len(memory._known) == tasks.WARNED
    assert not memory.is_new(arrays[-1], 8)


def test_the_reprs_in_warnings_are_short_and_harmless():
    class Loud:
        def __init__(self):
            self.data = bytes(2_000_000)

        def __repr__(self):
            raise RuntimeError("no repr")

        def __reduce__(self):
            return bytes, (self.data,)

    [message] = warned((Loud(),))
    assert "args[0].data: b'" in message

    class Long(Loud):
        __slots__ = ()

        def __repr__(self):
            return "<" + "x" * 10_000 + ">"

    x = Long()
    x.__dict__.clear()
    x._data = bytes(2_000_000)
    x.__class__.__reduce__ = lambda self: (bytes, (self._data,))
    [message] = warned((x,))
    assert "at args[0]: <xxx" in message and len(message) < 400


def test_another_dumps_may_be_given():
    assert warn_dumps([1], dumps=lambda x: b"ab") == b"ab"
    [message] = warned([1], dumps=lambda x: b"abc", limit=2)
    assert message.startswith("Large object of size 3 B in a task, at args: [1]")


def test_tasks_with_large_arguments_are_warned_about():
    big = np.ones(200_000)
    with pytest.warns(
        UserWarning, match=r"Large object of size 1.53 MiB in a task, at args\[1\]\['w'\]: array"
    ) as caught:
        dumps_task((plain, 1, {"w": big}))
    assert caught[0].filename == __file__
    dumps_task((plain, 1, {"w": big}))
    with pytest.warns(UserWarning, match=r"at kwargs\['x'\]: array") as caught:
        dumps_task((apply, plain, [], {"x": np.ones(200_000)}))
    assert caught[0].filename == __file__


# ---- threads


def test_many_threads_dump_and_load():
    ns = interactive("n = 0\nf = lambda x: x + n")
    made = [interactive(f"k = {i}\ndef g(x): return x * k\nf = lambda x: g(x)")["f"] for i in range(40)]
    data = [dumps_function(f) for f in made]
    tasks.clear_caches()
    errors: list[BaseException] = []
    loaded: list[list[Any]] = []
    start = threading.Barrier(8)

    def work(seed: int) -> None:
        try:
            start.wait()
            for turn in range(30):
                for i in range(40):
                    k = (i * 7 + seed) % 40
                    assert pickle.loads(dumps_function(made[k]))(3) == 3 * k
                    assert run(dumps_task((made[k], turn))) == turn * k
                func, arg = trip((made[turn], seed))
                assert func(arg) == seed * turn
            loaded.append([loads_function(one) for one in data])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for i in range(200):  # meanwhile a global changes under a function that is dumped
            ns["n"] = i
            assert shipped(ns["f"])(0) == i
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors, errors[0]
    for functions in zip(*loaded, strict=True):
        assert len(set(map(id, functions))) == 1


def test_clearing_while_others_work():
    f = interactive("f = lambda x: x + 1")["f"]
    stop = threading.Event()
    errors = []

    def clear():
        while not stop.is_set():
            tasks.clear_caches()

    def work():
        try:
            for i in range(500):
                assert run(dumps_task((f, i))) == i + 1
        except BaseException as error:
            errors.append(error)

    clearer = threading.Thread(target=clear)
    workers = [threading.Thread(target=work) for _ in range(3)]
    clearer.start()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    stop.set()
    clearer.join()
    assert not errors
