"""Autograd engines of several workers in one process, joined by a bag of messages in the test's hands."""

import random

import torch

from mpirpc._core.autograd_engine import AutogradEngine
from mpirpc._core.messages import Body, Gradient


class CarriedError:
    """A body that carries an exception object, for the dump and load ports of these tests."""

    def __init__(self, error):
        self.error = error
        self.payload, self.tensors = b"", []


class Event:
    """Waits by letting the cluster go on; gives up when nothing is left to do."""

    def __init__(self, cluster):
        self.cluster = cluster
        self.is_set = False

    def set(self):
        self.is_set = True

    def wait(self, deadline):
        while not self.is_set:
            if self.cluster.clock > deadline or not self.cluster.step():
                return False
        return True


class Ports:
    """Surroundings of one engine: everything lands in the cluster."""

    def __init__(self, cluster, rank):
        self.cluster = cluster
        self.rank = rank

    def send(self, dest, message, body=None):
        self.cluster.bag.append((self.rank, dest, message, body))

    def start(self, work):
        self.cluster.works.append(work)

    def new_event(self):
        return Event(self.cluster)

    def dump_error(self, error):
        return CarriedError(error)

    def load_error(self, source, body):
        return body.error

    def describe(self, rank):
        return f"'worker{rank}' (rank {rank})"


class Cluster:
    """``size`` engines. ``pick`` chooses what happens next: a position in ``bag`` followed by ``works``.

    Attributes:
        bag: Messages under way: source, dest, message, body.
        works: What executor threads have to do.
        log: Every message delivered.
    """

    def __init__(self, size, pick=None):
        self.bag, self.works, self.log = [], [], []
        self.clock = 0.0
        self.pick = pick or (lambda num: 0)
        self.engines = [AutogradEngine(Ports(self, rank)) for rank in range(size)]

    def step(self):
        """Let one thing happen; False if there is nothing."""
        num = len(self.bag) + len(self.works)
        if not num:
            return False
        position = self.pick(num)
        if position < len(self.bag):
            self.deliver(position)
        else:
            self.works.pop(position - len(self.bag))()
        return True

    def deliver(self, position=0):
        """Deliver one message, its tensors in memory of their own as after a transfer."""
        source, dest, message, body = self.bag.pop(position)
        self.log.append((source, dest, message))
        if isinstance(message, Gradient) and body is not None:
            body = Body(body.payload, [t.clone() for t in body.tensors], flat=body.flat)
        self.engines[dest].on_message(source, message, body)

    def drain(self):
        """Let everything happen."""
        while self.step():
            pass

    def introduce(self, context_id, source, dest):
        """A request without tensors goes from ``source`` to ``dest``."""
        self.engines[source].note_request(context_id, dest)
        return self.engines[dest].enter(context_id, source)

    def post(self, context_id, source, dest, tensors):
        """Send tensors by one message. Calling what is returned receives them and returns what came."""
        self.introduce(context_id, source, dest)
        message_id = self.engines[source].attach_send(context_id, dest, tensors)
        flags = [t.requires_grad for t in tensors]
        copies = [t.detach().clone() for t in tensors]

        def receive():
            if not message_id:
                return copies
            return self.engines[dest].attach_recv(context_id, source, message_id, copies, flags)

        return receive

    def move(self, context_id, source, dest, *tensors):
        """Send tensors and receive them at once."""
        received = self.post(context_id, source, dest, list(tensors))()
        return received[0] if len(received) == 1 else received

    def call(self, context_id, source, dest, func, *tensors):
        """A call: the tensors go to ``dest``, the result comes back."""
        received = self.post(context_id, source, dest, list(tensors))()
        return self.move(context_id, dest, source, func(*received))

    def num(self, kind):
        """How many messages of this kind were delivered."""
        return sum(isinstance(message, kind) for _, _, message in self.log)


def shuffled(seed):
    """A ``pick`` that takes anything."""
    return random.Random(seed).randrange


def leaf(*values):
    return torch.tensor(values or (1.0, 2.0), dtype=torch.float64, requires_grad=True)


class Box:
    """A cluster with a context on worker 0, which makes all the calls."""

    def __init__(self, size=2):
        self.cluster = Cluster(size)
        self.engines = self.cluster.engines
        self.context_id = self.engines[0].new_context()

    def call(self, func, *tensors, dest=1):
        return self.cluster.call(self.context_id, 0, dest, func, *tensors)

    def backward(self, *roots, **options):
        self.engines[0].backward(self.context_id, list(roots), **options)

    def gradient(self, rank, tensor):
        found = self.engines[rank].get_gradients(self.context_id).get(tensor)
        return None if found is None else found.tolist()

    def close(self):
        """Release the context; afterwards nothing must be left anywhere."""
        if self.context_id in self.engines[0]._contexts:
            self.engines[0].release_context(self.context_id)
        self.cluster.drain()
        for engine in self.engines:
            assert (engine.stats().contexts, engine.stats().passes) == (0, 0)
