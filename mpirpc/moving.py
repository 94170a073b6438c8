"""Tensors inside Python values, from one device to another."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["moved"]


def moved(value: Any, device: str) -> Any:
    """Move the tensors in ``value``, also those in tuples, lists and dicts.   Copies: what is moved."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if type(value) in (tuple, list):
        return type(value)(moved(item, device) for item in value)
    if type(value) is dict:
        return {key: moved(item, device) for key, item in value.items()}
    return value
