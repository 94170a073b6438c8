"""``Future``: a ``torch.futures.Future`` whose ``wait`` moves communication forward.

A thread that waits for a future polls the network itself instead of being woken by the thread that does: half
the time of a small call. Everything else (``then``, callbacks, ``torch.futures.collect_all``) is torch's.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

import torch

from mpirpc._core.agent import Agent, Pending
from mpirpc._core.error_transfer import fresh, kept
from mpirpc._core.timing import deadline_after
from mpirpc._core.waiter import Waiter
from mpirpc.errors import ConfigurationError, RpcTimeoutError

_InC: Any = torch._C.Future
"""What does torch's work. Its class in Python, between that and ours, adds only time, to each call twice."""

_NO_DEVICES: list[torch.device] = []

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
        """Make one; who calls this sets ``_waiter`` to what is done when the future is."""
        future: Future[Any] = cls.__new__(cls)
        _InC.__init__(future, _NO_DEVICES)
        future._agent = agent
        future._has_callbacks = False
        return future

    def wait(self, timeout: float = 0) -> T:
        """Wait for the result and return it, or raise the exception of the call.

        Args:
            timeout: Limit of this wait in seconds; 0 means none. The call has its own and goes on: the future
                can be waited for again.

        Thread: any.   Progress: drives it.

        Raises:
            RpcTimeoutError: The result was not there in time, or no response came before the deadline of the
                call.
            ConfigurationError: ``timeout`` is negative or no number.
            Exception: What the callee raised, with its traceback as cause.
        """
        waiter = self._waiter
        if not timeout >= 0:
            raise ConfigurationError(
                f"timeout={timeout!r} is not a time limit", "give seconds, 0 for no limit"
            )
        if not waiter.done:
            if timeout:
                if not self._agent.wait(waiter, deadline_after(timeout)):
                    raise RpcTimeoutError(
                        f"a future was waited for longer than {timeout:g} s",
                        "the call goes on: wait again, or give the call itself a timeout",
                        timeout=timeout,
                    )
            elif isinstance(waiter, Pending):
                self._agent.wait_response(waiter)
            else:
                self._agent.wait(waiter)
        result: T = _InC.wait(self)
        return result

    set_result = _InC.set_result

    def set_exception(self, result: BaseException) -> None:  # type: ignore[override]  # torch says T
        """Fail with an exception; each ``wait`` raises a copy of it. Thread: any.

        torch's own raises the same object each time, which then holds the frames of everyone who waited, out
        of the garbage collector's sight.
        """
        error = kept(result)

        def raise_error(_: Any) -> None:
            raise fresh(error)

        self._set_unwrap_func(raise_error)
        self.set_result(error)  # seen by raise_error only

    def then(self, callback: Callable[[torch.futures.Future[T]], S]) -> Future[S]:
        """Return a future of ``callback(self)``, called when this one is done.

        Thread: the callback runs on an executor thread, or here and now if this future is done already.

        Raises:
            TypeError: The callback cannot be called.
        """
        if not callable(callback):
            raise TypeError(f"then(): incompatible function arguments. callback={callback!r} is not callable")
        chained: Future[Any] = Future._make(self._agent)
        chained._waiter = Waiter()

        def run(done: torch.futures.Future[T]) -> None:
            try:
                result = callback(done)
            except BaseException as error:  # SystemExit too: who waits must not wait for ever
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

    def __await__(self) -> Generator[Any, None, T]:
        """``await future`` in asyncio code: the result, or the exception of the call.

        Thread: that of the event loop, which goes on meanwhile. Cancelling the task ends the wait, not the
        call.
        """
        if not self.done():
            loop = asyncio.get_running_loop()
            arrived = loop.create_future()

            def tell() -> None:
                if not arrived.done():
                    arrived.set_result(None)

            self.add_done_callback(lambda _: _call_in(loop, tell))
            yield from arrived
        return self.wait()


def _call_in(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    try:
        loop.call_soon_threadsafe(function)
    except RuntimeError:  # the loop was closed: nobody waits there any more
        return


class FirstError(Waiter):
    """Done when all of some futures are done, or one of them has failed.

    Attributes:
        failed: That one.
    """

    def __init__(self, futures: Sequence[torch.futures.Future[Any]]) -> None:
        super().__init__()
        self.failed: torch.futures.Future[Any] | None = None
        self._missing = len(futures)
        self._lock = threading.Lock()  # around _missing
        for future in futures:  # torch's own way: no hand-over to an executor thread for so little
            torch._C.Future.add_done_callback(future, self._note)
        if not futures:
            self.set()

    def _note(self, future: torch.futures.Future[Any]) -> None:
        try:
            future.value()
        except BaseException:
            if self.failed is None:
                self.failed = future
        with self._lock:
            self._missing -= 1
        if self.failed is not None or not self._missing:
            self.set()
