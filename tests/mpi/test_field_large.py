"""More than 2 GiB in one call: sizes around what a C int counts, and 3 GiB, one direction at a time.

A rank holds one copy at a time. Runs with ``MPIRPC_TEST_LARGE=1`` on 2 ranks only, as it takes minutes, and
where 8 GiB of memory are free.
"""

import os

import pytest
import torch

import mpirpc as rpc

LIMIT = 2**31 - 1
"""Bytes that one MPI message holds before MPI-4."""

NEEDED = 8 << 30

kept = []


def available_nbytes():
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0


def make(nbytes):
    """A tensor whose bytes depend on their place, without a second copy on the way."""
    tensor = torch.zeros(nbytes, dtype=torch.uint8)
    for place in marks(nbytes):
        tensor[place : place + 64] = torch.arange(64, dtype=torch.uint8) + place % 191
    return tensor


def marks(nbytes):
    """Where the bytes are looked at: the ends, around every 2**30 bytes (a chunk's end), and between."""
    places = {0, nbytes - 64, nbytes // 3}
    places |= {edge + off for edge in range(1 << 30, nbytes, 1 << 30) for off in (-64, -1, 0)}
    return sorted(place for place in places if 0 <= place <= nbytes - 64)


def check(tensor, nbytes):
    """Compare with what ``make`` made; where marks overlap, the later one counts."""
    assert (tensor.dtype, tensor.shape) == (torch.uint8, (nbytes,))
    expected = {}
    for place in marks(nbytes):
        expected |= {place + i: (i + place % 191) % 256 for i in range(64)}
    places = torch.tensor(sorted(expected))
    assert tensor[places].tolist() == [expected[place] for place in sorted(expected)]
    assert int(tensor[64:4096].sum()) == sum(value for place, value in expected.items() if 64 <= place < 4096)
    return nbytes


def give(nbytes):
    return make(nbytes)


@pytest.mark.mpi(min_size=2)
@pytest.mark.patience(300)
@pytest.mark.skipif(
    os.environ.get("MPIRPC_TEST_LARGE") != "1", reason="takes minutes: set MPIRPC_TEST_LARGE=1"
)
@pytest.mark.parametrize(
    ("nbytes", "direction"),
    [(LIMIT, "argument"), (LIMIT + 1, "argument"), (LIMIT + 2, "result"), (3 << 30, "argument")],
)
def test_tensor_around_and_above_two_gib(rpc_world, nbytes, direction):
    """pytorch#52854, mpi4py#23: it arrives whole, and takes no more memory than one copy at each end."""
    enough = torch.tensor([int(available_nbytes() > NEEDED)])
    rpc_world.comm.Bcast(enough.numpy())  # all ranks skip, or none
    if not enough or rpc_world.size > 2:
        pytest.skip("2 ranks are enough" if enough else "less than 8 GiB of memory is free")
    if rpc_world.rank != 0:
        return
    if direction == "argument":
        assert rpc.rpc_sync("worker1", check, args=(make(nbytes), nbytes), timeout=0) == nbytes
    else:
        check(rpc.rpc_sync("worker1", give, args=(nbytes,), timeout=0), nbytes)
