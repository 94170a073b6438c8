"""torch's types and words for errors that mpirpc raises at the same place in its own.

The suite asserts them by regular expression. Each entry only rewords: an error that mpirpc does not raise is
not raised here either.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

import mpirpc
from mpirpc import RRef
from mpirpc.errors import (
    ConfigurationError,
    NotAFutureError,
    NotInitializedError,
    RRefError,
    SerializationError,
    UnknownWorkerError,
)
from tests.conformance.facades import Facade


@contextlib.contextmanager
def said(kind: type[BaseException], to: type[BaseException], words: str, when: str = "") -> Iterator[None]:
    """Raise ``to(words)`` where mpirpc raises ``kind`` (with ``when`` in its text)."""
    try:
        yield
    except kind as error:
        if when not in str(error):
            raise
        raise to(words) from error


def add(facades: Mapping[str, Facade]) -> None:
    """Reword what these functions and methods raise."""
    rpc, api = facades["torch.distributed.rpc"], facades["torch.distributed.rpc.api"]
    for module in (rpc, api):
        module.extras["get_worker_info"] = _get_worker_info
        module.extras["WorkerInfo"] = _WorkerInfo
    RRef.local_value = _reworded_local_value(RRef.local_value)  # type: ignore[method-assign,assignment]
    RRef.__init__ = _reworded_init(RRef.__init__)  # type: ignore[method-assign]
    RRef.to_here = _reworded_to_here(RRef.to_here)  # type: ignore[method-assign,assignment]
    mpirpc.Future.then = _reworded_then(mpirpc.Future.then)  # type: ignore[method-assign,assignment]
    for name in ("rpc_sync", "rpc_async", "remote"):
        reworded = _reworded_call(getattr(mpirpc, name))
        for module in (rpc, api):
            module.extras[name] = reworded


def _get_worker_info(worker_name: Any = None) -> mpirpc.WorkerInfo:
    with said(UnknownWorkerError, RuntimeError, "could not find destination"):
        return mpirpc.get_worker_info(worker_name)


class _NamedLikeWorkers(type):
    """Every worker's info is an instance, however it was made."""

    def __instancecheck__(cls, obj: object) -> bool:
        return isinstance(obj, mpirpc.WorkerInfo)

    def __call__(cls, name: str, id: int) -> mpirpc.WorkerInfo:
        words = "Worker name must match [A-Za-z0-9-_:]*, must be non-empty and shorter than 128"
        with said(ConfigurationError, RuntimeError, words):
            return mpirpc.WorkerInfo(name, id)


class _WorkerInfo(metaclass=_NamedLikeWorkers):
    """mpirpc's, refusing names in torch's words."""


def _reworded_local_value(real: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(real)
    def local_value(self: Any) -> Any:
        if self.is_owner():
            return real(self)
        ids = str(self)[len("UserRRef(") : -1]
        ids = ids.replace("RRefId = ", "rref_id=").replace("ForkId = ", "fork_id=")
        me, owner = mpirpc.get_worker_info(), self.owner()
        words = f"For UserRRef({ids}), can't call localValue() on user {me!r}. Call it on owner {owner!r}"
        with said(RRefError, RuntimeError, words):
            return real(self)

    return local_value


def _reworded_init(real: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(real)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        words = "Current RPC agent is not set! Did you initialize the RPC framework"
        with said(NotInitializedError, RuntimeError, words):
            real(self, *args, **kwargs)

    return init


def _reworded_call(real: Callable[..., Any]) -> Callable[..., Any]:
    """What torch says of operators and scripted functions, for which it has ways of its own."""

    @functools.wraps(real)
    def call(to: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            if torch.jit._builtins._find_builtin(func) is not None:
                words = "Overloaded torch operator invoked from Python failed to match any schema"
                stack.enter_context(said(TypeError, RuntimeError, words, "received an invalid combination"))
            if isinstance(func, torch._C.ScriptMethod):
                stack.enter_context(said(SerializationError, TypeError, "cannot pickle a script method"))
            stack.enter_context(_said_of_script(func))
            return real(to, func, *args, **kwargs)

    return call


def _said_of_script(func: Any) -> contextlib.AbstractContextManager[None]:
    if not isinstance(getattr(func, "__wrapped__", None), torch.jit.ScriptFunction):
        return contextlib.nullcontext()
    words = "Async functions must return an IValue of Future type, but got Tensor"
    return said(NotAFutureError, RuntimeError, words, "returned Tensor")


def _reworded_to_here(real: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(real)
    def to_here(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _said_of_script(self._creation.what if self._creation is not None else None):
            return real(self, *args, **kwargs)

    return to_here


def _reworded_then(real: Callable[..., Any]) -> Callable[..., Any]:
    """torch hides the type of what a callback raised."""

    @functools.wraps(real)
    def then(self: Any, callback: Any) -> Any:
        future = real(self, callback)
        wait = future.wait

        def reworded_wait(*args: Any) -> Any:
            try:
                return wait(*args)
            except TypeError as error:
                raise RuntimeError(str(error)) from error

        future.wait = reworded_wait
        return future

    return then
