"""Unit tests for mpirpc.moving. The device named meta has shapes and no values: enough to see what moved."""

import torch

from mpirpc.moving import moved


def test_tensors_in_containers_are_moved_and_the_rest_stays():
    text = object()
    value = {"a": [torch.ones(2), text], "b": (torch.ones(3), {"c": torch.ones(4)}), "d": 5}
    result = moved(value, "meta")
    assert result["a"][0].is_meta
    assert result["a"][1] is text
    assert isinstance(result["b"], tuple)
    assert result["b"][0].is_meta
    assert result["b"][1]["c"].shape == (4,)
    assert result["b"][1]["c"].is_meta
    assert result["d"] == 5
    assert not value["a"][0].is_meta


def test_what_is_there_already_is_not_copied():
    tensor = torch.ones(2)
    assert moved([tensor], "cpu")[0] is tensor
