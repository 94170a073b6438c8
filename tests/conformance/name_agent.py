"""torch's private names about the agent: who is there, timeouts, debug info."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mpirpc
from mpirpc._core.current import get_current, get_current_or_none
from tests.conformance.facades import Facade


def add(facades: Mapping[str, Facade]) -> None:
    """Add these names."""
    names = {
        "_get_current_rpc_agent": _get_current_rpc_agent,
        "_is_current_rpc_agent_set": lambda: get_current_or_none() is not None,
        "_set_rpc_timeout": _set_rpc_timeout,
        "get_rpc_timeout": lambda: get_current().options.rpc_timeout,
        "TensorPipeAgent": _Agent,
    }
    facades["torch.distributed.rpc"].extras.update(names)
    facades["torch.distributed.rpc"].extras["enable_gil_profiling"] = mpirpc.profiler.measure_gil_wait
    facades["torch.distributed.rpc.api"].extras.update(names)


def reset() -> None:
    """Nothing to put back: all state is the runtime's."""


class _Agent:
    """The current agent, as torch shows it."""

    def get_worker_infos(self) -> list[mpirpc.WorkerInfo]:
        return mpirpc.get_worker_infos()

    def get_worker_info(self, name: Any = None) -> mpirpc.WorkerInfo:
        return mpirpc.get_worker_info(name)

    def get_debug_info(self) -> dict[str, str]:
        runtime, info = get_current(), mpirpc.debug_info()
        gil_wait = (
            {"agent.gil_average_wait_time_us": str(info["gil_wait_us"])} if "gil_wait_us" in info else {}
        )
        return gil_wait | {
            "agent.thread_pool_size": str(runtime.options.num_worker_threads),
            "agent.client_active_calls": str(info["pending_calls"]),
            "agent.server_active_calls": str(info["open_calls"]),
            "agent.num_idle_threads": str(info["executor_threads"] - info["running_calls"]),
        }


def _get_current_rpc_agent() -> _Agent:
    get_current()
    return _Agent()


def _set_rpc_timeout(timeout: float) -> None:
    get_current().options.rpc_timeout = timeout
