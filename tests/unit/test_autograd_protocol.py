"""Unit tests for mpirpc._core.autograd_protocol (guarantees A1 to A5 in docs/design/autograd.md)."""

import pytest

from mpirpc._core.autograd_protocol import (
    ROOTS,
    Ack,
    Answer,
    BackwardPass,
    Begin,
    Component,
    Fail,
    Finished,
    StartRun,
    Structure,
)

ME, A, B, C = 0, 1, 2, 3
"""Ranks: the worker under test and its neighbours. Send ids are 11, 12, ...; recv ids 21, 22, ..."""


def begin(worker, source, sent_up_to=99, wants_ack=True):
    return worker.on_begin(source, sent_up_to, wants_ack)


def gradient(worker, source, send_id, has_gradient=True, wants_ack=False, acks=False):
    return worker.on_gradient(source, send_id, has_gradient, 99, wants_ack, acks)


def answer(dest, recv_id, has_gradient, wants_ack=False, acks=False):
    return Answer(dest, recv_id, has_gradient, wants_ack, acks)


NOTHING = Structure({}, {}, {}, ())
SERVED_CALL = Structure({11: A}, {21: A}, {21: 0b1}, (Component(0b1, (21,), True),))
"""A called: recv 21 brought the arguments, send 11 took the result back."""
CALLER = Structure(
    {11: A, ROOTS: ME}, {21: A}, {21: 0b10}, (Component(0b1, (), True), Component(0b10, (21,), False))
)
"""The root, after one call to A."""


# --- A1: every recv is answered exactly once, every send resolves ---


def test_recv_that_nothing_reaches_is_answered_none_at_once():
    worker = BackwardPass(ME, Structure({}, {21: A}, {}, ()), parent=A)
    begin(worker, A)
    assert worker.start() == [answer(A, 21, has_gradient=False, acks=True), Finished()]


def test_gradient_goes_through_a_served_call():
    worker = BackwardPass(ME, SERVED_CALL, parent=A)
    gradient(worker, A, 11, wants_ack=True)
    run = StartRun(0, (11,), (21,), last=True)
    assert worker.start() == [run]
    assert worker.on_run_finished(run, {21}) == [answer(A, 21, has_gradient=True, acks=True), Finished()]


def test_none_goes_through_a_served_call_without_a_run():
    worker = BackwardPass(ME, SERVED_CALL, parent=A)
    gradient(worker, A, 11, has_gradient=False, wants_ack=True)
    assert worker.start() == [answer(A, 21, has_gradient=False, acks=True), Finished()]


def test_run_that_finds_no_gradient_for_a_recv_answers_none():
    worker = BackwardPass(ME, SERVED_CALL, parent=A)
    gradient(worker, A, 11, wants_ack=True)
    [run] = worker.start()
    assert answer(A, 21, has_gradient=False, acks=True) in worker.on_run_finished(run, ())


def test_gradient_for_a_send_that_is_not_open_is_ignored():
    worker = BackwardPass(ME, SERVED_CALL, parent=A)
    begin(worker, A)
    worker.start()
    assert worker.on_send_cancelled(11) == [answer(A, 21, has_gradient=False, acks=True), Finished()]
    assert gradient(worker, A, 11) == []
    assert gradient(worker, B, 77, wants_ack=True) == [Ack(B)]


# --- A2: exact gradients: what a run starts from ---


def two_sends(reach, recvs=(21,), has_leaves=True):
    """Sends 11 to A and 12 to B in one component, recv 21 from C."""
    structure = Structure({11: A, 12: B}, {21: C}, {21: reach}, (Component(0b11, recvs, has_leaves),))
    worker = BackwardPass(ME, structure, parent=A)
    begin(worker, A, wants_ack=False)
    worker.start()
    return worker


def test_recv_waits_for_all_sends_that_reach_it():
    worker = two_sends(reach=0b11)
    assert gradient(worker, A, 11) == []
    assert gradient(worker, B, 12) == [StartRun(0, (11, 12), (21,), last=True)]


def test_send_resolved_with_none_is_left_out():
    worker = two_sends(reach=0b11)
    gradient(worker, A, 11, has_gradient=False)
    assert gradient(worker, B, 12) == [StartRun(0, (12,), (21,), last=True)]


def test_leaves_wait_for_all_sends_of_the_component():
    worker = two_sends(reach=0b01)
    early = StartRun(0, (11,), (21,), last=False)
    assert gradient(worker, A, 11) == [early]
    worker.on_run_finished(early, {21})
    assert gradient(worker, B, 12) == [StartRun(0, (11, 12), (), last=True)]


def test_component_without_leaves_needs_no_last_run():
    worker = two_sends(reach=0b01, has_leaves=False)
    [early] = gradient(worker, A, 11)
    worker.on_run_finished(early, {21})
    assert gradient(worker, B, 12, has_gradient=False) == []


def test_one_run_at_a_time_in_a_component():
    """The last run may free the graph under a run that is not over."""
    worker = two_sends(reach=0b01)
    [early] = gradient(worker, A, 11)
    assert gradient(worker, B, 12) == []
    assert StartRun(0, (11, 12), (), last=True) in worker.on_run_finished(early, {21})


def test_components_run_side_by_side():
    parts = tuple(Component(1 << i, (21 + i,), True) for i in range(2))
    worker = BackwardPass(ME, Structure({11: A, 12: A}, {21: A, 22: A}, {21: 1, 22: 2}, parts), parent=A)
    gradient(worker, A, 11)
    gradient(worker, A, 12)
    assert worker.start() == [StartRun(0, (11,), (21,), last=True), StartRun(1, (12,), (22,), last=True)]


# --- A3: no wait in a circle ---


def test_recv_is_answered_early_while_another_send_is_open():
    """A -> me -> A -> me over a kept value: A resolves send 12 only after the answer to recv 21."""
    worker = two_sends(reach=0b01)
    [early] = gradient(worker, A, 11)
    assert early == StartRun(0, (11,), (21,), last=False)
    assert answer(C, 21, has_gradient=True, wants_ack=True) in worker.on_run_finished(early, {21})


def test_recv_is_answered_none_early_while_another_send_is_open():
    worker = two_sends(reach=0b01)
    assert gradient(worker, A, 11, has_gradient=False) == [answer(C, 21, has_gradient=False, wants_ack=True)]


def test_recvs_that_became_ready_during_a_run_go_into_the_next_one():
    structure = Structure(
        {11: A, 12: A, 13: A}, {21: A, 22: A}, {21: 0b001, 22: 0b010}, (Component(0b111, (21, 22), True),)
    )
    worker = BackwardPass(ME, structure, parent=A)
    gradient(worker, A, 11)
    [first] = [action for action in worker.start() if isinstance(action, StartRun)]
    assert gradient(worker, A, 12) == []
    assert worker.on_run_finished(first, {21}) == [
        answer(A, 21, has_gradient=True),
        StartRun(0, (12,), (22,), last=False),
    ]


# --- A4: the root learns of the end, when all is over ---


def test_root_alone_is_finished_after_its_run():
    worker = BackwardPass(ME, Structure({ROOTS: ME}, {}, {}, (Component(1, (), True),)), parent=None)
    [run] = worker.start()
    assert worker.on_run_finished(run, ()) == [Finished()]


def test_root_needs_no_begin_for_a_worker_that_gets_an_answer_at_once():
    worker = BackwardPass(ME, CALLER, parent=None)
    run = StartRun(1, (ROOTS,), (21,), last=True)
    assert worker.start() == [run]
    assert worker.on_run_finished(run, {21}) == [answer(A, 21, has_gradient=True, wants_ack=True)]
    [last] = gradient(worker, A, 11, acks=True)
    assert worker.on_run_finished(last, ()) == [Finished()]


def test_root_tells_workers_it_only_sent_to():
    parts = (Component(0b01, (), False), Component(0b10, (), False))
    worker = BackwardPass(ME, Structure({ROOTS: ME, 11: A}, {}, {}, parts), parent=None)
    assert worker.start() == [Begin(A, wants_ack=True)]
    assert gradient(worker, A, 11, has_gradient=False) == []
    assert worker.on_ack(A) == [Finished()]


def test_begin_is_needed_when_the_answer_to_that_worker_must_wait():
    """Recv 21 from A waits for send 11 to A: without Begin both would wait."""
    parts = (Component(0b01, (21,), False), Component(0b10, (), False))
    worker = BackwardPass(ME, Structure({11: A, ROOTS: ME}, {21: A}, {21: 0b01}, parts), parent=None)
    assert worker.start() == [Begin(A, wants_ack=True)]


def test_message_to_an_engaged_worker_wants_no_ack():
    structure = Structure({11: A, 12: B}, {}, {}, (Component(1, (), True), Component(2, (), True)))
    worker = BackwardPass(ME, structure, parent=A)
    begin(worker, A)
    assert worker.start() == [Begin(A, wants_ack=False), Begin(B, wants_ack=True)]


def test_second_message_to_a_worker_wants_no_second_ack():
    worker = BackwardPass(ME, Structure({}, {21: B, 22: B}, {}, ()), parent=A)
    begin(worker, A)
    assert worker.start() == [answer(B, 21, False, wants_ack=True), answer(B, 22, False)]
    assert worker.on_ack(B) == [Finished(), Ack(A)]


def test_parent_is_acknowledged_only_when_all_is_done():
    worker = BackwardPass(ME, SERVED_CALL, parent=B)
    begin(worker, B)
    assert worker.start() == [Begin(A, wants_ack=True)]
    [run] = gradient(worker, A, 11)
    assert worker.on_run_finished(run, {21}) == [answer(A, 21, has_gradient=True)]
    assert worker.on_ack(A) == [Finished(), Ack(B)]


def test_others_are_acknowledged_at_once():
    worker = BackwardPass(ME, SERVED_CALL, parent=A)
    begin(worker, A)
    worker.start()
    assert begin(worker, B) == [Ack(B)]


def test_message_of_the_parent_that_wants_an_ack_may_come_second():
    """The parent's first message was overtaken by its second, which engaged us."""
    worker = BackwardPass(ME, Structure({}, {21: A}, {}, ()), parent=A)
    gradient(worker, A, 77, wants_ack=False)
    assert worker.start() == [answer(A, 21, has_gradient=False), Finished()]
    assert begin(worker, A, wants_ack=True) == [Ack(A)]


def test_worker_is_not_done_while_a_send_is_open():
    worker = BackwardPass(ME, SERVED_CALL, parent=A)
    begin(worker, A)
    worker.start()
    assert not worker.done
    assert worker.open_sends() == {11: A}


# --- messages under way while the pass goes on ---


def test_late_recv_that_the_source_counts_on_is_answered_none():
    worker = BackwardPass(ME, NOTHING, parent=A)
    begin(worker, A, sent_up_to=30)
    worker.start()
    assert worker.on_late_recv(A, 30) == [answer(A, 30, has_gradient=False)]


def test_late_recv_sent_after_the_source_began_is_not_answered():
    worker = BackwardPass(ME, NOTHING, parent=A)
    begin(worker, A, sent_up_to=30)
    worker.start()
    assert worker.on_late_recv(A, 31) == []


def test_late_recv_is_answered_when_its_source_turns_out_to_be_engaged():
    worker = BackwardPass(ME, NOTHING, parent=A)
    begin(worker, A)
    worker.start()
    assert worker.on_late_recv(B, 30) == []
    assert worker.on_late_recv(B, 31) == []
    assert begin(worker, B, sent_up_to=30) == [answer(B, 30, has_gradient=False), Ack(B)]


# --- A5: failure ---


def test_waits_for_open_sends_acknowledgements_and_its_own_runs():
    """The root sent 11 to B; nothing reaches recv 22 from C, so C must acknowledge a "none"."""
    components = (Component(0b1, (), True), Component(0b10, (21,), False))
    worker = BackwardPass(ME, Structure({11: B, ROOTS: ME}, {21: A, 22: C}, {21: 0b10}, components), None)
    [run] = [action for action in worker.start() if isinstance(action, StartRun)]
    assert worker.waits_for() == {ME, B, C}
    worker.on_run_finished(run, {21})
    assert worker.waits_for() == {A, B, C}
    worker.on_ack(A)
    gradient(worker, C, 99, has_gradient=False, acks=True)
    assert worker.waits_for() == {B}
    gradient(worker, B, 11, has_gradient=False, acks=True)
    assert worker.waits_for() == set()
    assert worker.done


def test_failure_is_told_to_every_neighbour_once():
    worker = BackwardPass(ME, SERVED_CALL, parent=A)
    begin(worker, A)
    worker.start()
    assert worker.on_failed([A, B]) == [Fail(A), Fail(B)]
    assert worker.on_failed([A, B]) == []


@pytest.mark.parametrize(
    "event",
    [
        lambda worker: gradient(worker, A, 11, wants_ack=True),
        lambda worker: begin(worker, B),
        lambda worker: worker.on_ack(A),
        lambda worker: worker.on_send_cancelled(11),
        lambda worker: worker.on_late_recv(A, 22),
        lambda worker: worker.on_run_finished(StartRun(0, (11,), (21,), last=True), {21}),
    ],
)
def test_after_a_failure_nothing_sets_off_anything(event):
    worker = BackwardPass(ME, SERVED_CALL, parent=A)
    begin(worker, A)
    worker.start()
    worker.on_failed([])
    assert event(worker) == []
    assert not worker.done
