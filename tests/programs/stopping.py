"""Worker 0 stops the process of worker 1 (SIGSTOP) and continues it; for tests/test_failures.py, 3 ranks."""

import os
import signal
import threading

import torch

import mpirpc as rpc
from tests.programs.failing import double, tell

LIMIT = 0.5


def main():
    options = rpc.MPIRpcBackendOptions(rpc_timeout=LIMIT * 100)
    rpc.init_rpc(rpc_backend_options=options)
    me = rpc.get_worker_info().id
    if me == 0:
        drive()
    tell(f"shutdown of worker{me}", rpc.shutdown)
    print(f"worker{me} is at its end", flush=True)


def drive():
    pid = rpc.rpc_sync("worker1", os.getpid)
    rref = rpc.remote("worker1", abs, args=(-3,))
    rref.to_here()
    with rpc.autograd.context() as context_id:
        weight = torch.ones(1, requires_grad=True)
        loss = rpc.rpc_sync("worker1", double, args=(weight,)).sum()
        os.kill(pid, signal.SIGSTOP)
        tell("call", lambda: rpc.rpc_sync("worker1", abs, args=(-1,), timeout=LIMIT))
        tell("fetch", lambda: rref.to_here(timeout=LIMIT))
        tell(
            "backward in time",
            lambda: rpc.autograd.backward(context_id, [loss], retain_graph=True, timeout=LIMIT),
        )
        passing = threading.Thread(
            target=tell, args=("backward", lambda: rpc.autograd.backward(context_id, [loss]))
        )
        passing.start()
        tell("call elsewhere", lambda: rpc.rpc_sync("worker2", abs, args=(-2,)))
        tell("backward waits", passing.is_alive)
        os.kill(pid, signal.SIGCONT)
        passing.join()
        tell("gradient", lambda: rpc.autograd.get_gradients(context_id)[weight].item())
    tell("call afterwards", lambda: rpc.rpc_sync("worker1", abs, args=(-1,)))
    tell("fetch afterwards", rref.to_here)
    os.kill(pid, signal.SIGSTOP)
    tell("shutdown", lambda: rpc.shutdown(timeout=LIMIT))
    os.kill(pid, signal.SIGCONT)


if __name__ == "__main__":
    main()
