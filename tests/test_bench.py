"""bench.py runs, tells exact from inexact, and writes what --against reads."""

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

PATH = Path(__file__).parent.parent / "bench.py"
pytestmark = pytest.mark.skipif(not PATH.exists(), reason="bench.py is not beside the tests")


def run(*arguments):
    return subprocess.run(
        [sys.executable, str(PATH), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("bench_under_test", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_small_rows(tmp_path):
    done = run("--only", "fixed/none,messages/tiny", "--repeat", 1, "--json", tmp_path / "one.json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "geometric means" in done.stdout
    found = json.loads((tmp_path / "one.json").read_text())
    assert found["failures"] == []
    assert found["versions"]["python"] == sys.version.split()[0]
    assert {"machine", "load", "full", "seconds", "summary", "missing"} <= set(found)
    cells = {(c["section"], c["row"], c["contender"]): c for c in found["cells"]}
    assert {key[:2] for key in cells} == {("fixed", "none"), ("messages", "tiny")}
    for contender in ("fastser", "fastser.pickle", "pickle5", "marshal"):
        cell = cells["fixed", "none", contender]
        assert cell["exact"] is True
        assert cell["size"] > 0
        for metric in ("dumps", "loads"):
            assert 0 < cell["stats"][metric]["best"] <= cell["stats"][metric]["median"]

    again = run("--only", "fixed/none", "--repeat", 1, "--against", tmp_path / "one.json")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "then  now  ratio" in " ".join(again.stdout.split()).replace(" ", "  ")


def test_inexact_and_failing_contenders(bench):
    options = bench.argparse.Namespace(full=False, repeat=1, only="none")
    run = bench.Bench(options)
    pairs = {
        "fastser": (repr, lambda data: 1.0),
        "raises": (lambda x: 1 / 0, eval),
        "dies": (lambda x: bench.os._exit(3), eval),
        "exact": (lambda x: repr(x).encode(), eval),
    }
    run.compete("fixed", "row", 1, pairs, bench.same, None)
    cells = run.of("fixed")["row"]
    assert cells["fastser"].error.startswith("TypeError")  # the size of a str is not known
    assert cells["raises"].error == "ZeroDivisionError: division by zero"
    assert cells["dies"].error == "crashed with exit code 3"
    assert cells["exact"].exact
    assert bench.fastest(cells, "dumps") is cells["exact"]
    pairs["fastser"] = (lambda x: b"", lambda data: 1.0)
    run.compete("fixed", "other", 1, pairs, bench.same, None)
    assert run.failures()[-1] == "fixed/other: fastser: not the same object"


def test_list_and_unknown_row():
    listed = run("--list", "--only", "objects,memory").stdout.split("\n")
    assert "objects/float_const" in listed
    assert "memory/array 400 MB" in listed
    assert not any(line.startswith("cluster") for line in listed)
    unknown = run("--only", "nothing like this")
    assert unknown.returncode == 2
    assert "--list" in unknown.stderr


def test_same_is_exact(bench):
    quiet = math.nan
    for x in (
        1,
        True,
        1.5,
        quiet,
        -0.0,
        [1, (2.0, {"a": {3}})],
        np.arange(3),
        np.float64(1),
        {"b": 1, "a": 2},
    ):
        assert bench.same(x, x)
    for a, b in (
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        ([1, True], [True, 1]),
        ([1.0, None], [1, None]),
        ((1,), [1]),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({1}, {True}),
        (np.arange(3), np.arange(3.0)),
        (1.0, np.float64(1)),
    ):
        assert not bench.same(a, b)


@pytest.mark.parametrize("n", [10])
def test_workloads_are_reproducible(bench, n):
    for name in bench.WORKLOADS:
        assert bench.same(bench.build(name, n), bench.build(name, n)), name
