"""Tasks to bytes and back: functions by caches that are never stale, large arguments with a warning."""

from __future__ import annotations

import dis
import functools
import itertools
import reprlib
import sys
import threading
import warnings
import weakref
from abc import ABCMeta
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from enum import EnumMeta
from operator import is_
from types import BuiltinFunctionType, CodeType, FunctionType, GenericAlias, ModuleType, UnionType
from typing import Any

import cloudpickle

from fastser import _pickler, core, dispatch
from fastser import pickle as fast_pickle
from fastser.errors import DispatchError, FrameError
from fastser.wrappers import Frames, Header


class _Absent:
    """What a global or the content of a cell is that is not there."""


BUDGET = 32 * 2**20  # bytes of all pickled functions that a cache keeps
SHARE = 16  # a part of the budget that one entry may take at most: 2 MiB of 32
ENTRY = 512  # bytes that an entry takes besides its data, roughly
STAMP_LIMIT = 1000  # captured objects; with more of them, looking costs as much as pickling
CODES = 4096  # code objects whose global names are kept
LARGE = 1_000_000  # bytes of pickled arguments that deserve a warning
WEIGHED = 1000  # objects that the search for a large one weighs
PATH_DEPTH = 10  # levels that it descends
NAMED = 3  # large objects that one warning names
WARNED = 1024  # large objects that are remembered
MARKS = 8  # items, at either end, that tell two large objects apart
TEXT = 70  # characters of an object in a warning

ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented)})
UNSTAMPED = ATOMS | {CodeType, _Absent}  # have no parts, or what they have cannot change
REFERABLE = frozenset({FunctionType, BuiltinFunctionType, type, ABCMeta, EnumMeta})
NESTING = frozenset({list, tuple, dict})
MODULE_NAMES = ("__package__", "__name__", "__path__", "__file__")  # travel with every function by value
GLOBAL_OPS = frozenset({"LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL"})
ABSENT = _Absent()
FORMS = ("call", "apply", "node", "whole")


class ByteLRU:
    """Keep what was used last, up to a number of bytes.  May be used from many threads.

    Parameters
    ----------
    budget : int
        Bytes that all entries may take, keys and bookkeeping not exactly counted (`ENTRY` bytes each).
    share : int
        An entry of more than ``budget / share`` bytes is not kept.

    Examples
    --------
    >>> cache = ByteLRU(4096, share=2)
    >>> cache.put("a", 1, nbytes=1000), cache.put("b", 2, nbytes=1000), cache.put("c", 3, nbytes=2000)
    (1, 2, 3)
    >>> cache.get("a"), cache.get("b"), cache.nbytes <= 4096
    (1, 2, True)
    """

    def __init__(self, budget: int, share: int = SHARE):
        self.budget = budget
        self.share = share
        self.nbytes = 0
        self._entries: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Hashable) -> Any:
        """Return the value of *key*, or None."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            return entry[0]

    def put(self, key: Hashable, value: Any, nbytes: int, replace: bool = True) -> Any:
        """Keep *value*, unless it is too large; return the value that *key* has now, or *value*.

        With ``replace=False`` a value that another thread put first stays.
        """
        nbytes += ENTRY
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                if not replace:
                    return entry[0]
                self._drop(key)
            if nbytes * self.share <= self.budget:
                self._entries[key] = value, nbytes
                self.nbytes += nbytes
                while self.nbytes > self.budget:
                    self._drop(next(iter(self._entries)))
        return value

    def _drop(self, key: Hashable) -> None:
        self.nbytes -= self._entries.pop(key)[1]

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._entries, old = OrderedDict(), self._entries
            self.nbytes = 0
        del old  # outside of the lock: dropping functions may run code


# ---- what the pickle of a function depends on


def _stamp(obj: object) -> list[Any] | None:
    """List every object that the pickle of the function *obj* depends on; None if that may change unseen.

    Two stamps with the same objects, one by one, mean the same pickle: each object in them is
    immutable plain data, a module or something that goes by reference, or its parts are in it too.
    """
    stamp: list[Any] = [obj]
    todo: list[Any] = [obj]  # what is in the stamp, and its parts not yet
    seen: set[int] = set()
    while todo:
        x = todo.pop()
        if id(x) in seen:
            continue
        if len(stamp) > STAMP_LIMIT:
            return None
        seen.add(id(x))
        cls = type(x)
        parts: Sequence[Any]
        if cls in REFERABLE:
            names = _reference(x)
            if names is not None:
                stamp += names
                continue
            if cls is not FunctionType or type(x.__module__) is not str:  # cloudpickle searches its module
                return None
            parts = _function_parts(x)
        elif cls is tuple or cls is frozenset:
            if len(x) > STAMP_LIMIT:
                return None
            parts = x if cls is tuple else tuple(x)
        elif cls is ModuleType:
            parts = (x.__name__,)
            if type(parts[0]) is not str or sys.modules.get(parts[0]) is not x or _by_value(parts[0]):
                return None
        elif cls is functools.partial:
            parts = [x.func, x.args]
            _add_dict(x.keywords, parts)
            _add_dict(x.__dict__, parts)
        elif cls is GenericAlias or cls is UnionType:
            parts = getattr(x, "__origin__", None), x.__args__
        else:
            return None
        stamp += parts
        for part in parts:
            if type(part) not in UNSTAMPED:
                todo.append(part)
    return stamp


def _same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(map(is_, a, b))


def _reference(obj: Any) -> tuple[str, str] | None:
    """Return module and name of a function or class that goes by reference, or None."""
    module_name = getattr(obj, "__module__", None)
    name = obj.__qualname__
    if type(module_name) is not str or type(name) is not str or module_name == "__main__":
        return None
    if type(obj) is BuiltinFunctionType and not isinstance(obj.__self__, (ModuleType, type(None))):
        return None  # a method, which travels with its object
    found: Any = sys.modules.get(module_name)
    try:
        for part in name.split("."):
            found = getattr(found, part)
    except Exception:  # modules may answer by code of their own
        return None
    if found is not obj or _by_value(module_name):
        return None
    return module_name, sys.intern(name)  # names of builtins are made anew each time


def _by_value(module_name: str) -> bool:
    """Tell whether what the module holds was registered to go by value."""
    registry = cloudpickle.list_registry_pickle_by_value()
    if not registry:
        return False
    parts = module_name.split(".")
    return any(".".join(parts[:n]) in registry for n in range(1, len(parts) + 1))


def _function_parts(func: Any) -> list[Any]:
    """Return all that cloudpickle writes of a function that goes by value."""
    code = func.__code__
    parts = [code, func.__name__, func.__qualname__, func.__module__, func.__doc__, func.__defaults__]
    for attributes in (func.__kwdefaults__, func.__annotations__, func.__dict__):
        _add_dict(attributes, parts)
    namespace = func.__globals__
    captured = [namespace.get(name, ABSENT) for name in _global_names(code)]
    if func.__closure__:
        captured += map(_content, func.__closure__)
    parts += captured
    for value in captured:
        if type(value) is ModuleType and value.__package__:
            _add_submodules(value.__name__, code.co_names, parts)
    return parts


def _add_dict(attributes: dict[Any, Any] | None, parts: list[Any]) -> None:
    if attributes:
        parts.append(len(attributes))
        parts += attributes
        parts += attributes.values()
    else:
        parts.append(attributes is None)


def _add_submodules(package: str, names: Iterable[str], parts: list[Any]) -> None:
    """Add the loaded modules below *package* that the code can name; cloudpickle lets them be imported."""
    for name in names:
        module = sys.modules.get(f"{package}.{name}")
        if module is not None:
            parts.append(module)
            _add_submodules(f"{package}.{name}", names, parts)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return ABSENT


_codes: dict[int, tuple[CodeType, tuple[str, ...]]] = {}


def _global_names(code: CodeType) -> tuple[str, ...]:
    """Return the globals that *code* and the code inside of it refer to."""
    known = _codes.get(id(code))
    if known is not None:  # it holds the code, so the id is of no other
        return known[1]
    names = dict.fromkeys(MODULE_NAMES)
    todo = [code]
    while todo:
        part = todo.pop()
        names.update((i.argval, None) for i in dis.get_instructions(part) if i.opname in GLOBAL_OPS)
        todo.extend(const for const in part.co_consts if isinstance(const, CodeType))
    if len(_codes) >= CODES:
        _codes.clear()
    _codes[id(code)] = code, tuple(names)
    return tuple(names)


# ---- functions on the receiver

_loaded = ByteLRU(BUDGET)


def loads_function(data: Any) -> Callable[..., Any]:
    """Return the function of a pickle; the same bytes give the same function as long as it is kept.

    So whatever a function keeps with itself, such as code compiled for it, is there for its next task.
    A function that came by reference is returned only while it is what the module holds.

    Parameters
    ----------
    data : bytes-like
        What `dumps_function` or any pickler wrote.

    Raises
    ------
    FrameError
        If the pickle is that of an object which cannot be called.
    Exception
        Whatever ``pickle.loads`` raises.

    Examples
    --------
    >>> add = loads_function(dumps_function(lambda x, y=1: x + y))
    >>> add(1), add is loads_function(dumps_function(lambda x, y=1: x + y))
    (2, False)
    >>> data = dumps_function(lambda x: x)
    >>> loads_function(data) is loads_function(data)
    True
    """
    if type(data) is not bytes:
        data = bytes(data)
    kept = _loaded.get(data)
    if kept is not None:
        func, by_reference = kept
        if not by_reference or _reference(func) is not None:
            return func  # type: ignore[no-any-return]
    func = fast_pickle.loads(data)
    if not callable(func):
        raise FrameError(f"expected the pickle of a callable, got one of {type(func).__name__}")
    by_reference = type(func) in REFERABLE and _reference(func) is not None
    # what another thread loaded meanwhile stays, but not what was found stale
    replace = by_reference or kept is not None
    return _loaded.put(data, (func, by_reference), len(data), replace)[0]  # type: ignore[no-any-return]


# ---- kinds of tasks


def _is_task(x: Any) -> bool:
    """Tell whether *x* is ``(func, *args)``."""
    return type(x) is tuple and bool(x) and callable(x[0])


def _is_apply(func: Any) -> bool:
    """Tell whether *func* is ``dask.utils.apply``."""
    return getattr(func, "__module__", None) == "dask.utils" and getattr(func, "__name__", None) == "apply"


def _holds_task(values: Iterable[Any]) -> bool:
    """Tell whether one of *values* is a task, or holds one in lists and values of dicts at any depth."""
    todo = [x for x in values if type(x) in NESTING]
    seen: set[int] = set()
    while todo:
        x = todo.pop()
        if type(x) is tuple:
            if _is_task(x):
                return True
        elif id(x) not in seen:
            seen.add(id(x))
            items = x.values() if type(x) is dict else x
            if not NESTING.isdisjoint(map(type, items)):
                todo.extend(item for item in items if type(item) in NESTING)
    return False


def _spec(name: str) -> Any:
    """Return a class of dask's task specification; if dask is not loaded, one that has no objects."""
    return getattr(sys.modules.get("dask._task_spec"), name, _NoClass)


class _NoClass:
    """A class without objects."""


def execute_task(task: Any) -> Any:
    """Run a task with the tasks in its arguments; lists of tasks give lists, other objects themselves.

    Examples
    --------
    >>> execute_task((sum, [1, (max, 2, 3)]))
    4
    """
    if _is_task(task):
        return task[0](*map(execute_task, task[1:]))
    if type(task) is list:
        return list(map(execute_task, task))
    if isinstance(task, _spec("GraphNode")):
        return task()
    return task


def read_node(cls: Any, state: Any, func: Any) -> Any:
    """Make a dask task from its state without the function, and the function; programs name this."""
    try:
        slots = cls.get_all_slots()
        state = list(state)
        if len(state) != len(slots):
            raise TypeError(f"expected {len(slots)} parts of the state, got {len(state)}")
        state[slots.index("func")] = loads_function(func) if type(func) is bytes else func
        node = cls.__new__(cls)
        node.__setstate__(tuple(state))
    except (AttributeError, TypeError) as error:
        raise FrameError(f"expected the class and state of a dask task, got {cls!r:.100}: {error}") from error
    return node


# ---- large objects


class _Search:
    """Find what makes an object large."""

    def __init__(self, find_reducer: Callable[[type], Any], limit: int):
        self.find_reducer = find_reducer
        self.limit = limit
        self.left = WEIGHED
        self.seen: set[int] = set()

    def weigh(self, x: Any) -> int:
        """Return the bytes of the pickle of *x*, whose large buffers are not copied for it."""
        if type(x) is str or type(x) is bytes or type(x) is bytearray:
            return len(x)
        if type(x) in ATOMS or self.left <= 0:
            return 0
        self.left -= 1
        nbytes = 0

        def count(buffer: Any) -> bool:
            nonlocal nbytes
            nbytes += buffer.raw().nbytes
            return False

        try:
            program = _pickler.dumps(x, buffer_callback=count, find_reducer=self.find_reducer)
        except Exception:  # as part of the whole it was written in another way
            return 0
        return len(program) + nbytes

    def find(self, x: Any, path: str, nbytes: int, depth: int = PATH_DEPTH) -> Iterator[tuple[str, Any, int]]:
        """Yield path, object and bytes of each large object that holds no large object itself."""
        self.seen.add(id(x))
        found = False
        for name, part in _parts(x) if depth else ():
            if id(part) in self.seen:
                continue
            weight = self.weigh(part)
            if weight > self.limit:
                found = True
                yield from self.find(part, path + name, weight, depth - 1)
        if not found:
            yield path, x, nbytes


def _parts(x: Any) -> Iterator[tuple[str, Any]]:
    """Yield what *x* holds, and how to get at it."""
    if isinstance(x, dict):
        yield from ((f"[{reprlib.repr(key)}]", value) for key, value in x.items())
    elif isinstance(x, (list, tuple)):
        if not ATOMS - {str, bytes} >= set(map(type, x)):
            yield from ((f"[{i}]", item) for i, item in enumerate(x))
    elif isinstance(x, functools.partial):
        yield from ((f".{name}", getattr(x, name)) for name in ("func", "args", "keywords"))
    elif not isinstance(x, (type, ModuleType)):
        attributes = getattr(x, "__dict__", None)
        if isinstance(attributes, dict):
            yield from ((f".{k}", v) for k, v in attributes.items() if isinstance(k, str) and k[:1] != "_")


class _Warned:
    """Remember what was warned about, by identity as long as it lives.

    What takes no weak reference, such as a list, is known again by its address, type, size and where some
    of its items are.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[int, tuple[weakref.ref[Any] | None, Any]] = OrderedDict()
        self._lock = threading.Lock()

    def is_new(self, x: Any, nbytes: int) -> bool:
        """Tell whether *x* was not met before; from now on it was."""
        ref, marks = None, None
        try:
            ref = weakref.ref(x)
        except TypeError:
            marks = type(x), nbytes, _marks(x)
        with self._lock:
            known = self._known.get(id(x))
            self._known[id(x)] = ref, marks
            self._known.move_to_end(id(x))
            if len(self._known) > WARNED:
                self._known.popitem(last=False)
        if known is None:
            return True
        return known[1] != marks if known[0] is None else known[0]() is not x


def _marks(x: Any) -> tuple[Any, ...]:
    """Return a little of *x* that another object at the same address would hardly have."""
    if isinstance(x, (str, bytes, bytearray)):
        return x[:MARKS], x[-MARKS:]
    if isinstance(x, (list, tuple)):
        return (*map(id, x[:MARKS]), *map(id, x[-MARKS:]))
    return tuple(map(id, itertools.islice(x.values(), MARKS))) if isinstance(x, dict) else ()


def _size(nbytes: float) -> str:
    """Return a number of bytes for people.

    >>> _size(999), _size(8_000_128)
    ('999 B', '7.63 MiB')
    """
    if nbytes < 1024:
        return f"{nbytes} B"
    for unit in ("KiB", "MiB", "GiB"):
        nbytes /= 1024
        if nbytes < 1024:
            return f"{nbytes:.2f} {unit}"
    return f"{nbytes / 1024:.2f} TiB"


def _text(x: Any) -> str:
    """Return the start and the end of the repr of *x*, which is not made whole if that can be helped."""
    text = repr(bytes(x[:TEXT])) if isinstance(x, (bytes, bytearray)) else reprlib.repr(x)
    return text if len(text) <= TEXT else f"{text[: TEXT - 20]} ... {text[-15:]}"


# ---- tasks


class Tasks:
    """Functions and tasks to bytes, for one codec, and the caches for it.

    `fastser.tasks.dumps_function` and its kin are the methods of one on fastser's own codec;
    `fastser.dask` can make another on that of distributed.

    Parameters
    ----------
    codec : Codec
        Its wrappers are unwrapped in arguments at any depth, its handlers write what is inside.
    budget : int
        Bytes of pickled functions that are kept.
    """

    def __init__(self, codec: core.Codec, budget: int = BUDGET):
        self.codec = codec
        self._dumped = ByteLRU(budget)
        self._warned = _Warned()

    def clear_caches(self) -> None:
        """Forget the functions in all caches, here and of `loads_function`.

        To be called when modules change under functions that were loaded, as by ``upload_file``.
        """
        self._dumped.clear()
        _loaded.clear()

    # ---- functions

    def dumps_function(self, func: Callable[..., Any] | bytes) -> bytes:
        """Return the pickle of a function, kept for the next time.

        A kept pickle is used again only if nothing it depends on can have changed: code, defaults,
        annotations, attributes, closure, the globals that the code refers to, and the same of functions
        among those that go by value too.  Functions that hold anything mutable, methods and other
        callables are pickled anew each time.

        Parameters
        ----------
        func : callable or bytes
            Bytes are taken for a pickled function and returned as they are.

        Raises
        ------
        TypeError
            If *func* is neither.
        PicklingError, RecursionError
            And whatever else the pickler raises.

        Examples
        --------
        >>> import pickle
        >>> f = lambda x: x + 1
        >>> pickle.loads(dumps_function(f))(1)
        2
        >>> dumps_function(f) is dumps_function(f)
        True
        >>> dumps_function(b"pickled already")
        b'pickled already'
        """
        if isinstance(func, bytes):
            return func
        if not callable(func):
            raise TypeError(f"expected a callable, or its pickle as bytes, got {type(func).__name__}")
        return self._dumps_function(func)[0]

    def _dumps_function(self, func: Callable[..., Any]) -> tuple[bytes, bool]:
        """Return the pickle of *func*, and whether it depends on immutable objects only."""
        stamp = _stamp_or_none(func)
        if stamp is None:
            return self._program(func), False
        kept = self._dumped.get(id(func))
        if kept is not None and _same(kept[0], stamp):
            return kept[1], True
        data = self._program(func)
        after = _stamp_or_none(func)  # another thread may have changed what the pickle depends on
        if after is not None and _same(after, stamp):
            self._dumped.put(id(func), (stamp, data), len(data) + 8 * len(stamp))
        return data, True

    # ---- pickles

    def _program(self, x: object) -> bytes:
        """Return the pickle of *x* with all buffers inside."""
        return self.codec.two_tries(lambda find: _pickler.dumps(x, find_reducer=find))

    def warn_dumps(
        self,
        obj: object,
        dumps: Callable[[Any], bytes] | None = None,
        limit: int = LARGE,
        *,
        name: str = "args",
        stacklevel: int = 2,
    ) -> bytes:
        """Return the pickle of *obj*, with a warning if it is large.

        The warning names each large object inside of *obj*, its size and the path to it.  An object is
        warned about once as long as it lives.

        Parameters
        ----------
        obj : object
            `Serialize` marks and `Serialized` data are unwrapped at any depth.
        dumps : callable, optional
            ``dumps(obj) -> bytes``, in place of fastser's pickle.
        limit : int
            Bytes that are not large yet.
        name : str
            What the paths in the warning start with.
        stacklevel : int
            As for ``warnings.warn``.

        Warns
        -----
        UserWarning
            If the pickle has more than *limit* bytes.

        Examples
        --------
        >>> import numpy as np
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     data = warn_dumps(({"weights": np.ones(1250)},), limit=5000)
        >>> "at args[0]['weights']: array([1., 1." in str(caught[0].message)
        True
        """
        data = self._program(obj) if dumps is None else dumps(obj)
        if len(data) > limit:
            search = _Search(self.codec.find_reducer, limit)
            found = sorted(search.find(obj, name, len(data)), key=lambda item: -item[2])
            new = [item for item in found if self._warned.is_new(item[1], item[2])]
            if new:
                places = [
                    f"Large object of size {_size(nbytes)} in a task, at {path}: {_text(x)}"
                    for path, x, nbytes in new[:NAMED]
                ]
                if len(new) > NAMED:
                    places.append(f"and {len(new) - NAMED} more")
                advice = (
                    "It travels inside of every task that names it. Send it once with "
                    "future = client.scatter(...) and pass the future, or load it in the task."
                )
                warnings.warn("\n".join([*places, advice]), UserWarning, stacklevel=stacklevel)
        return data

    # ---- tasks to bytes

    def dumps_task(self, task: Any) -> Any:
        """Turn a task into parts that a scheduler can hold without a look inside.

        Parameters
        ----------
        task : object
            ``(func, *args)``, also ``(dask.utils.apply, func, args, kwargs)``; a dask ``Task``; or data.

        Returns
        -------
        dict or Serialize
            ``{"function": bytes, "args": bytes}``, with ``"kwargs": bytes`` if there are any, for a
            plain call.  Tasks that hold tasks, dask tasks with dependencies and all that is no task are
            marked `Serialize` as a whole.  A scheduler has no use of the key of a dask task in the dict,
            so it is not there.

        Warns
        -----
        UserWarning
            If arguments are large, as by `warn_dumps`.

        Raises
        ------
        PicklingError, RecursionError
            And whatever else the pickler raises.

        Examples
        --------
        >>> sorted(dumps_task((max, 1, 2)))
        ['args', 'function']
        >>> dumps_task((max, 1, (abs, -2)))
        <Serialize: (<built-in function max>, 1, (<built-in function abs>, -2))>
        """
        if isinstance(task, (self.codec.wrappers.serialize, self.codec.wrappers.serialized)):
            return task
        call = _call_of(task)
        if call is None:
            return self.codec.wrappers.serialize(task)
        func, args, kwargs = call
        dumped = {
            "function": self.dumps_function(func),
            "args": self.warn_dumps(args, stacklevel=3),
        }
        if kwargs:
            dumped["kwargs"] = self.warn_dumps(kwargs, name="kwargs", stacklevel=3)
        return dumped

    def loads_task(self, dumped: Any) -> tuple[Callable[..., Any], Any, Any]:
        """Return function, arguments and keyword arguments of what `dumps_task` gave.

        Parameters
        ----------
        dumped : dict or object
            A dict may hold arguments that are loaded already.  What was marked as a whole may come as
            the mark, as `Serialized`, or as the task itself, unless that is a dict; `execute_task` runs it.

        Raises
        ------
        FrameError
            If a dict has no function, other keys, or parts that are no arguments.
        Exception
            Whatever ``pickle.loads`` raises.

        Examples
        --------
        >>> function, args, kwargs = loads_task(dumps_task((max, 1, 2)))
        >>> function(*args, **kwargs)
        2
        >>> function, args, kwargs = loads_task(dumps_task((max, 1, (abs, -2))))
        >>> function(*args, **kwargs)
        2
        """
        if not isinstance(dumped, dict):
            return execute_task, (self._unwrapped(dumped),), {}
        if not {"function"} <= dumped.keys() <= {"function", "args", "kwargs"}:
            raise FrameError(f"a task: expected function, args and kwargs, got {list(dumped)!r:.200}")
        func = dumped["function"]
        if not callable(func):
            if not isinstance(func, (bytes, bytearray, memoryview)):
                raise FrameError(f"function: expected bytes, got {type(func).__name__}")
            func = loads_function(func)
        args = _loaded_part(dumped, "args", (tuple, list), ())
        kwargs = _loaded_part(dumped, "kwargs", (dict,), {})
        return func, args, kwargs

    def _unwrapped(self, x: Any) -> Any:
        wrappers = self.codec.wrappers
        while isinstance(x, wrappers.serialize):
            x = x.data
        if isinstance(x, wrappers.serialized):
            return self.codec.deserialize(x.header, x.frames)
        return x

    # ---- the family

    def task_dumps(self, x: Any) -> tuple[Header, Frames]:
        """Write a task: its function by `dumps_function`, the rest as a program and buffers.

        Frame 0 is the function, frame 1 the program, then come buffers; a dask task other than ``Task``
        itself has no frame for a function.  Functions of dask tasks inside go by `dumps_function` too,
        where nothing they hold can be shared.  What the function of the task shares with its arguments
        is not shared any more on the other side.

        Raises
        ------
        DispatchError
            If *x* is no task.
        """
        cls = type(x)
        if _is_task(x):
            apply = len(x) in (3, 4) and _is_apply(x[0]) and callable(x[1])
            func, rest, form = (x[1], x[2:], "apply") if apply else (x[0], x[1:], "call")
        elif cls is _spec("Task"):
            state, func = _taken_apart(x)
            rest, form = (cls, state), "node"
        elif isinstance(x, _spec("GraphNode")):
            header, frames = self._compile(x)
            return {**header, "serializer": "task", "form": "whole"}, frames
        else:
            raise DispatchError(f"not a task: {cls.__name__}")
        header, frames = self._compile(rest)
        return {**header, "serializer": "task", "form": form}, [self.dumps_function(func), *frames]

    def task_loads(self, header: Header, frames: Frames) -> Any:
        """Read what `task_dumps` wrote.

        Raises
        ------
        FrameError
            If header and frames do not fit each other, or do not hold a task.
        ImportError
            If the task is one of dask, which is not installed here.
        """
        form = header.get("form")
        if form not in FORMS:
            raise FrameError(f"form: expected one of {list(FORMS)}, got {form!r:.100}")
        if form == "whole":
            return self.codec.pickle_loads(header, frames)
        if len(frames) < 2:
            raise FrameError(f"expected frames of a function and a program, got {len(frames)}")
        func = loads_function(frames[0])
        rest = self.codec.pickle_loads(header, frames[1:])
        expected = {"call": range(sys.maxsize), "apply": (1, 2), "node": (2,)}[form]
        if type(rest) is not tuple or len(rest) not in expected:
            raise FrameError(f"expected a tuple, the rest of a task of form {form!r}, got {rest!r:.100}")
        if form == "node":
            cls, state = rest
            return read_node(cls, state, func)
        if form == "apply":
            from dask.utils import apply

            return apply, func, *rest
        return func, *rest

    def _compile(self, x: object) -> tuple[Header, Frames]:
        def write(find: Callable[[type], Any]) -> tuple[Header, Frames]:
            task = _spec("Task")
            return self.codec._compile(x, lambda cls: self._reduce_node if cls is task else find(cls))

        return self.codec.two_tries(write)

    def _reduce_node(self, x: Any) -> Any:
        """Write a dask task inside of a program; its function as bytes where that changes nothing."""
        state, func = _taken_apart(x)
        if type(func) is not FunctionType or _reference(func) is not None:
            return read_node, (type(x), state, func)
        data, alone = self._dumps_function(func)
        return read_node, (type(x), state, data if alone else func)


def _stamp_or_none(func: object) -> list[Any] | None:
    try:
        return _stamp(func)
    except Exception:  # attributes that are computed, or dicts that another thread changes meanwhile
        return None


def _call_of(task: Any) -> tuple[Any, Any, Any] | None:
    """Return function, args and kwargs if *task* is no more than one call, or None."""
    if _is_task(task):
        func, rest = task[0], task[1:]
        if _holds_task(rest):
            return None
        if _is_apply(func) and len(rest) in (2, 3) and callable(rest[0]) and type(rest[1]) in (tuple, list):
            kwargs = rest[2] if len(rest) == 3 else {}
            if kwargs is None or type(kwargs) is dict:
                return rest[0], rest[1], kwargs
        return func, rest, None
    if type(task) is _spec("Task"):
        nested = (_spec("GraphNode"), _spec("TaskRef"))
        if not any(isinstance(arg, nested) for arg in itertools.chain(task.args, task.kwargs.values())):
            return task.func, task.args, task.kwargs
    return None


def _taken_apart(task: Any) -> tuple[tuple[Any, ...], Any]:
    """Return the state of a dask task without its function, and the function."""
    state = list(task.__getstate__())
    at = type(task).get_all_slots().index("func")
    func, state[at] = state[at], None
    return tuple(state), func


def _loaded_part(dumped: dict[str, Any], name: str, types: tuple[type, ...], default: Any) -> Any:
    part = dumped.get(name)
    if isinstance(part, (bytes, bytearray, memoryview)):
        part = fast_pickle.loads(part)
    if part is None:
        return default
    if not isinstance(part, types):
        raise FrameError(f"{name}: expected {types[0].__name__}, got {type(part).__name__}")
    return part


tasks = Tasks(core.codec)
dispatch.register_serialization_family("task", tasks.task_dumps, tasks.task_loads)
dumps_function = tasks.dumps_function
dumps_task = tasks.dumps_task
loads_task = tasks.loads_task
warn_dumps = tasks.warn_dumps
clear_caches = tasks.clear_caches
