"""A parameter server that answers all trainers of a round together, by ``async_execution``."""

import os
import threading

import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn, optim
from torch.distributed import rpc as same_rpc
from torch.distributed.rpc.functions import async_execution

PROCESSES = 3
ROUNDS = 4


class BatchUpdateServer:
    def __init__(self, num_trainers):
        torch.manual_seed(0)
        self.model = nn.Linear(4, 2)
        self.lock = threading.Lock()
        self.future_model = torch.futures.Future()
        self.num_trainers = num_trainers
        self.waiting = 0
        self.optimizer = optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def get_model(self):
        return self.model

    @staticmethod
    @async_execution
    def update_and_fetch_model(server_rref, gradients):
        self = server_rref.local_value()
        with self.lock:
            self.waiting += 1
            for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
                parameter.grad += gradient
            future = self.future_model
            if self.waiting >= self.num_trainers:
                for parameter in self.model.parameters():
                    parameter.grad /= self.num_trainers
                self.waiting = 0
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=False)
                self.future_model = torch.futures.Future()
                future.set_result(self.model)
        return future


class Trainer:
    def __init__(self, server_rref):
        self.server_rref = server_rref
        self.loss_fn = nn.MSELoss()
        self.generator = torch.Generator().manual_seed(rpc.get_worker_info().id)

    def train(self):
        model = self.server_rref.rpc_sync().get_model()
        losses = []
        for _ in range(ROUNDS):
            inputs = torch.randn(6, 4, generator=self.generator)
            labels = torch.randn(6, 2, generator=self.generator)
            loss = self.loss_fn(model(inputs), labels)
            model.zero_grad()
            loss.backward()
            losses.append(loss.item())
            model = rpc.rpc_sync(
                self.server_rref.owner(),
                BatchUpdateServer.update_and_fetch_model,
                args=(self.server_rref, [parameter.grad for parameter in model.parameters()]),
            )
        return losses


def run_trainer(server_rref):
    return Trainer(server_rref).train()


@rpc.functions.async_execution
def add_on(worker, number):
    return rpc.rpc_async(worker, torch.add, args=(torch.tensor(number), 1)).then(
        lambda done: done.wait() + 10
    )


def run(rank, world_size):
    assert same_rpc is rpc
    assert rpc.is_available()
    rpc.init_rpc(
        f"trainer{rank}" if rank else "ps",
        rank=rank,
        world_size=world_size,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(num_worker_threads=16, rpc_timeout=60),
    )
    if rank == 0:
        server_rref = rpc.RRef(BatchUpdateServer(world_size - 1))
        futures = [
            rpc.rpc_async(f"trainer{i}", run_trainer, args=(server_rref,)) for i in range(1, world_size)
        ]
        for i, future in enumerate(futures, 1):
            print(f"trainer{i}:", " ".join(f"{loss:.5f}" for loss in future.wait()))
        print("added:", rpc.rpc_sync("trainer1", add_on, args=("trainer2", 5)).item())
    rpc.shutdown()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29500")
    mp.spawn(run, args=(PROCESSES,), nprocs=PROCESSES)
