"""Calls of random kinds and sizes between all ranks, 16 in flight at each; every reply carries a checksum.

``MPIRPC_SOAK_SECONDS`` (default 3) says for how long; ``MPIRPC_SOAK_SEED`` which calls.
"""

import os
import random
import time
import zlib
from collections import deque

import pytest
import torch

import mpirpc as rpc

SECONDS = float(os.environ.get("MPIRPC_SOAK_SECONDS", "3"))
SEED = int(os.environ.get("MPIRPC_SOAK_SEED", "0"))
IN_FLIGHT = 16
SIZES = [0, 1, 100, 5_000, 40_000, 300_000]
"""Bytes: below and above the limits for heads received at once and for tensors inside the head."""


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


def start(source, names):
    """Start one call; return what gives its answer, and the checksum that the answer must have."""
    question = torch.frombuffer(bytearray(source.randbytes(source.choice(SIZES)) or b"x"), dtype=torch.uint8)
    to, other, nbytes = source.choice(names), source.choice(names), source.choice(SIZES)
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
