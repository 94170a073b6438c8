"""``init_rpc``, the three ways to call, ``shutdown``: a thin cover over the current runtime."""

from __future__ import annotations

import atexit
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypeVar, overload

import torch
from torch.jit import ScriptFunction

from mpirpc._core.agent import WorkerInfo
from mpirpc._core.current import get_current, get_current_or_none, is_forked, set_process_runtime
from mpirpc._core.future import FirstError, Future
from mpirpc._core.mpi_faults import end_job, has_others
from mpirpc._core.runtime import Runtime
from mpirpc._core.timing import deadline_after
from mpirpc.backend_registry import BackendType, init_backend
from mpirpc.errors import ConfigurationError, RpcError, RpcTimeoutError
from mpirpc.functions import check_script_call
from mpirpc.options import RpcBackendOptions
from mpirpc.rref import UNSET_TIMEOUT, RRef, check_timeout

__all__ = [
    "WorkerInfo",
    "all_gather",
    "barrier",
    "broadcast",
    "debug_info",
    "get_worker_info",
    "get_worker_infos",
    "init_rpc",
    "is_available",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
    "wait",
    "wait_all",
]

T = TypeVar("T")

To = str | int | WorkerInfo

_is_awaited = True
"""Whether others may wait for this rank in ``init_rpc``: it has not called it yet, or broke off there."""


def is_available() -> bool:
    """Say that RPC can be used; here for programs that ask."""
    return True


def init_rpc(
    name: str | None = None,
    backend: BackendType | None = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
) -> None:
    """Join the RPC group; returns when every rank has joined and knows all names.

    Rank and world size come from MPI: the ranks of ``rpc_backend_options.comm``, by default all of the job.
    Call it on every one of them, on the main thread; after ``shutdown`` it may be called again.

    Args:
        name: This worker's name, unique in the group; default ``worker{rank}``.
        backend: Default ``BackendType.MPI``.
        rank: Checked against MPI if given.
        world_size: Checked against MPI if given.
        rpc_backend_options: Settings; default ``MPIRpcBackendOptions()``.

    Raises:
        ConfigurationError: RPC runs already; or, on every rank alike, a rank or size differs from MPI's, a
            name is bad or used twice, a device map is for nobody, or the job was started wrongly.

    Progress: blocks until all ranks have called it.
    """
    global _is_awaited
    _is_awaited = False
    running: Runtime | None = get_current_or_none()
    if running is not None:
        raise ConfigurationError(
            f"RPC is already initialized: {running.agent.me}", "call mpirpc.shutdown() first"
        )
    if backend is None:
        backend = BackendType.MPI
    if not isinstance(backend, BackendType):
        raise ConfigurationError(
            f"backend={backend!r} must be a BackendType", "leave it out, or use BackendType.MPI"
        )
    options = backend.construct_options() if rpc_backend_options is None else rpc_backend_options
    try:
        set_process_runtime(init_backend(backend, name, rank, world_size, options))
    except RpcError:  # on all ranks alike, or before any waited for another
        raise
    except BaseException:  # Ctrl-C: the others go on waiting for this rank
        _is_awaited = True
        raise


def shutdown(graceful: bool = True, timeout: float = 0) -> None:
    """Leave the RPC group. Does nothing when RPC does not run.

    Graceful: waits until all workers have called it and every call, also those that calls made, is over;
    meanwhile this worker goes on serving. Then RRefs are released. Not graceful: stops now, pending calls
    fail.

    Args:
        graceful: Whether to wait for the others.
        timeout: Limit in seconds for a graceful shutdown; 0 means none.

    Raises:
        RpcTimeoutError: The others did not come to rest in time; this worker has stopped all the same.
        WorkerLostError: Another one has stopped without waiting for the group; this worker has stopped too.
            (One that died is not waited for, where that is survived.)
        RRefError: RRefs were leaked, which is a bug; this worker has stopped all the same.
    """
    runtime: Runtime | None = get_current_or_none()
    if runtime is None:
        return
    try:
        runtime.shutdown(graceful, timeout)
    finally:
        if not runtime.is_running:
            set_process_runtime(
                None, "RPC was shut down: call mpirpc.init_rpc on every rank to start it again"
            )


def get_worker_info(worker_name: To | None = None) -> WorkerInfo:
    """Return the worker with this name, rank or WorkerInfo; by default this one.

    Raises:
        UnknownWorkerError: There is none.
        NotInitializedError: RPC does not run.
    """
    agent = get_current().agent
    found: WorkerInfo = agent.me if worker_name is None else agent.find_worker(worker_name)
    return found


def get_worker_infos() -> list[WorkerInfo]:
    """Return all workers of the group, in order of rank.

    Raises:
        NotInitializedError: RPC does not run.
    """
    return list(get_current().agent.workers)


def rpc_sync(
    to: To,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_TIMEOUT,
) -> Any:
    """Run ``func(*args, **kwargs)`` on worker ``to`` and return its result.

    Args:
        to: Name, rank or WorkerInfo of the callee; may be this worker, arguments are copied all the same.
        func: A function, class, method, torch operator or scripted function that the callee can import.
        args: Positional arguments.
        kwargs: Keyword arguments.
        timeout: Limit in seconds; 0 means none; unset, the group's default.

    Raises:
        UnknownWorkerError: There is no such worker.
        SerializationError: An argument cannot be pickled.
        RpcTimeoutError: No response in time; the call may still run.
        Exception: What ``func`` raised: the same type, with the remote traceback as cause.

    Thread: any.   Progress: drives it.   Copies: one per tensor, by the network.
    """
    runtime = get_current()
    dest, call, limit = _prepare(runtime, to, func, args, kwargs, timeout)
    return runtime.calls.wait_result(runtime.calls.start_call(dest, call, limit))


def rpc_async(
    to: To,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_TIMEOUT,
) -> Future[Any]:
    """Start ``func(*args, **kwargs)`` on worker ``to`` and return a future of its result.

    Small tensors are copied before this returns; tensors above ``eager_limit`` must not be changed until the
    future is done. See ``rpc_sync`` for arguments and errors; those of the call itself are raised by the
    future. A callee that holds calls back until more have come must be given few enough bytes, or a larger
    ``max_unfinished_nbytes``; a call that is held up longer than its limit raises ``RpcTimeoutError`` here.

    Thread: any.   Progress: may block while ``max_unfinished_nbytes`` are on their way to ``to``.
    """
    runtime = get_current()
    dest, call, limit = _prepare(runtime, to, func, args, kwargs, timeout)
    future: Future[Any] = runtime.calls.start_future(dest, call, limit)
    return future


def broadcast(
    to: Iterable[To],
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_TIMEOUT,
) -> list[Future[Any]]:
    """Start the same call on several workers and return one future for each, in their order.

    The call is pickled once, however many workers there are. See ``rpc_async``.

    Args:
        to: Names, ranks or WorkerInfos of the callees.
        func: A function that they can import.
        args: Positional arguments.
        kwargs: Keyword arguments.
        timeout: Limit of each call in seconds; 0 means none; unset, the group's default.

    Thread: any.   Progress: may block while too much is on its way to one of them.
    """
    runtime = get_current()
    calls = runtime.calls
    prepared = [_prepare(runtime, worker, func, args, kwargs, timeout) for worker in to]
    if not prepared:
        return []
    call, limit = prepared[0][1:]
    body = calls.body_for_several(call)
    return [calls.start_future(dest, call, limit, body) for dest, _, _ in prepared]


def remote(
    to: To,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_TIMEOUT,
) -> RRef[Any]:
    """Start ``func(*args, **kwargs)`` on worker ``to``, leave its result there, and return an RRef to it.

    Returns at once. An exception of ``func`` is kept at the owner and raised where the RRef is used. See
    ``rpc_sync`` for arguments.

    Thread: any.   Progress: may block while ``max_unfinished_nbytes`` are on their way to ``to``.
    """
    runtime = get_current()
    dest, call, limit = _prepare(runtime, to, func, args, kwargs, timeout)
    return RRef._remote(runtime.calls, dest, call, limit)


def _prepare(
    runtime: Runtime,
    to: To,
    func: Callable[..., Any],
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
    timeout: float,
) -> tuple[int, tuple[Any, tuple[Any, ...], dict[str, Any]], float]:
    """Check what the three ways to call have in common: the callee's rank, the call, the limit."""
    if not callable(func):
        raise TypeError(f"func={func!r} is not callable: function should be callable")
    if isinstance(func, ScriptFunction):
        check_script_call(func, len(args or ()) + len(kwargs or ()))
    agent = runtime.agent
    limit = check_timeout(timeout, agent.options.rpc_timeout)
    dest = agent.find_worker(to).id
    return dest, (func, tuple(args) if args else (), dict(kwargs) if kwargs else {}), limit


@contextmanager
def wait_all() -> Iterator[None]:
    """Wait, on leaving the block, for every call that ``rpc_async`` started in it on this thread.

    All of them are waited for, also when one fails or the block raises.

    Raises:
        Exception: The first error among the calls, in the order in which they were started.

    Example::

        with mpirpc.wait_all():
            for worker in ("worker1", "worker2"):
                mpirpc.rpc_async(worker, update)
    """
    runtime = get_current()
    failed = []
    with runtime.calls.collected_futures() as futures:
        try:
            yield
        finally:
            for future in futures:
                try:
                    future.wait()
                except Exception:
                    failed.append(future)
    if failed:
        failed[0].wait()  # raises, with frames of its own


@overload
def wait(futures: torch.futures.Future[T], timeout: float = 0) -> T: ...
@overload
def wait(futures: Iterable[torch.futures.Future[T]], timeout: float = 0) -> list[T]: ...
def wait(futures: Any, timeout: float = 0) -> Any:
    """Wait for a future, or for several, and return the result, or a list of them.

    Of several it raises as soon as one has failed, whatever the others do; ``torch.futures.wait_all`` waits
    for all of them first, as it cannot see the failure of a future that Python code has failed.

    Args:
        futures: Futures of ``rpc_async``, or any ``torch.futures.Future``.
        timeout: Limit of this wait in seconds; 0 means none. The calls go on.

    Raises:
        RpcTimeoutError: Not all were done in time.
        Exception: Of a call that failed.

    Thread: any.   Progress: drives it.
    """
    agent = get_current().agent
    limit = check_timeout(timeout, 0)
    if isinstance(futures, Future):
        return futures.wait(limit)
    single = isinstance(futures, torch._C.Future)
    several = [futures] if single else list(futures)
    goal = FirstError(several)
    if not agent.wait(goal, deadline_after(limit)):
        missing = sum(not future.done() for future in several)
        raise RpcTimeoutError(
            f"{missing} of {len(several)} futures were not done after {limit:g} s",
            "the calls go on: wait again, or give them a timeout of their own",
            timeout=limit,
        )
    if goal.failed is not None:
        goal.failed.wait()  # raises
    return futures.wait() if single else [future.wait() for future in several]


def all_gather(obj: Any, workers: Iterable[To] | None = None, timeout: float = 0) -> dict[str, Any]:
    """Give an object and return what each worker gave, by name. All of ``workers`` must call it.

    The objects travel over one of the workers: meant for small ones. Several threads of a worker may take
    part in rounds of their own; who meets whom is then open.

    Args:
        obj: Anything that can be sent.
        workers: Who takes part, this worker among them; default all of the group.
        timeout: Limit in seconds; 0 means none.

    Raises:
        RpcTimeoutError: Some had not called it in time; it fails on the others too.
        ConfigurationError: This worker is not among ``workers``.
        UnknownWorkerError: One of ``workers`` is not in the group.

    Thread: any.   Progress: waits for all of ``workers``.
    """
    runtime = get_current()
    agent = runtime.agent
    names = {agent.find_worker(worker).name for worker in (agent.workers if workers is None else workers)}
    if agent.me.name not in names:
        raise ConfigurationError(f"{agent.me} is not among the workers that take part: {sorted(names)}")
    limit = check_timeout(timeout, runtime.options.rpc_timeout)
    objects: dict[str, Any] = runtime.gathering.all_gather(sorted(names), obj, limit)
    return objects


def barrier(workers: Iterable[To] | None = None, timeout: float = 0) -> None:
    """Wait until all of ``workers`` have called it. Arguments and errors are those of ``all_gather``."""
    all_gather(None, workers, timeout)


def debug_info() -> dict[str, Any]:
    """Return counts of what lives in this worker and what it has done since ``init_rpc``.

    Keys: ``calls_sent``, ``calls_served``, ``pending_calls`` (sent, not answered), ``open_calls`` (received,
    not answered), ``messages_sent``, ``messages_received``, ``bytes_sent``, ``bytes_received``,
    ``unfinished_nbytes`` (sent, not yet taken by the network), ``owned_rrefs`` (values here), ``used_rrefs``
    (handles here of values elsewhere), ``forks`` (handles elsewhere of values here), ``pending_rrefs``
    (handles that wait for a confirmation), ``executor_threads``, ``running_calls``, ``autograd_contexts`` and
    other ``autograd_*``; ``lost_workers`` (names of those that died, where that is survived); ``gil_wait_us``
    if ``profiler.measure_gil_wait`` is on.

    Raises:
        NotInitializedError: RPC does not run.
    """
    info: dict[str, Any] = get_current().debug_info()
    return info


def _stop_at_exit() -> None:
    """A program that ends without ``shutdown``: stop the threads before the interpreter goes.

    If it ends by an exception, the others would wait for this worker for ever, in ``init_rpc`` if it did not
    come through that: end the job, its traceback is printed.
    """
    runtime: Runtime | None = get_current_or_none()
    if runtime is None:
        if _is_awaited and _ended_by_exception() and not is_forked() and has_others():
            sys.stderr.write("mpirpc: an exception ended this rank before it had joined: ending the job\n")
            sys.stderr.flush()
            end_job(1)
        return
    if getattr(sys, "last_value", None) is not None and len(runtime.agent.workers) > 1:
        sys.stderr.write(f"mpirpc: {runtime.agent.me} ended by an exception: ending the job\n")
        sys.stderr.flush()
        runtime.transport.abort()
    warnings.warn(f"{runtime.agent.me} ends without mpirpc.shutdown()", RuntimeWarning, stacklevel=1)
    shutdown(graceful=False)


def _ended_by_exception() -> bool:
    """Say whether an exception has come out of the whole program: its traceback starts where nothing calls.

    Test runners and the like leave ``sys.last_traceback``, too, for exceptions that they caught.
    """
    traceback: TracebackType | None = getattr(sys, "last_traceback", None)
    return traceback is not None and traceback.tb_frame.f_back is None


atexit.register(_stop_at_exit)
