"""Unit tests for mpirpc.testing.FaultyTransport: what is refused fails, what is held back comes late."""

import pytest

import mpirpc as rpc
from mpirpc._core import wire
from mpirpc._core.messages import CallRequest, FetchRequest, ForkRequest, RRefId, UserDelete
from mpirpc._core.runtime import Runtime
from mpirpc._core.transport_loopback import LoopbackNetwork, LoopbackTransport
from mpirpc.errors import RpcTimeoutError, RRefError, TransportError
from mpirpc.options import MPIRpcBackendOptions
from mpirpc.testing import FaultyTransport, LoopbackCluster

LATE = 0.05
REQUEST = CallRequest(1)
OTHER = FetchRequest(2, RRefId(0, 1))


@pytest.fixture
def network():
    return LoopbackNetwork(2)


def faulty(network, **faults):
    """An end of rank 0 with a rule by kind of message."""
    return FaultyTransport(
        LoopbackTransport(network, 0), lambda dest, message: faults.get(type(message).__name__, 0)
    )


def post(transport, message):
    transport.post_send(1, wire.encode(message, None, 100))


def received(network):
    arrivals = LoopbackTransport(network, 1).poll()
    return [wire.decode(arrival.head, arrival.frames).message for arrival in arrivals]


def test_other_messages_pass(network):
    transport = faulty(network, UserDelete=None)
    post(transport, REQUEST)
    assert received(network) == [REQUEST]
    assert (transport.stats().messages_sent, transport.has_unfinished()) == (1, False)


def test_a_refused_message_raises_and_is_not_sent(network):
    transport = faulty(network, CallRequest=None)
    with pytest.raises(TransportError, match="refused CallRequest to rank 1"):
        post(transport, REQUEST)
    assert received(network) == []


def test_a_held_message_is_unfinished_until_its_time(network, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("mpirpc.testing.monotonic", lambda: clock[0])
    transport = faulty(network, CallRequest=5)
    post(transport, REQUEST)
    post(transport, OTHER)
    transport.poll()
    assert received(network) == [OTHER]
    assert transport.has_unfinished()
    assert transport.unfinished_nbytes(1) > 0 == transport.unfinished_nbytes(0)
    clock[0] = 5.0
    transport.poll()
    assert received(network) == [REQUEST]
    assert not transport.has_unfinished()


def test_closing_drops_what_is_held(network):
    transport = faulty(network, CallRequest=5)
    post(transport, REQUEST)
    transport.close(graceful=False)
    assert not transport.has_unfinished()


# --- under a worker ---


class FaultyCluster(LoopbackCluster):
    """Two workers; the first one's transport is faulty."""

    def __init__(self, fault):
        self.network = LoopbackNetwork(2)
        first, second = (LoopbackTransport(self.network, rank) for rank in range(2))
        workers = [rpc.WorkerInfo(f"worker{rank}", rank) for rank in range(2)]
        self.runtimes = [
            Runtime(end, workers, MPIRpcBackendOptions()) for end in (FaultyTransport(first, fault), second)
        ]


def refuse_remote(dest, message):
    return None if isinstance(message, CallRequest) and message.rref_id.local_id else 0


def delay_forks(dest, message):
    return LATE if isinstance(message, (ForkRequest, UserDelete)) else 0


def use(rref):
    return rref.to_here()


def test_a_refused_remote_call_leaves_nothing_and_tells_whoever_uses_its_rref():
    with FaultyCluster(refuse_remote) as cluster, cluster.on(0):
        for to in (0, 1):
            rref = rpc.remote(to, dict)
            with pytest.raises(TransportError, match="refused CallRequest"):
                rref._calls.wait_result(rref._creation)
            with pytest.raises(RRefError, match=r"RRef creation via remote\(\) failed"):
                rref.to_here()
            with pytest.raises(RRefError, match="RRef creation"):
                rpc.rpc_async("worker1", use, args=(rref,))
        assert rpc.debug_info()["pending_rrefs"] == 0


def test_who_waits_already_when_a_remote_call_to_itself_is_refused_is_told():
    with FaultyCluster(refuse_remote) as cluster, cluster.on(0):
        with pytest.raises(RRefError, match="RRef creation"):
            rpc.remote(0, dict).to_here()
        with pytest.raises(RRefError, match="RRef creation"):
            rpc.remote(0, dict).local_value()


def test_late_control_messages_keep_values_alive_as_long_as_needed():
    with FaultyCluster(delay_forks) as cluster, cluster.on(0):
        rref = rpc.remote("worker1", dict, args=([(1, 2)],))
        assert rpc.rpc_sync("worker1", use, args=(rref,)) == {1: 2}
        del rref


def test_a_call_held_back_beyond_its_deadline_times_out():
    with FaultyCluster(lambda dest, message: LATE if isinstance(message, CallRequest) else 0) as cluster:
        with cluster.on(0), pytest.raises(RpcTimeoutError):
            rpc.rpc_sync("worker1", dict, timeout=0.001)
