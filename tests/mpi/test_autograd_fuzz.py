"""Distributed autograd against one process, on random programs.

``MPIRPC_FUZZ_PROGRAMS`` (200) is how many, ``MPIRPC_FUZZ_FIRST`` (0) the first seed. What a program may do is
said in ``autograd_programs``; a failure tells the command that repeats just that program.
"""

import os
import sys
import threading

import pytest

from tests.mpi.autograd_fuzz import run_program
from tests.mpi.autograd_programs import SEEDS_PER_GROUP, options_of

FIRST = int(os.environ.get("MPIRPC_FUZZ_FIRST", "0"))
END = FIRST + int(os.environ.get("MPIRPC_FUZZ_PROGRAMS", "200"))
PATIENCE = 30.0
"""Seconds for ``SEEDS_PER_GROUP`` programs, which take about one; then the watchdog shows all stacks."""


def _groups():
    """Seeds that run in one group, one after the other."""
    for start in range(FIRST - FIRST % SEEDS_PER_GROUP, END, SEEDS_PER_GROUP):
        seeds = range(max(start, FIRST), min(start + SEEDS_PER_GROUP, END))
        mark = pytest.mark.rpc_options(**options_of(start))
        yield pytest.param(seeds, marks=mark, id=f"{seeds.start}-{seeds.stop - 1}")


def _how_to_repeat(seed, size):
    return (
        f"program {seed} on {size} ranks; repeat it with: MPIRPC_FUZZ_FIRST={seed} MPIRPC_FUZZ_PROGRAMS=1 "
        f"mpirun -n {size} python -m pytest --with-mpi tests/mpi/test_autograd_fuzz.py"
    )


class Announcer:
    """Says which program is stuck, before the watchdog ends the job."""

    def __init__(self, err, size):
        self._err = err
        self._size = size
        self.seed = None
        self._timer = threading.Timer(PATIENCE * 0.8, self._announce)

    def _announce(self):
        print(f"\nstuck in {_how_to_repeat(self.seed, self._size)}", file=self._err, flush=True)

    def __enter__(self):
        self._timer.start()
        return self

    def __exit__(self, *_exc):
        self._timer.cancel()
        self._timer.join()


@pytest.fixture
def terminal(capfd):
    """Standard error as it is without pytest."""
    with capfd.disabled():
        copy = os.dup(sys.stderr.fileno())
    with os.fdopen(copy, "w") as file:
        yield file


@pytest.mark.mpi(min_size=2)
@pytest.mark.patience(PATIENCE)
@pytest.mark.parametrize("seeds", list(_groups()))
def test_gradients_are_those_of_one_process(rpc_world, terminal, seeds):
    if rpc_world.rank != 0:
        return
    with Announcer(terminal, rpc_world.size) as announcer:
        for seed in seeds:
            announcer.seed = seed
            try:
                run_program(seed, rpc_world.size)
            except Exception as error:
                raise AssertionError(_how_to_repeat(seed, rpc_world.size)) from error
