"""``RRef``: a reference to an object on some worker, and the proxies that call its methods there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

from mpirpc._core.agent import Pending, WorkerInfo
from mpirpc._core.call import Calls
from mpirpc._core.current import get_current
from mpirpc._core.error_transfer import fresh
from mpirpc._core.future import Future
from mpirpc._core.messages import NO_FORK, ForkDescriptor, ForkId, RRefId
from mpirpc._core.pickling import Call, OnValue
from mpirpc._core.timing import deadline_after
from mpirpc.errors import (
    AutogradError,
    ConfigurationError,
    NotInitializedError,
    RpcTimeoutError,
    RRefError,
    TransportError,
)

__all__ = ["RRef", "RRefProxy"]

T = TypeVar("T")

UNSET_TIMEOUT = -1.0
"""Means: the group's default limit."""


def check_timeout(timeout: float, default: float) -> float:
    """Return the limit of a call in seconds; 0 means none.

    Raises:
        ConfigurationError: It is negative or no number.
    """
    if timeout == UNSET_TIMEOUT:
        return default
    if not timeout >= 0:
        raise ConfigurationError(f"timeout={timeout!r} is not a time limit", "give seconds, 0 for no limit")
    return timeout


class RRef(Generic[T]):
    """A reference to a value of type ``T`` that lives on its *owner*; other workers hold *user* handles.

    Made by ``RRef(value)`` on the owner or by ``remote``; arrives when one is sent in a call. The value lives
    until the last handle on any worker is gone. RRefs are sent only inside calls, where the library can count
    them.

    Args:
        value: The object to refer to; this worker becomes its owner. It is not copied.
        type_hint: Accepted for programs that pass it; Python code does not need it.
        devices: Accepted for programs that pass it.

    Raises:
        NotInitializedError: RPC does not run in this process.

    Thread: any; a handle may be used by several threads and be dropped on any.
    """

    _calls: Calls
    _rref_id: RRefId
    _fork_id: ForkId
    _owner: int
    _creation: Pending | None

    def __init__(self, value: T, type_hint: Any = None, devices: Any = None) -> None:
        calls: Calls = get_current().calls
        rref_id = calls.store.new_rref_id()
        place = calls.store.create(rref_id, "RRef()")
        self._set(calls, rref_id, NO_FORK, calls.agent.rank, None)
        calls.store.set_value(place, value)

    def _set(
        self, calls: Calls, rref_id: RRefId, fork_id: ForkId, owner: int, creation: Pending | None
    ) -> None:
        self._calls = calls
        self._rref_id = rref_id
        self._fork_id = fork_id
        self._owner = owner
        self._creation = creation

    @classmethod
    def _adopted(cls, calls: Calls, fork: ForkDescriptor) -> RRef[Any]:
        """Make the object for a handle that arrived and that the store has recorded."""
        rref = cls.__new__(cls)
        at_home = fork.owner == calls.agent.rank
        rref._set(calls, fork.rref_id, NO_FORK if at_home else fork.fork_id, fork.owner, None)
        return rref

    @classmethod
    def _remote(cls, calls: Calls, dest: int, call: Call, timeout: float) -> RRef[Any]:
        """Start a call whose result stays at ``dest`` as the value of the RRef returned."""
        store = calls.store
        rref_id = store.new_rref_id()
        rref = cls.__new__(cls)
        if dest == calls.agent.rank:
            place = store.create(rref_id, "a call from itself")
            rref._set(calls, rref_id, NO_FORK, dest, None)

            def on_end(pending: Pending) -> None:
                pending.set()
                if isinstance(pending.error, TransportError):  # never sent: nobody else will fill the place
                    store.set_value(place, None, pending.error)

            rref._creation = calls.start_call(dest, call, timeout, rref_id, on_done=on_end)
            return rref
        fork_id = store.new_fork_id()
        store.create_user(rref_id, fork_id, dest)

        def confirm() -> None:  # also by a response that comes after the timeout
            store.confirm_user(fork_id)

        def on_done(pending: Pending) -> None:
            if pending.incoming is not None:
                confirm()
            elif isinstance(pending.error, TransportError):  # never sent
                store.forget_user(fork_id)
            pending.set()

        try:
            creation = calls.start_call(dest, call, timeout, rref_id, fork_id, on_done, confirm)
        except BaseException:
            store.forget_user(fork_id)
            raise
        rref._set(calls, rref_id, fork_id, dest, creation)
        return rref

    # --- who ---

    def is_owner(self) -> bool:
        """Say whether the value lives on this worker."""
        return self._owner == self._calls.agent.rank

    def owner(self) -> WorkerInfo:
        """Return the worker on which the value lives."""
        return self._calls.agent.workers[self._owner]

    def owner_name(self) -> str:
        """Return the name of the worker on which the value lives."""
        return self.owner().name

    def confirmed_by_owner(self) -> bool:
        """Say whether the owner knows this handle. True at the owner; elsewhere soon after it was made."""
        return self.is_owner() or self._calls.store.is_confirmed(self._fork_id)

    # --- the value ---

    def local_value(self) -> T:
        """Return the value itself, at its owner. Waits if the call that makes it has not finished.

        Raises:
            RRefError: This worker is not the owner.
            Exception: What the call that should have made the value raised.
        """
        if not self.is_owner():
            me, owner = self._calls.agent.me, self.owner()
            raise RRefError(
                f"local_value() called on {me}, but rref {self._rref_id} is owned by {owner}: "
                f"can't call RRef.local_value() on a non-owner",
                "use to_here() to copy the value, or rpc_sync() to run a method at the owner",
            )
        return self._wait_value(deadline_after(0))

    def _wait_value(self, deadline: float) -> T:
        place = self._calls.store.find(self._rref_id)
        if not self._calls.agent.wait(place.ready, deadline):
            raise RpcTimeoutError(
                f"RPC ran for more than set timeout: the value of rref {self._rref_id} is not there yet",
                worker=str(self.owner()),
            )
        if place.error is not None:
            self._check_creation()
            raise fresh(place.error)
        value: T = place.value
        return value

    def to_here(self, timeout: float = UNSET_TIMEOUT) -> T:
        """Return a copy of the value, fetched from its owner; at the owner, the value itself.

        Waits until the value is there.

        Args:
            timeout: Limit in seconds; 0 means none; unset, the group's default.

        Raises:
            RpcTimeoutError: The deadline passed, or the ``remote`` call that should have made the value timed
                out.
            Exception: What the call that should have made the value raised.

        Progress: drives it.   Copies: one, by the network.
        """
        limit = self._limit(timeout)
        self._check_alive("Cannot call to_here() on it after deletion.")
        self._check_creation()
        if self.is_owner():
            return self._wait_value(deadline_after(limit))
        calls = self._calls
        value: T = calls.wait_result(calls.start_fetch(self._owner, self._rref_id, limit))
        return value

    def _check_creation(self) -> None:
        """Raise the error of a creating call that never got to its owner, or timed out."""
        creation = self._creation
        if creation is None or not creation.done or creation.error is None:
            return
        if isinstance(creation.error, RpcTimeoutError):
            raise RpcTimeoutError(
                f"RRef creation via remote() timed out, the value may not exist: {creation.error.message}",
                "raise timeout= of remote()",
                worker=creation.error.worker,
                timeout=creation.error.timeout,
            )
        if isinstance(creation.error, TransportError):
            raise RRefError(f"RRef creation via remote() failed: {creation.error}") from fresh(creation.error)
        raise fresh(creation.error)

    def _check_alive(self, refusal: str) -> None:
        """Refuse what cannot be done any more once the group has ended here."""
        if self._calls.agent.is_closed:
            raise NotInitializedError(
                f"no call can be made any more with rref {self._rref_id}: "
                f"{self._calls.agent.closed_because}. {refusal}"
            )

    def _limit(self, timeout: float) -> float:
        return check_timeout(timeout, self._calls.agent.options.rpc_timeout)

    # --- calls of the value's methods ---

    def rpc_sync(self, timeout: float = UNSET_TIMEOUT) -> RRefProxy:
        """Return a proxy: ``rref.rpc_sync().method(x)`` returns the result of ``value.method(x)``."""
        return RRefProxy(self, self._call_sync, timeout)

    def rpc_async(self, timeout: float = UNSET_TIMEOUT) -> RRefProxy:
        """Return a proxy: ``rref.rpc_async().method(x)`` returns a future of the method's result."""
        return RRefProxy(self, self._call_async, timeout)

    def remote(self, timeout: float = UNSET_TIMEOUT) -> RRefProxy:
        """Return a proxy: ``rref.remote().method(x)`` returns an RRef of the method's result."""
        return RRefProxy(self, self._call_remote, timeout)

    def _call_sync(self, call: Call, limit: float) -> Any:
        return self._calls.wait_result(self._calls.start_call(self._owner, call, limit))

    def _call_async(self, call: Call, limit: float) -> Future[Any]:
        calls = self._calls
        return calls.start_future(self._owner, call, limit)

    def _call_remote(self, call: Call, limit: float) -> RRef[Any]:
        return RRef._remote(self._calls, self._owner, call, limit)

    # --- autograd ---

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Run backward from the value, a scalar tensor, at its owner.

        Args:
            dist_autograd_ctx_id: The distributed autograd context that gets the gradients; -1, at the owner
                only, means plain autograd into ``.grad``.
            retain_graph: Keep the graph for another backward pass.

        Raises:
            AutogradError: The value is no tensor, the context is unknown, or a user gave none: gradients of
                what other workers did would be lost without a word.
            RpcTimeoutError: Not over within the group's ``rpc_timeout``.
        """
        if self.is_owner():
            _backward(self, dist_autograd_ctx_id, retain_graph)
        elif dist_autograd_ctx_id == -1:
            raise AutogradError(
                f"backward() of rref {self._rref_id} was called on {self._calls.agent.me}, which is not its "
                "owner: User RRefs require 'dist_autograd_ctx_id' to be specified",
                "call it inside `with autograd.context() as context_id:` and pass context_id",
            )
        else:
            call = (_backward, (self, dist_autograd_ctx_id, retain_graph), dict[str, Any]())
            self._call_sync(call, self._limit(UNSET_TIMEOUT))

    # --- the object ---

    def __reduce__(self) -> Any:
        raise RRefError(
            f"cannot pickle rref {self._rref_id} outside of a call: "
            "Can not pickle rref in python pickler, rref can only be pickled when using RPC",
            "pass it as an argument or a result of rpc_sync, rpc_async or remote",
        )

    def __repr__(self) -> str:
        if self.is_owner():
            return f"OwnerRRef(RRefId={self._rref_id}, owner={self.owner_name()})"
        return f"UserRRef(RRefId={self._rref_id}, ForkId={self._fork_id}, owner={self.owner_name()})"

    def __del__(self) -> None:
        calls: Calls | None = getattr(self, "_calls", None)
        if calls is None:  # made by nobody: __init__ raised
            return
        # no lock is waited for, no message sent: a collection may strike anywhere, in a send too
        engine = calls.agent.engine
        if self._fork_id == NO_FORK:
            engine.chores.append((calls.store.drop_owner, self._rref_id))
        else:
            engine.chores.append((calls.store.release_user, self._fork_id))
        engine.wake()


_PROBED = frozenset(
    "__deepcopy__ __copy__ __getstate__ __setstate__ __getnewargs__ __getnewargs_ex__ __wrapped__ "
    "__torch_function__ __dlpack__".split()
)
"""What Python, numpy and torch look for in any object; ``__getitem__`` and the like are methods to call."""


class RRefProxy:
    """Calls methods of an RRef's value at its owner; made by ``rref.rpc_sync()`` and its like.

    Any attribute is taken for a method; whether there is one shows at the owner. Making a proxy sends
    nothing.
    """

    __slots__ = ("_call", "_rref", "_timeout")

    def __init__(self, rref: RRef[Any], call: Callable[[Call, float], Any], timeout: float) -> None:
        self._rref = rref
        self._call = call
        self._timeout = timeout

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name in _PROBED or name.startswith(("__array", "__cuda_array")):
            raise AttributeError(name)
        return lambda *args, **kwargs: self._run(name, args, kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the value itself."""
        return self._run("__call__", args, kwargs)

    def _run(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        rref = self._rref
        rref._check_creation()
        return self._call((OnValue(method), (rref, *args), kwargs), rref._limit(self._timeout))


def _backward(rref: RRef[Any], context_id: int, retain_graph: bool) -> None:
    """Run backward from an RRef's value. Thread: any, at the owner."""
    value = rref.local_value()
    if not isinstance(value, torch.Tensor):
        raise AutogradError(
            f"RRef should contain a tensor for .backward(), it contains {type(value).__qualname__}"
        )
    if context_id == -1:
        value.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
    else:
        rref._calls.autograd.backward(context_id, [value], retain_graph, rref._limit(UNSET_TIMEOUT))
