"""Long use: nothing goes wrong, and nothing grows.

Calls of random kinds and sizes between all ranks, 32 in flight at each, every reply with a checksum; then
calls that do nothing. ``MPIRPC_SOAK_SECONDS`` (default 3) and ``MPIRPC_SOAK_CALLS`` (default 30,000) say how
long; ``MPIRPC_SOAK_SEED`` which calls.
"""

import os
import random
import threading
import time
import zlib
from collections import deque

import pytest
import torch

import mpirpc as rpc

SECONDS = float(os.environ.get("MPIRPC_SOAK_SECONDS", "3"))
SEED = int(os.environ.get("MPIRPC_SOAK_SEED", "0"))
CALLS = int(os.environ.get("MPIRPC_SOAK_CALLS", "30000"))
IN_FLIGHT = 32
LARGEST = 300 * 1024
"""Bytes."""


def checksum(tensor):
    return zlib.crc32(tensor.numpy().tobytes())


def answer(question, nbytes):
    """The question's checksum, and a tensor with its own."""
    reply = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    return checksum(question), reply, checksum(reply)


def ask_on(to, question, nbytes):
    return rpc.rpc_sync(to, answer, args=(question, nbytes))


@rpc.functions.async_execution
def ask_later(to, question, nbytes):
    return rpc.rpc_async(to, answer, args=(question, nbytes))


def read_and_answer(question, nbytes):
    return answer(question.to_here(), nbytes)


def size(source):
    """As often small as large: below and above all limits for heads and for tensors in them."""
    return (
        source.randint(1, 1 << source.randrange(1, 19))
        if source.random() < 0.5
        else source.randint(1, LARGEST)
    )


def start(source, names):
    """Start one call; return what gives its answer, and the checksum that the answer must have."""
    question = torch.frombuffer(bytearray(source.randbytes(size(source))), dtype=torch.uint8)
    to, other, nbytes = source.choice(names), source.choice(names), size(source)
    kind = source.randrange(5)
    if kind == 0:
        wait = rpc.rpc_async(to, ask_on, args=(other, question, nbytes)).wait
    elif kind == 1:
        wait = rpc.rpc_async(to, ask_later, args=(other, question, nbytes)).wait
    elif kind == 2:
        wait = rpc.remote(to, answer, args=(question, nbytes)).to_here
    elif kind == 3:
        wait = rpc.rpc_async(to, read_and_answer, args=(rpc.RRef(question), nbytes)).wait
    else:
        wait = rpc.rpc_async(to, answer, args=(question, nbytes)).wait
    return wait, checksum(question)


def check(started):
    wait, expected = started
    heard, reply, sent = wait()
    assert heard == expected
    assert checksum(reply) == sent


@pytest.mark.mpi(min_size=2)
@pytest.mark.patience(SECONDS + 60)
@pytest.mark.rpc_options(num_worker_threads=4, chunk_nbytes=65_536)
def test_soak(rpc_world):
    source = random.Random(SEED * 1000 + rpc_world.rank)
    flying = deque()
    end = time.monotonic() + SECONDS
    num_calls = 0
    while time.monotonic() < end:
        flying.append(start(source, rpc_world.names))
        num_calls += 1
        if len(flying) >= IN_FLIGHT:
            check(flying.popleft())
    while flying:
        check(flying.popleft())
    assert num_calls > IN_FLIGHT
    rpc_world.barrier()


# --- nothing grows ---


def nothing():
    """Do nothing."""


def resident_nbytes():
    """Memory that this process has in use."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def state():
    return resident_nbytes(), threading.active_count()


@pytest.mark.mpi(min_size=2)
@pytest.mark.patience(CALLS / 500 + 60)
def test_calls_leave_nothing_behind(rpc_world):
    """Memory after all calls is that after the first tenth, threads and tables too."""
    if rpc_world.rank == 0:
        for _ in range(CALLS // 10):
            rpc.rpc_sync("worker1", nothing)
        before = [state(), rpc.rpc_sync("worker1", state)]
        for _ in range(CALLS - CALLS // 10):
            rpc.rpc_sync("worker1", nothing)
        after = [state(), rpc.rpc_sync("worker1", state)]
        for (memory, threads), (memory_before, threads_before) in zip(after, before, strict=True):
            assert memory - memory_before < 4 << 20
            assert threads <= threads_before + 2  # spare threads come and go
    rpc_world.barrier()
    info = rpc.debug_info()
    assert (info["owned_rrefs"], info["used_rrefs"], info["forks"], info["autograd_contexts"]) == (0, 0, 0, 0)
    assert info["pending_calls"] == 0


@pytest.mark.mpi(min_size=2)
@pytest.mark.patience(CALLS / 500 + 60)
@pytest.mark.rpc_options(max_unfinished_nbytes=1 << 20)
def test_calls_without_waiting_keep_memory_bounded(rpc_world):
    """As many calls of 10 KiB as the machine can make: what has no answer is bounded on both sides."""
    if rpc_world.rank == 0:
        payload = bytes(10 * 1024)
        before = [resident_nbytes(), rpc.rpc_sync("worker1", resident_nbytes)]
        futures = deque(maxlen=1000)  # those before have an answer: at most 100 have none
        for _ in range(CALLS // 3):
            futures.append(rpc.rpc_async("worker1", len, args=(payload,)))
        assert {future.wait() for future in futures} == {len(payload)}
        after = [resident_nbytes(), rpc.rpc_sync("worker1", resident_nbytes)]
        assert all(now - then < 32 << 20 for now, then in zip(after, before, strict=True))
    rpc_world.barrier()
