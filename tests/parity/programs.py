"""Small programs that run on ``torch.distributed.rpc`` and on mpirpc without a change.

Worker 0 runs each and gets a result of tensors, numbers and texts; worker 1 serves. Which of the two is used
is chosen once per process by :func:`use`, as user code chooses by its imports.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

lib = SimpleNamespace(rpc=None, autograd=None, optimizer=None)
"""The modules in use."""

CALLEE = "worker1"


def use(rpc: Any, autograd: Any, optimizer: Any) -> None:
    """Choose the library."""
    lib.rpc, lib.autograd, lib.optimizer = rpc, autograd, optimizer


# --- what runs at worker 1 ---


class Counter:
    """An object with a state."""

    def __init__(self, start: int) -> None:
        self.value = start

    def add(self, number: int) -> int:
        self.value += number
        return self.value

    @staticmethod
    def double(number: int) -> int:
        return 2 * number


class Part:
    """Half a model."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x))

    def parameter_rrefs(self) -> list[Any]:
        return [lib.rpc.RRef(parameter) for parameter in self.layer.parameters()]

    def state(self) -> list[torch.Tensor]:
        return [parameter.detach() for parameter in self.layer.parameters()]


def describe(*args: Any, **kwargs: Any) -> str:
    shown = [*args, *sorted(kwargs.items())]
    return f"{lib.rpc.get_worker_info().name}: {shown}"


def fail(text: str) -> None:
    raise ValueError(text)


def fetch_and_add(rref: Any, x: torch.Tensor) -> torch.Tensor:
    return rref.to_here() + x


def call_back(x: torch.Tensor) -> torch.Tensor:
    return lib.rpc.rpc_sync("worker0", torch.mul, args=(x, x)) * 2


def affine(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (x @ weight).sin()


def new_tensor() -> torch.Tensor:
    return torch.arange(4.0)


def error_of(function: Any, *args: Any, says: str = "") -> tuple[str, bool]:
    """Type of what a call raises, and whether its text has ``says`` in it; the rest of the texts differs."""
    try:
        function(*args)
    except Exception as error:
        return type(error).__name__, says in str(error)
    return "", False


# --- programs, at worker 0 ---


def calls() -> Any:
    rpc = lib.rpc
    futures = [rpc.rpc_async(CALLEE, torch.add, args=(torch.ones(2), number)) for number in range(4)]
    chained = rpc.rpc_async(CALLEE, new_tensor).then(lambda done: done.wait() * 3)
    return [
        rpc.rpc_sync(CALLEE, describe, args=(1, "two", None), kwargs={"three": (3.0, [4])}),
        rpc.rpc_sync(rpc.get_worker_info(CALLEE), Counter.double, args=(21,)),
        [future.wait() for future in futures],
        torch.futures.wait_all([rpc.rpc_async(CALLEE, abs, args=(-number,)) for number in range(3)]),
        chained.wait(),
        rpc.rpc_sync(CALLEE, call_back, args=(torch.full((2,), 3.0),)),
        rpc.rpc_sync("worker0", describe, args=("to oneself",)),
    ]


def errors() -> Any:
    rpc = lib.rpc
    return [
        error_of(lambda: rpc.rpc_sync(CALLEE, fail, args=("bad value",)), says="bad value"),
        error_of(lambda: rpc.rpc_async(CALLEE, fail, args=("bad value",)).wait(), says="bad value"),
        error_of(lambda: rpc.remote(CALLEE, fail, args=("bad value",)).to_here(), says="bad value"),
        error_of(lambda: rpc.rpc_sync(CALLEE, torch.add, args=(torch.ones(2), torch.ones(3)))),
    ]


def rrefs() -> Any:
    rpc = lib.rpc
    counter = rpc.remote(CALLEE, Counter, args=(10,))
    made = rpc.remote(CALLEE, new_tensor)
    mine = rpc.RRef(torch.full((4,), 0.5))
    return [
        counter.rpc_sync().add(5),
        counter.rpc_async().add(7).wait(),
        counter.remote().add(1).to_here(),
        made.to_here(),
        [made.is_owner(), made.owner_name(), made.owner().id, made.confirmed_by_owner()],
        [mine.is_owner(), mine.owner_name(), mine.local_value(), mine.to_here()],
        rpc.rpc_sync(CALLEE, fetch_and_add, args=(mine, torch.ones(4))),
        rpc.rpc_sync(CALLEE, fetch_and_add, args=(made, torch.ones(4))),
    ]


def gradients() -> Any:
    rpc, autograd = lib.rpc, lib.autograd
    torch.manual_seed(1)
    x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    with autograd.context() as context_id:
        first = rpc.rpc_sync(CALLEE, affine, args=(x, weight))
        second = rpc.remote(CALLEE, affine, args=(first, weight)).to_here()
        third = rpc.rpc_async(CALLEE, call_back, args=(second * first,)).wait()
        loss = third.mean()
        autograd.backward(context_id, [loss, (third * weight[0]).sum()], retain_graph=True)
        autograd.backward(context_id, [loss])
        found = autograd.get_gradients(context_id)
        return [loss.detach(), found[x], found[weight], len(found), x.grad is None]


def misuse_of_autograd() -> Any:
    autograd = lib.autograd
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        return [
            error_of(autograd.backward, context_id, [], says="No tensors provided")[1],
            error_of(autograd.backward, context_id, [x], says="all roots need to be scalar")[1],
            error_of(autograd.backward, context_id, [x.sum().detach()], says="requires_grad not set")[1],
            error_of(autograd.backward, 100, [x.sum()], says="autograd context with id: 100")[1],
            error_of(autograd.get_gradients, 100, says="autograd context with id: 100")[1],
        ]


def training() -> Any:
    """Two parts, one on each worker, trained by the distributed optimizer."""
    rpc, autograd = lib.rpc, lib.autograd
    parts = [rpc.remote("worker0", Part, args=(1,)), rpc.remote(CALLEE, Part, args=(2,))]
    parameters = [rref for part in parts for rref in part.rpc_sync().parameter_rrefs()]
    optimizer = lib.optimizer(torch.optim.SGD, parameters, lr=0.1, momentum=0.9)
    torch.manual_seed(3)
    inputs, targets = torch.randn(8, 4), torch.randn(8, 4)
    losses = []
    for _ in range(5):
        with autograd.context() as context_id:
            middle = parts[0].rpc_sync().forward(inputs)
            loss = torch.nn.functional.mse_loss(parts[1].rpc_sync().forward(middle), targets)
            autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        losses.append(loss.item())
    return [losses, *[part.rpc_sync().state() for part in parts]]


PROGRAMS = [calls, errors, rrefs, gradients, misuse_of_autograd, training]


def run_all() -> dict[str, Any]:
    """Run every program; called at worker 0."""
    return {program.__name__: program() for program in PROGRAMS}
