"""Unit tests for mpirpc._core.transport_loopback: messages arrive, are held, reordered, dropped, counted."""

import pytest
import torch

from mpirpc._core.transport import Outgoing
from mpirpc._core.transport_loopback import LoopbackNetwork, LoopbackTransport


@pytest.fixture
def network():
    return LoopbackNetwork(3)


@pytest.fixture
def transports(network):
    return [LoopbackTransport(network, rank) for rank in range(3)]


def heads(transport):
    """The heads of all messages that are there."""
    found = []
    while arrivals := transport.poll():
        found += [bytes(arrival.head) for arrival in arrivals]
    return found


def test_message_is_there_at_once(transports):
    frame = torch.arange(4, dtype=torch.uint8)
    transports[0].post_send(1, Outgoing(b"head", [frame]))
    frame.zero_()
    (arrival,) = transports[1].poll()
    assert (arrival.source, bytes(arrival.head)) == (0, b"head")
    assert arrival.frames[0].tolist() == [0, 1, 2, 3]
    arrival.head[0] = 0
    assert transports[1].poll() == ()


def test_message_to_oneself(transports):
    transports[2].post_send(2, Outgoing(b"me", []))
    assert heads(transports[2]) == [b"me"]


def test_held_messages_are_released_in_any_order(network, transports):
    network.hold()
    for head in (b"a", b"b", b"c"):
        transports[0].post_send(1, Outgoing(head, []))
    assert heads(transports[1]) == []
    network.release(2)
    network.release()
    assert heads(transports[1]) == [b"c", b"a"]
    network.release_all()
    transports[0].post_send(1, Outgoing(b"d", []))
    assert heads(transports[1]) == [b"b", b"d"]


def test_selector_sees_source_dest_and_head(network, transports):
    seen = []
    network.hold(lambda source, dest, head: seen.append((source, dest, bytes(head))) or dest == 2)
    transports[0].post_send(1, Outgoing(b"a", []))
    transports[1].post_send(2, Outgoing(b"b", []))
    assert seen == [(0, 1, b"a"), (1, 2, b"b")]
    assert (heads(transports[1]), heads(transports[2])) == ([b"a"], [])
    assert [dest for dest, _ in network.held] == [2]


def test_dropped_messages_are_counted_and_gone(network, transports):
    network.drop(lambda source, dest, head: head == b"a")
    for head in (b"a", b"b", b"a"):
        transports[0].post_send(1, Outgoing(head, []))
    assert (heads(transports[1]), network.dropped) == ([b"b"], 2)


def test_dropping_comes_before_holding(network, transports):
    network.hold()
    network.drop(lambda source, dest, head: True)
    transports[0].post_send(1, Outgoing(b"a", []))
    assert (network.held, network.dropped) == ([], 1)


def test_sum_is_there_when_everyone_has_taken_part(transports):
    for rank in (0, 2):
        transports[rank].post_sum([rank, 10])
        assert transports[rank].poll_sum() is None
    transports[1].post_sum([1, 10])
    assert [transport.poll_sum() for transport in transports] == [[3, 30]] * 3


def test_sums_are_kept_apart(transports):
    for transport in transports:
        transport.post_sum([1])
    transports[0].post_sum([5])
    assert transports[0].poll_sum() is None
    assert transports[1].poll_sum() == [3]


def test_counts(transports):
    transports[0].post_send(1, Outgoing(b"head", [torch.zeros(100, dtype=torch.uint8)]))
    heads(transports[1])
    sent, received = transports[0].stats(), transports[1].stats()
    assert (sent.messages_sent, sent.bytes_sent, sent.messages_received) == (1, 104, 0)
    assert (received.messages_received, received.bytes_received, received.messages_sent) == (1, 104, 0)
    assert (sent.unfinished_messages, sent.unfinished_nbytes) == (0, 0)


def test_nothing_is_ever_under_way(transports):
    transports[0].post_send(1, Outgoing(b"head", []))
    assert not transports[0].has_unfinished()
    assert transports[0].unfinished_nbytes(1) == 0
    transports[0].close(graceful=True)
    transports[0].abort()
