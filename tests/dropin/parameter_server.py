"""A parameter server: the model lives on one process, trainers run it and step it from afar."""

import os
import threading

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.distributed.optim import DistributedOptimizer

PROCESSES = 3
STEPS = 4

server = None
server_lock = threading.Lock()


class ParameterServer(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, inputs):
        return self.layers(inputs)

    def get_parameter_rrefs(self):
        return [rpc.RRef(parameter) for parameter in self.parameters()]

    def get_gradients(self, context_id):
        gradients = dist_autograd.get_gradients(context_id)
        return sum(gradient.abs().sum().item() for gradient in gradients.values())


def get_server():
    global server
    with server_lock:
        if server is None:
            server = ParameterServer()
        return server


def call_method(method, rref, *args):
    return method(rref.local_value(), *args)


def remote_method(method, rref, *args):
    return rpc.rpc_sync(rref.owner(), call_method, args=[method, rref, *args])


class TrainerNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.server_rref = rpc.remote("parameter_server", get_server)

    def forward(self, inputs):
        return remote_method(ParameterServer.forward, self.server_rref, inputs)

    def parameter_rrefs(self):
        return remote_method(ParameterServer.get_parameter_rrefs, self.server_rref)


def train(rank):
    """Run by the trainers, one after the other."""
    net = TrainerNet()
    optimizer = DistributedOptimizer(torch.optim.SGD, net.parameter_rrefs(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    figures = []
    for _ in range(STEPS):
        inputs = torch.randn(5, 6, generator=generator)
        targets = torch.randint(3, (5,), generator=generator)
        with dist_autograd.context() as context_id:
            loss = F.cross_entropy(net(inputs), targets)
            dist_autograd.backward(context_id, [loss])
            total = remote_method(ParameterServer.get_gradients, net.server_rref, context_id)
            assert total > 0
            optimizer.step(context_id)
        figures.append((round(loss.item(), 5), round(total, 5)))
    return figures


def run(rank, world_size):
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=8, rpc_timeout=60)
    name = "parameter_server" if rank == 0 else f"trainer_{rank}"
    rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=options)
    if rank == 0:
        for trainer in range(1, world_size):
            for loss, total in rpc.rpc_sync(f"trainer_{trainer}", train, args=(trainer,)):
                print(f"trainer {trainer}: loss {loss:.5f}, gradients {total:.5f}")
    rpc.shutdown()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29500")
    mp.spawn(run, args=(PROCESSES,), nprocs=PROCESSES, join=True)
