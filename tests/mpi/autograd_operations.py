"""What the steps of the programs of ``autograd_programs`` compute, in one process and over RPC alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def as_real(x: torch.Tensor) -> torch.Tensor:
    return x.real + 2 * x.imag if x.is_complex() else x.double()


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.tanh() ** 3

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 3 * x.tanh() ** 2 * (1 - x.tanh() ** 2)


def no_grad_operation(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return a * 0.5 + b


def packed_operation(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """As checkpointing does: what backward needs is made again there."""
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach() / 2, lambda x: x * 2):
        return (a.sin() * b).tanh()


OPERATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": torch.add,
    "mul": lambda a, b: a * b.tanh(),
    "sin": lambda a, b: a.sin() * b + a,
    "tanh": lambda a, b: (a * b).tanh(),
    "maximum": torch.maximum,
    "matmul": lambda a, b: a.tanh() @ b / len(a),
    "chunk": lambda a, b: torch.cat([a, b]).chunk(2)[1] * 0.7,
    "softmax": lambda a, b: a.softmax(0) - b,
    "relu": lambda a, b: a.relu(),
    "custom": lambda a, b: Cube.apply(a) + b,
    "packed": packed_operation,
    "complex": torch.complex,
    "mask": lambda a, b: (a > b).to(torch.int64),
    "detach": lambda a, b: a.detach(),
    "no_grad": no_grad_operation,
    "fresh": lambda a, b: a * 1.0 + 0.5,
}

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transpose": lambda a: a.t(),
    "row": lambda a: a[:1].expand_as(a),
    "column": lambda a: a.unbind(1)[0].expand_as(a),
    "same": lambda a: a.reshape(-1).view_as(a),
}


def change(kind: str, a: torch.Tensor) -> None:
    if a.dtype != torch.float64 or (a.is_leaf and a.requires_grad) or 0 in a.stride():
        return
    if kind == "mul":
        a.mul_(1.5)
    elif kind == "view":
        a[0].add_(1.0)
    elif kind == "add":
        a.add_(a)
    else:
        a[0].zero_()


def hook(gradient: torch.Tensor) -> torch.Tensor:
    """Not linear: it must see the whole gradient, once."""
    return gradient * gradient.abs().clamp(max=2) + gradient.sin()


class BackwardFails(ValueError):
    """What the failing operation of a program raises."""


def fail(_gradient: torch.Tensor) -> torch.Tensor:
    raise BackwardFails("this backward fails")
