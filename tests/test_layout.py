"""The rooms: who imports whom, what is public, and that the examples in the docs are true."""

import ast
import doctest
import importlib
import pathlib
import pkgutil
import re
import subprocess
import sys

import pytest

import fastser

ROOT = pathlib.Path(fastser.__file__).parent
# Imports point to the left only.
ROOMS = [
    "errors",
    "wrappers",
    "dispatch",
    "_utf8",
    "_lists",
    "_frames",
    "_msgpack",
    "_pickler",
    "pickle",
    "compression",
    "core",
    "_message",
    "tasks",
    "handlers",
    "inspection",
    "dask",
    "__main__",
    "__init__",
]
PUBLIC = [
    "serialize",
    "deserialize",
    "serialize_and_split",
    "merge_and_deserialize",
    "serialize_bytelist",
    "serialize_bytes",
    "deserialize_bytes",
    "Serialize",
    "to_serialize",
    "Serialized",
    "ToPickle",
    "Pickled",
    "dumps",
    "loads",
    "dask_serialize",
    "dask_deserialize",
    "register_serialization",
    "register_serialization_family",
    "register_generic",
    "frame_split_size",
    "merge_memoryviews",
    "pack_frames",
    "unpack_frames",
    "maybe_compress",
    "decompress",
    "infer_if_recurse_to_serialize_list",
    "check_dask_serializable",
    "dumps_function",
    "loads_function",
    "dumps_task",
    "warn_dumps",
]


def sources():
    return sorted(path for path in ROOT.rglob("*.py*") if path.suffix in (".py", ".pyx"))


def room(path):
    return path.relative_to(ROOT).parts[0].removesuffix(path.suffix)


def imported_rooms(path):
    """Yield the rooms of fastser that a source file imports."""
    text = path.read_text()
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [node.module]
                if node.module == "fastser":
                    modules = [f"fastser.{alias.name}" for alias in node.names]
            else:
                continue
            yield from (name.split(".")[1] for name in modules if name.startswith("fastser."))
    else:
        for module, names in re.findall(r"^\s*from (fastser[\w.]*) c?import ([\w, ]+)", text, re.M):
            found = [module] if module != "fastser" else [f"fastser.{name}" for name in names.split(", ")]
            yield from (name.split(".")[1] for name in found)
        assert not re.search(r"^\s*c?import fastser", text, re.M)


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path):
    here = room(path)
    for other in imported_rooms(path):
        if other != here:
            assert ROOMS.index(other) < ROOMS.index(here), f"{here} must not import {other}"


def test_only_the_dask_room_imports_distributed():
    for path in sources():
        if room(path) == "dask":
            continue
        found = re.findall(r"^\s*(?:from|import) distributed\b", path.read_text(), re.M)
        assert not found, path


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names(name):
    assert name in fastser.__all__
    thing = getattr(fastser, name)
    assert thing.__doc__ if callable(thing) else thing


def test_all_is_what_there_is():
    assert all(hasattr(fastser, name) for name in fastser.__all__)
    assert sorted(fastser.__all__) == list(fastser.__all__)


def test_pickle_has_the_names_of_pickle():
    for name in ("dumps", "loads", "dump", "load", "Pickler", "Unpickler"):
        assert callable(getattr(fastser.pickle, name))


def modules():
    for module in pkgutil.walk_packages(fastser.__path__, "fastser."):
        if not module.name.endswith((".preload", ".__main__")):  # these act when imported
            yield module.name


@pytest.mark.parametrize("name", sorted(modules()))
def test_doctests(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_readme_examples():
    readme = ROOT.parent / "README.md"
    text = "".join(re.findall(r"^>>>.*\n(?:^(?!```).*\n)*", readme.read_text(), re.M))
    parser = doctest.DocTestParser()
    test = parser.get_doctest(text, {}, "README.md", str(readme), 0)
    assert test.examples
    assert doctest.DocTestRunner().run(test).failed == 0


def test_no_module_bears_the_name_of_a_public_function():
    names = {name.rpartition(".")[2] for name in modules()}
    assert not {name for name in names & set(fastser.__all__) if callable(getattr(fastser, name))}


def test_import_brings_no_optional_library():
    script = "import fastser, sys; print(*{name.partition('.')[0] for name in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    optional = {"dask", "distributed", "pandas", "pyarrow", "scipy", "h5py", "netCDF4", "sparse", "torch"}
    assert optional.isdisjoint(loaded.split())


def test_stubs_are_true(tmp_path):
    pytest.importorskip("mypy")
    names = [f"fastser.{path.stem}" for path in ROOT.glob("*.pyx")]
    assert all((ROOT / f"{name.partition('.')[2]}.pyi").exists() for name in names)
    # what the stubs leave out is private to the modules
    command = [sys.executable, "-m", "mypy.stubtest", "--ignore-missing-stub", *names]
    result = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
