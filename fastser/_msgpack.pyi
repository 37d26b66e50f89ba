from collections.abc import Callable
from typing import Any

from typing_extensions import Buffer

def pack(obj: Any, default: Callable[[Any], Any] | None = None) -> bytes: ...
def unpack(data: Buffer, hook: Callable[[dict[Any, Any]], Any] | None = None, tuples: bool = True) -> Any: ...
