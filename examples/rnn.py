"""A recurrent network whose parts live on different workers, trained as if it were in one place.

    mpirun -n 3 python examples/rnn.py

The network reads the Zen of Python, which every Python ships, and learns to tell the next character. The
table of character vectors and the decoder are on worker 1, the LSTM is on worker 2 (on two ranks: on worker
0); rank 0 drives them through RemoteModules. The LSTM's state passes from one piece of text to the next, as
a plain value. The backward pass goes through the network to where the parts are, and a DistributedOptimizer
steps all parameters there.

The same network is then trained in one process. Prints the losses of both and, from rank 0, as the last line:
``OK: the split network learns as the whole one does``.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import sys

import torch
from torch import Tensor, nn, optim
from torch.nn import functional

import mpirpc as rpc
from mpirpc import autograd
from mpirpc.nn import RemoteModule, full_parameters
from mpirpc.optim import DistributedOptimizer

NUM_EPOCHS = 6
NUM_COLUMNS = 8
"""The text is cut into so many columns, which are read side by side."""
PIECE = 20
"""Characters of a column in one step."""
WIDTH = 32
TOLERANCE = 1e-9

State = tuple[Tensor, Tensor]


def read_text() -> str:
    """The Zen of Python: the module ``this`` prints it when it is imported."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        importlib.import_module("this")
    return printed.getvalue()


def make_pieces(text: str) -> list[Tensor]:
    """Cut the text into pieces of ``(PIECE + 1, NUM_COLUMNS)`` character numbers.

    The last character of one is the first of the next.
    """
    alphabet = sorted(set(text))
    numbers = torch.tensor([alphabet.index(character) for character in text])
    height = len(numbers) // NUM_COLUMNS
    columns = numbers[: height * NUM_COLUMNS].reshape(NUM_COLUMNS, height).t()
    return [columns[start : start + PIECE + 1] for start in range(0, height - PIECE, PIECE)]


def make(seed: int, module_class: type[nn.Module], *sizes: int) -> nn.Module:
    """A module whose start values depend on the seed alone; runs where the module is to live.

    It draws from a generator of its own: two modules may be made on one worker at the same time.
    """
    module = module_class(*sizes).double()
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        nn.init.uniform_(parameter, -0.2, 0.2, generator=generator)
    return module


class Network(nn.Module):
    """Three parts, wherever they are."""

    def __init__(self, table: nn.Module, lstm: nn.Module, decoder: nn.Module) -> None:
        super().__init__()
        self.table, self.lstm, self.decoder = table, lstm, decoder

    def forward(self, characters: Tensor, state: State) -> tuple[Tensor, State]:
        """Return the scores of every next character and the LSTM's new state."""
        outputs, state = self.lstm(self.table(characters), state)
        return self.decoder(outputs), state


def loss_and_state(model: Network, piece: Tensor, state: State) -> tuple[Tensor, State]:
    """The loss on a piece of text, and the state for the next one, cut off from this one's graph."""
    scores, (hidden, cell) = model(piece[:-1], state)
    loss = functional.cross_entropy(scores.flatten(0, 1), piece[1:].flatten())
    return loss, (hidden.detach(), cell.detach())


def start_state() -> State:
    zeros = torch.zeros(1, NUM_COLUMNS, WIDTH, dtype=torch.float64)
    return zeros, zeros


def train_split(pieces: list[Tensor], num_characters: int) -> list[float]:
    """Train with the parts on other workers; returns the losses."""
    workers = rpc.get_worker_infos()
    text_worker, lstm_worker = workers[1], workers[2 % len(workers)]
    model = Network(
        RemoteModule(text_worker, make, (1, nn.Embedding, num_characters, WIDTH)),
        RemoteModule(lstm_worker, make, (2, nn.LSTM, WIDTH, WIDTH)),
        RemoteModule(text_worker, make, (3, nn.Linear, WIDTH, num_characters)),
    )
    optimizer = DistributedOptimizer(optim.Adam, full_parameters(model), lr=0.01)
    losses = []
    for _ in range(NUM_EPOCHS):
        state = start_state()
        for piece in pieces:
            with autograd.context() as context_id:
                loss, state = loss_and_state(model, piece, state)
                autograd.backward(context_id, [loss])
                optimizer.step(context_id)
            losses.append(loss.item())
    return losses


def train_whole(pieces: list[Tensor], num_characters: int) -> list[float]:
    """Train the same network in this process; returns the losses."""
    model = Network(
        make(1, nn.Embedding, num_characters, WIDTH),
        make(2, nn.LSTM, WIDTH, WIDTH),
        make(3, nn.Linear, WIDTH, num_characters),
    )
    optimizer = optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(NUM_EPOCHS):
        state = start_state()
        for piece in pieces:
            optimizer.zero_grad()
            loss, state = loss_and_state(model, piece, state)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def drive() -> int:
    """What rank 0 does. Returns an exit status."""
    text = read_text()
    pieces, num_characters = make_pieces(text), len(set(text))
    split, whole = train_split(pieces, num_characters), train_whole(pieces, num_characters)
    for epoch in range(NUM_EPOCHS):
        last = (epoch + 1) * len(pieces) - 1
        print(f"epoch {epoch + 1}: last loss {split[last]:.6f} split, {whole[last]:.6f} in one process")
    difference = max(abs(a - b) for a, b in zip(split, whole, strict=True))
    print(f"the {len(split)} losses differ by {difference:.1e} at most")
    if not (difference < TOLERANCE and split[-1] < split[0]):
        print(f"FAILED: {TOLERANCE} is allowed, and losses go down", flush=True)
        return 1
    print("OK: the split network learns as the whole one does", flush=True)
    return 0


def main() -> int:
    rpc.init_rpc()
    status = 0
    if rpc.get_worker_info().id == 0:
        status = drive() if len(rpc.get_worker_infos()) > 1 else refuse()
    rpc.shutdown()  # the other ranks serve until here
    return status


def refuse() -> int:
    print("needs two or more ranks: mpirun -n 3 python examples/rnn.py", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
