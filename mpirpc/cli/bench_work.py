"""What ``bench`` measures: one program, run by mpirpc's workers and by those of torch's own RPC alike.

Imports nothing of mpirpc: the processes of the torch peer load this file by its path, and must not start MPI.
All that differs between the two libraries is in :class:`Api`, which :func:`install` puts in place.

A *measurement* is a function ``(api, count, **parameters) -> Series`` in :data:`WORK`; it repeats one
operation ``count`` times, from rank 0 to rank 1 unless it says otherwise, and returns what each took. What is
called by RPC stands at module level and comes first.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Barrier, Thread
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

Series = dict[str, list[float]]
"""Samples by name. ``time`` is in seconds per operation."""

SMALL = 4
"""Elements of a small tensor."""


@dataclass(frozen=True, slots=True)
class Api:
    """One library, as the measurements use it.

    Attributes:
        rpc: The module with ``rpc_sync``, ``rpc_async`` and ``remote``.
        autograd: The module with ``context``, ``backward`` and ``get_gradients``.
        optimizer: The class ``DistributedOptimizer``.
        rank: Of this process; its worker is called ``worker{rank}``.
        size: How many workers there are.
    """

    rpc: Any
    autograd: Any
    optimizer: Any
    rank: int
    size: int

    @property
    def next_worker(self) -> str:
        """The worker of the next rank; after the last comes rank 0."""
        return worker_name((self.rank + 1) % self.size)


_installed: dict[str, Api] = {}


def install(api: Api) -> None:
    """Say which library this process measures; callees need it for calls of their own."""
    _installed["api"] = api


def worker_name(rank: int) -> str:
    """The name that workers have by default in mpirpc, and are given in torch."""
    return f"worker{rank}"


# --- what runs at the callee ---


def noop() -> None:
    """Do nothing."""


def echo(tensor: Tensor) -> Tensor:
    """Send back what came."""
    return tensor


def take(tensor: Tensor) -> None:
    """Keep nothing, send nothing back."""


def make_value() -> Tensor:
    """What ``remote`` creates: a small tensor."""
    return torch.ones(SMALL)


def make_weight() -> Tensor:
    """A small parameter."""
    return torch.ones(SMALL, requires_grad=True)


def pass_on(num_hops: int) -> int:
    """Call the next rank, which calls the next, until all hops are made; returns how many were."""
    if num_hops == 0:
        return 0
    api = _installed["api"]
    made: int = api.rpc.rpc_sync(api.next_worker, pass_on, args=(num_hops - 1,))
    return made + 1


def call_all(num_calls: int) -> None:
    """Call every other rank ``num_calls`` times, all in flight at once."""
    api = _installed["api"]
    others = [worker_name(rank) for rank in range(api.size) if rank != api.rank]
    for future in [api.rpc.rpc_async(other, noop) for _ in range(num_calls) for other in others]:
        future.wait()


def cpu_seconds() -> float:
    """CPU time that this process has used, all threads together."""
    return time.process_time()


def cpus() -> list[int]:
    """The cores that this process may run on."""
    return sorted(os.sched_getaffinity(0))


class Spinner:
    """A thread that runs pure Python code until it is stopped.

    Args:
        switch_interval: ``sys.setswitchinterval`` meanwhile; 0 leaves it as it is.
    """

    def __init__(self, switch_interval: float) -> None:
        self._usual = sys.getswitchinterval()
        if switch_interval:
            sys.setswitchinterval(switch_interval)
        self._stopping = False
        self._thread = Thread(target=self._spin, name="bench-spinner", daemon=True)
        self._thread.start()

    def _spin(self) -> None:
        turns = 0
        while not self._stopping:
            turns += 1

    def stop(self) -> None:
        """Return once it has ended."""
        self._stopping = True
        self._thread.join()
        sys.setswitchinterval(self._usual)


_spinners: list[Spinner] = []


def start_spinning(switch_interval: float) -> None:
    """Keep this process's interpreter busy until ``stop_spinning``."""
    _spinners.append(Spinner(switch_interval))


def stop_spinning() -> None:
    """End what ``start_spinning`` began."""
    _spinners.pop().stop()


_memory_before: list[int] = []


def begin_memory() -> None:
    """From now on watch this process's memory (Linux only)."""
    # What was freed and kept by malloc would be taken again without showing.
    with contextlib.suppress(AttributeError):  # not in every C library
        ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")  # the peak is from now on what is in use now: proc(5)
    _memory_before.append(_status_nbytes("VmRSS"))


def end_memory() -> int:
    """Return how many bytes the peak was above the start."""
    return _status_nbytes("VmHWM") - _memory_before.pop()


def resident_nbytes() -> int:
    """Memory that this process has in use (Linux only)."""
    return _status_nbytes("VmRSS")


def _status_nbytes(key: str) -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        for line in file:
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {key}")


# --- the measurements ---


def _times(count: int, operation: Callable[[], object]) -> list[float]:
    samples = []
    for _ in range(count):
        start = perf_counter()
        operation()
        samples.append(perf_counter() - start)
    return samples


def _noop(api: Api, count: int) -> Series:
    rpc_sync, to = api.rpc.rpc_sync, api.next_worker
    return {"time": _times(count, lambda: rpc_sync(to, noop))}


def _add(api: Api, count: int) -> Series:
    rpc_sync, to, arguments = api.rpc.rpc_sync, api.next_worker, (torch.ones(SMALL), torch.ones(SMALL))
    return {"time": _times(count, lambda: rpc_sync(to, torch.add, args=arguments))}


def _send(api: Api, count: int, function: Callable[[Tensor], Any], nbytes: int) -> Series:
    rpc_sync, to, arguments = api.rpc.rpc_sync, api.next_worker, (torch.ones(nbytes, dtype=torch.uint8),)
    return {"time": _times(count, lambda: rpc_sync(to, function, args=arguments))}


def _echo(api: Api, count: int, nbytes: int) -> Series:
    return _send(api, count, echo, nbytes)


def _one_way(api: Api, count: int, nbytes: int) -> Series:
    return _send(api, count, take, nbytes)


def _threads(api: Api, count: int, num_threads: int) -> Series:
    """``count`` no-ops over all threads; one sample, the mean time from one call's end to the next.

    The time begins when each thread has made one call more: how long threads take to start is not measured.
    """
    each = max(1, count // num_threads)
    gate = Barrier(num_threads + 1)

    def make_calls() -> None:
        try:
            api.rpc.rpc_sync(api.next_worker, noop)
        except BaseException:
            gate.abort()
            raise
        gate.wait()
        for _ in range(each):
            api.rpc.rpc_sync(api.next_worker, noop)

    with ThreadPoolExecutor(num_threads) as pool:
        running = [pool.submit(make_calls) for _ in range(num_threads)]
        gate.wait()
        start = perf_counter()
        for thread in running:
            thread.result()
        return {"time": [(perf_counter() - start) / (each * num_threads)]}


def _burst(api: Api, count: int, num_calls: int) -> Series:
    """``num_calls`` no-ops in flight from one thread; a sample is the mean time a call of one burst."""

    def burst() -> None:
        for future in [api.rpc.rpc_async(api.next_worker, noop) for _ in range(num_calls)]:
            future.wait()

    return {"time": [sample / num_calls for sample in _times(count, burst)]}


def _remote(api: Api, count: int) -> Series:
    return {"time": _times(count, lambda: api.rpc.remote(api.next_worker, make_value).to_here())}


def _chain(api: Api, count: int, num_hops: int) -> Series:
    """A call that calls the next rank, and so on; a sample is the time a hop of one chain."""
    return {"time": [sample / num_hops for sample in _times(count, lambda: pass_on(num_hops))]}


def _autograd(api: Api, count: int) -> Series:
    inputs = torch.ones(SMALL, requires_grad=True)
    arguments = (inputs, torch.ones(SMALL))

    def step() -> None:
        with api.autograd.context() as context_id:
            loss = api.rpc.rpc_sync(api.next_worker, torch.mul, args=arguments).sum()
            api.autograd.backward(context_id, [loss])
            api.autograd.get_gradients(context_id)

    return {"time": _times(count, step)}


def _optimizer(api: Api, count: int) -> Series:
    """Only the steps are timed, not the passes that make their gradients."""
    weight = api.rpc.remote(api.next_worker, make_weight)
    optimizer = api.optimizer(torch.optim.SGD, [weight], lr=1e-3)
    samples = []
    for _ in range(count):
        with api.autograd.context() as context_id:
            api.autograd.backward(context_id, [weight.to_here().sum()])
            start = perf_counter()
            optimizer.step(context_id)
            samples.append(perf_counter() - start)
    return {"time": samples}


def _all_to_all(api: Api, count: int, num_calls: int) -> Series:
    """Every rank calls every other one; a sample is the mean time a call, all ranks together."""

    def exchange() -> None:
        others = [
            api.rpc.rpc_async(worker_name(rank), call_all, args=(num_calls,)) for rank in range(1, api.size)
        ]
        call_all(num_calls)
        for future in others:
            future.wait()

    total = api.size * (api.size - 1) * num_calls
    samples = [sample / total for sample in _times(count, exchange)]
    workers = [worker_name(rank) for rank in range(1, api.size)]
    residents = [resident_nbytes(), *(api.rpc.rpc_sync(to, resident_nbytes) for to in workers)]
    return {"time": samples, "resident": [max(residents)]}


def _busy(api: Api, count: int, where: str, switch_interval: float) -> Series:
    """No-ops while the caller's or the callee's interpreter has other work."""
    if where == "caller":
        start_spinning(switch_interval)
    else:
        api.rpc.rpc_sync(api.next_worker, start_spinning, args=(switch_interval,))
    try:
        return _noop(api, count)
    finally:
        if where == "caller":
            stop_spinning()
        else:
            api.rpc.rpc_sync(api.next_worker, stop_spinning)


def _idle(api: Api, count: int, seconds: float) -> Series:
    """Do nothing for a while, then call: ``time`` of that call; ``cpu``, cores that the busier end used."""
    series: Series = {"time": [], "cpu": []}
    for _ in range(count):
        there, here, start = api.rpc.rpc_sync(api.next_worker, cpu_seconds), cpu_seconds(), perf_counter()
        time.sleep(seconds)
        here, idle_time = cpu_seconds() - here, perf_counter() - start
        series["time"] += _times(1, lambda: api.rpc.rpc_sync(api.next_worker, noop))
        there = api.rpc.rpc_sync(api.next_worker, cpu_seconds) - there
        series["cpu"].append(max(there, here) / idle_time)
    return series


def _memory(api: Api, count: int, nbytes: int) -> Series:
    """Peak memory of an echo in payloads: what the callee takes; what the caller takes beyond the result."""
    series: Series = {"callee": [], "caller": []}
    tensor = torch.ones(nbytes, dtype=torch.uint8)
    for _ in range(count):
        api.rpc.rpc_sync(api.next_worker, begin_memory)
        begin_memory()
        result = api.rpc.rpc_sync(api.next_worker, echo, args=(tensor,))
        series["caller"].append(end_memory() / nbytes - 1)
        del result
        series["callee"].append(api.rpc.rpc_sync(api.next_worker, end_memory) / nbytes)
    return series


WORK: dict[str, Callable[..., Series]] = {
    "noop": _noop,
    "add": _add,
    "echo": _echo,
    "one-way": _one_way,
    "threads": _threads,
    "burst": _burst,
    "remote": _remote,
    "chain": _chain,
    "autograd": _autograd,
    "optimizer": _optimizer,
    "all-to-all": _all_to_all,
    "busy": _busy,
    "idle": _idle,
    "memory": _memory,
}
"""Every measurement by name."""


def measure(work: str, parameters: Mapping[str, Any], count: int, warm: int) -> Series:
    """Run one measurement in this process, after ``warm`` repeats that are not counted."""
    api, function = _installed["api"], WORK[work]
    if warm:
        function(api, warm, **parameters)
    return function(api, count, **parameters)
