"""A call at its callee: open the request, run the function, answer.

Requests are taken by the thread that polled; everything else runs on executor threads. What a caller does is
in ``call.py``.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Any

import torch
from torch.autograd.profiler_util import FunctionEvent

from mpirpc._core import messages as m
from mpirpc._core.agent import Agent, name_of
from mpirpc._core.autograd_graph import joined_to_graph
from mpirpc._core.contents import Contents
from mpirpc._core.error_transfer import dump_error, kept, load_error
from mpirpc._core.messages import NO_CONTEXT, NO_FORK, NO_RREF, Body
from mpirpc._core.pickling import OnValue, dumps_result
from mpirpc._core.profiling import Profiled, Recording, merge
from mpirpc._core.rref_store import OwnerValue, RRefStore
from mpirpc._core.wire import Incoming
from mpirpc.errors import NotAFutureError
from mpirpc.functions import is_async_execution

log = logging.getLogger("mpirpc.call")


class Server:
    """Serves the calls and fetches that come to one worker.

    Args:
        agent: Sends responses; handlers for requests are registered with it.
        store: RRef values.
        contents: Opens requests and fills responses.
    """

    def __init__(self, agent: Agent, store: RRefStore, contents: Contents) -> None:
        self.agent = agent
        self.store = store
        self.contents = contents
        self.observers: list[Callable[[list[FunctionEvent]], None]] = []  # told what each call has run
        self.open_calls: set[ServedCall] = set()  # received and not answered; each adds and removes itself
        self.num_served = 0
        self.lock = threading.Lock()  # around num_served
        agent.handlers[m.CallRequest] = self._on_call_request
        agent.handlers[m.FetchRequest] = self._on_fetch_request

    @property
    def num_open(self) -> int:
        """Requests received and not answered."""
        return len(self.open_calls)

    def _on_call_request(self, source: int, incoming: Incoming) -> None:
        """Take a call. Thread: the one that polled."""
        request = incoming.message
        assert isinstance(request, m.CallRequest)
        # first: if it is refused, the call does not count as open
        value = self._value_of(source, request) if request.rref_id != NO_RREF else None
        served = ServedCall(self, source, request.request_id, request.context_id)
        served.value = value
        self.agent.engine.works.append(partial(served.run, incoming, request.autograd_message_id))

    def _value_of(self, source: int, request: m.CallRequest) -> OwnerValue:
        """Return the place for the result of a call that makes an RRef's value."""
        if source == self.agent.rank and request.fork_id == NO_FORK:
            return self.store.find(request.rref_id)  # made by the caller: it is this worker
        return self.store.create(request.rref_id, self.agent.workers[source], request.fork_id)

    def _on_fetch_request(self, source: int, incoming: Incoming) -> None:
        """Answer with an RRef's value once it is there. Thread: the one that polled."""
        request = incoming.message
        assert isinstance(request, m.FetchRequest)
        value = self.store.find(request.rref_id)
        served = ServedCall(self, source, request.request_id, request.context_id)

        def answer() -> None:
            served.enter()
            served.respond(value.value, value.error)

        if value.ready.done:
            self.agent.engine.urgent.append(answer)
        else:
            self.store.when_ready(value, lambda: self.agent.executor.submit_urgent(answer))


class ServedCall:
    """One request that came, until it is answered.

    Attributes:
        context_id: The autograd context that it belongs to.
        value: If set, the result stays here as an RRef's value, and the answer only says that there is one.
        recording: If set, the caller wants to know what was run.
    """

    __slots__ = ("_request_id", "_server", "_source", "context_id", "recording", "value")

    def __init__(self, server: Server, source: int, request_id: int, context_id: int) -> None:
        self._server = server
        self._source = source
        self._request_id = request_id
        self.context_id = context_id
        self.value: OwnerValue | None = None
        self.recording: Recording | None = None
        server.open_calls.add(self)

    def enter(self) -> None:
        """Join the context; leave it alone if it was released meanwhile."""
        if self.context_id and not self._server.contents.autograd.enter(self.context_id, self._source):
            self.context_id = NO_CONTEXT

    # --- run ---

    def run(self, incoming: Incoming, message_id: int) -> None:
        """Run the call and answer it. Thread: executor."""
        if self.context_id:
            self.enter()
        server = self._server
        try:
            func, args, kwargs = server.contents.open(self._source, incoming, self.context_id, message_id)
        except BaseException as error:
            self.respond(None, error)
            return
        if type(func) is Profiled:
            func, self.recording = func.func, Recording(server.agent.rank)
        if incoming.num_forks:  # a function sees handles that their owners know, as in torch

            def run() -> None:
                self._run(func, args, kwargs)

            if not server.store.when_confirmed(incoming.forks(), lambda: server.agent.executor.submit(run)):
                return
        self._run(func, args, kwargs)

    def _run(self, func: Any, args: Any, kwargs: Any) -> None:
        if type(func) is OnValue:
            self._run_on_value(func.method, args[0], args[1:], kwargs)
        else:
            self._run_function(func, args, kwargs)

    def _run_on_value(self, method: str, rref: Any, args: Any, kwargs: Any) -> None:
        """Run a method of an RRef's value as soon as there is one."""
        store, executor = self._server.store, self._server.agent.executor
        value = store.find(rref._rref_id)

        def run() -> None:
            if value.error is not None:
                self.respond(None, value.error)
                return
            try:
                func = getattr(value.value, method)
            except BaseException as error:
                self.respond(None, error)
                return
            self._run_function(func, args, kwargs)
            keep = rref  # noqa: F841  the handle lives until the method has run

        if value.ready.done:
            run()
        else:
            store.when_ready(value, lambda: executor.submit(run))

    def _run_function(self, func: Any, args: Any, kwargs: Any) -> None:
        """Run user code on this thread."""
        server = self._server
        observers, of_thread = server.observers, server.contents.autograd.of_thread
        before = of_thread.context_id
        of_thread.context_id = self.context_id
        try:
            if self.recording is None and not observers:
                result = func(*args, **kwargs)
            else:
                result = self._record(list(observers), func, args, kwargs)
            if is_async_execution(func):
                self._respond_later(func, result)
                return
        except BaseException as error:
            self.respond(None, error)
            return
        finally:
            of_thread.context_id = before
        self.respond(result, None)

    def _record(
        self, observers: list[Callable[[list[FunctionEvent]], None]], func: Any, args: Any, kwargs: Any
    ) -> Any:
        recording = self.recording or Recording(self._server.agent.rank)
        try:
            return recording.run(func, args, kwargs)
        finally:
            for note in observers:
                note(merge(map(copy, recording.events), True, True))

    # --- answer ---

    def _respond_later(self, func: Any, result: Any) -> None:
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
                self.respond(None, error)
            else:
                self.respond(value, None)

        result.add_done_callback(answer)

    def respond(self, result: Any, error: BaseException | None) -> None:
        """Answer: with the result, or, if it made an RRef's value, with the news that there is one."""
        server = self._server
        if error is not None and not isinstance(error, Exception):
            # SystemExit would end who uses the value here
            error = load_error(dump_error(error), str(server.agent.me))
        try:
            if self.value is not None:
                server.store.set_value(self.value, result, kept(error) if error is not None else None)
                result = None
            if error is None:
                error = self._send_result(result)
            if error is not None:
                log.debug("call failed: source=%d request=%d error=%r", self._source, self._request_id, error)
                server.agent.send(self._source, m.ErrorResponse(self._request_id), dump_error(error))
        finally:
            with server.lock:
                server.num_served += 1
            server.open_calls.discard(self)

    def _send_result(self, result: Any) -> BaseException | None:
        """Send a response; return what prevented it."""
        source, context_id, contents = self._source, self.context_id, self._server.contents
        message_id, body = 0, None
        try:
            if context_id:
                result = joined_to_graph(result)
            if self.recording is not None:
                result = self.recording.response(result)
            body = dumps_result(result, contents.hook)
            if context_id:
                message_id = contents.attach(context_id, source, body)
            response = m.new_of(m.CallResponse, (self._request_id, context_id, message_id))
            self._server.agent.send(source, response, body)
        except BaseException as error:
            contents.take_back(context_id, message_id, body or Body())
            return error
        return None
