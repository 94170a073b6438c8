"""A call at its caller: ``start_call`` sends it, ``finish_call`` opens the response.

Both serve ``rpc_sync``, ``rpc_async`` and ``remote`` alike; fetching an RRef's value is a call without a
function. What the callee does in between is in ``serve.py``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from mpirpc._core import messages as m
from mpirpc._core.agent import Agent, Pending, name_of
from mpirpc._core.autograd_graph import call_joined_to_graph
from mpirpc._core.contents import Contents
from mpirpc._core.error_transfer import fresh, load_error
from mpirpc._core.future import Future
from mpirpc._core.messages import NO_CONTEXT, NO_FORK, NO_RREF, Body, ForkId, RRefId
from mpirpc._core.pickling import Call, dumps_call, loads
from mpirpc._core.profiling import Profiled, is_profiling, start_span
from mpirpc._core.wire import PAYLOAD_IN_HEAD
from mpirpc.errors import InternalError


class _OfThread(threading.local):
    """Futures of the calls that a thread starts, inside of :meth:`Calls.collected_futures`."""

    futures: list[Future[Any]] | None = None


class Calls:
    """Makes the calls of one worker.

    Args:
        agent: Sends requests.
        contents: Fills requests and opens responses.
    """

    def __init__(self, agent: Agent, contents: Contents) -> None:
        self.agent = agent
        self.contents = contents
        self.store = contents.store
        self.autograd = contents.autograd
        self._thread = _OfThread()
        agent.on_late_response(contents.release_late)

    # --- start ---

    def start_call(
        self,
        dest: int,
        call: Call,
        timeout: float,
        rref_id: RRefId = NO_RREF,
        fork_id: ForkId = NO_FORK,
        on_done: Callable[[Pending], None] | None = None,
        on_late: Callable[[], None] | None = None,
        body: Body | None = None,
        future: Future[Any] | None = None,
    ) -> Pending:
        """Send a call (function, args, kwargs) and return what waits for its response.

        With ``rref_id`` the result stays at the callee as that RRef's value. ``body`` is what
        :meth:`body_for_several` has made of the call.

        Thread: any.   Progress: may block while too much is on its way to ``dest``.
        Copies: small tensors once; larger ones must stay untouched until the response is here.

        Raises:
            SerializationError: Something cannot be pickled; nothing was sent.
        """
        agent = self.agent
        agent.get_ready(dest)  # before RRefs of a group that has ended are forked
        pending = Pending(agent.next_id(), dest, timeout, call[0])
        pending.on_done, pending.on_late, pending.future = on_done, on_late, future
        if is_profiling():
            mode = "remote" if rref_id != NO_RREF else "sync" if on_done is None else "async"
            call = self._profiled(call, pending, mode)
        context_id = self.autograd.of_thread.context_id
        if context_id:
            context_id = self._context_of_request(dest)
        if body is None:
            body = dumps_call(call_joined_to_graph(call) if context_id else call, self.contents.hook)
        message_id = 0
        try:
            if context_id:
                message_id = self.contents.attach(context_id, dest, body)
            fields = pending.request_id, context_id, message_id, rref_id, fork_id
            request = m.new_of(m.CallRequest, fields)
            agent.request(request, body, pending)
        except BaseException:
            self.contents.take_back(context_id, message_id, body)
            raise
        return pending

    def body_for_several(self, call: Call) -> Body | None:
        """Pickle a call that goes to several workers. None if each needs a body of its own.

        RRefs are counted one by one, and a profiled call is another one for each callee.

        Raises:
            SerializationError: Something cannot be pickled.
        """
        if is_profiling():
            return None
        body = dumps_call(
            call_joined_to_graph(call) if self.autograd.current_context_id else call, self.contents.hook
        )
        if body.forks:
            self.contents.take_back(NO_CONTEXT, 0, body)
            return None
        if len(body.payload) > PAYLOAD_IN_HEAD:
            body.payload = bytearray(body.payload)  # a frame as it is: no copy for each worker
        return body

    def _profiled(self, call: Call, pending: Pending, mode: str) -> Call:
        """Begin the span of a call; return the call that makes its callee send back what it ran."""
        func, args, kwargs = call
        agent = self.agent
        callee = agent.workers[pending.dest].name
        span = pending.span = start_span(mode, func, agent.me.name, callee, agent.rank)
        on_done = pending.on_done
        if mode == "remote" and on_done is not None:  # nobody opens the response: it is empty but for this

            def end_span(pending: Pending) -> None:
                response: Any = (None, [])
                if pending.incoming is not None and isinstance(pending.incoming.message, m.CallResponse):
                    response = loads(pending.incoming.body()[0], [])
                span.end(response)
                on_done(pending)

            pending.on_done = end_span
        return Profiled(func), args, kwargs

    def start_fetch(
        self, owner: int, rref_id: RRefId, timeout: float, on_done: Callable[[Pending], None] | None = None
    ) -> Pending:
        """Ask the owner for a copy of an RRef's value. Thread: any."""
        self.agent.get_ready(owner)
        pending = Pending(self.agent.next_id(), owner, timeout, rref_id)
        pending.on_done = on_done
        context_id = self._context_of_request(owner)
        self.agent.request(m.FetchRequest(pending.request_id, rref_id, context_id), None, pending)
        return pending

    def _context_of_request(self, dest: int) -> int:
        """Return this thread's context, noted for ``dest``; none if it was released meanwhile."""
        context_id = self.autograd.current_context_id
        return context_id if context_id and self.autograd.note_request(context_id, dest) else NO_CONTEXT

    # --- finish ---

    def finish_call(self, pending: Pending) -> Any:
        """Return the result of a call that is over, or raise its error. Thread: any; runs user code."""
        if pending.error is not None:
            raise fresh(pending.error)
        incoming = pending.incoming
        if incoming is None:
            raise InternalError(f"request {pending.request_id} is over without a response")
        if incoming.kind is m.ErrorResponse:
            if pending.span is not None:
                pending.span.end((None, []))
            body, _ = incoming.body()
            raise load_error(body, self.agent.describe(pending.dest), name_of(pending.what))
        result = self.contents.open_response(pending.dest, incoming)
        return result if pending.span is None else pending.span.end(result)

    def wait_result(self, pending: Pending) -> Any:
        """Wait for a call and return its result, or raise its error. Thread: any. Progress: drives it."""
        self.agent.wait_response(pending)
        return self.finish_call(pending)

    def start_future(self, dest: int, call: Call, timeout: float, body: Body | None = None) -> Future[Any]:
        """Start a call and return a future of its result. See :meth:`start_call`."""
        future = Future._make(self.agent)
        future._waiter = self.start_call(dest, call, timeout, on_done=self._fulfil, body=body, future=future)
        started = self._thread.futures
        if started is not None:
            started.append(future)
        return future

    @contextmanager
    def collected_futures(self) -> Iterator[list[Future[Any]]]:
        """Collect the futures of all calls that this thread starts inside; blocks nest."""
        before = self._thread.futures
        self._thread.futures = futures = list[Future[Any]]()
        try:
            yield futures
        finally:
            self._thread.futures = before

    def _fulfil(self, pending: Pending) -> None:
        """The call of a future is over: finish it, on an executor thread if the user's callbacks will run."""
        future, pending.future = pending.future, None  # it holds the call, too
        has_failed = pending.error is not None  # then it is on such a thread already
        if future._has_callbacks and not has_failed and not self.agent.executor.is_stopping:
            self.agent.executor.submit_urgent(partial(self._fulfil_here, future, pending))
        else:
            self._fulfil_here(future, pending)

    def _fulfil_here(self, future: Future[Any], pending: Pending) -> None:
        try:
            result = self.finish_call(pending)
        except BaseException as error:
            pending.set()
            future.set_exception(error)
        else:
            pending.set()
            future.set_result(result)
