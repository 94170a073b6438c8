"""Marks for functions that are called by RPC."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

__all__ = ["async_execution"]

_F = TypeVar("_F", bound=Callable[..., Any])

_MARK = "_mpirpc_async_execution"


def async_execution(fn: _F) -> _F:
    """Say that ``fn`` returns a future whose value is the result of the call.

    The callee's thread is free as soon as ``fn`` returns; the response leaves when the future is done. So a
    handler can wait for other workers, or for a whole batch of callers, without holding a thread. With
    ``staticmethod`` and ``classmethod``, either order works: this decorator outside or inside of theirs.

    Args:
        fn: A function (or method) that returns a ``torch.futures.Future``.

    Returns:
        A function with the same behaviour, marked.

    Errors:
        A call whose function returns something else fails at the caller with ``NotAFutureError``, which is a
        ``TypeError``.

    Thread: the function runs on an executor thread of the callee.
    """
    if isinstance(fn, (staticmethod, classmethod)):
        setattr(fn.__func__, _MARK, True)
        return fn

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    if isinstance(fn, torch.jit.ScriptFunction):
        wrapper.__module__, wrapper.__name__ = place_of_script(fn)
        wrapper.__qualname__ = wrapper.__name__
    setattr(wrapper, _MARK, True)
    return wrapper  # type: ignore[return-value]


def place_of_script(fn: torch.jit.ScriptFunction[Any, Any]) -> tuple[str, str]:
    """Return module and name of a scripted function; its ``__module__`` and ``__name__`` are its class's."""
    module, _, name = fn.qualified_name.removeprefix("__torch__.").rpartition(".")
    return module or "__main__", name


def check_script_call(fn: torch.jit.ScriptFunction[Any, Any], num_args: int) -> None:
    """Refuse a call of a scripted function with more arguments than it takes, before anything is sent.

    Raises:
        RuntimeError: In TorchScript's words.
    """
    schema: Any = fn.schema
    takes = len(schema.arguments)
    if num_args > takes:
        name = place_of_script(fn)[1]
        raise RuntimeError(
            f"{name}() expected at most {takes} argument(s) but received {num_args} argument(s). "
            f"Declaration: {schema}"
        )


def is_async_execution(fn: Callable[..., Any]) -> bool:
    """Say whether ``fn`` (or the function of a bound method) is marked by :func:`async_execution`."""
    return getattr(fn, _MARK, False) is True
