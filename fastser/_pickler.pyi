from collections.abc import Callable
from pickle import PickleBuffer
from typing import Any, Final, Protocol

from typing_extensions import disjoint_base

IN_BAND: Final[int]

class _Writable(Protocol):
    def write(self, b: bytes, /) -> object: ...

@disjoint_base
class Pickler:
    bin: bool
    fast: bool
    memo: Any
    dispatch_table: Any
    persistent_id: Any
    @property
    def protocol(self) -> int: ...
    def __init__(
        self,
        file: _Writable,
        protocol: int | None = None,
        *,
        fix_imports: bool = True,
        buffer_callback: Callable[[PickleBuffer], Any] | None = None,
    ) -> None: ...
    def dump(self, obj: object) -> None: ...
    def clear_memo(self) -> None: ...

def dumps(
    obj: object,
    protocol: int | None = None,
    *,
    fix_imports: bool = True,
    buffer_callback: Callable[[PickleBuffer], Any] | None = None,
    find_reducer: Callable[[type], Callable[[Any], Any] | None] | None = ...,
) -> bytes: ...
def is_referable(obj: object) -> bool: ...
