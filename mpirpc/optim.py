"""``DistributedOptimizer``: any ``torch.optim`` class over parameters that live on several workers.

The caller keeps one RRef per owner of parameters; behind each is a *local optimizer*, made and stepped there
by RPC. Gradients never travel: each owner takes its own out of the autograd context.

Rules for this file: public API only. What runs at the caller comes first, what runs at an owner second.
Whatever is to happen on every owner goes through :func:`_at_owners`, which waits for all and reports all
failures together. So a new method (``zero_grad``, ``state_dict``, a scheduler) is a method of
:class:`_LocalOptimizer` and a line in :class:`DistributedOptimizer`.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, TypeVar

from torch import Tensor, optim
from torch.utils.weak import WeakTensorKeyDictionary

from mpirpc.api import WorkerInfo, rpc_async
from mpirpc.autograd import get_gradients
from mpirpc.errors import AutogradError, RemoteError
from mpirpc.rref import RRef

__all__ = ["DistributedOptimizer"]

_T = TypeVar("_T")


# --- at the caller ---


class DistributedOptimizer:
    """Optimize parameters where they live: one local ``torch.optim`` optimizer at each owner.

    The constructor waits for every owner: afterwards all local optimizers exist, or it has raised. Steps of
    several optimizers that share a parameter, from any worker, take turns at its owner. There is no common
    order between owners, and steps are not kept apart from forward and backward passes of others:
    asynchronous training is allowed, and the caller's to arrange. A step takes the gradients of one autograd
    context, so concurrent trainers never mix theirs, and ``.grad`` of the parameters is afterwards what it
    was before.

    Args:
        optimizer_class: Class to create at each owner: any subclass of ``torch.optim.Optimizer`` whose
            ``step`` needs no closure.
        params_rref: RRefs to the parameters (leaf tensors), each a single tensor.
        args: Further arguments of ``optimizer_class``, after the parameters.
        kwargs: Keyword arguments of ``optimizer_class``.

    Raises:
        TypeError: ``optimizer_class`` is no optimizer class or needs a closure (``LBFGS`` does, which
            evaluates the model several times in one step), or something in ``params_rref`` is no RRef.
        ValueError: ``params_rref`` is empty.
        RemoteError: Some owner could not create its optimizer; every such owner and its error is named.

    Attributes:
        remote_optimizers: One RRef per owner, in the order in which ``params_rref`` names the owners first.

    Thread: any.   Progress: waits for remote progress.

    Example::

        with autograd.context() as context_id:
            loss = criterion(model(inputs), targets)
            autograd.backward(context_id, [loss])
            optimizer.step(context_id)
    """

    def __init__(
        self,
        optimizer_class: type[optim.Optimizer],
        params_rref: Iterable[RRef[Any]],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        _check_optimizer_class(optimizer_class)
        calls = [
            (owner, _new_local_optimizer, (optimizer_class, rrefs, args, kwargs))
            for owner, rrefs in _group_by_owner(params_rref)
        ]
        self._name = optimizer_class.__name__
        self.remote_optimizers: list[RRef[_LocalOptimizer]] = _at_owners(f"creating {self._name}", calls)

    def step(self, context_id: int) -> None:
        """Apply the gradients of one autograd context to the parameters, on all owners at once.

        A parameter without a gradient in the context stays as it is, as with ``.grad is None`` in
        ``torch.optim``. The owners that succeed are stepped even if another fails.

        Args:
            context_id: The context whose backward pass is over; it must still be open.

        Raises:
            AutogradError: This worker knows no such context.
            RemoteError: Some owner's step failed; every such owner and its error is named.

        Thread: any.   Progress: waits for remote progress.
        """
        get_gradients(
            context_id
        )  # raises for an unknown context, which an owner could not tell from an unused one
        self._call_all("step", context_id)

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self._name}, {len(self.remote_optimizers)} owners)"

    def _call_all(self, method: str, *args: Any) -> list[Any]:
        """Run a method of every local optimizer; results in the order of ``remote_optimizers``."""
        rrefs = self.remote_optimizers
        calls = [(rref.owner(), _call_local_optimizer, (rref, method, args)) for rref in rrefs]
        return _at_owners(f"{method} of {self._name}", calls)


def _check_optimizer_class(optimizer_class: object) -> None:
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, optim.Optimizer)):
        raise TypeError(f"optimizer_class must be a torch.optim.Optimizer class, not {optimizer_class!r}")
    _, *parameters = inspect.signature(optimizer_class.step).parameters.values()
    if any(p.name == "closure" and p.default is p.empty for p in parameters):
        raise TypeError(
            f"{optimizer_class.__name__} cannot be distributed: its step() needs a closure that evaluates "
            "the whole model again, and each owner holds only a part of it\n"
            "hint: use an optimizer that works from gradients alone, such as SGD, Adam or Adagrad"
        )


def _group_by_owner(params_rref: Iterable[RRef[Any]]) -> list[tuple[WorkerInfo, list[RRef[Any]]]]:
    """Sort parameters by owner; owners in order of first appearance.

    Parameter groups (dicts with their own options) will be taken apart here too.
    """
    groups: dict[int, tuple[WorkerInfo, list[RRef[Any]]]] = {}
    for index, rref in enumerate(params_rref):
        if not isinstance(rref, RRef):
            raise TypeError(f"params_rref[{index}] must be an RRef to a parameter, not {type(rref).__name__}")
        owner = rref.owner()
        groups.setdefault(owner.id, (owner, []))[1].append(rref)
    if not groups:
        raise ValueError("params_rref is empty: there is nothing to optimize")
    return list(groups.values())


def _at_owners(what: str, calls: Sequence[tuple[WorkerInfo, Callable[..., _T], tuple[Any, ...]]]) -> list[_T]:
    """Run one call per owner at the same time, and wait for all of them, also when some fail."""
    futures = [(owner, rpc_async(owner, function, args=args)) for owner, function, args in calls]
    results: list[_T] = []
    errors: list[tuple[WorkerInfo, Exception]] = []
    for owner, future in futures:
        try:
            results.append(future.wait())
        except Exception as error:
            errors.append((owner, error))
    if errors:
        raise _joint_error(what, errors, len(calls)) from errors[0][1]
    return results


def _joint_error(what: str, errors: list[tuple[WorkerInfo, Exception]], num_owners: int) -> RemoteError:
    """Make one error of all owners' errors: first who, then each one's type and text."""
    lines = [f"{what} failed on {len(errors)} of {num_owners} workers"]
    lines += [f"  {owner}: {type(error).__name__}: {error}" for owner, error in errors]
    workers = ", ".join(str(owner) for owner, _ in errors)
    return RemoteError("\n".join(lines), type_name=type(errors[0][1]).__qualname__, worker=workers)


# --- at an owner ---


@dataclass(frozen=True, slots=True)
class _ParameterLock:
    """A lock over parameters, and its place in the order in which locks are taken."""

    serial: int
    lock: Lock = field(default_factory=Lock, compare=False)


class _ParameterLocks:
    """Which lock guards which parameter of this process.

    The parameters of a new optimizer that have no lock yet get one together, so optimizers over the same
    parameters share exactly one lock, optimizers over disjoint parameters share none, and overlapping ones
    share some.
    """

    def __init__(self) -> None:
        self._serials = itertools.count()
        # Parameter -> _ParameterLock; an entry lives as long as its parameter. Changed under _mutex.
        self._locks: Any = WeakTensorKeyDictionary()
        self._mutex = Lock()  # guards _locks; held for look-ups only

    def of(self, parameters: Iterable[Tensor]) -> list[Lock]:
        """Return the locks that guard these parameters, in the order in which they must be taken."""
        with self._mutex:
            fresh = _ParameterLock(next(self._serials))
            found: set[_ParameterLock] = {self._locks.setdefault(p, fresh) for p in parameters}
        return [guard.lock for guard in sorted(found, key=lambda guard: guard.serial)]


_LOCKS = _ParameterLocks()
"""Of the process and not of a runtime: a parameter may outlive ``shutdown``, and never has two owners."""


class _LocalOptimizer:
    """The ``torch.optim`` optimizer of one owner, over its part of the parameters.

    Attributes:
        optimizer: Changed under the locks of its parameters.
    """

    def __init__(
        self,
        optimizer_class: type[optim.Optimizer],
        rrefs: list[RRef[Any]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self._parameters: list[Tensor] = [rref.local_value() for rref in rrefs]
        self.optimizer: Any = optimizer_class(self._parameters, *args, **kwargs)
        self._locks = _LOCKS.of(self._parameters)

    def step(self, context_id: int) -> None:
        """Step from the context's gradients, while no other optimizer steps any of the same parameters."""
        with self._exclusive(), _lent_gradients(self._parameters, _gradients_here(context_id)):
            self.optimizer.step()

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        with ExitStack() as stack:
            for lock in self._locks:
                stack.enter_context(lock)
            yield


def _gradients_here(context_id: int) -> Mapping[Tensor, Tensor]:
    """The context's gradients here; none if it never came here (the caller has checked that it exists)."""
    try:
        return get_gradients(context_id)
    except AutogradError:
        return {}


@contextmanager
def _lent_gradients(parameters: Sequence[Tensor], gradients: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Let ``.grad`` be the context's gradient (or None) inside, and what it was before afterwards.

    The parameters' locks must be held.
    """
    before = [parameter.grad for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.grad = gradients.get(parameter)
        yield
    finally:
        for parameter, grad in zip(parameters, before, strict=True):
            parameter.grad = grad


def _new_local_optimizer(
    optimizer_class: type[optim.Optimizer],
    rrefs: list[RRef[Any]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> RRef[_LocalOptimizer]:
    """Create a local optimizer here and hand out a reference to it."""
    return RRef(_LocalOptimizer(optimizer_class, rrefs, args, kwargs))


def _call_local_optimizer(rref: RRef[_LocalOptimizer], method: str, args: tuple[Any, ...]) -> Any:
    return getattr(rref.local_value(), method)(*args)
