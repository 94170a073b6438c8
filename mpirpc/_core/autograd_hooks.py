"""Hooks that run when a gradient is accumulated: DDP's reducer, ``register_post_accumulate_grad_hook``.

A backward pass takes gradients out of torch's engine before they get to ``.grad``, so these hooks would never
run. They are run here, once per pass. The engine is given the sums, ``.grad`` is lent to it, and what it
holds afterwards (of DDP: the mean over its ranks) is the gradient.

DDP's leaves go through the engine together, which it counts on, and each other leaf by itself: a hook may
wait for the other trainers, whose passes may need the other leaves of this worker first.
"""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import Any
from weakref import WeakSet

import torch
from torch import distributed
from torch.autograd.graph import GradientEdge, Node, _engine_run_backward
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from mpirpc._core.parameter_locks import PARAMETER_LOCKS
from mpirpc.errors import AutogradError

# --- which leaves ---

_ddp_modules: WeakSet[DistributedDataParallel] = WeakSet()
"""Those that live; under ``_ddp_lock``. Their hooks are written in C++ and cannot be seen from Python."""

_ddp_lock = threading.Lock()


def _note_ddp(module: torch.nn.Module, *_part: Any) -> None:
    """A module has got a part; that of DDP is what it wraps."""
    if isinstance(module, DistributedDataParallel):
        with _ddp_lock:
            _ddp_modules.add(module)


def _noting(setstate: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Wrap what makes DDP modules in ``copy.deepcopy`` and unpickling: no hook tells of these."""

    @functools.wraps(setstate)
    def set_and_note(self: DistributedDataParallel, state: Any) -> None:
        setstate(self, state)
        _note_ddp(self)

    return set_and_note


register_module_module_registration_hook(_note_ddp)
DistributedDataParallel.__setstate__ = _noting(DistributedDataParallel.__setstate__)  # type: ignore[method-assign]
if distributed.is_available() and distributed.is_initialized():  # some may be older than this import
    _ddp_modules.update(it for it in gc.get_objects() if issubclass(type(it), DistributedDataParallel))


def _parameters_by_ddp() -> dict[DistributedDataParallel, list[torch.Tensor]]:
    """Return the parameters that each DDP module averages."""
    with _ddp_lock:
        modules = list(_ddp_modules)
    found = {}
    for module in modules:
        parameters = getattr(module, "_module_parameters", None) or module.parameters()
        found[module] = [parameter for parameter in parameters if parameter.requires_grad]
    return found


def hook_test() -> Callable[[Node], bool]:
    """Return what says whether a leaf's node has such hooks."""
    if not _ddp_modules:
        return _has_hooks
    of_ddp = {id(parameter) for parameters in _parameters_by_ddp().values() for parameter in parameters}
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


# --- running them ---


class HookRun:
    """One run of the engine for leaves that must go through it together.

    Attributes:
        leaves: Those whose ``.grad`` hooks may set: of DDP all that it averages, for it knows gradients of
            other ranks that this one has none of.
        adds_up: ``.grad`` must hold what earlier passes have found, and then holds the sum: under ``no_sync``
            DDP leaves that for its next mean.

    Raises:
        AutogradError: A DDP module has a static graph.
    """

    def __init__(
        self,
        edges: Sequence[GradientEdge],
        gradients: Sequence[torch.Tensor],
        ddp: Mapping[DistributedDataParallel, Sequence[torch.Tensor]],
    ) -> None:
        self._edges, self._gradients = edges, gradients
        self.adds_up = bool(ddp)
        leaves = chain(map(leaf_of, edges), *ddp.values())
        self.leaves = list({id(leaf): leaf for leaf in leaves}.values())
        self._writes_again = any(getattr(module, "gradient_as_bucket_view", False) for module in ddp)
        if any(getattr(module, "static_graph", False) for module in ddp):
            raise AutogradError(
                "DistributedDataParallel(static_graph=True) does not work in a distributed backward pass: "
                "its trainers would not average their gradients",
                "make it without static_graph",
            )

    def alone(self) -> AbstractContextManager[None]:
        """Keep everybody else off the leaves' ``.grad``."""
        return PARAMETER_LOCKS.held(PARAMETER_LOCKS.of(self.leaves))

    def accumulate(self, before: Mapping[torch.Tensor, torch.Tensor]) -> dict[torch.Tensor, torch.Tensor]:
        """Accumulate as ``backward`` would; return what ``.grad`` of each leaf is then, if anything.

        ``.grad`` is afterwards what it was before. User code runs here; DDP waits for its other ranks.

        Args:
            before: What ``.grad`` is to hold, if the run ``adds_up``.

        Copies: ``before``, and what DDP will write to again (``gradient_as_bucket_view``).
        """
        with (
            _lent_grad(self.leaves, before, self._writes_again),
            _without_tensor_hooks([leaf_of(edge) for edge in self._edges]),
        ):
            _engine_run_backward(
                tuple(self._edges),
                tuple(self._gradients),
                False,
                False,
                (),
                allow_unreachable=True,
                accumulate_grad=True,
            )
            # none where a hook has used it up, as an optimizer that steps in backward does
            return {leaf: self._own(leaf.grad) for leaf in self.leaves if leaf.grad is not None}

    def _own(self, grad: torch.Tensor) -> torch.Tensor:
        if self._writes_again or (
            grad.layout is torch.strided and grad.untyped_storage().nbytes() > grad.nbytes
        ):
            grad = grad.clone()
        return grad.detach()


def hook_runs(edges: Sequence[GradientEdge], gradients: Sequence[torch.Tensor]) -> list[HookRun]:
    """Return the runs for these gradients of leaves, in the order in which they are to be done."""
    by_ddp = _parameters_by_ddp()
    leaves = {id(leaf_of(edge)) for edge in edges}
    ddp = {
        module: parameters
        for module, parameters in by_ddp.items()
        if not leaves.isdisjoint(map(id, parameters))
    }
    of_ddp = {id(parameter) for parameters in ddp.values() for parameter in parameters}
    together: tuple[list[GradientEdge], list[torch.Tensor]] = ([], [])
    runs = []
    for edge, gradient in zip(edges, gradients, strict=True):
        if id(leaf_of(edge)) in of_ddp:
            together[0].append(edge)
            together[1].append(gradient)
        else:
            runs.append(HookRun([edge], [gradient], {}))
    return [*runs, HookRun(*together, ddp)] if ddp else runs


def leaf_of(edge: GradientEdge) -> torch.Tensor:
    """The leaf whose accumulator this edge leads to."""
    accumulator: Any = edge.node
    leaf: torch.Tensor = accumulator.variable
    return leaf


@contextmanager
def _lent_grad(
    leaves: Sequence[torch.Tensor], lent: Mapping[torch.Tensor, torch.Tensor], is_written_to: bool
) -> Iterator[None]:
    """Let ``.grad`` be a copy of what is lent, or None, inside.

    ``is_written_to``: DDP may write to what it was before.
    """
    before = [leaf.grad.clone() if is_written_to and leaf.grad is not None else leaf.grad for leaf in leaves]
    try:
        for leaf in leaves:
            leaf.grad = lent[leaf].clone() if leaf in lent else None
        yield
    finally:
        for leaf, grad in zip(leaves, before, strict=True):
            leaf.grad = grad


class _OfThread(threading.local):
    """The ids of the leaves whose hooks this thread runs."""

    leaves: Collection[int] = ()


_thread = _OfThread()


class _TensorHook:
    """A leaf's tensor hook that stays out of a :class:`HookRun`: it has seen these gradients already.

    It takes the hook's place in the leaf's table for good, so that passes of other threads see the same hooks
    at any time, and a handle removes it as ever.
    """

    def __init__(self, leaf: torch.Tensor, hook: Callable[[torch.Tensor], Any]) -> None:
        self._leaf_id = id(leaf)
        self._hook = hook

    def __call__(self, gradient: torch.Tensor) -> Any:
        return None if self._leaf_id in _thread.leaves else self._hook(gradient)


@contextmanager
def _without_tensor_hooks(leaves: Sequence[torch.Tensor]) -> Iterator[None]:
    for leaf in leaves:
        table: Any = leaf._backward_hooks
        for key, hook in list(table.items()) if table else ():
            if type(hook) is not _TensorHook:
                table[key] = _TensorHook(leaf, hook)
    before, _thread.leaves = _thread.leaves, {id(leaf) for leaf in leaves}
    try:
        yield
    finally:
        _thread.leaves = before
