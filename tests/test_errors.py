"""Errors say which member failed, and where."""

import threading

import pytest

import fastser


class Holder:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)


@pytest.mark.parametrize(
    ("make", "path", "kind"),
    [
        (lambda bad: [1, bad], "x[1]", "lock"),
        (lambda bad: {"a": 1, "b": [1, 2, (3, bad)]}, "x['b'][2][1]", "lock"),
        (lambda bad: Holder(rows=[Holder(ok=1), Holder(inner=bad)]), "x.rows[1].inner", "lock"),
        (lambda bad: {1: {bad}}, "x[1], member ", "lock"),
    ],
)
def test_the_error_names_the_path_to_the_member(make, path, kind):
    x = make(threading.Lock())
    with pytest.raises(fastser.SerializationError) as raised:
        fastser.serialize(x, on_error="raise")
    text = str(raised.value)
    assert f"of type {type(x).__name__}, because of {path}" in text
    assert f"of type {kind}: TypeError: cannot pickle" in text
    assert isinstance(raised.value.__cause__, TypeError)

    header, frames = fastser.serialize(x)  # the answer that travels raises at the reader
    assert header == {"serializer": "error"}
    with pytest.raises(fastser.SerializationError) as raised:
        fastser.deserialize(header, frames)
    assert path in str(raised.value)
    assert "cannot pickle '_thread.lock' object" in str(raised.value)


def test_the_object_itself_is_to_blame():
    with pytest.raises(fastser.SerializationError, match=r"^Could not serialize object of type lock: TypeE"):
        fastser.serialize(threading.Lock(), on_error="raise")


def test_a_cycle_does_not_keep_the_search_going():
    x = [threading.Lock()]
    x.insert(0, x)
    with pytest.raises(fastser.SerializationError, match=r"x\[1\] of type lock"):
        fastser.serialize(x, on_error="raise")


def test_an_exception_class_of_the_user_is_the_cause():
    class Refuses:
        def __reduce__(self):
            raise LookupError("not today")

    with pytest.raises(fastser.SerializationError) as raised:
        fastser.serialize({"k": Refuses()}, on_error="raise")
    assert "x['k'] of type Refuses: LookupError: not today" in str(raised.value)
    assert isinstance(raised.value.__cause__, LookupError)
