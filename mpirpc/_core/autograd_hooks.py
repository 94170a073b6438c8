"""Hooks that run when a gradient is accumulated: DDP's reducer, ``register_post_accumulate_grad_hook``.

A backward pass takes gradients out of torch's engine before they get to ``.grad``, so these hooks would never
run. They are run here: once per pass, for all leaves of a worker in one run of the engine, which is what DDP
counts on. The engine is given the sums, ``.grad`` is lent to it, and what it holds afterwards (of DDP: the
mean over its ranks) is the gradient.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed
from torch.autograd.graph import GradientEdge, Node, _engine_run_backward

from mpirpc._core.parameter_locks import PARAMETER_LOCKS


def hook_test() -> Callable[[Node], bool]:
    """Return what says whether a leaf's node may have such hooks.

    Hooks written in C++, as DDP's are, cannot be seen: where DDP could be at work (it needs a process group)
    all leaves count.
    """
    if distributed.is_available() and distributed.is_initialized():
        return lambda node: True
    return _has_hooks


def _has_hooks(node: Any) -> bool:
    if node.variable._post_accumulate_grad_hooks:
        return True
    handle = node.register_hook(_nothing)  # torch shows a node's hooks only to one that is registered
    hooks = handle.hooks_dict_ref()
    handle.remove()
    return bool(hooks)


def _nothing(*_gradients: Any) -> None:
    """Take the place of a hook."""


def run_hooks(edges: Sequence[GradientEdge], gradients: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Accumulate these gradients of leaves as ``backward`` would; return what ``.grad`` is then, if anything.

    ``.grad`` is afterwards what it was before. User code runs here; DDP waits for its other ranks.

    Copies: what DDP will write to again (``gradient_as_bucket_view``).
    """
    leaves = [edge.node.variable for edge in edges]  # type: ignore[attr-defined]
    with (
        PARAMETER_LOCKS.held(PARAMETER_LOCKS.of(leaves)),
        _without_grad(leaves),
        _without_tensor_hooks(leaves),
    ):
        _engine_run_backward(
            tuple(edges), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True
        )
        return [_own(leaf.grad) for leaf in leaves]


@contextmanager
def _without_grad(leaves: Sequence[torch.Tensor]) -> Iterator[None]:
    before = [leaf.grad for leaf in leaves]
    try:
        for leaf in leaves:
            leaf.grad = None
        yield
    finally:
        for leaf, grad in zip(leaves, before, strict=True):
            leaf.grad = grad


class _OfThread(threading.local):
    """Whether this thread is in :func:`run_hooks`."""

    skips_tensor_hooks = False


_thread = _OfThread()


class _TensorHook:
    """A leaf's tensor hook that stays out of :func:`run_hooks`: it has seen these gradients already.

    It takes the hook's place in the leaf's table for good, so that passes of other threads see the same hooks
    at any time, and a handle removes it as ever.
    """

    def __init__(self, hook: Callable[[torch.Tensor], Any]) -> None:
        self._hook = hook

    def __call__(self, gradient: torch.Tensor) -> Any:
        return None if _thread.skips_tensor_hooks else self._hook(gradient)


@contextmanager
def _without_tensor_hooks(leaves: Sequence[torch.Tensor]) -> Iterator[None]:
    for leaf in leaves:
        table: Any = leaf._backward_hooks
        for key, hook in list(table.items()) if table else ():
            if type(hook) is not _TensorHook:
                table[key] = _TensorHook(hook)
    _thread.skips_tensor_hooks = True
    try:
        yield
    finally:
        _thread.skips_tensor_hooks = False


def _own(grad: Any) -> torch.Tensor | None:
    if grad is None:  # a hook has used it up, as an optimizer that steps in backward does
        return None
    if grad.layout is torch.strided and grad.untyped_storage().nbytes() > grad.nbytes:
        grad = grad.clone()
    own: torch.Tensor = grad.detach()
    return own
