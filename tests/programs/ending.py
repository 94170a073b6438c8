"""A program that ends in the way its arguments name; tests/test_run.py starts it on two ranks.

Rank 1 does what is named, the others are where the second argument says: ``rpc`` waits for a call that does
not end, ``shutdown`` waits in ``rpc.shutdown``, ``collective`` in an MPI barrier, ``same`` do as rank 1
does.
"""

import sys
import threading
import time

from mpi4py import MPI

import mpirpc
from mpirpc import launch

NEVER = threading.Event()


def never():
    NEVER.wait()


def fail():
    try:
        {}["missing"]
    except KeyError as error:
        raise ValueError("this is wrong\nin two lines") from error


def save_for_long():
    time.sleep(launch.MEET_PATIENCE + 1)
    print("saved by rank 1", flush=True)


def get_stuck():
    """Wait in MPI for ever; "ready" is printed once the main thread is in there, and not a step earlier."""
    alone = MPI.COMM_SELF.Dup()

    def tell():
        alone.Recv(bytearray(1), tag=1)
        print("ready", flush=True)

    threading.Thread(target=tell, daemon=True).start()
    alone.Sendrecv(bytearray(1), 0, sendtag=1, recvbuf=bytearray(1), source=0, recvtag=2)


def end(how):
    if how == "raise":
        fail()
    elif how.startswith("exit"):
        sys.exit(int(how[4:]))
    elif how == "text":
        sys.exit("what python prints")
    elif how == "callback":
        mpirpc.on_terminate(lambda: print(f"saved by rank {MPI.COMM_WORLD.rank}", flush=True))
        mpirpc.on_terminate(lambda: 1 // 0)
        mpirpc.on_terminate(lambda: print(f"saved more by rank {MPI.COMM_WORLD.rank}", flush=True))
        try:
            print("ready", flush=True)
            mpirpc.rpc_sync(MPI.COMM_WORLD.rank, never, timeout=0)
        finally:
            print("unwound", flush=True)
    elif how == "slowly":
        mpirpc.on_terminate(save_for_long)
        print("ready", flush=True)
        NEVER.wait()
    elif how == "stuck":
        mpirpc.on_terminate(lambda: print("saved all the same", flush=True))
        get_stuck()


def main(how, others):
    mpirpc.init_rpc(f"name{MPI.COMM_WORLD.rank}")
    if MPI.COMM_WORLD.rank == 1 or others == "same":
        end(how)
    elif others == "rpc":
        mpirpc.rpc_sync(0, never, timeout=0)
    elif others == "collective":
        MPI.COMM_WORLD.Dup().Barrier()
    mpirpc.shutdown()
    print(f"rank {MPI.COMM_WORLD.rank} is at its end", flush=True)


if __name__ == "__main__":
    if sys.argv[3:] == ["run_main"]:
        mpirpc.run_main(lambda: main(*sys.argv[1:3]))
    else:
        main(*sys.argv[1:3])
