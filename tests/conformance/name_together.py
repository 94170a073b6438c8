"""torch's private names for what workers do together, and for waiting for all calls of a block."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

import mpirpc
from mpirpc._core.current import get_current
from tests.conformance import name_words
from tests.conformance.facades import Facade

UNSET = -1.0

log = logging.getLogger(__name__)


def add(facades: Mapping[str, Facade]) -> None:
    """Add these names."""
    api = facades["torch.distributed.rpc.api"]
    pickler = facades["torch.distributed.rpc.internal"]._internal_rpc_pickler
    api.extras.update(
        _all_gather=_all_gather,
        _barrier=_barrier,
        _wait_all_workers=wait_all_workers,
        _wait_all=mpirpc.wait_all,
        _thread_local_var=_ThreadLocalVar(),
        _default_pickler=pickler,
        _use_rpc_pickler=_UsePickler(api),
        _broadcast_to_followers=lambda sequence_id, objects_map: None,
    )
    facades["torch.distributed.rpc"].extras["_wait_all"] = mpirpc.wait_all
    facades["torch.distributed.rpc"].extras["_server_process_global_profile"] = _ServerProfile
    torch.futures.wait_all = _wait_all_futures


class _ThreadLocalVar(threading.local):
    """torch's list of the futures started in a ``_wait_all`` block."""

    @property
    def future_list(self) -> list[Any]:
        futures: list[Any] | None = getattr(get_current().calls._thread, "futures", None)
        if futures is None:
            raise AttributeError("future_list")
        return futures


def _all_gather(
    obj: Any, worker_names: Iterable[str] | None = None, timeout: float = UNSET
) -> dict[str, Any]:
    """Gather; the worker that keeps the round says in torch's words that the others were late."""
    limit = get_current().options.rpc_timeout if timeout == UNSET else timeout
    me = mpirpc.get_worker_info().name
    try:
        return mpirpc.all_gather(obj, worker_names or None, limit)
    except mpirpc.RpcTimeoutError as error:
        names = worker_names or [worker.name for worker in mpirpc.get_worker_infos()]
        if me != min(names):
            raise
        raise RuntimeError(
            f"followers timed out in _all_gather after {limit:.2f} seconds: {error}"
        ) from error


def _barrier(worker_names: Iterable[str]) -> None:
    try:
        mpirpc.barrier(worker_names)
    except RuntimeError:
        log.exception("barrier failed")


def wait_all_workers(timeout: float = 0) -> None:
    """Wait until all workers have called it."""
    mpirpc.barrier(timeout=timeout)


def _wait_all_futures(futures: Iterable[Any]) -> list[Any]:
    """mpirpc's; torch's own leaves early only for futures that its C++ has failed."""
    with name_words.said(torch.jit.Error, RuntimeError, "Expected error", "Expected error"):
        return mpirpc.wait(futures)


class _ServerProfile(mpirpc.profiler.profile_served_calls):
    """mpirpc's, with torch's name for its events."""

    @property
    def process_global_function_events(self) -> list[Any]:
        return self.calls


class _UsePickler:
    """``_use_rpc_pickler``: names the pickler in use while a block runs; mpirpc has one pickler."""

    def __init__(self, api: Facade) -> None:
        self._api = api

    @contextlib.contextmanager
    def __call__(self, pickler: Any) -> Iterator[None]:
        before = self._api._default_pickler
        self._api._default_pickler = pickler
        try:
            yield
        finally:
            self._api._default_pickler = before
