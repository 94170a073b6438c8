"""What else published programs use: names, RemoteModule, gloo beside RPC, environment variables, errors."""

import os

import torch
import torch.distributed as dist
import torch.distributed.nn
import torch.distributed.rpc.api
import torch.multiprocessing
from torch.distributed.nn.api.remote_module import RemoteModule
from torch.distributed.optim import DistributedOptimizer, PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.distributed.rpc import PyRRef, RRef, TensorPipeRpcBackendOptions, WorkerInfo, init_rpc, shutdown
from torch.distributed.rpc.constants import DEFAULT_RPC_TIMEOUT_SEC, UNSET_RPC_TIMEOUT

PROCESSES = 2


def fail():
    raise ValueError("wrong")


@torch.distributed.rpc.api._require_initialized
def names_of_all():
    return sorted(torch.distributed.rpc.api._all_gather(os.environ["WORLD_SIZE"]).items())


def say(rank, *words):
    if rank == 0:
        print(*words)


def run(rank, world_size):
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(world_size)
    options = TensorPipeRpcBackendOptions(num_worker_threads=4, rpc_timeout=50, _transports=["uv"])
    options.set_device_map(f"worker{1 - rank}", {"cpu": "cpu"})
    say(rank, options.num_worker_threads, options.rpc_timeout, DEFAULT_RPC_TIMEOUT_SEC, UNSET_RPC_TIMEOUT)
    say(rank, torch.distributed.rpc._is_current_rpc_agent_set())
    init_rpc(
        f"worker{rank}", rank=rank, world_size=world_size, rpc_backend_options=TensorPipeRpcBackendOptions()
    )
    rpc = torch.distributed.rpc
    say(rank, rpc._is_current_rpc_agent_set(), rpc.get_rpc_timeout(), names_of_all())
    say(rank, [info.name for info in rpc.api._get_current_rpc_agent().get_worker_infos()])
    say(rank, isinstance(RRef(1), (PyRRef, RRef)), isinstance(rpc.get_worker_info(), WorkerInfo))
    if rank == 0:
        layer = RemoteModule("worker1/cpu", torch.nn.Linear, args=(3, 2))
        with torch.distributed.autograd.context() as context_id:
            loss = layer(torch.ones(1, 3)).sum()
            torch.distributed.autograd.backward(context_id, [loss])
            DistributedOptimizer(torch.optim.SGD, layer.remote_parameters(), lr=0.1).step(context_id)
        print(
            round((loss - layer(torch.ones(1, 3)).sum()).item(), 4),
            torch.distributed.nn.RemoteModule is RemoteModule,
        )
        try:
            rpc.rpc_sync("worker1", fail)
        except ValueError as error:
            print(type(error).__name__, "wrong" in str(error))
        with rpc.api._wait_all():
            rpc.rpc_async("worker1", torch.add, args=(torch.ones(1), 1))
    rpc.api._barrier([f"worker{i}" for i in range(world_size)])
    dist.init_process_group(
        "gloo", rank=rank, world_size=world_size, init_method=f"file://{os.environ['MEET']}"
    )
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    zero = ZeroRedundancyOptimizer(torch.nn.Linear(2, 2).parameters(), torch.optim.SGD, lr=0.1)
    say(rank, total.item(), type(zero).__name__, PostLocalSGDOptimizer.__name__)
    dist.destroy_process_group()
    shutdown()


if __name__ == "__main__":
    context = torch.multiprocessing.start_processes(
        run, args=(PROCESSES,), nprocs=PROCESSES, join=False, start_method="spawn"
    )
    while not context.join():
        pass
