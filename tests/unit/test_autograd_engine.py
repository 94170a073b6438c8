"""Unit tests for mpirpc._core.autograd_engine: contexts, attaching, wrong arguments (guarantee A6)."""

import pytest
import torch

from mpirpc._core.autograd_context import MAX_TOMBSTONES
from mpirpc._core.autograd_engine import AutogradEngine
from mpirpc._core.messages import (
    BackwardAck,
    BackwardBegin,
    BackwardFailed,
    CallRequest,
    ContextRelease,
    Gradient,
    PassId,
)
from mpirpc.errors import AutogradError, InternalError
from tests.unit.autograd_cluster import Box, Cluster, leaf


@pytest.fixture
def box():
    """Two workers and a context; ends with a leak check."""
    box = Box()
    yield box
    box.close()


# --- contexts ---


def test_context_ids_are_unique_over_workers():
    engines = Cluster(3).engines
    ids = [engine.new_context() for engine in engines]
    assert ids == [1, 1 << 48 | 1, 2 << 48 | 1]
    assert engines[1].max_id == (1 << 48) + (1 << 48) - 1


def test_context_is_current_until_released():
    engine = Cluster(1).engines[0]
    assert engine.current_context_id == 0
    context_id = engine.new_context()
    assert engine.current_context_id == context_id
    engine.release_context(context_id)
    assert engine.current_context_id == 0


def test_second_context_on_a_thread_is_refused():
    engine = Cluster(1).engines[0]
    engine.new_context()
    with pytest.raises(AutogradError, match="Already have an autograd context id for this thread"):
        engine.new_context()


@pytest.mark.parametrize(
    "use",
    [
        lambda engine: engine.retrieve(77),
        lambda engine: engine.get_gradients(77),
        lambda engine: engine.release_context(77),
        lambda engine: engine.backward(77, [leaf().sum()]),
    ],
)
def test_unknown_context_is_refused(use):
    with pytest.raises(AutogradError, match="Could not find autograd context with id: 77"):
        use(Cluster(1).engines[0])


def test_release_reaches_every_worker_that_a_call_touched():
    """0 calls 1, which calls 2: worker 0 knows nothing of 2."""
    cluster = Cluster(3)
    context_id = cluster.engines[0].new_context()
    cluster.introduce(context_id, 0, 1)
    cluster.introduce(context_id, 1, 2)
    assert [engine.stats().contexts for engine in cluster.engines] == [1, 1, 1]
    cluster.engines[0].release_context(context_id)
    cluster.drain()
    assert [engine.stats().contexts for engine in cluster.engines] == [0, 0, 0]
    assert cluster.num(ContextRelease) == 2


def test_request_of_a_released_context_runs_without_recording(box):
    """The release overtakes the handling of the request."""
    box.engines[0].note_request(box.context_id, 1)
    box.engines[0].release_context(box.context_id)
    box.cluster.drain()
    assert not box.engines[1].enter(box.context_id, 0)
    assert box.engines[1].attach_send(box.context_id, 0, [leaf() * 2]) == 0
    x = torch.ones(2)
    assert box.engines[1].attach_recv(box.context_id, 0, 5, [x], [True]) == [x]


def test_response_for_a_released_context_is_not_connected(box):
    receive = box.cluster.post(box.context_id, 0, 1, [leaf()])
    box.engines[0].release_context(box.context_id)
    box.cluster.drain()
    assert not receive()[0].requires_grad


def test_late_messages_do_not_bring_a_context_back(box):
    x = leaf()
    box.backward(box.call(lambda a: a * 2, x).sum())
    message = next(m for _, dest, m in box.cluster.log if isinstance(m, Gradient) and dest == 1)
    box.engines[0].release_context(box.context_id)
    box.cluster.drain()
    pass_id = PassId(0, 9)
    for late in (
        message,
        BackwardBegin(box.context_id, pass_id, False),
        BackwardAck(box.context_id, pass_id),
        BackwardFailed(box.context_id, pass_id),
        ContextRelease(box.context_id),
    ):
        box.engines[1].on_message(0, late)
    assert box.engines[1].stats().contexts == 0
    assert not box.cluster.bag


def test_tombstones_are_bounded():
    engine = Cluster(1).engines[0]
    for _ in range(MAX_TOMBSTONES + 10):
        engine.release_context(engine.new_context())
    assert len(engine._tombstones._ids) == MAX_TOMBSTONES


def test_record_can_be_looked_at(box):
    x = leaf()
    box.call(lambda a: a * 2, x)
    context = box.engines[0].retrieve(box.context_id)
    [send], [recv] = context.sends.values(), context.recvs.values()
    assert send.next_functions[0][0].variable is x
    assert send.name() == "torch::distributed::autograd::SendRpcBackward"
    assert (send.dest, recv.source, context.known_workers) == (1, 1, {1})
    assert "sends=1 recvs=1" in repr(context)
    assert "recvs=1" in repr(box.engines[0])


# --- attaching ---


def test_tensors_without_grad_are_not_recorded(box):
    assert box.engines[0].attach_send(box.context_id, 1, [torch.ones(2)]) == 0


def test_nothing_is_recorded_under_no_grad(box):
    with torch.no_grad():
        assert box.engines[0].attach_send(box.context_id, 1, [leaf()]) == 0


def test_only_flagged_tensors_are_connected(box):
    x, plain, count = leaf(), torch.ones(2), torch.tensor([3])
    received = box.cluster.move(box.context_id, 0, 1, plain, x, count)
    assert [t.requires_grad for t in received] == [False, True, False]


def test_same_received_object_twice_is_connected_once(box):
    """What was one object at the sender may arrive as one; its gradient must not count twice."""
    x = leaf()
    box.cluster.introduce(box.context_id, 0, 1)
    message_id = box.engines[0].attach_send(box.context_id, 1, [x, x])
    copy = x.detach().clone()
    a, b = box.engines[1].attach_recv(box.context_id, 0, message_id, [copy, copy], [True, True])
    assert a is b
    back = box.cluster.move(box.context_id, 1, 0, a * 2 + b)
    box.backward(back.sum())
    assert box.gradient(0, x) == [3, 3]


# --- messages under way while a pass runs ---


def test_message_received_during_the_pass_is_answered_none(box):
    x, y = leaf(), leaf()
    receive = box.cluster.post(box.context_id, 0, 1, [y])
    root = (x * 2).sum()
    box.cluster.works.append(lambda: box.cluster.works.append(receive))
    box.backward(root)
    assert (box.gradient(0, x), box.gradient(0, y)) == ([2, 2], None)
    assert box.cluster.num(Gradient) == 1


def test_begin_may_come_before_the_first_request(box):
    """The request waits for an executor thread while Begin is handled."""
    y = leaf()
    box.engines[0].note_request(box.context_id, 1)
    message_id = box.engines[0].attach_send(box.context_id, 1, [y])

    def receive():
        assert box.engines[1].enter(box.context_id, 0)
        box.engines[1].attach_recv(box.context_id, 0, message_id, [torch.ones(2)], [True])

    box.cluster.works.append(lambda: box.cluster.works.append(receive))
    box.backward(leaf().sum())
    assert box.engines[1].stats().recvs == 1


def test_cancelled_send_is_not_waited_for(box):
    message_id = box.engines[0].attach_send(box.context_id, 1, [leaf()])
    box.engines[0].cancel_send(box.context_id, message_id)
    x = leaf()
    box.backward(x.sum())
    assert box.gradient(0, x) == [1, 1]


def test_send_cancelled_during_the_pass_resolves(box):
    box.cluster.introduce(box.context_id, 0, 1)
    message_id = box.engines[0].attach_send(box.context_id, 1, [leaf()])
    box.cluster.works.append(lambda: box.engines[0].cancel_send(box.context_id, message_id))
    box.backward(leaf().sum())
    assert not box.engines[0].stats().passes


def test_cancel_in_a_dead_context_is_ignored(box):
    box.engines[0].cancel_send(12345, 1)


# --- wrong arguments ---


@pytest.mark.parametrize(
    ("roots", "text"),
    [
        ([], "No tensors provided for gradient computation"),
        ([torch.ones(1)], "requires_grad not set on"),
        ([leaf() * 2], "is not a scalar, all roots need to be scalar"),
        ([leaf(1.0)], "does not have a valid gradient function"),
        ([leaf().sum() * 1j], "only for real scalars"),
    ],
)
def test_wrong_roots_are_refused(box, roots, text):
    with pytest.raises(AutogradError, match=text):
        box.backward(*roots)


@pytest.mark.parametrize(("context_id", "roots"), [(1, None), (None, []), (1, ["loss"]), (1, leaf().sum())])
def test_wrong_types_are_refused(box, context_id, roots):
    with pytest.raises(TypeError, match="incompatible function arguments"):
        box.engines[0].backward(context_id, roots)


def test_other_messages_are_refused(box):
    with pytest.raises(InternalError, match="CallRequest is no message of distributed autograd"):
        box.engines[0].on_message(1, CallRequest(1))
    assert CallRequest not in AutogradEngine.MESSAGES
