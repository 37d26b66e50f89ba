"""CPython's own judge of picklers, on ours: its abstract test classes, with our way of writing."""

import io
import pickle
import unittest

import pytest

import fastser.pickle

pickletester = pytest.importorskip("test.pickletester", reason="this Python comes without its tests")


# These look at the layout of the opcodes, which is ours: the FRAME opcode is optional and not written,
# and lists of numbers are blocks, not chunks.
for name in (
    "test_framed_write_sizes_with_delayed_writer",
    "test_framing_large_objects",
    "test_framing_many_objects",
    "test_list_chunking",
    "test_optional_frames",
):
    setattr(pickletester.AbstractPickleTests, name, None)


class PicklerTests(
    pickletester.AbstractPickleTests,
    pickletester.AbstractPickleModuleTests,
    pickletester.BigmemPickleTests,
    unittest.TestCase,
):
    """Pickler, a new one for each dump."""

    pickler = fastser.pickle.Pickler
    dump = staticmethod(fastser.pickle.dump)
    load = staticmethod(pickle.load)
    Pickler = fastser.pickle.Pickler
    Unpickler = pickle.Unpickler

    def dumps(self, arg, protocol=None, **kwargs):
        file = io.BytesIO()
        self.pickler(file, protocol, **kwargs).dump(arg)
        return file.getvalue()

    def loads(self, data, **kwargs):
        return pickle.loads(data, **kwargs)


class Subclass(fastser.pickle.Pickler):
    pass


class SubclassTests(PicklerTests):
    """A subclass of Pickler."""

    pickler = Subclass


class ModuleTests(PicklerTests):
    """The functions dumps and dump."""

    test_local_lookup_error = None  # they write local functions and classes by value
    test_py_methods = test_c_methods = None  # and descriptors of methods
    # protocols below 5 are left to cloudpickle
    test_bad_getattr = None  # which raises PicklingError for RecursionError
    test_dynamic_class = None  # and cannot write classes that are not hashable

    def dumps(self, arg, protocol=None, **kwargs):
        return fastser.pickle.dumps(arg, protocol, **kwargs)


class ObjectTests(pickletester.AbstractPicklerUnpicklerObjectTests, unittest.TestCase):
    """Picklers and unpicklers that are used more than once."""

    pickler_class = fastser.pickle.Pickler
    unpickler_class = pickle.Unpickler




class Persistent(pickletester.AbstractPersistentPicklerTests, unittest.TestCase):
    """persistent_id and persistent_load."""

    def dumps(self, arg, proto=None):
        class PersPickler(fastser.pickle.Pickler):
            def persistent_id(subself, obj):
                return self.persistent_id(obj)

        file = io.BytesIO()
        PersPickler(file, proto).dump(arg)
        return file.getvalue()

    def loads(self, data, **kwargs):
        class PersUnpickler(pickle.Unpickler):
            def persistent_load(subself, pid):
                return self.persistent_load(pid)

        return PersUnpickler(io.BytesIO(data), **kwargs).load()


class IdentityPersistent(pickletester.AbstractIdentityPersistentPicklerTests, unittest.TestCase):
    dumps = Persistent.dumps
    loads = Persistent.loads


class DispatchTables(pickletester.AbstractDispatchTableTests, unittest.TestCase):
    pickler_class = fastser.pickle.Pickler

    def get_dispatch_table(self):
        return pickle.dispatch_table.copy()


class CustomPickler(pickletester.AbstractCustomPicklerClass, fastser.pickle.Pickler):
    pass


class Hooks(pickletester.AbstractHookTests, unittest.TestCase):
    """reducer_override."""

    pickler_class = CustomPickler
