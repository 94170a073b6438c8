"""One remote call, its parts side by side.

``start_call`` (caller), ``run_call`` (callee), ``finish_call`` (caller).

The same three steps serve ``rpc_sync``, ``rpc_async`` and ``remote``; fetching an RRef's value is a call
without a function. ``start`` and ``finish`` run on the caller's threads, ``run`` on an executor thread of the
callee.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from torch.autograd.profiler_util import FunctionEvent

from mpirpc._core import messages as m
from mpirpc._core.agent import Agent, Pending, name_of
from mpirpc._core.autograd_engine import AutogradEngine
from mpirpc._core.autograd_graph import call_joined_to_graph, joined_to_graph
from mpirpc._core.error_transfer import dump_error, fresh, kept, load_error
from mpirpc._core.future import Future
from mpirpc._core.messages import NO_CONTEXT, NO_FORK, NO_RREF, Body, ForkDescriptor, ForkId, RRefId
from mpirpc._core.pickling import Call, OnValue, RRefHook, dumps_call, dumps_result, load_flat, loads
from mpirpc._core.profiling import Profiled, Recording, is_profiling, merge, start_span
from mpirpc._core.rref_store import OwnerValue, RRefStore
from mpirpc._core.wire import PAYLOAD_IN_HEAD, Incoming, ShortIncoming
from mpirpc.errors import InternalError, NotAFutureError
from mpirpc.functions import is_async_execution

log = logging.getLogger("mpirpc.call")

Respond = Callable[[Any, BaseException | None], None]
"""Takes a call's result, or its exception."""


class _OfThread(threading.local):
    """Futures of the calls that a thread starts, inside of :meth:`Calls.collected_futures`."""

    futures: list[Future[Any]] | None = None


class Calls:
    """Makes and serves the calls of one worker.

    Args:
        agent: Sends requests and responses; handlers for calls are registered with it.
        store: RRef values and handles.
        autograd: Contexts, send and recv functions.
        hook: How RRefs get into messages.
        make_rref: Makes a handle object for a fork that was adopted.
    """

    def __init__(
        self,
        agent: Agent,
        store: RRefStore,
        autograd: AutogradEngine,
        hook: RRefHook,
        make_rref: Callable[[ForkDescriptor], Any],
    ) -> None:
        self.agent = agent
        self.store = store
        self.autograd = autograd
        self._hook = hook
        self._make_rref = make_rref
        self._lock = threading.Lock()  # around num_open
        self._thread = _OfThread()
        self.num_open = 0  # calls received and not answered
        self.num_served = 0
        self.observers: list[Callable[[list[FunctionEvent]], None]] = []  # told what each call has run
        agent.handlers[m.CallRequest] = self._on_call_request
        agent.handlers[m.FetchRequest] = self._on_fetch_request
        agent.on_late_response(self._release_late)

    # --- caller: start ---

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
        agent.check_open()  # before RRefs of a group that has ended are forked
        pending = Pending(agent.next_id(), dest, timeout, call[0])
        pending.on_done = on_done
        pending.on_late = on_late
        if is_profiling():
            mode = "remote" if rref_id != NO_RREF else "sync" if on_done is None else "async"
            call = self._profiled(call, pending, mode)
        context_id = self.autograd.current_context_id
        if context_id:
            context_id = self._context_of_request(dest)
        if body is None:
            body = dumps_call(call_joined_to_graph(call) if context_id else call, self._hook)
        message_id = 0
        try:
            if context_id:
                message_id = self._attach_send(context_id, dest, body)
            request = m.CallRequest(pending.request_id, context_id, message_id, rref_id, fork_id)
            agent.request(request, body, pending)
        except BaseException:
            self._take_back(context_id, message_id, body)
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
            call_joined_to_graph(call) if self.autograd.current_context_id else call, self._hook
        )
        if body.forks:
            self._take_back(NO_CONTEXT, 0, body)
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
        self.agent.check_open()
        pending = Pending(self.agent.next_id(), owner, timeout, f"to_here of rref {rref_id}")
        pending.on_done = on_done
        context_id = self._context_of_request(owner)
        self.agent.request(m.FetchRequest(pending.request_id, rref_id, context_id), None, pending)
        return pending

    def _context_of_request(self, dest: int) -> int:
        """Return this thread's context, noted for ``dest``; none if it was released meanwhile."""
        context_id = self.autograd.current_context_id
        return context_id if context_id and self.autograd.note_request(context_id, dest) else NO_CONTEXT

    def _attach_send(self, context_id: int, dest: int, body: Body) -> int:
        self.autograd.note_request(context_id, dest)
        return self.autograd.attach_send(context_id, dest, body.tensors) if body.tensors else 0

    def _take_back(self, context_id: int, message_id: int, body: Body) -> None:
        """Undo what was prepared for a message that was not sent."""
        for fork in body.forks:
            self._hook.cancel(fork)
        if message_id:
            self.autograd.cancel_send(context_id, message_id)

    # --- callee: run ---

    def _on_call_request(self, source: int, incoming: Incoming) -> None:
        """Take a call. Thread: the one that polled."""
        request = incoming.message
        assert isinstance(request, m.CallRequest)
        value = None
        if request.rref_id != NO_RREF and not (source == self.agent.rank and request.fork_id == NO_FORK):
            value = self.store.create(
                request.rref_id, f"a call from {self.agent.describe(source)}", request.fork_id
            )
        elif request.rref_id != NO_RREF:
            value = self.store.find(request.rref_id)  # made by the caller: it is this worker
        self._count_open(1)
        self.agent.engine.works.append(lambda: self.run_call(source, request, incoming, value))

    def _count_open(self, step: int) -> None:
        with self._lock:
            self.num_open += step

    def run_call(
        self, source: int, request: m.CallRequest, incoming: Incoming, value: OwnerValue | None
    ) -> None:
        """Run a call and answer it. Thread: executor."""
        context_id = request.context_id
        if context_id and not self.autograd.enter(context_id, source):
            context_id = NO_CONTEXT

        recording: Recording | None = None

        def respond(result: Any, error: BaseException | None) -> None:
            self._respond(source, request.request_id, context_id, value, result, error, recording)

        try:
            func, args, kwargs = self._open(source, incoming, context_id, request.autograd_message_id)
        except BaseException as error:
            respond(None, error)
            return
        if type(func) is Profiled:
            func, recording = func.func, Recording(self.agent.rank)
        if incoming.num_forks:  # a function sees handles that their owners know, as in torch

            def run() -> None:
                self._run(func, args, kwargs, context_id, respond, recording)

            if not self.store.when_confirmed(incoming.forks(), lambda: self.agent.executor.submit(run)):
                return
        self._run(func, args, kwargs, context_id, respond, recording)

    def _run(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        context_id: int,
        respond: Respond,
        recording: Recording | None,
    ) -> None:
        if isinstance(func, OnValue):
            self._run_on_value(func.method, args[0], args[1:], kwargs, context_id, respond, recording)
        else:
            self._run_function(func, args, kwargs, context_id, respond, recording)

    def _run_on_value(
        self,
        method: str,
        rref: Any,
        args: Any,
        kwargs: Any,
        context_id: int,
        respond: Respond,
        recording: Recording | None,
    ) -> None:
        """Run a method of an RRef's value as soon as there is one."""
        value = self.store.find(rref._rref_id)

        def run() -> None:
            if value.error is not None:
                respond(None, value.error)
                return
            try:
                func = getattr(value.value, method)
            except BaseException as error:
                respond(None, error)
                return
            self._run_function(func, args, kwargs, context_id, respond, recording)
            keep = rref  # noqa: F841  the handle lives until the method has run

        if value.ready.done:
            run()
        else:
            self.store.when_ready(value, lambda: self.agent.executor.submit(run))

    def _run_function(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        context_id: int,
        respond: Respond,
        recording: Recording | None,
    ) -> None:
        """Run user code on this thread."""
        autograd = self.autograd
        before = autograd.current_context_id
        autograd.current_context_id = context_id
        try:
            if recording is None and not self.observers:
                result = func(*args, **kwargs)
            else:
                result = self._record(recording or Recording(self.agent.rank), func, args, kwargs)
            if is_async_execution(func):
                self._respond_later(func, result, respond)
                return
        except BaseException as error:
            respond(None, error)
            return
        finally:
            autograd.current_context_id = before
        respond(result, None)

    def _record(self, recording: Recording, func: Any, args: Any, kwargs: Any) -> Any:
        observers = list(self.observers)
        try:
            return recording.run(func, args, kwargs)
        finally:
            for note in observers:
                note(merge(map(copy, recording.events), True, True))

    @staticmethod
    def _respond_later(func: Any, result: Any, respond: Respond) -> None:
        """Answer when the future that an ``async_execution`` function returned is done."""
        if not isinstance(result, torch._C.Future):  # as those of torch.futures.collect_all are
            raise NotAFutureError(
                "Functions decorated with @rpc.async_function must return a torch.futures.Future object, "
                f"{name_of(func)} returned {type(result).__qualname__}",
                "the decorator is mpirpc.functions.async_execution; without it any result will do",
            )

        def answer(done: Any) -> None:
            try:
                value = done.value()
            except BaseException as error:
                respond(None, error)
            else:
                respond(value, None)

        result.add_done_callback(answer)

    # --- callee: respond ---

    def _respond(
        self,
        source: int,
        request_id: int,
        context_id: int,
        value: OwnerValue | None,
        result: Any,
        error: BaseException | None,
        recording: Recording | None = None,
    ) -> None:
        """Answer a call: with its result, or, if it made an RRef's value, with the news that there is one."""
        if error is not None and not isinstance(
            error, Exception
        ):  # SystemExit would end who uses the value here
            error = load_error(dump_error(error), str(self.agent.me))
        try:
            if value is not None:
                self.store.set_value(value, result, kept(error) if error is not None else None)
                result = None
            if error is None:
                error = self._send_result(source, request_id, context_id, result, recording)
            if error is not None:
                log.debug("call failed: source=%d request=%d error=%r", source, request_id, error)
                self.agent.send(source, m.ErrorResponse(request_id), dump_error(error))
        finally:
            self.num_served += 1
            self._count_open(-1)

    def _send_result(
        self, source: int, request_id: int, context_id: int, result: Any, recording: Recording | None
    ) -> BaseException | None:
        """Send a response; return what prevented it."""
        message_id, body = 0, Body()
        try:
            if context_id:
                result = joined_to_graph(result)
            body = dumps_result(result if recording is None else recording.response(result), self._hook)
            message_id = self._attach_send(context_id, source, body) if context_id else 0
            self.agent.send(source, m.CallResponse(request_id, context_id, message_id), body)
        except BaseException as error:
            self._take_back(context_id, message_id, body)
            return error
        return None

    def _on_fetch_request(self, source: int, incoming: Incoming) -> None:
        """Answer with an RRef's value once it is there. Thread: the one that polled."""
        request = incoming.message
        assert isinstance(request, m.FetchRequest)
        value = self.store.find(request.rref_id)
        self._count_open(1)

        def answer() -> None:
            context_id = request.context_id
            if context_id and not self.autograd.enter(context_id, source):
                context_id = NO_CONTEXT
            self._respond(source, request.request_id, context_id, None, value.value, value.error)

        if value.ready.done:
            self.agent.engine.urgent.append(answer)
        else:
            self.store.when_ready(value, lambda: self.agent.executor.submit_urgent(answer))

    # --- caller: finish ---

    def finish_call(self, pending: Pending) -> Any:
        """Return the result of a call that is over, or raise its error. Thread: any; runs user code."""
        if pending.error is not None:
            raise fresh(pending.error)
        incoming = pending.incoming
        if incoming is None:
            raise InternalError(f"request {pending.request_id} is over without a response")
        response = incoming.message
        if isinstance(response, m.ErrorResponse):
            if pending.span is not None:
                pending.span.end((None, []))
            body, _ = incoming.body()
            raise load_error(body, self.agent.describe(pending.dest), name_of(pending.what))
        assert isinstance(response, m.CallResponse)
        result = self._open(pending.dest, incoming, response.context_id, response.autograd_message_id)
        return result if pending.span is None else pending.span.end(result)

    def wait_result(self, pending: Pending) -> Any:
        """Wait for a call and return its result, or raise its error. Thread: any. Progress: drives it."""
        self.agent.wait_response(pending)
        return self.finish_call(pending)

    def future_of(self, start: Callable[[Callable[[Pending], None]], Pending]) -> Future[Any]:
        """Start a call by ``start(on_done)`` and return a future of its result."""
        future = Future._make(self.agent)

        def on_done(pending: Pending) -> None:
            if future._has_callbacks and not self.agent.is_closed:
                self.agent.executor.submit_urgent(lambda: self._fulfil(future, pending))
            else:
                self._fulfil(future, pending)

        future._waiter = start(on_done)
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

    def _fulfil(self, future: Future[Any], pending: Pending) -> None:
        try:
            result = self.finish_call(pending)
        except BaseException as error:
            pending.set()
            future.set_exception(error)
        else:
            pending.set()
            future.set_result(result)

    def _open(self, source: int, incoming: Incoming, context_id: int, message_id: int) -> Any:
        """Rebuild what a message carries: handles first (they must be released even if unpickling fails)."""
        if isinstance(incoming, ShortIncoming) and not incoming.described:
            return load_flat(incoming.flat)
        rrefs = [self._adopt(fork) for fork in incoming.forks()]
        body, needs_grad = incoming.body()
        tensors = body.tensors
        if message_id and context_id:
            tensors = self.autograd.attach_recv(context_id, source, message_id, tensors, needs_grad)
        elif True in needs_grad:
            for tensor, needs in zip(tensors, needs_grad, strict=True):
                tensor.requires_grad_(needs)
        return loads(body, tensors, rrefs)

    def _adopt(self, fork: ForkDescriptor) -> Any:
        self.store.adopt(fork)
        return self._make_rref(fork)

    def _release_late(self, source: int, incoming: Incoming) -> None:
        """Take a response that nobody waits for. Thread: the one that polled.

        The handles in it are let go, and its tensors join the context, so that a backward pass can answer for
        them.
        """
        for fork in incoming.forks():
            self._adopt(fork)
        response = incoming.message
        if isinstance(response, m.CallResponse) and response.autograd_message_id:
            body, needs_grad = incoming.body()
            message_id = response.autograd_message_id
            self.autograd.attach_recv(response.context_id, source, message_id, body.tensors, needs_grad)
