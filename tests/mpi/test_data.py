"""What can be sent (docs/data.md): each kind arrives at the callee as it is here, and comes back the same."""

import dataclasses
import enum
from collections import OrderedDict, defaultdict, namedtuple

import numpy as np
import pytest
import torch
from torch import nn

import mpirpc as rpc

pytestmark = [
    pytest.mark.mpi(min_size=2),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype"),
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta"),
    pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated"),
    pytest.mark.filterwarnings("ignore:.*quantize_per.*deprecated"),
]


@dataclasses.dataclass
class Sample:
    features: torch.Tensor
    label: int
    extra: dict


class Colour(enum.Enum):
    RED = 1


class Tagged(torch.Tensor):
    """A tensor subclass."""


Point = namedtuple("Point", "x y")

DTYPES = [
    getattr(torch, name)
    for name in (
        "bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64 complex32 "
        "complex64 complex128 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
    ).split()
    if hasattr(torch, name)
]


def dense(dtype):
    numbers = torch.arange(6 * dtype.itemsize, dtype=torch.uint8) % 2
    return numbers.view(dtype).reshape(2, 3)


def grid():
    return torch.arange(24.0).reshape(4, 6)


def sparse_source():
    return torch.eye(4) * torch.arange(1.0, 5.0)


def trained_module():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


def shared_pair():
    whole = torch.arange(10.0)
    return whole, whole[2:5]


def object_array():
    return np.array([{"a": 1}, None, "text"], dtype=object)


TENSORS = {f"dense {dtype}".replace("torch.", ""): (lambda dtype=dtype: dense(dtype)) for dtype in DTYPES} | {
    "no dimensions": lambda: torch.tensor(3.5),
    "empty": lambda: torch.zeros(0, 3),
    "large": lambda: torch.arange(300_000.0),
    "strided": lambda: grid()[::2, 1::2],
    "transposed": lambda: grid().t(),
    "expanded": lambda: grid()[:, :1].expand(4, 6),
    "channels last": lambda: torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0)).to(
        memory_format=torch.channels_last
    ),
    "conjugate view": lambda: torch.tensor([1 + 2j, 3 - 1j]).conj(),
    "negative view": lambda: torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
    "requires grad": lambda: grid().requires_grad_(),
    "parameter": lambda: nn.Parameter(grid(), requires_grad=False),
    "subclass": lambda: grid().as_subclass(Tagged),
    "sparse coo": lambda: sparse_source().to_sparse(),
    "sparse coo, not coalesced": lambda: torch.sparse_coo_tensor(
        torch.tensor([[0, 0], [1, 1]]), torch.tensor([1.0, 2.0]), (2, 2), check_invariants=True
    ),
    "sparse csr": lambda: sparse_source().to_sparse_csr(),
    "sparse csc": lambda: sparse_source().to_sparse_csc(),
    "sparse bsr": lambda: sparse_source().to_sparse_bsr((2, 2)),
    "sparse bsc": lambda: sparse_source().to_sparse_bsc((2, 2)),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)]),
    "nested jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)], layout=torch.jagged),
    "meta": lambda: torch.empty(2, 3, device="meta"),
    "quantized": lambda: torch.quantize_per_tensor(grid(), 0.5, 3, torch.qint8),
    "quantized per channel": lambda: torch.quantize_per_channel(
        grid(), torch.ones(4) / 2, torch.zeros(4, dtype=torch.int64), 0, torch.quint8
    ),
}

OBJECTS = {
    "numbers and text": lambda: (1, 2**100, 1.5, 1 + 2j, True, None, "ä", b"b", bytearray(b"c")),
    "containers": lambda: {"a": [1, (2, {3}), frozenset({4})], "b": OrderedDict(c=defaultdict(list, d=[5]))},
    "named tuple": lambda: Point(1, y=2),
    "enum, type, slice, range": lambda: (Colour.RED, Colour, slice(1, 2), range(3), Ellipsis),
    "torch's own": lambda: (torch.float32, torch.device("cpu"), torch.Size([1, 2]), torch.strided),
    "numpy": lambda: (np.arange(6).reshape(2, 3), np.float32(1.5), np.arange(100_000)),
    "numpy of objects": object_array,
    "function": lambda: (sorted, torch.add, sparse_source),
    "exception": lambda: ValueError("told", 1),
}


def same(a, b):
    """Compare in every respect that the table promises."""
    if isinstance(a, torch.Tensor):
        return same_tensor(a, b)
    if isinstance(a, np.ndarray):
        return type(b) is np.ndarray and a.dtype == b.dtype and a.tolist() == b.tolist()
    if isinstance(a, BaseException):
        return type(a) is type(b) and a.args == b.args
    if isinstance(a, tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def same_tensor(a, b):
    if a.is_nested:
        return b.is_nested and same(tuple(a.unbind()), tuple(b.unbind()))
    about = [(t.dtype, t.shape, t.layout, t.device, t.requires_grad, type(t), t.is_quantized) for t in (a, b)]
    if about[0] != about[1]:
        return False
    if a.is_meta:
        return True
    if a.is_quantized:
        return torch.equal(a.int_repr(), b.int_repr()) and a.qscheme() == b.qscheme()
    if a.layout is torch.sparse_coo:
        indices = torch.equal(a._indices(), b._indices())
        return indices and a.is_coalesced() == b.is_coalesced() and torch.equal(a._values(), b._values())
    if a.layout in (torch.sparse_csr, torch.sparse_bsr):
        places = torch.equal(a.crow_indices(), b.crow_indices()) and torch.equal(
            a.col_indices(), b.col_indices()
        )
        return places and torch.equal(a.values(), b.values())
    if a.layout is not torch.strided:
        places = torch.equal(a.ccol_indices(), b.ccol_indices()) and torch.equal(
            a.row_indices(), b.row_indices()
        )
        return places and torch.equal(a.values(), b.values())
    plain = [t.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg() for t in (a, b)]
    bytes_of = [t.contiguous().reshape(-1).view(torch.uint8) for t in plain]
    return torch.equal(*bytes_of)


def make(kind):
    return (TENSORS.get(kind) or OBJECTS[kind])()


def there_and_back(kind, arrived):
    """Compare with what this worker makes itself; send it back."""
    return same(make(kind), arrived), arrived


def test_alone(rpc_world):
    for kind in [*TENSORS, *OBJECTS]:
        there, back = rpc.rpc_sync(rpc_world.next, there_and_back, args=(kind, make(kind)))
        assert (kind, there, same(make(kind), back)) == (kind, True, True)


def inside(kind):
    return {"list": [make(kind), 1], "sample": Sample(torch.ones(2), 3, {"x": make(kind)})}


def same_inside(kind, arrived):
    return same(make(kind), arrived["list"][0]) and same(make(kind), arrived["sample"].extra["x"])


def there_and_back_inside(kind, arrived):
    return same_inside(kind, arrived), arrived


def test_inside_other_things(rpc_world):
    for kind in [*TENSORS, *OBJECTS]:
        there, back = rpc.rpc_sync(rpc_world.next, there_and_back_inside, args=(kind, inside(kind)))
        assert (kind, there, same_inside(kind, back)) == (kind, True, True)


def forward_of(module, x):
    return module.eval()(x), module


def test_module(rpc_world):
    module, x = trained_module(), torch.ones(4, 3)
    output, back = rpc.rpc_sync(rpc_world.next, forward_of, args=(module, x))
    torch.testing.assert_close(output, module.eval()(x))
    assert all(map(torch.equal, back.state_dict().values(), module.state_dict().values()))
    assert [p.requires_grad for p in back.parameters()] == [True] * 4


def share_memory(pair):
    whole, part = pair
    part.zero_()
    return bool((whole[2:5] == 0).all())


def test_tensors_that_share_memory_share_it_there(rpc_world):
    assert rpc.rpc_sync(rpc_world.next, share_memory, args=(shared_pair(),))


def read_inside(structure):
    return structure["rrefs"][0].to_here() + structure["sample"].extra["rref"].to_here()


def test_rrefs_inside(rpc_world):
    structure = {"rrefs": [rpc.RRef(1)], "sample": Sample(torch.ones(1), 0, {"rref": rpc.RRef(2)})}
    assert rpc.rpc_sync(rpc_world.next, read_inside, args=(structure,)) == 3


@pytest.mark.parametrize("numel", [10, 1_000], ids=["inside the message", "above one KiB"])
def test_small_arguments_may_be_changed_at_once(rpc_world, numel):
    """Up to ``eager_limit`` they are copied before ``rpc_async`` returns."""
    tensor = torch.ones(numel)
    future = rpc.rpc_async(rpc_world.next, torch.sum, args=(tensor,))
    tensor.zero_()
    assert future.wait().item() == numel


def test_large_arguments_may_be_changed_when_the_future_is_done(rpc_world):
    tensor = torch.ones(1_000_000)
    for round_ in range(3):
        assert rpc.rpc_async(rpc_world.next, torch.sum, args=(tensor,)).wait().item() == 1_000_000 * (
            round_ + 1
        )
        tensor += 1
