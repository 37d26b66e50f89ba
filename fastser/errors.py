"""Every exception that fastser raises on its own account."""


class FastserError(Exception):
    """Base of all errors that fastser raises on its own account."""


class FrameError(FastserError, ValueError):
    """Bytes or a header that do not hold what they say: truncated, swapped, lying."""


class DispatchError(FastserError, TypeError, NotImplementedError):
    """No handler or family takes the object, or the reader may not use the one that wrote it.

    It is a ``NotImplementedError`` too, which is how a family says "not mine" in distributed.
    """


class SerializationError(FastserError, TypeError):
    """An object could not be serialized; the message names its type and the cause."""
