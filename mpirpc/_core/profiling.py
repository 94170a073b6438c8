"""Calls in torch's profilers: at the caller a span for each call, below it what the callee ran.

A profiled call leaves a *mark* in the caller's profile: a ``record_function`` range of no length whose name
ends in the number of its :class:`Span`. How long the call took, and the events that its callee sent back
with the response, are kept in the span; :func:`merge` puts them in the place of the mark when the profile is
read (see ``profiler_hooks.py``). So no profiler has to know about other threads, or about other workers'
clocks: what the callee ran is shown in the middle of its span.

The callee records with torch's legacy profiler, which is bound to one thread, whatever the caller profiles
with.
"""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch
from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig
from torch.autograd import profiler_legacy
from torch.autograd.profiler import record_function
from torch.autograd.profiler_util import FunctionEvent, Interval

is_profiling: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
"""Say whether this thread is being profiled. 0.2 us."""

_parse: Any = profiler_legacy._parse_legacy_records
_Event: Any = FunctionEvent
_Interval: Any = Interval

REMOTE_OP = "#remote_op: "
"""Between the name of a call and the name of what its callee ran."""

MAX_EVENTS = 1 << 18
"""Events of callees kept for profiles that have not been read; the oldest go first."""

_MARK = re.compile(r"rpc_(?:sync|async|remote)#.* \[(\d+)\]$", re.DOTALL)


def shown_as(name: str) -> AbstractContextManager[Any]:
    """Show what the block does under this name, if this thread is being profiled."""
    return record_function(name) if is_profiling() else nullcontext()


class RemoteEvent(NamedTuple):
    """One event of a callee's profile. Times are in us since the profile began; shapes one list per input."""

    name: str
    start_us: float
    end_us: float
    thread: int
    node_id: int
    is_async: bool
    shapes: Any
    cpu_memory: int
    device_memory: int


class Span:
    """One profiled call, at its caller.

    Attributes:
        key: ``rpc_sync#function(caller -> callee)``.
        node_id: Rank of the caller.
        is_async: Other calls of the thread may overlap with it.
        elapsed_us: From the mark to the response; 0 while there is none.
        remote: What the callee ran.
    """

    __slots__ = ("_begun", "elapsed_us", "is_async", "key", "node_id", "remote")

    def __init__(self, key: str, node_id: int, is_async: bool) -> None:
        self.key = key
        self.node_id = node_id
        self.is_async = is_async
        self.elapsed_us = 0.0
        self.remote: list[RemoteEvent] = []
        with record_function(f"{key} [{_spans.add(self)}]"):
            self._begun = perf_counter_ns()

    def end(self, response: Any) -> Any:
        """Note that the call is over; take the callee's events off its response."""
        self.elapsed_us = (perf_counter_ns() - self._begun) / 1000
        result, self.remote = response
        return result


class _Spans:
    """Spans by the number in their mark: a profile may be read at any time later, and more than once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._spans: dict[int, Span] = {}  # oldest first

    def add(self, span: Span) -> int:
        with self._lock:
            number = next(self._numbers)
            self._spans[number] = span
            if number % 1024 == 0:
                self._forget_oldest()
            return number

    def _forget_oldest(self) -> None:
        excess = sum(1 + len(span.remote) for span in self._spans.values()) - MAX_EVENTS
        while excess > 0:
            excess -= 1 + len(self._spans.pop(next(iter(self._spans))).remote)

    def find(self, name: str) -> Span | None:
        """Return the span whose mark has this name."""
        mark = _MARK.match(name) if name.startswith("rpc_") else None
        return self._spans.get(int(mark[1])) if mark is not None else None

    def __bool__(self) -> bool:
        return bool(self._spans)


_spans = _Spans()
find_span = _spans.find


def has_spans() -> bool:
    """Say whether any call of this process was profiled."""
    return bool(_spans)


def start_span(mode: str, func: Any, caller: str, callee: str, node_id: int) -> Span:
    """Mark the beginning of a call in this thread's profile. ``mode``: sync, async or remote."""
    return Span(f"rpc_{mode}#{_short_name(func)}({caller} -> {callee})", node_id, mode != "sync")


def _short_name(func: Any) -> str:
    if isinstance(func, torch.jit.ScriptFunction):
        return str(func.qualified_name)
    name: str = getattr(func, "__qualname__", None) or type(func).__qualname__
    return name.replace("_VariableFunctionsClass.", "torch.")


class Profiled:
    """Stands where a call's function would: run ``func``, and send back what it ran."""

    __slots__ = ("func",)

    def __init__(self, func: Any) -> None:
        self.func = func

    def __reduce__(self) -> tuple[Any, ...]:
        return Profiled, (self.func,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Only marks a call; never run."""
        raise NotImplementedError


class Recording:
    """What one call runs at its callee. ``node_id``: rank of the callee."""

    def __init__(self, node_id: int) -> None:
        self.events: list[FunctionEvent] = []
        self._node_id = node_id

    def run(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run ``func`` and record what it runs on this thread; nothing, if the thread is profiled already.

        If ``func`` begins a profile of its own, the recording ends there.
        """
        if is_profiling():
            return func(*args, **kwargs)
        _enable_profiler_legacy(
            ProfilerConfig(ProfilerState.CPU, True, True, False, False, False, _ExperimentalConfig())
        )
        _thread.recording = self
        try:
            return func(*args, **kwargs)
        finally:
            end_recording()

    def response(self, result: Any) -> tuple[Any, list[RemoteEvent]]:
        """Return what to answer: the result, and the events so far, those of nested calls among them."""
        return result, [self._packed(event) for event in merge(self.events, True, True)]

    def _packed(self, event: FunctionEvent) -> RemoteEvent:
        return RemoteEvent(
            event.name,
            event.time_range.start,
            event.time_range.end,
            event.thread,
            event.node_id if event.is_remote else self._node_id,
            event.is_async,
            event.input_shapes,
            event.cpu_memory_usage,
            event.device_memory_usage,
        )


def end_recording() -> None:
    """End the recording of this thread, if there is one: torch has room for one profile."""
    recording, _thread.recording = _thread.recording, None
    if recording is not None:
        recording.events = _parse(_disable_profiler_legacy())


class _OfThread(threading.local):
    """The recording that a thread is in."""

    recording: Recording | None = None


_thread = _OfThread()


def merge(events: Iterable[FunctionEvent], with_shapes: bool, with_memory: bool) -> list[FunctionEvent]:
    """Replace marks by what is known of their calls; return all events in order of time."""
    merged: list[FunctionEvent] = []
    for event in events:
        merged.append(event)
        span = find_span(event.name)
        if span is None:
            continue
        event.name = event.trace_name = span.key
        event.node_id = span.node_id
        event.is_async = span.is_async
        start = event.time_range.start
        event.time_range = _Interval(start, max(event.time_range.end, start + span.elapsed_us))
        for remote in placed(span, event.time_range.start):
            merged.append(_unpacked(remote, with_shapes, with_memory))
    merged.sort(key=lambda event: (event.time_range.start, -event.time_range.end))
    return merged


def placed(span: Span, start_us: float) -> list[RemoteEvent]:
    """Return what the callee of ``span`` ran, named after it and on the caller's clock."""
    busy = max((event.end_us for event in span.remote), default=0.0)
    shift = start_us + max(0.0, span.elapsed_us - busy) / 2
    return [
        event._replace(
            name=span.key + REMOTE_OP + event.name,
            start_us=event.start_us + shift,
            end_us=event.end_us + shift,
        )
        for event in span.remote
    ]


def _unpacked(event: RemoteEvent, with_shapes: bool, with_memory: bool) -> FunctionEvent:
    unpacked: FunctionEvent = _Event(
        id=0,
        name=event.name,
        trace_name=event.name,
        thread=event.thread,
        start_us=event.start_us,
        end_us=event.end_us,
        input_shapes=event.shapes if with_shapes else [],
        cpu_memory_usage=event.cpu_memory if with_memory else 0,
        device_memory_usage=event.device_memory if with_memory else 0,
        stack=[],
        is_async=event.is_async,
        is_remote=True,
        node_id=event.node_id,
        is_legacy=True,
    )
    return unpacked
