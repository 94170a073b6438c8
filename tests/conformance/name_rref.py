"""torch's private names about RRefs, and its text form of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

import mpirpc
from mpirpc import RRef
from mpirpc._core.current import get_current
from tests.conformance.facades import Facade


def add(facades: Mapping[str, Facade]) -> None:
    """Add these names, and private methods to ``RRef``."""
    rpc = facades["torch.distributed.rpc"]
    rpc.extras.update(
        PyRRef=type("PyRRef", (), {}),
        _rref_context_get_debug_info=_rref_context_get_debug_info,
        _get_debug_info=lambda: _get_debug_info(facades),
    )
    for method in (_get_type, _get_future, _get_profiling_future, _serialize):
        setattr(RRef, method.__name__, method)
    RRef.__str__ = _text  # type: ignore[method-assign,assignment]


# --- debug info ---


def _rref_context_get_debug_info() -> dict[str, str]:
    """torch's counts: an RRef that was never shared is not one of ``num_owner_rrefs``."""
    runtime, info = get_current(), mpirpc.debug_info()
    owned, engine = runtime.store._owned, runtime.agent.engine
    with runtime.store._lock:
        shared = sum(bool(owned.forks(rref_id)) for rref_id in owned.rrefs())
    return {
        "num_owner_rrefs": str(shared),
        "num_forks": str(info["forks"]),
        "num_pending_users": str(info["pending_rrefs"]),
        "num_pending_futures": str(info["pending_calls"] + len(engine.chores) + len(engine.urgent)),
    }


def _get_debug_info(facades: Mapping[str, Facade]) -> dict[str, str]:
    rpc, autograd = facades["torch.distributed.rpc"], facades["torch.distributed.autograd"]
    return {
        **_rref_context_get_debug_info(),
        **rpc._get_current_rpc_agent().get_debug_info(),
        **autograd._get_debug_info(),
    }


# --- methods ---


class _Creation(torch.futures.Future[None]):
    """Future of the call that makes an RRef's value."""

    _rref: RRef[Any]

    def wait(self) -> None:
        calls, creation = self._rref._calls, self._rref._creation
        if creation is not None:
            calls.agent.wait_response(creation)
            calls.finish_call(creation)


def _get_future(rref: RRef[Any]) -> torch.futures.Future[None]:
    future = _Creation()
    future._rref = rref
    return future


def _get_profiling_future(rref: RRef[Any]) -> torch.futures.Future[None]:
    return _get_future(rref)


def _rref_typeof_on_owner(rref: RRef[Any]) -> type:
    return type(rref.local_value())


def _get_type(rref: RRef[Any], timeout: float = -1.0, blocking: bool = True) -> Any:
    """Ask the owner for the value's type, once."""
    state = vars(rref)
    if "_type_future" not in state:
        call: Callable[..., Any] = mpirpc.rpc_async
        state["_type_future"] = call(rref.owner(), _rref_typeof_on_owner, args=(rref,), timeout=timeout)
    return state["_type_future"].wait() if blocking else state["_type_future"]


def _serialize(rref: RRef[Any]) -> Any:
    """Fork the handle, as sending it would, and take the fork back."""
    hook = rref._calls.contents.hook
    hook.cancel(hook.fork(rref))
    raise NotImplementedError("an RRef's fork is not data here")


def _text(rref: RRef[Any]) -> str:
    """torch's form, with the names of its C++ classes; its ids begin with 0."""
    rref_id = f"GloballyUniqueId(created_on={rref._rref_id[0]}, local_id={rref._rref_id[1] - 1})"
    if rref.is_owner():
        return f"OwnerRRef({rref_id})"
    fork = f"GloballyUniqueId(created_on={rref._fork_id[0]}, local_id={rref._fork_id[1] - 1})"
    return f"UserRRef(RRefId = {rref_id}, ForkId = {fork})"
