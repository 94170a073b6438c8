"""Unit tests for mpirpc._core.devices: the number of a device on the wire. No device is needed."""

from types import SimpleNamespace

import pytest
import torch

from mpirpc._core.devices import HOST, device_code, device_from_code
from mpirpc.errors import SerializationError


def on(name):
    """Something that says it is a tensor there."""
    return SimpleNamespace(device=torch.device(name))


MAP = {torch.device("cuda:0"): torch.device("cuda:3"), torch.device("cuda:1"): torch.device("cpu")}


def test_host_tensors_need_no_map():
    assert device_code(torch.ones(1), None) == HOST
    assert device_code(torch.ones(1), MAP) == HOST


@pytest.mark.parametrize(("here", "there"), [("cuda:0", "cuda:3"), ("cuda:1", "cpu")])
def test_the_map_says_where_to(here, there):
    assert device_from_code(device_code(on(here), MAP)) == torch.device(there)


def test_a_target_without_a_number_is_the_first():
    assert device_from_code(
        device_code(on("cuda:0"), {torch.device("cuda:0"): torch.device("cuda")})
    ) == torch.device("cuda:0")


@pytest.mark.parametrize("device_map", [None, {}, MAP], ids=["none", "empty", "another device"])
def test_a_device_without_a_place_is_refused(device_map):
    with pytest.raises(SerializationError, match=r"(?s)tensor on cuda:7 has no place .*device_maps="):
        device_code(on("cuda:7"), device_map)
