"""Calls as arguments of calls: how a reducer writes a program of more than one step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Call:
    """Travels as a call, arrives as its result; the pickle does not name this class.

    Examples
    --------
    >>> import pickle
    >>> pickle.loads(pickle.dumps(Call(divmod, Call(len, "abcde"), 3)))
    (1, 2)
    """

    __slots__ = ("args", "func")

    def __init__(self, func: Callable[..., Any], *args: Any):
        self.func = func
        self.args = args

    def __call__(self, *args: Any) -> Any:
        """Make the call and call its result; here only because a pickler asks for a callable."""
        return self.func(*self.args)(*args)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.func, self.args
