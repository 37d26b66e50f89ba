"""Functions and classes go by value where cloudpickle would do so, and arrive as it lets them arrive."""

import dataclasses
import enum
import functools
import pickle
import subprocess
import sys
import textwrap
import types

import cloudpickle
import pytest

from fastser.pickle import dumps


def copy(obj):
    return pickle.loads(dumps(obj))


def main_module(source):
    """Run *source* as if it were typed at a prompt; return its names."""
    names = {"__name__": "__main__", "__builtins__": __builtins__}
    exec(textwrap.dedent(source), names)
    return names


def test_closures():
    def counter(start):
        count = [start]

        def add(n):
            count[0] += n
            return count[0]

        return add, count

    add, count = copy(counter(5))
    assert add(2) == 7
    assert count == [7]  # the cell holds the list that travelled beside the function


def test_a_function_that_refers_to_itself():
    def factorial(n):
        return n * factorial(n - 1) if n else 1

    assert copy(factorial)(5) == 120


def test_defaults_attributes_and_annotations():
    def f(a: int, b=(1, [2]), *, c="x") -> str:
        "doc"
        return f"{a}{b}{c}"

    f.tag = {"k": 1}
    g = copy(f)
    assert (g.__defaults__, g.__kwdefaults__, g.__doc__, g.tag) == (((1, [2]),), {"c": "x"}, "doc", {"k": 1})
    assert g.__annotations__ == {"a": int, "return": str}
    assert g(0) == "0(1, [2])x"


def test_functions_of_one_dump_share_their_globals():
    names = main_module(
        """
        total = 1
        def add(n):
            global total
            total += n
        def get():
            return total
        """
    )
    add, get = copy((names["add"], names["get"]))
    assert add.__globals__ is get.__globals__
    add(5)
    assert get() == 6
    assert names["total"] == 1


def test_only_the_globals_that_are_used_travel():
    names = main_module("used = 1\nunused = open\ndef f():\n    return used")
    names["unused"] = sys.stdout  # cannot be pickled
    assert copy(names["f"])() == 1


def test_classes_of_main():
    names = main_module(
        """
        class Base:
            def greet(self):
                return "base " + self.name
        class Child(Base):
            kind = "child"
            def __init__(self, name):
                self.name = name
            def greet(self):
                return "child of " + super().greet()
            @classmethod
            def make(cls):
                return cls("made")
            @staticmethod
            def twice(x):
                return 2 * x
            @property
            def upper(self):
                return self.name.upper()
        """
    )
    one, two, cls = copy([names["Child"]("a"), names["Child"]("b"), names["Child"]])
    assert one.greet() == "child of base a"
    assert type(one) is type(two) is cls
    assert (cls.make().name, cls.twice(4), one.upper, cls.kind) == ("made", 8, "A", "child")


def test_a_class_dumped_twice_is_one_class_in_one_process():
    names = main_module("class C:\n    pass")
    assert copy(names["C"]) is copy(names["C"])


def test_a_class_defined_anew_is_another_class():
    first = main_module("class C:\n    version = 1")["C"]
    second = main_module("class C:\n    version = 2")["C"]
    assert [cls.version for cls in copy([first, second])] == [1, 2]


def test_dynamic_classes_of_many_kinds():
    class Colour(enum.Enum):
        RED = 1

    @dataclasses.dataclass
    class Point:
        x: int
        y: list = dataclasses.field(default_factory=list)

    class Slotted:
        __slots__ = ("a", "b")

    slotted = Slotted()
    slotted.a = [1]
    red, red_again, point, slotted = copy([Colour.RED, Colour.RED, Point(3), slotted])
    assert red is red_again and red.value == 1
    assert (point.x, point.y) == (3, [])
    assert slotted.a == [1] and not hasattr(slotted, "b")


def test_methods_and_partials():
    class Greeter:
        def greet(self, name, mark="!"):
            return f"{self.word} {name}{mark}"

    greeter = Greeter()
    greeter.word = "hi"
    method, partial, same = copy([greeter.greet, functools.partial(greeter.greet, mark="?"), greeter])
    assert method("Ann") == "hi Ann!"
    assert partial("Bob") == "hi Bob?"
    assert method.__self__ is same


def test_nested_in_plain_data_the_rest_keeps_the_fast_way():
    data = {"f": lambda x: x + 1, "rows": [[i / 2 for i in range(1000)] for _ in range(10)]}
    written = dumps(data)
    assert len(written) < 10 * 8000 + 2000  # typed blocks: 8 bytes a float
    back = pickle.loads(written)
    assert back["rows"] == data["rows"] and back["f"](1) == 2


def test_importable_functions_go_by_reference():
    assert b"_make_function" not in dumps(textwrap.dedent)
    assert copy(textwrap.dedent) is textwrap.dedent
    assert copy(dataclasses.dataclass) is dataclasses.dataclass


def test_registered_modules_go_by_value():
    module = types.ModuleType("by_value_for_this_test")
    exec("class Config:\n    x = 3\ndef f():\n    return Config.x", module.__dict__)
    sys.modules[module.__name__] = module
    try:
        assert b"_make_function" not in dumps([module.f])
        cloudpickle.register_pickle_by_value(module)
        try:
            written = dumps({"a": (1, module.f, module.Config())})
        finally:
            cloudpickle.unregister_pickle_by_value(module)
    finally:
        del sys.modules[module.__name__]
    back = pickle.loads(written)
    assert back["a"][1]() == 3
    assert back["a"][2].x == 3


@pytest.mark.parametrize("definition", ["f = lambda x: x * factor", "def f(x):\n    return x * factor"])
def test_a_process_without_the_definition_reads_it(definition, tmp_path):
    writer = f"factor = 6\n{definition}\nclass Box:\n    pass\nbox = Box()\nbox.f = f\n"
    writer += "import sys, fastser.pickle\nsys.stdout.buffer.write(fastser.pickle.dumps([f, box]))"
    written = subprocess.run([sys.executable, "-c", writer], check=True, capture_output=True).stdout
    reader = "import sys, pickle\nf, box = pickle.load(sys.stdin.buffer)\n"
    reader += "assert 'fastser' not in sys.modules\nprint(f(7), box.f is f, type(box).__name__)"
    read = subprocess.run([sys.executable, "-c", reader], input=written, check=True, capture_output=True)
    assert read.stdout.split() == [b"42", b"True", b"Box"]
