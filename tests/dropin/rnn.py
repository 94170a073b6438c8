"""A recurrent network in two places: embedding and decoder on the server, the LSTM here."""

import os
import threading

import torch
import torch.distributed.autograd as dist_autograd
import torch.multiprocessing as mp
from torch import nn, optim
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import RRef

PROCESSES = 2
TOKENS, WIDTH, HIDDEN = 20, 6, 8

drawing = threading.Lock()  # both parts are made on the server at one time, from one random generator


def call_method(method, rref, *args, **kwargs):
    return method(rref.local_value(), *args, **kwargs)


def remote_method(method, rref, *args, **kwargs):
    return rpc.rpc_sync(rref.owner(), call_method, args=[method, rref, *args], kwargs=kwargs)


def parameter_rrefs(module):
    return [RRef(parameter) for parameter in module.parameters()]


class EmbeddingTable(nn.Module):
    def __init__(self):
        super().__init__()
        with drawing:
            torch.manual_seed(1)
            self.table = nn.Embedding(TOKENS, WIDTH)

    def forward(self, tokens):
        return self.table(tokens)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        with drawing:
            torch.manual_seed(2)
            self.layer = nn.Linear(HIDDEN, TOKENS)

    def forward(self, output):
        return self.layer(output)


class RNNModel(nn.Module):
    def __init__(self, server):
        super().__init__()
        self.embedding_rref = rpc.remote(server, EmbeddingTable)
        torch.manual_seed(4)
        self.lstm = nn.LSTM(WIDTH, HIDDEN)
        self.decoder_rref = rpc.remote(server, Decoder)

    def forward(self, tokens, hidden):
        embedded = remote_method(EmbeddingTable.forward, self.embedding_rref, tokens)
        output, hidden = self.lstm(embedded, hidden)
        return remote_method(Decoder.forward, self.decoder_rref, output), hidden

    def parameter_rrefs(self):
        return [
            *remote_method(parameter_rrefs, self.embedding_rref),
            *parameter_rrefs(self.lstm),
            *remote_method(parameter_rrefs, self.decoder_rref),
        ]


def train():
    model = RNNModel("server")
    optimizer = DistributedOptimizer(optim.SGD, model.parameter_rrefs(), lr=0.5)
    criterion = nn.CrossEntropyLoss()
    generator = torch.Generator().manual_seed(0)
    hidden = (torch.zeros(1, 3, HIDDEN), torch.zeros(1, 3, HIDDEN))
    for step in range(5):
        tokens = torch.randint(TOKENS, (7, 3), generator=generator)
        with dist_autograd.context() as context_id:
            hidden = tuple(part.detach() for part in hidden)
            output, hidden = model(tokens[:-1], hidden)
            loss = criterion(output.reshape(-1, TOKENS), tokens[1:].reshape(-1))
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        print(f"step {step}: loss {loss.item():.5f}")


def run(rank, world_size):
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    )
    name = "trainer" if rank == 0 else "server"
    rpc.init_rpc(
        name,
        backend=rpc.BackendType.TENSORPIPE,
        rank=rank,
        world_size=world_size,
        rpc_backend_options=options,
    )
    if rank == 0:
        train()
    rpc.shutdown()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29500")
    mp.spawn(run, args=(PROCESSES,), nprocs=PROCESSES)
