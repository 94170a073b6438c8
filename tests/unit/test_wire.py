"""Unit tests for mpirpc._core.wire: every message survives the trip, no damage surprises the reader."""

import itertools
import marshal
import random
from dataclasses import astuple

import numpy as np
import pytest
import torch

from mpirpc._core import messages as m
from mpirpc._core import tensor_layout
from mpirpc._core.messages import Body, ForkDescriptor, ForkId, PassId, RRefId
from mpirpc._core.short_messages import SHORT_MARK
from mpirpc._core.tensor_layout import has_dtype
from mpirpc._core.wire import MAGIC, copy_of, decode, encode, frame_sizes, has_frames, new_frames
from mpirpc.errors import RemoteProtocolError, SerializationError

EAGER = 1024
BIG = (1 << 62) + 7

MESSAGES = [
    m.CallRequest(1),
    m.CallRequest(BIG, BIG - 1, 5, RRefId(3, 9), ForkId(3, 10)),
    m.CallResponse(2),
    m.CallResponse(BIG, 17, 5),
    m.ErrorResponse(4),
    m.FetchRequest(5, RRefId(1, 2), 6),
    m.ForkRequest(RRefId(1, 2), ForkId(3, 4)),
    m.ForkAccept(ForkId(3, 4)),
    m.ChildAccept(ForkId(3, 4)),
    m.UserDelete(RRefId(1, 2), ForkId(3, 4)),
    m.BackwardBegin(7, PassId(1, 2), True, 8, False),
    m.Gradient(7, PassId(1, 2), 9, True, False, 8, True, True),
    m.BackwardAck(7, PassId(1, 2)),
    m.BackwardFailed(7, PassId(1, 2), 3),
    m.ContextRelease(7),
    m.Leave(),
    m.RestReport(1, 2, 3, 4, 5, True),
    m.AtRest(2),
]
FORKS = [ForkDescriptor(RRefId(0, 1), ForkId(2, 3), 4, 5), ForkDescriptor(RRefId(1, 1), ForkId(2, 9), 0, 0)]
DTYPES = [
    dtype
    for dtype in sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)
    if has_dtype(dtype)
]


def arrive(outgoing):
    """The head and frames as a receiver gets them: in memory of their own."""
    return bytearray(outgoing.head), [copy_of(frame) for frame in outgoing.frames]


def round_trip(message, body=None, eager_limit=EAGER):
    head, frames = arrive(encode(message, body, eager_limit))
    assert frame_sizes(head) == [frame.nbytes for frame in frames]
    made = new_frames(head)
    assert [(frame.dtype, frame.shape) for frame in made] == [(frame.dtype, frame.shape) for frame in frames]
    assert all(frame.is_contiguous() and frame.is_cpu for frame in made)
    incoming = decode(head, frames)
    return incoming.message, *incoming.body()


def send(*tensors, eager_limit=EAGER):
    """The tensors after the trip."""
    _, body, _ = round_trip(m.CallResponse(1), Body(tensors=list(tensors)), eager_limit)
    _, flat, _ = round_trip(m.CallResponse(1), flat_body(*tensors), eager_limit)
    assert all(same(one, other) for one, other in zip(flat.tensors, body.tensors, strict=True))
    return body.tensors


def flat_body(*tensors):
    """A result of tensors alone, written as a short message wherever that can be."""
    return Body(b"", list(tensors), [], (None, tuple(range(len(tensors))), tuple(range(len(tensors))), ()))


def nbytes_of(*tensors, eager_limit=EAGER):
    return encode(m.CallResponse(1), Body(tensors=list(tensors)), eager_limit).nbytes


def same(received, sent):
    assert received.dtype == sent.dtype
    assert received.shape == sent.shape
    assert received.device == sent.device
    assert torch.equal(bytes_of(received), bytes_of(sent))
    return True


def bytes_of(tensor):
    return tensor.detach().reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)


# --- messages ---


@pytest.mark.parametrize("message", MESSAGES, ids=repr)
def test_every_message_survives_alone(message):
    received, body, needs_grad = round_trip(message)
    assert received == message
    assert type(received) is type(message)
    assert (bytes(body.payload), body.tensors, body.forks, needs_grad) == (b"", [], [], [])


@pytest.mark.parametrize("message", MESSAGES, ids=repr)
def test_every_message_survives_with_a_body(message):
    tensors = [torch.arange(5), torch.ones(EAGER)]
    received, body, _ = round_trip(message, Body(b"payload", tensors, FORKS))
    assert received == message
    assert bytes(body.payload) == b"payload"
    assert body.forks == FORKS
    assert all(same(r, s) for r, s in zip(body.tensors, tensors, strict=True))


def test_every_kind_of_message_is_tried_here():
    assert {type(message) for message in MESSAGES} == set(m.Message.__args__)


def test_flags_come_back_as_booleans():
    received, _, _ = round_trip(m.BackwardBegin(7, PassId(1, 2), True, 8, False))
    assert [type(value) for value in astuple(received)] == [int, PassId, bool, int, bool]


def test_forks_can_be_read_without_the_tensors():
    head, frames = arrive(encode(m.CallRequest(1), Body(b"x", [torch.ones(3)], FORKS), EAGER))
    assert decode(head, frames).forks() == FORKS


def test_payload_needs_no_tensors():
    _, body, _ = round_trip(m.ErrorResponse(1), Body(b"x" * 100_000))
    assert bytes(body.payload) == b"x" * 100_000


# --- tensors ---


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4), (0,), (2, 0, 3), (EAGER,)], ids=str)
def test_every_dtype_and_shape(dtype, shape):
    sent = torch.randint(0, 2, (*shape, dtype.itemsize), dtype=torch.uint8).view(dtype).reshape(shape)
    assert same(send(sent)[0], sent)


VIEWS = {
    "strided": lambda x: x[::2, 1::3],
    "transposed": lambda x: x.t(),
    "column": lambda x: x[:, 3],
    "expanded": lambda x: x[:, :1].expand(40, 50),
    "expanded twice": lambda x: x[0, 0].expand(300, 200),
    "one element of a row": lambda x: x[5, 5:6],
    "diagonal": lambda x: x.diagonal(),
    "unfolded": lambda x: x[0].unfold(0, 5, 1),
    "empty slice": lambda x: x[10:10],
    "permuted": lambda x: x.reshape(10, 4, 40).permute(2, 0, 1),
}


@pytest.mark.parametrize("eager_limit", [0, 1 << 20])
@pytest.mark.parametrize("view", VIEWS)
def test_views_keep_shape_and_values(view, eager_limit):
    sent = VIEWS[view](torch.arange(1600.0).reshape(40, 40))
    received = send(sent, eager_limit=eager_limit)[0]
    assert same(received, sent)


def test_expanded_tensor_stays_small():
    assert nbytes_of(torch.ones(1).expand(1_000_000)) < 200


def test_transposed_tensor_is_not_copied_row_by_row():
    received = send(torch.arange(6.0).reshape(2, 3).t())[0]
    assert received.stride() == (1, 3)


def test_small_view_of_a_large_tensor_sends_only_what_it_covers():
    large = torch.zeros(1_000_000)
    assert nbytes_of(large[500:510]) < 200
    assert nbytes_of(large[::100_000]) < 200


def test_large_tensor_becomes_a_frame_that_shares_the_senders_memory():
    sent = torch.zeros(EAGER)
    outgoing = encode(m.CallResponse(1), Body(tensors=[sent]), EAGER)
    assert [frame.data_ptr() for frame in outgoing.frames] == [sent.data_ptr()]
    assert len(outgoing.head) < 200


def test_small_tensors_are_copied_at_once():
    sent = torch.zeros(4)
    outgoing = encode(m.CallResponse(1), Body(tensors=[sent]), EAGER)
    sent += 1
    assert decode(*arrive(outgoing)).body()[0].tensors[0].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(("numel", "frames"), [(256, 0), (257, 1)])
def test_eager_limit_counts_bytes_and_is_the_last_that_goes_along(numel, frames):
    assert len(encode(m.CallResponse(1), Body(tensors=[torch.ones(numel)]), 1024).frames) == frames


@pytest.mark.parametrize("eager_limit", [0, 1 << 20])
def test_overlapping_tensors_share_memory_at_the_receiver(eager_limit):
    base = torch.arange(100.0)
    head, middle, all_of_it = send(base[:60], base[40:80], base, eager_limit=eager_limit)
    middle[0] = -1.0
    assert (head[40], all_of_it[40]) == (-1.0, -1.0)
    assert nbytes_of(base[:60], base[40:80], base) < base.nbytes + 400


@pytest.mark.parametrize("eager_limit", [0, 1 << 20])
def test_the_same_tensor_twice_is_sent_once(eager_limit):
    sent = torch.arange(2000.0)
    first, second = send(sent, sent, eager_limit=eager_limit)
    assert first.data_ptr() == second.data_ptr()
    assert same(first, sent)


@pytest.mark.parametrize("eager_limit", [0, 1 << 20])
def test_overlapping_views_with_elements_of_different_size(eager_limit):
    base = torch.arange(64, dtype=torch.uint8)
    sent = [base[3:40], base[8:24].view(torch.float64), base[2:10].view(torch.int16)]
    received = send(*sent, eager_limit=eager_limit)
    assert all(same(r, s) for r, s in zip(received, sent, strict=True))
    received[1].fill_(0)
    assert received[0][5:21].sum() == 0


@pytest.mark.parametrize("eager_limit", [0, 1 << 20])
def test_tensors_that_only_touch_stay_apart(eager_limit):
    base = torch.arange(10.0)
    left, right = send(base[:5], base[5:], eager_limit=eager_limit)
    assert left.untyped_storage().data_ptr() != right.untyped_storage().data_ptr()
    assert same(left, base[:5])
    assert same(right, base[5:])


@pytest.mark.parametrize("eager_limit", [0, 1 << 20])
def test_overlapping_windows_over_one_numpy_array(eager_limit):
    """Two tensors over the same memory that are no views of each other: each knows its own part only."""
    base = np.arange(100.0)
    sent = [torch.from_numpy(base[:60]), torch.from_numpy(base[40:])]
    received = send(*sent, eager_limit=eager_limit)
    assert all(same(r, s) for r, s in zip(received, sent, strict=True))


def test_requires_grad_is_told_apart_and_received_tensors_do_not():
    sent = [torch.ones(2, requires_grad=True), torch.ones(2), torch.ones(EAGER, requires_grad=True) * 2]
    _, body, needs_grad = round_trip(m.CallRequest(1), Body(tensors=sent))
    assert needs_grad == [True, False, True]
    assert not any(tensor.requires_grad for tensor in body.tensors)


def test_received_tensors_can_be_changed_and_leave_the_message_alone():
    head, frames = arrive(encode(m.CallRequest(1), Body(tensors=[torch.zeros(3)]), EAGER))
    before = bytes(head)
    decode(head, frames).body()[0].tensors[0].add_(1)
    assert bytes(head) == before


def test_many_tensors_of_all_sizes():
    sent = [torch.full((n * 37 % 700,), float(n)) for n in range(100)]
    assert all(same(r, s) for r, s in zip(send(*sent), sent, strict=True))


# --- short messages ---


@pytest.mark.parametrize("message", MESSAGES[:4], ids=repr)
def test_calls_and_responses_of_plain_values_are_short(message):
    flat = (("module", "func"), (1, "two", None, 0), (3,), ())
    sent = torch.arange(6.0, requires_grad=True).reshape(2, 3)
    outgoing = encode(message, Body(b"", [sent], [], flat), EAGER)
    assert outgoing.head[:1] == SHORT_MARK
    assert frame_sizes(bytearray(outgoing.head)) == []
    assert not has_frames(bytearray(outgoing.head))
    incoming = decode(bytearray(outgoing.head), [])
    body, needs_grad = incoming.body()
    assert (incoming.message, type(incoming.message)) == (message, type(message))
    assert (body.flat, body.forks, needs_grad) == (flat, [], [True])
    assert same(body.tensors[0], sent)


BASE = torch.arange(2 * EAGER, dtype=torch.uint8)
NOT_SHORT = {
    "overlapping": [BASE[:10], BASE[5:15]],
    "strided": [BASE[:20:2]],
}


@pytest.mark.parametrize("tensors", NOT_SHORT.values(), ids=NOT_SHORT)
def test_other_tensors_make_a_message_general(tensors):
    assert encode(m.CallResponse(1), flat_body(*tensors), EAGER).head[:1] != SHORT_MARK


def test_large_tensors_of_a_short_message_are_the_frames_that_came():
    large, small = torch.rand(2, EAGER, requires_grad=True), torch.rand(3)
    outgoing = encode(m.CallResponse(1), flat_body(large, small, large.detach()[:0]), EAGER)
    assert outgoing.head[:1] == SHORT_MARK
    assert has_frames(bytearray(outgoing.head))
    assert [frame.data_ptr() for frame in outgoing.frames] == [large.data_ptr()]
    head, frames = arrive(outgoing)
    body, needs_grad = decode(head, frames).body()
    assert body.tensors[0] is frames[0]
    assert needs_grad == [True, False, False]
    assert all(same(got, sent) for got, sent in zip(body.tensors, (large, small, large[:0]), strict=True))


def test_frame_keeps_its_memory_whatever_becomes_of_the_users_tensor():
    large = torch.rand(2, EAGER, requires_grad=True)
    address = large.data_ptr()
    [frame] = encode(m.CallResponse(1), flat_body(large), EAGER).frames
    large.data = torch.zeros(1)
    assert (frame.data_ptr(), frame.nbytes, frame.requires_grad) == (address, 8 * EAGER, False)


@pytest.mark.parametrize("body", [flat_body(torch.rand(EAGER)), Body(tensors=[torch.rand(EAGER)])])
def test_frames_are_no_inference_tensors_whatever_mode_their_receiver_is_in(body):
    outgoing = encode(m.CallResponse(1), body, EAGER)
    with torch.inference_mode():
        made = [*new_frames(bytearray(outgoing.head)), *map(copy_of, outgoing.frames)]
    assert [frame.is_inference() for frame in made] == [False, False]


def test_frame_of_a_dtype_that_is_missing_here_is_received_and_refused(monkeypatch):
    head, _ = arrive(encode(m.CallResponse(1), flat_body(torch.rand(EAGER), torch.rand(EAGER)), EAGER))
    known = [None if dtype is torch.float32 else dtype for dtype in tensor_layout._DTYPES]
    monkeypatch.setattr(tensor_layout, "_DTYPES", known)
    assert [frame.nbytes for frame in new_frames(head)] == [4 * EAGER, 4 * EAGER]
    with pytest.raises(RemoteProtocolError):
        decode(head, new_frames(head)).body()


def test_copy_has_the_strides_of_what_arrives():
    column = torch.rand(1, 2 * EAGER).t()
    [copy] = [copy_of(frame) for frame in encode(m.CallResponse(1), flat_body(column), EAGER).frames]
    [made] = new_frames(bytearray(encode(m.CallResponse(1), flat_body(column), EAGER).head))
    assert column.stride() != copy.stride() == made.stride()


@pytest.mark.parametrize("head", [b"", b"(", b"((", b"(((", MAGIC.to_bytes(2, "little")])
def test_head_that_is_no_message_brings_no_frames(head):
    assert not has_frames(bytearray(head)) or new_frames(bytearray(head)) == []


@pytest.mark.parametrize("frames", [[], [torch.zeros(8 * EAGER, dtype=torch.uint8)], [torch.zeros(EAGER, 2)]])
def test_other_frames_than_those_announced_are_refused(frames):
    head, _ = arrive(encode(m.CallResponse(1), flat_body(torch.rand(2, EAGER)), EAGER))
    with pytest.raises(RemoteProtocolError):
        decode(head, frames).body()


def test_what_a_short_message_cannot_be_is_told():
    head = bytearray(encode(m.CallResponse(1), flat_body(torch.ones(7)), EAGER).head)
    for damaged in (head[:-1], head[:9], head[:2], head.replace(b"\x07\0\0\0", b"\x08\0\0\0", 1)):
        assert read(damaged, []) == "refused"
    content = marshal.loads(head)
    wrong_tensors = [((6, False, (8,), b"1234"),), ((99, False, (), b""),), ((6, False),)]
    for place, value in [(0, 1), (1, 200), (2, (1, 2, 3, 4)), *((4, tensors) for tensors in wrong_tensors)]:
        changed = (*content[:place], value, *content[place + 1 :])
        assert read(bytearray(marshal.dumps(changed, 2)), []) == "refused"
    assert read(bytearray(marshal.dumps(content[:4], 2)), []) == "refused"


# --- damage ---


def samples():
    """One head of every shape that occurs, with its frames."""
    base = torch.arange(200.0)
    bodies = [
        None,
        Body(b"payload"),
        Body(b"", [], FORKS),
        Body(b"p", [torch.ones(3), torch.ones((), dtype=torch.bool), base[::3], base[:0]], FORKS),
        Body(b"p", [base, base[10:20], base.reshape(10, 20).t()]),
        Body(b"p", [torch.ones(600), torch.ones(2, 3, requires_grad=True)]),
    ]
    return [arrive(encode(message, body, EAGER)) for message, body in itertools.product(MESSAGES, bodies)]


def read(head, frames):
    """Read a message to the end; a RemoteProtocolError is an answer, any other exception is not."""
    try:
        sizes = frame_sizes(head)
        if sum(sizes) < 1 << 20:  # else it would never arrive
            frames = new_frames(head)
        elif len(sizes) != len(frames):
            return "not read"
        incoming = decode(head, frames)
        assert isinstance(incoming.message, m.Message)
        incoming.forks()
        incoming.body()
    except RemoteProtocolError:
        return "refused"
    return "read"


def test_every_truncation_is_refused():
    for head, frames in samples():
        for end in range(len(head)):
            assert read(head[:end], frames) == "refused", f"{end} of {len(head)} bytes: {bytes(head[:end])!r}"
        assert read(head, frames) == "read"


@pytest.mark.parametrize("seed", range(4))
def test_changed_bytes_are_refused_or_read(seed):
    source = random.Random(seed)
    heads = samples()
    for _ in range(3000):
        head, frames = source.choice(heads)
        damaged = bytearray(head)
        for _ in range(source.choice([1, 1, 2, 5])):
            byte = source.choice([0, 1, 127, 128, 255, source.randrange(256)])
            damaged[source.randrange(2, len(damaged))] = byte
        read(damaged, frames)


@pytest.mark.parametrize("seed", range(4))
def test_garbage_is_refused_or_read(seed):
    source = random.Random(seed)
    for _ in range(3000):
        garbage = bytearray(source.randbytes(source.randrange(200)))
        if source.random() < 0.9:
            garbage[:4] = MAGIC.to_bytes(2, "little") + bytes([source.randrange(20), 0])
        if source.random() < 0.9:  # plausible counts
            garbage[4:24] = b"".join(source.randrange(4).to_bytes(size, "little") for size in (4, 4, 4, 8))
        read(garbage, [])


def test_another_version_is_told():
    head = bytearray(encode(m.ContextRelease(1), None, EAGER).head)
    head[0] ^= 0xFF
    with pytest.raises(RemoteProtocolError, match=r"(?s)begins with 0x.* same version of mpirpc"):
        frame_sizes(head)
    with pytest.raises(RemoteProtocolError, match=r"(?s)begins with 0x.* same version of mpirpc"):
        decode(head, [])


def test_unknown_kind_is_told():
    head = bytearray(encode(m.ContextRelease(1), None, EAGER).head)
    head[2] = 200
    with pytest.raises(RemoteProtocolError, match="unknown kind 200"):
        decode(head, [])


def test_missing_frame_is_told():
    head, _ = arrive(encode(m.CallResponse(1), Body(tensors=[torch.ones(EAGER)]), EAGER))
    with pytest.raises(RemoteProtocolError):
        decode(head, []).body()


def test_tensor_larger_than_its_memory_is_refused_before_memory_is_taken():
    head, frames = arrive(encode(m.CallResponse(1), Body(tensors=[torch.ones(7)]), EAGER))
    place = head.rindex((7).to_bytes(8, "little"))
    head[place : place + 8] = (1 << 36).to_bytes(8, "little")
    with pytest.raises(RemoteProtocolError):
        decode(head, frames).body()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(800.0).reshape(2, 400)[:1].t(),
        torch.arange(56.0).reshape(8, 7)[:1, 0],
        torch.tensor(3.0),
        torch.tensor(3.0, requires_grad=True),
    ],
    ids=["column of a transpose", "one of a column", "scalar", "scalar with grad"],
)
def test_contiguous_tensor_with_any_strides_can_be_a_frame(tensor):
    assert tensor.is_contiguous()
    outgoing = encode(m.CallResponse(1), Body(tensors=[tensor]), 0)
    assert [(frame.dtype, frame.numel()) for frame in outgoing.frames] == [(torch.uint8, tensor.nbytes)]
    body, needs_grad = decode(*arrive(outgoing)).body()
    assert torch.equal(body.tensors[0], tensor)
    assert needs_grad == [tensor.requires_grad]


@pytest.mark.parametrize("eager_limit", [0, EAGER])
@pytest.mark.parametrize("flat", [None, (None, (0,), (0,), ())], ids=["general", "short"])
def test_zeros_without_memory_arrive_as_zeros(flat, eager_limit):
    zeros = torch._efficientzerotensor((3, 4))
    assert not zeros.data_ptr()
    body = Body(b"", [zeros, torch.ones(2)], [], flat)
    _, arrived, _ = round_trip(m.CallResponse(1), body, eager_limit)
    assert torch.equal(arrived.tensors[0], torch.zeros(3, 4))


@pytest.mark.parametrize("flat", [None, (None, (0,), (0,), ())], ids=["general", "short"])
def test_tensor_whose_memory_was_given_back_is_refused(flat):
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(SerializationError, match="no memory"):
        encode(m.CallResponse(1), Body(b"", [tensor], [], flat), EAGER)
