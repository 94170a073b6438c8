"""Lets torch's profilers show calls: what ``profiling.py`` knows joins a profile when it is read.

torch has no way to add events to a profile, so some of its Python functions are wrapped, once, when the first
worker of a process starts. Each does what it did, and then adds to it; a profile without calls stays as it
is.
"""

from __future__ import annotations

import functools
import json
import logging
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from torch.autograd import profiler, profiler_legacy
from torch.autograd.profiler_util import FunctionEvent

from mpirpc._core.profiling import (
    REMOTE_OP,
    RemoteEvent,
    end_recording,
    find_span,
    has_spans,
    merge,
    placed,
)

log = logging.getLogger("mpirpc.profiler")

_thread = threading.local()  # .profile: the legacy profile that this thread is ending


def install() -> None:
    """Wrap torch's functions, unless that was done. Thread: any."""
    if getattr(profiler_legacy._parse_legacy_records, "_shows_calls", False):
        return
    legacy: Any = profiler_legacy.profile
    legacy.__exit__ = _ending(legacy.__exit__)
    legacy._start_trace = _beginning(legacy._start_trace)
    profiler_legacy._parse_legacy_records = _with_calls_legacy(profiler_legacy._parse_legacy_records)
    kineto: Any = profiler.profile
    kineto._parse_kineto_results = _with_calls(kineto._parse_kineto_results)
    kineto._prepare_trace = _beginning(kineto._prepare_trace)
    kineto._start_trace = _beginning(kineto._start_trace)
    kineto.export_chrome_trace = _exporting(kineto.export_chrome_trace)


def _beginning(real: Any) -> Any:
    """A profile begins: if this thread runs a call that is being recorded, the recording ends here."""

    @functools.wraps(real)
    def begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        end_recording()
        return real(self, *args, **kwargs)

    return begin


def _ending(real: Any) -> Any:
    @functools.wraps(real)
    def __exit__(self: Any, *args: Any) -> Any:
        _thread.profile = self
        try:
            return real(self, *args)
        finally:
            del _thread.profile

    return __exit__


def _with_calls_legacy(real: Any) -> Any:
    @functools.wraps(real)
    def parse(records: Any) -> list[FunctionEvent]:
        events: list[FunctionEvent] = real(records)
        profile = getattr(_thread, "profile", None)  # none: a callee records a call, and merges it later
        return events if profile is None else merge(events, profile.record_shapes, profile.profile_memory)

    parse._shows_calls = True  # type: ignore[attr-defined]
    return parse


def _with_calls(real: Any) -> Any:
    @functools.wraps(real)
    def parse(self: Any, *args: Any, **kwargs: Any) -> list[FunctionEvent]:
        return merge(real(self, *args, **kwargs), self.record_shapes, self.profile_memory)

    return parse


def _exporting(real: Any) -> Any:
    @functools.wraps(real)
    def export_chrome_trace(self: Any, path: str, *args: Any, **kwargs: Any) -> Any:
        result = real(self, path, *args, **kwargs)
        if has_spans():
            _rewrite_trace(path)
        return result

    return export_chrome_trace


def _rewrite_trace(path: str) -> None:
    """Put calls and what their callees ran into a trace that kineto has written."""
    with open(path, encoding="utf-8") as file:
        text = file.read()
    if '"rpc_' not in text:
        return
    try:
        trace = json.loads(text)
    except ValueError:  # the profiler's own affair
        log.warning("a trace that is no JSON: calls are not put into it: path=%s", path)
        return
    events = trace.get("traceEvents") if isinstance(trace, dict) else None
    if events is None:  # not kineto's: written from events that have the calls already
        return
    trace["traceEvents"] = [new for event in events for new in _trace_events(event)]
    with open(path, "w", encoding="utf-8") as file:
        json.dump(trace, file)


def _trace_events(event: dict[str, Any]) -> Iterable[dict[str, Any]]:
    span = find_span(event.get("name", ""))
    if span is None or event.get("ph") != "X":
        return [event]
    whole = {**event, "name": span.key, "dur": max(event["dur"], span.elapsed_us)}
    if span.is_async:  # may overlap with others of its thread: a track of its own
        whole["tid"] = f"{event['tid']}: calls under way"
    return [whole, *_remote_trace_events(placed(span, event["ts"]))]


def _remote_trace_events(events: Iterable[RemoteEvent]) -> Iterator[dict[str, Any]]:
    for event in events:
        key, _, name = event.name.rpartition(REMOTE_OP)
        yield {
            "ph": "X",
            "cat": "cpu_op",
            "name": name,
            "pid": f"rank {event.node_id}",
            "tid": event.thread,
            "ts": event.start_us,
            "dur": event.end_us - event.start_us,
            "args": {"call": key, "Input Dims": event.shapes},
        }
