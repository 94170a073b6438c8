"""Exceptions on their way from callee to caller.

An exception arrives as the same type with the callee's traceback text as its cause; that text already holds,
one section a hop, what came from further workers. An exception that cannot be rebuilt here arrives as
``RemoteError``.
"""

from __future__ import annotations

import copy
import pickle
import traceback
from collections.abc import Mapping
from typing import Any, NamedTuple

from mpirpc._core.messages import Body
from mpirpc._core.pickling import dumps, loads
from mpirpc.errors import RemoteError, RemoteTraceback


class _Parts(NamedTuple):
    """What travels: three ways to rebuild the exception, the most faithful first, and the traceback."""

    pickled: bytes | None
    by_parts: bytes | None
    type_name: str
    text: str
    traceback: str


def dump_error(error: BaseException) -> Body:
    """Prepare an exception for another worker. Never fails. Thread: any; runs user code (``__reduce__``)."""
    kind = type(error)
    parts = _Parts(
        pickled=_try_pickle(error),
        by_parts=_try_pickle((kind, error.args, {k: v for k, v in vars(error).items() if _try_pickle(v)})),
        type_name=f"{kind.__module__}.{kind.__qualname__}",
        text=_text_of(error),
        traceback="".join(traceback.format_exception(kind, error, error.__traceback__)),
    )
    return dumps(tuple(parts))


def load_error(body: Body, worker: str, doing: str = "") -> BaseException:
    """Rebuild an exception that came from ``worker``. Never fails, never raises it.

    Args:
        body: As made by :func:`dump_error`.
        worker: ``'name' (rank r)`` of the sender.
        doing: What it was asked to do; for the text.
    """
    parts = _Parts(*loads(body, body.tensors))
    error = _rebuild(parts)
    if error is None:
        error = RemoteError(
            f"{worker} raised {parts.type_name}: {parts.text}",
            f"the exception could not be rebuilt here as {parts.type_name}",
            type_name=parts.type_name,
            worker=worker,
        )
    about = f" running {doing}" if doing else ""
    error.__cause__ = RemoteTraceback(f"--- on {worker}{about} ---\n{parts.traceback}")
    return error


def kept(error: BaseException) -> BaseException:
    """Return what to keep of an exception: a copy without frames, its traceback as text.

    An exception collects the frames it is raised through, with all their variables: RRefs, tensors. One that
    is kept (by a future, in place of an RRef's value) would keep them alive; so keep this, and raise
    :func:`fresh`.
    """
    if error.__traceback__ is None and isinstance(error.__cause__, (RemoteTraceback, type(None))):
        return error
    copied = _copy(error)
    copied.__cause__ = RemoteTraceback("".join(traceback.format_exception(error)))
    return copied


def fresh(error: BaseException) -> BaseException:
    """Return a copy of a kept exception, to be raised."""
    copied = _copy(error)
    if error.__cause__ is not None:
        copied.__cause__ = error.__cause__
    return copied


def _copy(error: BaseException) -> BaseException:
    for build in (copy.copy, _copy_without_init):
        try:
            copied = build(error)
        except (
            BaseException
        ):  # its constructor wants other arguments, or it raises anything: try the next way
            continue
        if type(copied) is type(error):
            return copied
    return error


def _copy_without_init(error: BaseException) -> BaseException:
    return _without_init((type(error), error.args, vars(error)))


def _rebuild(parts: _Parts) -> BaseException | None:
    for data, build in ((parts.pickled, _as_it_is), (parts.by_parts, _without_init)):
        if data is None:
            continue
        try:
            error = build(pickle.loads(data))
        except (Exception, SystemExit, GeneratorExit):  # its class, or what is in it, is not here or refuses
            continue
        if isinstance(error, Exception):  # not SystemExit and its like: they would end the caller
            return error
    return None


def _as_it_is(error: Any) -> Any:
    return error


def _without_init(found: tuple[type[BaseException], tuple[Any, ...], Mapping[str, Any]]) -> BaseException:
    """Rebuild an exception whose constructor wants other arguments than those in ``args``."""
    kind, args, state = found
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


def _try_pickle(obj: object) -> bytes | None:
    try:
        return pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)
    except BaseException:  # what cannot be pickled is left out, and __reduce__ may raise anything
        return None


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException:
        return f"<a {type(error).__name__} whose text cannot be made>"
