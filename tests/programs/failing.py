"""Worker 1 fails in the middle of what worker 0 does; tests/test_failures.py starts it on two or three ranks.

    failing.py CAUSE MOMENT

MOMENT is what worker 0 waits in: a ``call`` that does not end, a ``fetch`` of a value that does not come, a
``backward`` pass that does not end, ``shutdown``. Once it waits there, the main thread of worker 1 does what
CAUSE says: ``kill`` (SIGKILL to itself), ``raise``, ``exit`` (the program ends without shutdown), ``wait``
(nothing: the test sends a signal). Worker 2, if there is one, has nothing to do with it. Worker 0 tells what
it got, and looks at what is left.
"""

import os
import signal
import sys
import threading
import time
from contextlib import suppress

import torch

import mpirpc as rpc

NEVER = threading.Event()
STRIKE = threading.Event()
REST = ["worker0", "worker2"]
kept = []


def reach():
    STRIKE.set()


def hold():
    STRIKE.set()
    NEVER.wait()


class HoldGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        hold()


def held(x):
    return HoldGradient.apply(x)


def keep(*rrefs):
    """Hold handles of values elsewhere."""
    kept.extend(rrefs)


def wait_in(moment):
    if moment == "call":
        rpc.rpc_sync("worker1", hold, timeout=0)
    elif moment == "fetch":
        rpc.remote("worker1", hold, timeout=0).to_here(timeout=0)
    elif moment == "backward":
        with rpc.autograd.context() as context_id:
            weight = torch.ones(1, requires_grad=True)
            loss = rpc.rpc_sync("worker1", held, args=(weight,)).sum()
            rpc.autograd.backward(context_id, [loss])
    elif moment == "shutdown":
        with suppress(rpc.errors.WorkerLostError):  # it may fail before its answer has left
            rpc.rpc_sync("worker1", reach)
        rpc.shutdown()
    else:
        raise ValueError(moment)


def fail(cause):
    STRIKE.wait()
    print(f"worker1 is reached at {time.time():.3f}", flush=True)
    if cause == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif cause == "raise":
        raise ValueError("worker1 is broken")
    elif cause == "wait":
        NEVER.wait()
    elif cause != "exit":
        raise ValueError(cause)


def tell(what, run):
    """Say what an action on worker 0 came to."""
    try:
        result = run()
    except rpc.RpcError as error:
        result = f"{type(error).__name__}: {error}".partition("\n")[0]
    print(f"[{what}] {result}", flush=True)


def facts():
    info = rpc.debug_info()
    names = ("lost_workers", "forks", "pending_calls", "open_calls", "pending_rrefs", "autograd_contexts")
    return {name: info[name] for name in names}


def wait_until_lost():
    while not rpc.debug_info()["lost_workers"]:
        time.sleep(0.001)


def look_around(far):
    """What worker 0 can do after worker 1 has died and was noticed."""
    tell("new call", lambda: rpc.rpc_sync("worker1", abs, args=(-1,)))
    tell("its rref", far.to_here)
    tell("its rref, passed on", lambda: rpc.rpc_sync("worker2", type, args=(far,)).__name__)
    tell("a backward pass without it", backward_elsewhere)
    tell("barrier of all", rpc.barrier)
    other = rpc.rpc_async("worker2", rpc.barrier, args=(REST,))
    tell("barrier of the rest", lambda: (rpc.barrier(REST), other.wait()))
    rpc.rpc_sync("worker2", wait_until_lost)
    tell("facts here", facts)
    tell("facts there", lambda: rpc.rpc_sync("worker2", facts))


def double(x):
    return 2 * x


def backward_elsewhere():
    with rpc.autograd.context() as context_id:
        weight = torch.ones(1, requires_grad=True)
        rpc.autograd.backward(context_id, [rpc.rpc_sync("worker2", double, args=(weight,)).sum()])
        return rpc.autograd.get_gradients(context_id)[weight].item()


def main(cause, moment):
    rpc.init_rpc()
    me, size = rpc.get_worker_info().id, len(rpc.get_worker_infos())
    if me == 1:
        fail(cause)
        return
    if me == 0:
        survives = size == 3
        if survives:
            far = rpc.remote("worker1", abs, args=(-1,))
            rpc.rpc_sync("worker1", keep, args=(rpc.RRef(7), rpc.remote("worker2", abs, args=(-2,))))
        tell(moment, lambda: wait_in(moment))
        print(f"worker0 goes on at {time.time():.3f}", flush=True)
        if survives and moment != "shutdown":
            look_around(far)
            del far
    if me != 0 or moment != "shutdown":
        tell(f"shutdown of worker{me}", rpc.shutdown)
    print(f"worker{me} is at its end", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
