"""Unit tests for mpirpc._core.pickling: what can be sent arrives, flat or pickled; what cannot is named."""

import functools
import math
import operator
import pickle
import threading
from collections import namedtuple
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import nn

from mpirpc._core import pickling
from mpirpc._core.messages import Body, CallRequest, ForkDescriptor, ForkId, RRefId
from mpirpc._core.pickling import OnValue, RRefHook, dumps, dumps_call, dumps_result, loads
from mpirpc._core.wire import decode, encode
from mpirpc.errors import SerializationError

PICKLED = 0x80


# --- things to send ---


def top_level(*args, **kwargs):
    return args, kwargs


class Things:
    """A class with every kind of method."""

    def __init__(self, number=0):
        self.number = number

    def __eq__(self, other):
        return type(other) is Things and other.number == self.number

    __hash__ = None

    def bound(self, x):
        return self.number + x

    @staticmethod
    def static(x):
        return x

    @classmethod
    def of_class(cls, x):
        return cls(x)

    class Inner:
        pass


Point = namedtuple("Point", "x y")


@dataclass
class Record:
    name: str
    tensor: torch.Tensor
    more: list = field(default_factory=list)


class Unpicklable:
    def __reduce__(self):
        raise TypeError("not for sending")

    def __repr__(self):
        return "<the unpicklable one>"


class BadText:
    """Neither its pickle nor its text can be made."""

    def __reduce__(self):
        raise TypeError("not for sending")

    def __repr__(self):
        raise ValueError("no text")


class FailsToLoad:
    def __reduce__(self):
        return fail, ()


def fail():
    raise OSError("no such thing here")


class Handle:
    """What an RRef is to these tests."""

    def __init__(self, number):
        self.number = number


class Hook:
    """Counts forks and cancellations."""

    def __init__(self):
        self.made, self.cancelled = [], []
        self.hook = RRefHook(Handle, self._fork, self.cancelled.append)

    def _fork(self, handle):
        fork = ForkDescriptor(RRefId(0, handle.number), ForkId(0, len(self.made) + 1), 0, 0)
        self.made.append(fork)
        return fork

    def all_cancelled(self):
        return len(self.made) == len(self.cancelled) and set(self.made) == set(self.cancelled)


@pytest.fixture
def hook():
    return Hook()


def over_the_wire(body):
    incoming = decode(*as_arrived(encode(CallRequest(1), body, 1024)))
    return incoming.body()[0]


def as_arrived(outgoing):
    return bytearray(outgoing.head), [frame.clone() for frame in outgoing.frames]


def load(body):
    """What a receiver makes of it; RRefs arrive as ("rref", number)."""
    arrived = over_the_wire(body)
    return loads(arrived, arrived.tensors, [("rref", fork.rref_id.local_id) for fork in arrived.forks])


def send(obj):
    return load(dumps(obj))


def send_call(func, *args, **kwargs):
    return load(dumps_call((func, args, kwargs)))


# --- functions ---

FUNCTIONS = {
    "function": top_level,
    "builtin": max,
    "builtin of a module": math.hypot,
    "operator": operator.add,
    "torch function": torch.add,
    "torch constructor": torch.ones,
    "torch.nn.functional": nn.functional.relu,
    "method of Tensor": torch.Tensor.add,
    "in-place method of Tensor": torch.Tensor.add_,
    "class": Things,
    "inner class": Things.Inner,
    "builtin class": dict,
    "torch class": nn.Linear,
    "static method": Things.static,
    "unbound method": Things.bound,
    "method of str": str.upper,
    "numpy function": np.add,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_travel_by_name(name):
    func = FUNCTIONS[name]
    assert send_call(func, 1, 2) == (func, (1, 2), {})
    assert send_call(func, 1, key=2) == (func, (1,), {"key": 2})


@pytest.mark.parametrize(
    ("func", "result"),
    [
        (Things(5).bound, 8),
        (Things.of_class, Things(3)),
        (torch.tensor(5).add, torch.tensor(8)),
        (functools.partial(max, 4), 4),
    ],
    ids=["bound method", "class method", "bound method of a tensor", "partial"],
)
def test_functions_that_take_something_along(func, result):
    received, args, _ = send_call(func, 3)
    assert received(*args) == result


def test_module_as_function():
    layer = nn.Linear(2, 2)
    func, args, _ = send_call(layer, torch.ones(2))
    assert torch.equal(func(*args), layer(torch.ones(2)))


def test_lambda_travels_by_value():
    pytest.importorskip("cloudpickle")
    offset = 10
    func, args, _ = send_call(lambda x: x + offset, 3)
    assert func(*args) == 13


def test_lambda_takes_tensors_along_raw():
    pytest.importorskip("cloudpickle")
    tensor = torch.arange(3)
    body = dumps_call((lambda: tensor.sum(), (), {}))
    assert [t is tensor for t in body.tensors] == [True]
    assert load(body)[0]().item() == 3


def test_lambda_as_argument():
    pytest.importorskip("cloudpickle")
    _, (key,), _ = send_call(top_level, lambda x: -x)
    assert key(2) == -2


def test_without_cloudpickle_a_lambda_is_refused_with_advice(monkeypatch):
    monkeypatch.setattr(pickling, "cloudpickle", None)
    with pytest.raises(SerializationError, match=r"(?s)cannot send .*lambda.*hint: functions travel by name"):
        dumps_call((lambda: 1, (), {}))


def test_function_that_hides_behind_anothers_name_does_not_travel_as_that():
    """A decorated function keeps its name, but the module knows the other one."""
    pytest.importorskip("cloudpickle")

    @functools.wraps(top_level)
    def hidden(*args):
        return "hidden"

    func, args, _ = send_call(hidden, 1)
    assert func(*args) == "hidden"


def test_method_of_a_value_keeps_its_name():
    func, args, kwargs = send_call(OnValue("forward"), 1)
    assert (type(func), func.method, args, kwargs) == (OnValue, "forward", (1,), {})
    func, _, kwargs = send_call(OnValue("forward"), x=1)
    assert (type(func), func.method, kwargs) == (OnValue, "forward", {"x": 1})


def test_method_of_a_value_is_only_a_mark():
    with pytest.raises(SerializationError, match="without its value"):
        OnValue("forward")(1)


# --- flat and pickled agree ---

SIMPLE = [
    0,
    -1,
    2**100,
    1.5,
    math.inf,
    2 + 3j,
    True,
    None,
    "",
    "text \u00e9 \U0001f600",
    "\ud800",
    b"",
    b"\0\xff",
]


@pytest.mark.parametrize("value", SIMPLE, ids=repr)
def test_simple_values_are_flat_and_come_back_the_same(value):
    assert dumps_result(value).flat is not None
    for received in (load(dumps_result(value)), load(dumps(value))):
        assert received == value
        assert type(received) is type(value)


class Whole(int):
    pass


@pytest.mark.parametrize(
    "value",
    [Whole(3), [1, 2], (1, 2), {"a": 1}, {1, 2}, Point(1, 2), range(3), np.float64(2.0), Things(3), ..., int],
    ids=repr,
)
def test_other_values_are_pickled_and_come_back_the_same(value):
    body = dumps_result(value)
    assert body.payload[0] == PICKLED
    received = load(body)
    assert received == value
    assert type(received) is type(value)


def test_flat_and_pickled_calls_agree(hook):
    tensor = torch.arange(4.0)
    args = (1, tensor, "x", Handle(7), None, tensor, torch.ones(2, 2))
    flat = dumps_call((top_level, args, {}), hook.hook)
    pickled = dumps((top_level, args, {}), hook.hook)
    assert (flat.flat is not None, pickled.payload[0]) == (True, PICKLED)
    for body in (flat, pickled):
        func, received, kwargs = load(body)
        assert (func, kwargs) == (top_level, {})
        assert (received[0], received[2:5]) == (1, ("x", ("rref", 7), None))
        assert torch.equal(received[1], tensor)
        assert received[1] is received[5]
        assert torch.equal(received[6], torch.ones(2, 2))


def test_tensor_given_twice_is_sent_once():
    tensor = torch.ones(3)
    assert len(dumps_call((top_level, (tensor, tensor), {})).tensors) == 1
    assert len(dumps([tensor, tensor, {"again": tensor}]).tensors) == 1


def test_long_texts_are_pickled():
    assert dumps_result("x" * 70_000).payload[0] == dumps_result(b"x" * 70_000).payload[0] == PICKLED


def test_no_tensor_data_in_the_payload():
    tensor = torch.ones(100_000)
    for body in (dumps_result(tensor), dumps({"deep": [tensor]}), dumps_result(nn.Parameter(tensor))):
        assert len(body.payload) < 1000
        assert body.tensors[0].data_ptr() == tensor.data_ptr()


# --- tensors of all kinds ---

TENSORS = {
    "bool": torch.tensor([True, False]),
    "complex": torch.tensor([1 + 2j]),
    "bfloat16": torch.ones(3, dtype=torch.bfloat16),
    "float8": torch.ones(3).to(torch.float8_e4m3fn),
    "0-dim": torch.tensor(3.5),
    "empty": torch.empty(0, 3),
    "conj view": torch.tensor([1 + 2j, 3 - 1j]).conj(),
    "neg view": torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
    "sparse": torch.eye(3).to_sparse(),
    "transposed": torch.arange(6).reshape(2, 3).t(),
}


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: [t]], ids=["alone", "in a list"])
def test_tensors_of_all_kinds(name, wrap):
    tensor = TENSORS[name]
    received = load(dumps_result(wrap(tensor)))
    received = received[0] if type(received) is list else received
    assert (received.dtype, received.shape, received.layout) == (tensor.dtype, tensor.shape, tensor.layout)
    assert torch.equal(dense(received), dense(tensor))


def dense(tensor):
    tensor = tensor.to_dense() if tensor.is_sparse else tensor
    return tensor.float() if tensor.dtype is torch.float8_e4m3fn else tensor.resolve_conj().resolve_neg()


@pytest.mark.filterwarnings("ignore")
def test_quantized_tensor_goes_through_torch():
    tensor = torch.quantize_per_tensor(torch.arange(4.0), 0.5, 0, torch.quint8)
    assert torch.equal(send(tensor).dequantize(), tensor.dequantize())


def test_parameter_stays_a_parameter():
    parameter = nn.Parameter(torch.ones(2), requires_grad=False)
    received = send(parameter)
    assert type(received) is nn.Parameter
    assert not received.requires_grad
    assert torch.equal(received, parameter)


def test_module_with_parameters_and_buffers():
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    received = send(module)
    assert received.state_dict().keys() == module.state_dict().keys()
    assert all(torch.equal(received.state_dict()[k], v) for k, v in module.state_dict().items())


def test_tied_parameters_stay_tied():
    module = nn.Module()
    module.first = module.second = nn.Parameter(torch.ones(2))
    received = send(module)
    assert received.first is received.second


def test_numpy_arrays():
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    received = send(array)
    assert received.dtype == array.dtype
    assert (received == array).all()


def test_dataclass_with_tensors():
    received = send(Record("a", torch.ones(2), [torch.zeros(1), Record("b", torch.ones(()))]))
    assert received.name == "a"
    assert received.tensor.tolist() == [1, 1]
    assert received.more[1].tensor.item() == 1


def test_other_objects():
    assert math.isnan(load(dumps_result(math.nan)))
    assert send(torch.float16) is torch.float16
    assert send(torch.Size([1, 2])) == torch.Size([1, 2])
    assert send(torch.device("cpu")) == torch.device("cpu")


def test_cycle():
    cycle = [torch.ones(1)]
    cycle.append(cycle)
    received = send(cycle)
    assert received[1] is received


# --- refusals ---


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: {"deep": [x]}], ids=["alone", "deep"])
@pytest.mark.parametrize("make", [dumps, dumps_result, lambda x: dumps_call((top_level, (x,), {}))])
def test_unpicklable_object_is_named(make, wrap):
    with pytest.raises(
        SerializationError, match=r"cannot send .*<the unpicklable one>.*not for sending"
    ) as caught:
        make(wrap(Unpicklable()))
    assert isinstance(caught.value.__cause__, TypeError)


def test_unpicklable_object_without_text_or_with_a_long_one():
    with pytest.raises(SerializationError, match="cannot send an object of type BadText"):
        dumps(BadText())
    with pytest.raises(SerializationError, match=r"cannot send \['x{150,200}\.\.\.: "):
        dumps(["x" * 1000, Unpicklable()])


@pytest.mark.parametrize("obj", [threading.Lock(), (i for i in ())], ids=["lock", "generator"])
def test_locks_and_generators(obj):
    with pytest.raises(SerializationError, match="cannot send"):
        dumps(obj)


def test_future_is_refused():
    with pytest.raises(SerializationError, match=r"Can not pickle torch\.futures\.Future"):
        dumps(torch.futures.Future())


def test_forks_are_cancelled_when_something_else_cannot_be_pickled(hook):
    with pytest.raises(SerializationError):
        dumps([Handle(1), Handle(2), Unpicklable()], hook.hook)
    assert hook.made
    assert hook.all_cancelled()


def test_forks_are_made_once_when_cloudpickle_has_to_help(hook):
    pytest.importorskip("cloudpickle")
    body = dumps([Handle(1), lambda: 1], hook.hook)
    alive = [fork for fork in hook.made if fork not in hook.cancelled]
    assert body.forks == alive
    assert len(alive) == 1


def test_flat_call_with_an_unpicklable_argument_leaves_no_fork(hook):
    with pytest.raises(SerializationError):
        dumps_call((top_level, (Handle(1), Unpicklable()), {}), hook.hook)
    assert hook.all_cancelled()


def test_same_handle_twice_in_a_structure_is_one_fork(hook):
    handle = Handle(1)
    assert len(dumps([handle, handle], hook.hook).forks) == 1


def test_what_cannot_be_rebuilt_is_told_with_its_cause():
    with pytest.raises(
        SerializationError, match=r"cannot rebuild what arrived: OSError: no such thing here"
    ) as caught:
        send(FailsToLoad())
    assert isinstance(caught.value.__cause__, OSError)


def test_function_that_the_callee_lacks():
    body = dumps_call((top_level, (1,), {}))
    module, name = body.flat[0]
    for lacking in ((module, name + "X"), (module + "X", name)):
        body.flat = (lacking, *body.flat[1:])
        with pytest.raises(SerializationError, match=r"(?s)cannot rebuild .*importable on every worker"):
            loads(body, [])


@pytest.mark.parametrize("payload", [b"", b"(", b"\x80", b"\x80\x05", b"garbage", b"(\x04\0\0\0"], ids=repr)
def test_damaged_payload_is_told(payload):
    with pytest.raises(SerializationError, match="cannot rebuild"):
        loads(Body(payload), [])


def test_payload_that_names_a_tensor_it_lacks():
    for body in (dumps_result(torch.ones(1)), dumps([torch.ones(1)])):
        with pytest.raises(SerializationError, match="cannot rebuild"):
            loads(body, [])


def test_payload_read_outside_its_message():
    with pytest.raises(SerializationError, match="tensor 0 of a message was unpickled outside"):
        pickle.loads(dumps([torch.ones(1)]).payload)
