"""A model in two parts for the tests of optimizers, and the same training in one process to compare with.

Everything is float64, and sums are made in the same order on both sides: results are compared bit by bit.
"""

from __future__ import annotations

import torch

import mpirpc as rpc
from mpirpc import autograd

STEPS = 4


class Part:
    """Half a model: one weight."""

    def __init__(self, seed, requires_grad=True):
        generator = torch.Generator().manual_seed(seed)
        self.weight = torch.rand(
            (3, 3), generator=generator, dtype=torch.float64, requires_grad=requires_grad
        )

    def forward(self, x):
        return torch.tanh(self.weight @ x)

    def get_weight(self):
        return self.weight

    def weight_rref(self):
        return rpc.RRef(self.weight)

    def set_grad(self, value):
        self.weight.grad = torch.full_like(self.weight, value)

    def grad_value(self):
        return None if self.weight.grad is None else self.weight.grad[0, 0].item()


def make_parts(world, **kwargs):
    """Two parts by RRef, on worker1 and on the last worker, and RRefs to their weights."""
    parts = [rpc.remote(1, Part, args=(1,), kwargs=kwargs), rpc.remote(world.size - 1, Part, args=(2,))]
    return parts, [part.rpc_sync().weight_rref() for part in parts]


def inputs(step):
    """Return the input of a step."""
    return torch.rand((3, 3), generator=torch.Generator().manual_seed(100 + step), dtype=torch.float64)


def remote_backward(context_id, parts, step):
    """Run forward and backward pass of a step through parts by RRef; returns the loss."""
    loss = parts[1].rpc_sync().forward(parts[0].rpc_sync().forward(inputs(step))).sum()
    autograd.backward(context_id, [loss])
    return loss.detach()


def remote_step(parts, optimizer, step, max_norm=None):
    """Run a whole step through parts by RRef; returns the loss."""
    with autograd.context() as context_id:
        loss = remote_backward(context_id, parts, step)
        if max_norm is not None:
            optimizer.clip_grad_norm(context_id, max_norm)
        optimizer.step(context_id)
    return loss


def local_step(parts, optimizer, step, max_norm=None):
    """Run the same step in this process."""
    optimizer.zero_grad()
    loss = parts[1].forward(parts[0].forward(inputs(step))).sum()
    loss.backward()
    if max_norm is not None:
        torch.nn.utils.clip_grad_norm_([part.weight for part in parts], max_norm)
    optimizer.step()
    return loss.detach()


def assert_equal(weights, parts):
    """Compare weights by RRef with those of parts here, bit by bit."""
    for weight, part in zip(weights, parts, strict=True):
        torch.testing.assert_close(weight.to_here().detach(), part.weight.detach(), rtol=0, atol=0)
