"""The names of distributed that fastser stands in for, and how they are bound and put back."""

from __future__ import annotations

import importlib
import inspect
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial, wraps
from types import FunctionType
from typing import Any, NamedTuple

from fastser.dask import offloading
from fastser.dask.codec import STOCK_FAMILIES, codec, stock


class Name(NamedTuple):
    """A public function of distributed, the parameters it is known to have, and what stands in for it."""

    module: str
    attribute: str
    parameters: str
    ours: Callable[..., Any]
    log: str | None = None  # what distributed logs when the function fails


PROTOCOL = "distributed.protocol"
CLOSED_LIST = (
    Name(
        f"{PROTOCOL}.serialize", "serialize",
        "x serializers on_error context iterate_collection", codec.serialize,
    ),
    Name(f"{PROTOCOL}.serialize", "deserialize", "header frames deserializers", codec.deserialize),
    Name(
        f"{PROTOCOL}.serialize", "serialize_and_split",
        "x serializers on_error context size", codec.serialize_and_split,
    ),
    Name(
        f"{PROTOCOL}.serialize", "merge_and_deserialize",
        "header frames deserializers", codec.merge_and_deserialize,
    ),
    Name(f"{PROTOCOL}.serialize", "serialize_bytelist", "x compression kwargs", codec.serialize_bytelist),
    Name(f"{PROTOCOL}.serialize", "serialize_bytes", "x kwargs", codec.serialize_bytes),
    Name(f"{PROTOCOL}.serialize", "deserialize_bytes", "b", codec.deserialize_bytes),
    Name(
        f"{PROTOCOL}.core", "dumps",
        "msg serializers on_error context frame_split_size", codec.messages.dumps,
        log="Failed to Serialize",
    ),
    Name(
        f"{PROTOCOL}.core", "loads",
        "frames deserialize deserializers", codec.messages.loads,
        log="Failed to deserialize",
    ),
    Name(f"{PROTOCOL}.pickle", "dumps", "x buffer_callback protocol", codec.dumps_pickle),
    Name(f"{PROTOCOL}.pickle", "loads", "x buffers", codec.loads_pickle),
    Name("distributed.comm.utils", "to_frames", "msg allow_offload kwargs", offloading.to_frames),
)  # fmt: skip
FAMILIES = ("dask", "pickle")  # registered instead, where the names are not as expected
PACKAGES = ("distributed", "dask", "dask_cuda", "distributed_ucxx")  # whose copies of the names are found


class Rebinding:
    """The state of this process: who wants fastser, and what is bound because of it.

    Several parts of one process may want it: a client, a scheduler, each worker of
    ``LocalCluster(processes=False)``.  It is bound for the first and put back after the last.
    """

    def __init__(self, names: tuple[Name, ...] = CLOSED_LIST):
        self.names = names
        self.state = "absent"
        self.pairs: list[tuple[Any, Any]] = []  # theirs, ours; of all that was ever bound here
        self.registered: dict[str, tuple[Any, Any]] = {}  # family -> theirs, ours
        self._owners: set[str] = set()
        self._lock = threading.RLock()

    def acquire(self, owner: str) -> None:
        """Put fastser in place for *owner*; does nothing more if it is already."""
        with self._lock:
            self._owners.add(owner)
            if self.state != "absent":
                return
            unknown = self.mismatches()
            if not unknown:
                self.pairs = [(theirs, _stand_in(theirs, name)) for name, theirs in self._found()]
                _replace(self.pairs)
                self.state = "rebound"
                return
            self._register()
            self.state = "registered"
        warnings.warn(
            "this distributed is not known to fastser, which is limited to its serialization families "
            f"there: {'; '.join(unknown)}",
            stacklevel=3,
        )

    def release(self, owner: str) -> None:
        """Take the wish of *owner* back; after the last, distributed is what it was."""
        with self._lock:
            self._owners.discard(owner)
            if self._owners or self.state == "absent":
                return
            _replace([(ours, theirs) for theirs, ours in self.pairs])
            for family, (theirs, ours) in self.registered.items():
                if stock.families.get(family) is ours:
                    stock.families[family] = theirs
            self.registered = {}
            self.state = "absent"

    def mismatches(self) -> list[str]:
        """Say which names of distributed are not as fastser expects them."""
        unknown = []
        for name in self.names:
            where = f"{name.module}.{name.attribute}"
            try:
                theirs = _theirs(name)
                parameters = " ".join(inspect.signature(theirs).parameters)
            except (ImportError, AttributeError, TypeError, ValueError) as error:
                unknown.append(f"{where} is missing: {error}")
                continue
            if parameters != name.parameters:
                unknown.append(f"{where} takes ({parameters}), not ({name.parameters})")
            elif not isinstance(theirs, FunctionType):
                unknown.append(f"{where} is a {type(theirs).__name__}, not a function")
        return unknown

    def bind_spill(self, data: Any) -> None:
        """Let *data* of a worker, whose spill buffer holds functions since it was made, follow the names."""
        with self._lock:
            bound = self.state == "rebound"
            now = (
                {id(theirs): ours for theirs, ours in self.pairs}
                if bound
                else {id(ours): theirs for theirs, ours in self.pairs}
            )
        for slow in _spills(data):
            dump = slow.dump
            if isinstance(dump, partial) and id(dump.func) in now:
                slow.dump = partial(now[id(dump.func)], *dump.args, **dump.keywords)
            slow.load = now.get(id(slow.load), slow.load)

    def _found(self) -> Iterator[tuple[Name, Any]]:
        """The names and what they are bound to; one that is ours still (bound by hand) is not bound again."""
        known = {id(ours): theirs for theirs, ours in self.pairs}
        for name in self.names:
            theirs = _theirs(name)
            yield name, known.get(id(theirs), theirs)

    def _register(self) -> None:
        for family in FAMILIES:
            theirs = stock.families.get(family)
            if theirs is not None and theirs[:2] == STOCK_FAMILIES[family]:
                own = codec.own_families[family]
                stock.register_serialization_family(family, _passing(own.dumps), own.loads)
                self.registered[family] = theirs, stock.families[family]


def _passing(dumps: Any) -> Any:
    """Let *dumps* raise to say "not mine", as distributed expects it."""

    @wraps(dumps)
    def passing(x: Any, context: Any = None) -> Any:
        answer = dumps(x, context=context)
        if answer is NotImplemented:
            raise NotImplementedError(type(x).__qualname__)
        return answer

    return passing


def _theirs(name: Name) -> Any:
    return getattr(importlib.import_module(name.module), name.attribute)


def _stand_in(theirs: Any, name: Name) -> Any:
    """Return a function that looks like *theirs*, so that it is pickled by the same name, and calls ours."""
    ours, log = name.ours, name.log

    @wraps(theirs)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    @wraps(theirs)
    def logged_stand_in(*args: Any, **kwargs: Any) -> Any:
        try:
            return ours(*args, **kwargs)
        except Exception:
            logging.getLogger(name.module).critical(log, exc_info=True)
            raise

    return stand_in if log is None else logged_stand_in


def _replace(pairs: list[tuple[Any, Any]]) -> None:
    """Replace the first of each pair by the second in every module that holds it."""
    new = {id(old): new for old, new in pairs}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in PACKAGES:
            attributes = getattr(module, "__dict__", {})
            for attribute, value in list(attributes.items()):
                if id(value) in new:
                    attributes[attribute] = new[id(value)]


def _spills(data: Any) -> Iterator[Any]:
    """The parts of a worker's data that write to disk by functions they hold."""
    for _ in range(3):  # SpillBuffer.slow is a cache, whose data is what writes
        if hasattr(data, "dump") and hasattr(data, "load"):
            yield data
            return
        data = getattr(data, "slow", getattr(data, "data", None))


rebinding = Rebinding()
