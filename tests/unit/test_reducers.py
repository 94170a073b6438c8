"""Unit tests for the reducers of the options: a user's own way of pickling a type, in calls only."""

import pytest
import torch

from mpirpc._core.pickling import RRefHook, dumps, dumps_call, dumps_result, loads
from mpirpc.errors import ConfigurationError, SerializationError
from mpirpc.options import MPIRpcBackendOptions


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
    return loads(body, body.tensors, [])


def test_reducer_of_the_user_holds_for_its_type_only():
    hook = RRefHook(Handle, None, None, {Celsius: lambda value: (Celsius, (value.degrees + 1,))})
    assert load(dumps({"in": [Celsius(20)]}, hook))["in"][0].degrees == 21
    assert load(dumps_result(Celsius(20), hook)).degrees == 21
    with pytest.raises(SerializationError, match="not with me"):
        dumps(Kelvin(20), hook)


def test_reducer_holds_for_an_argument_itself():
    hook = RRefHook(Handle, None, None, {torch.Tensor: lambda tensor: (str, ("a tensor",))})
    assert load(dumps_call((len, (torch.ones(1),), {}), hook))[1] == ("a tensor",)
    assert load(dumps_result(torch.ones(1), hook)) == "a tensor"


@pytest.mark.parametrize("kind", [dict, str, tuple])
def test_reducers_of_what_pickle_writes_by_itself_are_refused(kind):
    with pytest.raises(ConfigurationError, match="pickle asks nobody"):
        MPIRpcBackendOptions(reducers={kind: str})
