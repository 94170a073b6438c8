"""Unit tests for mpirpc._core.autograd_pass: backward passes (guarantees A1 to A5)."""

import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from mpirpc._core.autograd_engine import AutogradEngine
from mpirpc._core.messages import (
    BackwardBegin,
    BackwardFailed,
    Gradient,
    PassId,
)
from mpirpc.errors import AutogradError, RpcTimeoutError, WorkerLostError
from tests.unit.autograd_cluster import Box, Cluster, Ports, leaf


@pytest.fixture
def box():
    """Two workers and a context; ends with a leak check."""
    box = Box()
    yield box
    box.close()


class Failing(torch.autograd.Function):
    """Fails in backward while ``error`` is set."""

    error = ValueError("no gradient today")

    @staticmethod
    def forward(_ctx, x):
        return x * 1

    @staticmethod
    def backward(_ctx, gradient):
        if Failing.error is not None:
            raise Failing.error
        return gradient


# --- backward ---


def test_one_call_takes_two_messages(box):
    x, w = leaf(1.0, 2.0), leaf(3.0, 4.0)
    box.backward(box.call(lambda a: a * w, x).sum())
    assert box.gradient(0, x) == [3, 4]
    assert box.gradient(1, w) == [1, 2]
    assert len(box.cluster.log) == 2


def test_gradients_are_not_written_to_grad(box):
    x = leaf()
    box.backward(box.call(lambda a: a * 2, x).sum())
    assert x.grad is None


def test_gradients_are_handed_out_in_a_new_dict(box):
    x = leaf()
    box.backward(x.sum())
    box.engines[0].get_gradients(box.context_id).clear()
    assert box.gradient(0, x) == [1, 1]


def test_pass_without_any_call(box):
    x = leaf(2.0)
    box.backward((x * x).sum(), (x * 3).sum())
    assert box.gradient(0, x) == [7]
    assert not box.cluster.log


def test_call_to_oneself(box):
    x, w = leaf(), leaf(3.0, 4.0)
    y = box.cluster.call(box.context_id, 0, 0, lambda a: a * w, x)
    box.backward(y.sum())
    assert (box.gradient(0, x), box.gradient(0, w)) == ([3, 4], [1, 2])


def test_unused_value_does_not_hang(box):
    x, y = leaf(), leaf()
    box.call(lambda a: a * 2, y)
    box.backward((x * 2).sum())
    assert (box.gradient(0, x), box.gradient(0, y)) == ([2, 2], None)


def test_ping_pong_over_a_kept_value(box):
    """A -> B -> A -> B -> A, where B's second step also uses what it got in the first."""
    x, kept = leaf(2.0), []

    def first(a):
        kept.append(a * a)
        return kept[0] * 3

    def second(b):
        return kept[0] * b

    y = box.call(second, box.call(first, x).sin())
    box.backward(y.sum())
    local = leaf(2.0)
    square = local * local
    (square * (square * 3).sin()).sum().backward()
    assert box.gradient(0, x) == pytest.approx(local.grad.tolist(), rel=1e-12)


def test_sent_leaf_gets_its_gradient_where_it_lives(box):
    x = leaf()
    box.backward((box.call(lambda a: a * 5, x) + x).sum())
    assert box.gradient(0, x) == [6, 6]


def test_micro_batches_share_a_parameter(box):
    """One component a call: the parameter's gradients of all calls add up."""
    w = leaf(1.0, 1.0)
    inputs = [leaf(float(i), 1.0) for i in range(5)]
    box.backward(sum(box.call(lambda a: a * w, x).sum() for x in inputs))
    assert box.gradient(1, w) == [10, 5]


def test_leaf_with_hooks_sees_the_sum_of_all_calls(box):
    w = leaf(1.0, 1.0)
    w.register_hook(lambda g: g * g)
    box.backward(sum(box.call(lambda a: a * w, leaf(float(i), 1.0)).sum() for i in range(5)))
    assert box.gradient(1, w) == [100, 25]


def test_hooks_on_sent_and_received_tensors_run(box):
    x, y = leaf(), leaf()
    h = y * 1
    h.register_hook(lambda g: g * 10)

    def double(a, b):
        a.register_hook(lambda g: g + 1)
        return (a + b) * 2

    box.backward(box.call(double, x, h).sum())
    assert (box.gradient(0, x), box.gradient(0, y)) == ([3, 3], [20, 20])


def test_repeated_passes_add_up(box):
    x = leaf()
    root = box.call(lambda a: a * a, x).sum()
    for _ in range(3):
        box.backward(root, retain_graph=True)
    assert box.gradient(0, x) == [6, 12]


def test_second_pass_over_a_freed_remote_graph_raises_torchs_error(box):
    root = box.call(lambda a: a * a, leaf()).sum()
    box.backward(root)
    with pytest.raises(AutogradError, match=r"Error on Node 1: .*backward through the graph a second time"):
        box.backward(root)


def test_second_pass_over_a_freed_local_graph_raises_torchs_error(box):
    y = box.call(lambda a: a * 2, leaf())
    root = (y * y).sum()
    box.backward(root)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        box.backward(root)


def test_forward_again_after_a_pass_answers_only_for_the_new_one(box):
    x = leaf()
    box.backward(box.call(lambda a: a * 2, x).sum())
    box.cluster.log.clear()
    y = box.call(lambda a: a * 3, x)
    box.cluster.drain()
    assert not box.cluster.log
    box.backward(y.sum())
    assert box.gradient(0, x) == [5, 5]


def test_sparse_gradients_stay_sparse(box):
    table = torch.zeros(5, 2, requires_grad=True)

    def look_up(t):
        return torch.nn.functional.embedding(torch.tensor([1, 3]), t, sparse=True)

    box.backward(box.call(look_up, table).sum())
    gradient = box.engines[0].get_gradients(box.context_id)[table]
    assert gradient.is_sparse
    assert gradient.to_dense()[:, 0].tolist() == [0, 1, 0, 1, 0]


def test_sparse_tensors_themselves_can_be_sent(box):
    x = torch.eye(2, dtype=torch.float64).to_sparse().requires_grad_()
    box.backward(torch.sparse.sum(box.call(lambda a: a * 2, x)))
    assert box.engines[0].get_gradients(box.context_id)[x].to_dense().tolist() == [[2, 0], [0, 2]]


def test_backward_works_under_no_grad(box):
    x = leaf()
    root = box.call(lambda a: a * 2, x).sum()
    with torch.no_grad():
        box.backward(root)
    assert box.gradient(0, x) == [2, 2]


def test_two_passes_of_two_contexts_stay_apart():
    cluster = Cluster(2)
    x, w = leaf(), leaf(3.0, 4.0)
    ids = [engine.new_context() for engine in cluster.engines]
    roots = [cluster.call(ids[r], r, 1 - r, lambda a: a * w, x).sum() for r in range(2)]
    cluster.works.append(lambda: cluster.engines[1].backward(ids[1], [roots[1]]))
    cluster.engines[0].backward(ids[0], [roots[0]])
    cluster.drain()
    for rank in range(2):
        assert cluster.engines[rank].get_gradients(ids[rank])[x].tolist() == [3, 4]
        assert cluster.engines[1 - rank].get_gradients(ids[rank])[w].tolist() == [1, 2]


# --- failures ---


def test_failure_elsewhere_is_raised_at_the_root(box):
    root = box.call(Failing.apply, leaf()).sum()
    text = r"(?s)Error on Node 1: no gradient today.*'worker1' \(rank 1\)"
    with pytest.raises(AutogradError, match=text) as info:
        box.backward(root)
    assert info.value.__cause__ is Failing.error


def test_failure_here_is_raised_as_it_is(box):
    y = box.call(lambda a: a * 2, leaf())
    with pytest.raises(ValueError, match="no gradient today"):
        box.backward(Failing.apply(y).sum())
    box.cluster.drain()
    assert box.cluster.num(BackwardFailed) == 2, "to the neighbour, and its one flood"


def test_failure_here_after_others_were_told_ends_the_pass_there(box):
    """The root fails in its second run; the other worker waits for nothing any more."""
    x = Failing.apply(leaf())
    y = box.call(lambda a: a * 2, x)
    with pytest.raises(ValueError, match="no gradient today"):
        box.backward(y.sum())
    box.cluster.drain()
    assert [engine.stats().passes for engine in box.engines] == [0, 0]


def test_failure_crosses_workers_that_only_pass_it_on():
    box = Box(3)
    y = box.call(lambda a: box.cluster.call(box.context_id, 1, 2, Failing.apply, a), leaf())
    with pytest.raises(AutogradError, match="Error on Node 2: no gradient today"):
        box.backward(y.sum())
    box.cluster.drain()
    assert [engine.stats().passes for engine in box.engines] == [0, 0, 0]


def test_pass_after_a_failed_one_succeeds(box, monkeypatch):
    x = leaf()
    root = box.call(Failing.apply, x).sum()
    with pytest.raises(AutogradError):
        box.backward(root, retain_graph=True)
    monkeypatch.setattr(Failing, "error", None)
    box.backward(root)
    assert box.gradient(0, x) == [1, 1]


def test_messages_of_a_failed_pass_are_dropped(box):
    """The failure overtakes the message that would engage worker 1."""
    box.call(lambda a: a * 2, leaf())
    pass_id = PassId(0, 9)
    body = Ports(box.cluster, 0).dump_error(ValueError("x"))
    box.engines[1].on_message(0, BackwardFailed(box.context_id, pass_id, failed_on=0), body)
    box.engines[1].on_message(0, BackwardBegin(box.context_id, pass_id, False))
    box.cluster.drain()
    assert box.cluster.num(Gradient) == 0
    assert box.cluster.num(BackwardFailed) == 1


def test_deadline_names_who_is_missing(box):
    box.cluster.introduce(box.context_id, 0, 1)
    box.engines[0].attach_send(box.context_id, 1, [leaf()])  # its message never arrives
    with pytest.raises(RpcTimeoutError, match=r"\(1 s\): no answer yet from 'worker1' ") as caught:
        box.backward(leaf().sum(), timeout=1)
    assert (caught.value.worker, caught.value.timeout) == ("'worker1' (rank 1)", 1)
    box.cluster.drain()
    assert [engine.stats().passes for engine in box.engines] == [0, 0]


def test_deadline_does_not_name_those_that_have_answered():
    box = Box(4)
    x = leaf()
    root = (box.call(lambda a: a * 2, x, dest=1) + box.call(lambda a: a * 3, x, dest=3)).sum()
    box.cluster.introduce(box.context_id, 0, 2)
    box.engines[0].attach_send(box.context_id, 2, [leaf()])  # its message never arrives
    with pytest.raises(RpcTimeoutError, match=r"no answer yet from 'worker2' \(rank 2\)\n"):
        box.backward(root, timeout=1)
    box.close()


@pytest.mark.parametrize("way", ["register_hook", "register_post_accumulate_grad_hook"])
def test_what_a_run_finds_after_the_failure_is_dropped(box, way):
    """The pass ends while user code of it runs: the context may be in use by the next one by then."""
    w = leaf(3.0, 4.0)

    def fail(_gradient):
        pass_id = PassId(0, 1)
        body = Ports(box.cluster, 0).dump_error(ValueError("over"))
        box.engines[1].on_message(0, BackwardFailed(box.context_id, pass_id, failed_on=0), body)

    handle = getattr(w, way)(fail)
    root = box.call(lambda a: a * w, leaf()).sum()
    with pytest.raises(AutogradError, match="over"):
        box.backward(root, retain_graph=True)
    assert box.gradient(1, w) is None
    handle.remove()
    box.backward(root)
    assert box.gradient(1, w) == [1, 2]


def test_lost_worker_ends_passes_that_need_it(box):
    root = box.call(lambda a: a * 2, leaf()).sum()
    box.cluster.works.append(lambda: box.engines[0].lose(1))
    box.cluster.pick = lambda num: num - 1
    with pytest.raises(WorkerLostError, match="a backward pass needs 'worker1'"):
        box.backward(root)


def test_close_ends_passes_and_frees_contexts(box):
    root = box.call(lambda a: a * 2, leaf()).sum()
    box.cluster.works.append(lambda: box.engines[0].close(WorkerLostError("shutdown")))
    box.cluster.pick = lambda num: num - 1
    with pytest.raises(WorkerLostError, match="shutdown"):
        box.backward(root)
    assert box.engines[0].stats().contexts == 0
    box.engines[1].close(WorkerLostError("shutdown"))


def test_release_during_a_pass_ends_it(box):
    root = box.call(lambda a: a * 2, leaf()).sum()
    box.cluster.works.append(lambda: box.engines[0].release_context(box.context_id))
    box.cluster.pick = lambda num: num - 1
    with pytest.raises(AutogradError, match=r"was released during backward pass 0\.1"):
        box.backward(root)


# --- threads ---


class ThreadedPorts(Ports):
    """Real threads: one delivers each worker's messages, some do the runs; waiting does not deliver."""

    def __init__(self, cluster, rank, pool):
        super().__init__(cluster, rank)
        self.start = pool.submit
        self.inbox = queue.SimpleQueue()

    def send(self, dest, message, body=None):
        self.cluster.engines[dest]._ports.inbox.put((self.rank, message, body))

    def new_event(self):
        event = threading.Event()
        wait = event.wait
        event.wait = lambda deadline: wait(deadline)
        return event

    def deliver(self, engine):
        while (item := self.inbox.get()) is not None:
            engine.on_message(*item)


def test_workers_with_threads_run_passes_side_by_side():
    """Three workers, three contexts over the same parameters; values go round, some are not used."""
    size, num_passes = 3, 20
    cluster = Cluster(size)
    weights = [leaf(1.5 + rank, -0.5) for rank in range(size)]
    with ThreadPoolExecutor(4) as pool, ThreadPoolExecutor(2 * size) as others:
        cluster.engines = [AutogradEngine(ThreadedPorts(cluster, rank, pool)) for rank in range(size)]
        for engine in cluster.engines:
            others.submit(engine._ports.deliver, engine)

        def forward(context_id, rank):
            x = h = weights[rank] * 1
            for hop in range(1, 7):
                here = (rank + hop) % size
                h = cluster.call(
                    context_id, rank, here, lambda a, b, w=weights[here]: (a * w + b).sin(), h, x
                )
                cluster.move(context_id, rank, here, h * 2)
            return h.sum()

        def work(rank):
            engine = cluster.engines[rank]
            context_id = engine.new_context()
            root = forward(context_id, rank)
            for number in range(num_passes):
                engine.backward(context_id, [root], retain_graph=number < num_passes - 1, timeout=60)
            found = [cluster.engines[r].get_gradients(context_id)[weights[r]] for r in range(size)]
            engine.release_context(context_id)
            return found

        found = list(others.map(work, range(size)))
        for engine in cluster.engines:
            engine._ports.inbox.put(None)
    for rank in range(size):
        x = h = weights[rank] * 1
        for hop in range(1, 7):
            h = (h * weights[(rank + hop) % size] + x).sin()
        expected = torch.autograd.grad(h.sum(), weights)
        for got, one in zip(found[rank], expected, strict=True):
            torch.testing.assert_close(got, one * num_passes, rtol=1e-9, atol=1e-9)
