"""Unit tests for the reducers of the options: a user's own way of pickling a type, in calls only."""

import pytest

from mpirpc._core.pickling import RRefHook, dumps, dumps_result, loads
from mpirpc.errors import SerializationError


class Handle:
    """What an RRef is to this test."""


class Celsius:
    def __init__(self, degrees):
        self.degrees = degrees

    def __reduce__(self):
        raise TypeError("not with me")


class Kelvin(Celsius):
    pass


def load(body):
    return loads(body.payload, body.tensors, [])


def test_reducer_of_the_user_holds_for_its_type_only():
    hook = RRefHook(Handle, None, None, {Celsius: lambda value: (Celsius, (value.degrees + 1,))})
    assert load(dumps({"in": [Celsius(20)]}, hook))["in"][0].degrees == 21
    assert load(dumps_result(Celsius(20), hook)).degrees == 21
    with pytest.raises(SerializationError, match="not with me"):
        dumps(Kelvin(20), hook)
