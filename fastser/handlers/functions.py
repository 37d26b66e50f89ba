"""Functions under functools.lru_cache that must travel by value."""

from __future__ import annotations

import functools
import sys
from typing import Any

import cloudpickle

from fastser.dispatch import Call, reducers


@reducers.register(functools._lru_cache_wrapper)
def reduce_lru_cache(x: Any) -> Any:
    """Write the wrapped function and the parameters of the cache, not what is in it."""
    if type(x) is not functools._lru_cache_wrapper or _by_reference(x):
        return NotImplemented
    try:
        params, wrapped = x.cache_parameters(), x.__wrapped__
    except AttributeError:
        return NotImplemented
    decorate = Call(functools.lru_cache, params["maxsize"], params["typed"])
    copied = {"__wrapped__": wrapped, **vars(wrapped)} if hasattr(wrapped, "__dict__") else {}
    own = {k: v for k, v in vars(x).items() if k not in copied or copied[k] is not v}
    return (decorate, (wrapped,), own) if own else (decorate, (wrapped,))


def _by_reference(x: Any) -> bool:
    """Tell whether a reader finds *x* by its name."""
    name = getattr(x, "__module__", None)
    module = sys.modules.get(name) if isinstance(name, str) else None
    if module is None or name == "__main__":
        return False
    by_value = cloudpickle.list_registry_pickle_by_value()
    parts = name.split(".")  # type: ignore[union-attr]
    if any(".".join(parts[:n]) in by_value for n in range(1, len(parts) + 1)):
        return False
    found: Any = module
    try:
        for part in x.__qualname__.split("."):
            found = getattr(found, part)
    except AttributeError:
        return False
    return found is x
