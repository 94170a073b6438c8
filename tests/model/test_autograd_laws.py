"""Laws of distributed autograd, on random programs with random message orders (docs/design/autograd.md).

A program runs twice: spread over simulated workers, and locally, where a send is the identity. Every step of
a program is drawn from what the spread run has so far. After each backward pass the gradients of all leaves
must agree.
"""

import os
import random
from collections import Counter

import pytest
import torch

from mpirpc._core.messages import BackwardAck, BackwardBegin, Gradient
from tests.unit.autograd_cluster import Cluster

NUM_EXAMPLES = int(os.environ.get("MPIRPC_MODEL_EXAMPLES", "200"))
SHAPE = (2,)


def _if_any(hook):
    """As with all of torch's functions of several outputs, a hook of one without gradient gets None."""
    return lambda gradient: None if gradient is None else hook(gradient)


HOOKS = [_if_any(lambda g: g * g), _if_any(lambda g: g * g.abs() + 0.1), _if_any(lambda g: g.sin() * 3)]
"""Not linear: each must see its whole gradient, once."""

OPERATIONS = [torch.add, torch.mul, torch.maximum, lambda a, b: a.sin() * b + a, lambda a, b: (a * b).tanh()]


class Program:
    """A random program, run both ways. ``values``: worker, tensor there, tensor of the local run."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        torch.manual_seed(seed)
        self.size = self.rng.randint(2, 4)
        self.cluster = Cluster(self.size, self.rng.randrange)
        self.engines = self.cluster.engines
        self.context_id = self.engines[0].new_context()
        for rank in range(1, self.size):
            self.cluster.introduce(self.context_id, 0, rank)
        self.leaves, self.values = [], []
        self.late = []  # messages not received yet: functions that receive them
        for rank in range(self.size):
            self.add_leaf(rank)

    # --- steps ---

    def add_leaf(self, rank):
        data = torch.randn(SHAPE, dtype=torch.float64)
        pair = data.clone().requires_grad_(), data.clone().requires_grad_()
        if self.rng.random() < 0.15:
            hook = self.rng.choice(HOOKS)
            for tensor in pair:
                tensor.register_hook(hook)
        self.leaves.append((rank, *pair))
        self.values.append((rank, *pair))

    def compute(self):
        rank, *first = self.rng.choice(self.values)
        second = self.rng.choice([value for value in self.values if value[0] == rank])[1:]
        operation = self.rng.choice(OPERATIONS)
        self.add(rank, *(operation(a, b) for a, b in zip(first, second, strict=True)))

    def move(self):
        """One message of up to three values, the same twice at times; received at once, late, or changed."""
        source = self.rng.choice(self.values)[0]
        dest = self.rng.randrange(self.size)
        here = [value for value in self.values if value[0] == source]
        sent = [self.rng.choice(here[-3:]) for _ in range(self.rng.randint(1, 3))]
        receive = self.cluster.post(self.context_id, source, dest, [value[1] for value in sent])
        if self.rng.random() < 0.1:
            self.late.append(receive)
            return
        for (_, _, local), received in zip(sent, receive(), strict=True):
            same = local.clone()
            if self.rng.random() < 0.2:
                received.mul_(1.5)
                same.mul_(1.5)
            self.add(dest, received, same)

    def add(self, rank, tensor, local):
        if self.rng.random() < 0.1:
            hook = self.rng.choice(HOOKS)
            tensor.register_hook(hook)
            local.register_hook(hook)
        self.values.append((rank, tensor, local))

    def run_forward(self):
        for _ in range(self.rng.randint(3, 25)):
            kind = self.rng.random()
            if kind < 0.07:
                self.add_leaf(self.rng.randrange(self.size))
            elif kind < 0.5:
                self.compute()
            else:
                self.move()

    # --- backward ---

    def draw_root(self):
        """A root somewhere: worker, root there, root of the local run."""
        rank = self.rng.choice(self.values)[0]
        here = [value for value in self.values if value[0] == rank]
        used = [self.rng.choice(here[-4:]) for _ in range(self.rng.randint(1, 2))]
        return rank, sum(u[1].sum() * 2 for u in used), sum(u[2].sum() * 2 for u in used)

    def run_backward(self):
        """One to three passes, two at the same time at times; the last frees the graph."""
        expected = [None] * len(self.leaves)
        num_passes = self.rng.randint(1, 3)
        roots = [self.draw_root() for _ in range(num_passes)]
        self.cluster.works += self.late
        for number, (rank, root, local) in enumerate(roots):
            retain_graph = number < num_passes - 1
            locals_ = torch.autograd.grad(
                local, [leaf for _, _, leaf in self.leaves], retain_graph=True, allow_unused=True
            )
            expected = [
                b if a is None else a if b is None else a + b for a, b in zip(expected, locals_, strict=True)
            ]

            def work(rank=rank, root=root, retain_graph=retain_graph):
                self.engines[rank].backward(self.context_id, [root], retain_graph, timeout=1)

            if retain_graph and self.rng.random() < 0.4:
                self.cluster.works.append(work)  # begins somewhere inside the next one
            else:
                if not retain_graph:
                    self.cluster.drain()  # nobody else may still use the graph
                work()
        return expected

    # --- laws ---

    def check_gradients(self, expected):
        for (rank, leaf, _), gradient in zip(self.leaves, expected, strict=True):
            got = self.engines[rank].get_gradients(self.context_id).get(leaf)
            if gradient is None:
                assert got is None
            else:
                torch.testing.assert_close(got, gradient, rtol=1e-9, atol=1e-9)
            assert leaf.grad is None

    def check_answers(self):
        """Every send got one answer in every pass that its worker took part in; at most one ack per pair."""
        answers = Counter()
        engaged = {}
        acks, wanted = Counter(), Counter()
        for source, dest, message in self.cluster.log:
            if not isinstance(message, Gradient | BackwardBegin | BackwardAck):
                continue
            engaged.setdefault(message.pass_id, {message.pass_id.root}).update((source, dest))
            if isinstance(message, BackwardAck):
                acks[message.pass_id, dest, source] += 1
            else:
                wanted[message.pass_id, source, dest] += message.wants_ack
            if isinstance(message, Gradient):
                answers[message.pass_id, dest, message.autograd_message_id] += 1
                acks[message.pass_id, dest, source] += message.acks
        assert max(wanted.values(), default=0) <= 1
        assert +acks == +wanted
        for pass_id, ranks in engaged.items():
            for rank in ranks:
                for send_id in self.engines[rank].retrieve(self.context_id).sends:
                    assert answers[pass_id, rank, send_id] == 1

    def check_release(self):
        self.engines[0].release_context(self.context_id)
        self.cluster.drain()
        for engine in self.engines:
            stats = engine.stats()
            assert (stats.contexts, stats.passes, stats.sends, stats.recvs) == (0, 0, 0, 0)


@pytest.mark.parametrize("block", range(10))
def test_gradients_are_those_of_the_local_program(block):
    for seed in range(block * NUM_EXAMPLES // 10, (block + 1) * NUM_EXAMPLES // 10):
        program = Program(seed)
        program.run_forward()
        try:
            expected = program.run_backward()
            program.cluster.drain()
            program.check_gradients(expected)
            program.check_answers()
            assert all(engine.stats().passes == 0 for engine in program.engines)
            program.check_release()
        except BaseException as error:
            error.add_note(f"program {seed} of {program.size} workers")
            raise
