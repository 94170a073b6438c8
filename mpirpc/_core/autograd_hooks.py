"""Hooks that run when a gradient is accumulated: DDP's reducer, ``register_post_accumulate_grad_hook``.

A backward pass takes gradients out of torch's engine before they get to ``.grad``, so these hooks would never
run. They are run here, once per pass. The engine is given the sums, ``.grad`` is lent to it, and what it
holds afterwards (of DDP: the mean over its ranks) is the gradient.

DDP's leaves go through the engine together, which it counts on, and without any others: it waits for the
other trainers, whose passes may need the other leaves of this worker first.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import distributed
from torch.autograd.graph import GradientEdge, Node, _engine_run_backward
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from mpirpc._core.parameter_locks import PARAMETER_LOCKS

_ddp_modules: WeakSet[DistributedDataParallel] = WeakSet()
"""Those that live; under ``_ddp_lock``. Their hooks are written in C++ and cannot be seen from Python."""

_ddp_lock = threading.Lock()


def _note_ddp(parent: torch.nn.Module, _name: str, _child: torch.nn.Module | None) -> None:
    """A module has got a part; that of DDP is what it wraps."""
    if isinstance(parent, DistributedDataParallel):
        with _ddp_lock:
            _ddp_modules.add(parent)


register_module_module_registration_hook(_note_ddp)
if distributed.is_available() and distributed.is_initialized():  # some may be older than this import
    _ddp_modules.update(it for it in gc.get_objects() if issubclass(type(it), DistributedDataParallel))


def _ddp_leaves() -> set[int]:
    """Return the ids of the parameters that DDP averages."""
    with _ddp_lock:
        modules = list(_ddp_modules)
    return {
        id(parameter)
        for module in modules
        for parameter in getattr(module, "_module_parameters", None) or module.parameters()
    }


def hook_test() -> Callable[[Node], bool]:
    """Return what says whether a leaf's node has such hooks."""
    if not _ddp_modules:
        return _has_hooks
    of_ddp = _ddp_leaves()
    return lambda node: id(node.variable) in of_ddp or _has_hooks(node)  # type: ignore[attr-defined]


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
    of_ddp = _ddp_leaves()
    found: list[torch.Tensor | None] = [None] * len(edges)
    is_of_ddp = [id(edge.node.variable) in of_ddp for edge in edges]  # type: ignore[attr-defined]
    for now in (False, True):
        places = [place for place, of in enumerate(is_of_ddp) if of is now]
        if places:
            grads = _accumulate([edges[place] for place in places], [gradients[place] for place in places])
            for place, grad in zip(places, grads, strict=True):
                found[place] = grad
    return found


def _accumulate(
    edges: Sequence[GradientEdge], gradients: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    """Do so in one run of the engine, with the leaves' locks held."""
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
