from collections.abc import Collection, Sequence
from typing import Any, Literal

from fastser.core import Codec

class Messages:
    codec: Codec
    def __init__(self, codec: Codec) -> None: ...
    def dumps(
        self,
        msg: Any,
        serializers: Collection[str] | None = None,
        on_error: Literal["message", "raise"] = "message",
        context: dict[str, Any] | None = None,
        frame_split_size: int | None = None,
    ) -> list[Any]: ...
    def loads(
        self,
        frames: Sequence[Any],
        deserialize: bool = True,
        deserializers: Collection[str] | None = None,
    ) -> Any: ...

messages: Messages
dumps = messages.dumps
loads = messages.loads
