"""``Future``: a ``torch.futures.Future`` whose ``wait`` moves communication forward.

A thread that waits for a future polls the network itself instead of being woken by the thread that does: half
    the time of
a small call. Everything else (``then``, callbacks, ``torch.futures.collect_all``) is torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from mpirpc._core.agent import Agent, Pending
from mpirpc._core.error_transfer import fresh, kept
from mpirpc._core.progress import Waiter

T = TypeVar("T")
S = TypeVar("S")


class Future(torch.futures.Future[T]):
    """The result of a call that is on its way.

    Made by ``rpc_async``, not by users; an ``async_execution`` function that needs a future of its own makes
    a ``torch.futures.Future``.
    """

    _agent: Agent
    _waiter: Waiter
    _has_callbacks: bool

    @classmethod
    def _make(cls, agent: Agent) -> Future[Any]:
        future: Future[Any] = cls()
        future._agent = agent
        future._waiter = Waiter()
        future._has_callbacks = False
        return future

    def wait(self) -> T:
        """Wait for the result and return it, or raise the exception of the call.

        Thread: any.   Progress: drives it.

        Raises:
            RpcTimeoutError: No response came before the deadline of the call.
            Exception: What the callee raised, with its traceback as cause.
        """
        waiter = self._waiter
        if not waiter.done:
            if isinstance(waiter, Pending):
                self._agent.wait_response(waiter)
            else:
                self._agent.wait(waiter)
        return super().wait()

    def set_exception(self, result: BaseException) -> None:  # type: ignore[override]  # torch says T
        """Fail with an exception; each ``wait`` raises a copy of it. Thread: any.

        torch's own raises the same object each time, which then holds the frames of everyone who waited, out
        of the garbage collector's sight.
        """
        error = kept(result)

        def raise_error(_: Any) -> None:
            raise fresh(error)

        self._set_unwrap_func(raise_error)
        self.set_result(error)  # type: ignore[arg-type]  # seen by raise_error only

    def then(self, callback: Callable[[torch.futures.Future[T]], S]) -> Future[S]:
        """Return a future of ``callback(self)``, called when this one is done.

        Thread: the callback runs on an executor thread, or here and now if this future is done already.

        Raises:
            TypeError: The callback cannot be called.
        """
        if not callable(callback):
            raise TypeError(f"then(): incompatible function arguments. callback={callback!r} is not callable")
        chained: Future[Any] = Future._make(self._agent)

        def run(done: torch.futures.Future[T]) -> None:
            try:
                result = callback(done)
            except Exception as error:
                chained.set_exception(error)
            else:
                chained.set_result(result)

        Future.add_done_callback(chained, lambda done: chained._waiter.set())
        chained._has_callbacks = False

        self.add_done_callback(run)
        return chained

    def add_done_callback(self, callback: Callable[[torch.futures.Future[T]], None]) -> None:
        """Call ``callback(self)`` when this future is done; its exceptions are logged.

        Thread: the callback runs on an executor thread, or here and now if this future is done already.
        """
        self._has_callbacks = True
        super().add_done_callback(callback)
