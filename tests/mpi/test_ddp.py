"""DistributedDataParallel (over gloo) and RPC in one model: gradients are those of one process on all data.

Every rank is a trainer; an embedding table lives on worker0, as on a parameter server.
"""

import copy
import pickle
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mpirpc as rpc
from mpirpc import autograd
from mpirpc.errors import AutogradError
from mpirpc.optim import DistributedOptimizer

pytestmark = pytest.mark.mpi(min_size=2)

ROWS, WIDTH, BATCH = 7, 4, 6


def table():
    return torch.arange(ROWS * WIDTH, dtype=torch.float64).reshape(ROWS, WIDTH) / 10


TABLE = nn.Embedding.from_pretrained(table(), freeze=False)
"""One per process; that of worker0 is used."""


def head():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, 3), nn.Tanh(), nn.Linear(3, 1)).double()


def batch(rank):
    return torch.randint(0, ROWS, (BATCH,), generator=torch.Generator().manual_seed(rank))


def look_up(indices):
    return TABLE(indices)


def gradient_of_table(context_id):
    return autograd.get_gradients(context_id)[TABLE.weight]


@pytest.fixture
def group(rpc_world, tmp_path_factory):
    """A gloo process group of all ranks."""
    folder = rpc.all_gather(str(tmp_path_factory.mktemp("store")))["worker0"]
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rpc_world.rank, world_size=rpc_world.size
    )
    yield rpc_world
    dist.destroy_process_group()


def expected(size, rank):
    """Gradients of the head (mean over trainers) and of the table (this trainer's part), in one process."""
    sums, mine = [], None
    for trainer in range(size):
        weight, model = table().requires_grad_(), head()
        loss = model(nn.functional.embedding(batch(trainer), weight)).square().sum()
        gradients = torch.autograd.grad(loss, [weight, *model.parameters()])
        if trainer == rank:
            mine = gradients[0]
        sums.append(gradients[1:])
    return [sum(parts) / size for parts in zip(*sums, strict=True)], mine


@pytest.mark.parametrize(
    "settings", [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}]
)
def test_gradients_are_those_of_one_process(group, settings):
    model = DistributedDataParallel(head(), **settings)
    of_head, of_table = expected(group.size, group.rank)
    for _ in range(3):
        with autograd.context() as context_id:
            rows = rpc.rpc_sync("worker0", look_up, args=(batch(group.rank),))
            autograd.backward(context_id, [model(rows).square().sum()])
            found = autograd.get_gradients(context_id)
            for parameter, gradient in zip(model.parameters(), of_head, strict=True):
                torch.testing.assert_close(found[parameter], gradient)
                assert parameter.grad is None or "gradient_as_bucket_view" in settings
            at_owner = rpc.rpc_sync("worker0", gradient_of_table, args=(context_id,))
            torch.testing.assert_close(at_owner, of_table)


def test_gradients_of_an_earlier_step_stay_what_they_are(group):
    """With ``gradient_as_bucket_view`` DDP writes the next step's gradients where it wrote these."""
    model = DistributedDataParallel(head(), gradient_as_bucket_view=True)
    kept = []
    for factor in (1.0, 5.0):
        with autograd.context() as context_id:
            rows = rpc.rpc_sync("worker0", look_up, args=(batch(group.rank),))
            autograd.backward(context_id, [factor * model(rows).square().sum()])
            kept.append([autograd.get_gradients(context_id)[p] for p in model.parameters()])
    for first, second in zip(*kept, strict=True):
        torch.testing.assert_close(second, 5.0 * first)


def test_local_backward_and_distributed_one_take_turns(group):
    model = DistributedDataParallel(head())
    of_head, _ = expected(group.size, group.rank)
    rows = nn.functional.embedding(batch(group.rank), table())
    for _ in range(2):
        with autograd.context() as context_id:
            autograd.backward(context_id, [model(rows).square().sum()])
            found = autograd.get_gradients(context_id)
            for parameter, gradient in zip(model.parameters(), of_head, strict=True):
                torch.testing.assert_close(found[parameter], gradient)
        model.zero_grad()
        model(rows).square().sum().backward()
        for parameter, gradient in zip(model.parameters(), of_head, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)


def numbered(rank):
    """An input that makes the gradient of a weight of ``Linear(2, 1)`` the number of the rank, from 1."""
    return torch.full((1, 2), 1.0 + rank)


def mean(size):
    return (1.0 + size) / 2


class TwoBranches(nn.Module):
    """Each rank uses one of two layers."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)])

    def forward(self, value, number):
        return self.branches[number](value)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copy_of_a_ddp_module_is_one(group, copied):
    model = copied(DistributedDataParallel(nn.Linear(2, 1, bias=False)))
    with autograd.context() as context_id:
        autograd.backward(context_id, [model(numbered(group.rank)).sum()])
        gradient = autograd.get_gradients(context_id)[model.module.weight]
    assert gradient.unique().tolist() == [mean(group.size)]


@pytest.mark.parametrize("gradient_as_bucket_view", [False, True])
def test_parameter_that_only_other_ranks_use_gets_its_mean(group, gradient_as_bucket_view):
    model = DistributedDataParallel(
        TwoBranches(), find_unused_parameters=True, gradient_as_bucket_view=gradient_as_bucket_view
    )
    by_branch = [sum(1.0 + rank for rank in range(b, group.size, 2)) / group.size for b in range(2)]
    for _ in range(3):
        with autograd.context() as context_id:
            autograd.backward(context_id, [model(numbered(group.rank), group.rank % 2).sum()])
            found = autograd.get_gradients(context_id)
        for branch, gradient in zip(model.module.branches, by_branch, strict=True):
            assert found[branch.weight].unique().tolist() == pytest.approx([gradient])
            assert branch.weight.grad is None


def test_gradients_add_up_under_no_sync(group):
    model = DistributedDataParallel(nn.Linear(2, 1, bias=False))
    with autograd.context() as context_id:
        with model.no_sync():
            autograd.backward(context_id, [model(numbered(group.rank)).sum()])
            mine = autograd.get_gradients(context_id)[model.module.weight]
        autograd.backward(context_id, [10 * model(numbered(group.rank)).sum()])
        found = autograd.get_gradients(context_id)[model.module.weight]
    assert mine.unique().tolist() == [1.0 + group.rank]
    assert found.unique().tolist() == [11 * mean(group.size)]


def test_passes_of_one_context_add_up_where_ddp_writes_to_its_gradients_again(group):
    model = DistributedDataParallel(nn.Linear(2, 1, bias=False), gradient_as_bucket_view=True)
    with autograd.context() as context_id:
        for factor in (1, 5, 10):
            autograd.backward(context_id, [factor * model(numbered(group.rank)).sum()])
        found = autograd.get_gradients(context_id)[model.module.weight]
    assert found.unique().tolist() == [16 * mean(group.size)]


def test_grad_of_a_local_backward_stays_what_it_is(group):
    """With ``gradient_as_bucket_view`` DDP has made it a view of what it writes to."""
    model = DistributedDataParallel(nn.Linear(2, 1, bias=False), gradient_as_bucket_view=True)
    model(numbered(group.rank)).sum().backward()
    with autograd.context() as context_id:
        autograd.backward(context_id, [10 * model(numbered(group.rank)).sum()])
    assert model.module.weight.grad.unique().tolist() == [mean(group.size)]


def test_static_graph_is_refused(group):
    model = DistributedDataParallel(nn.Linear(2, 1, bias=False), static_graph=True)
    with autograd.context() as context_id, pytest.raises(AutogradError, match="static_graph=True"):
        autograd.backward(context_id, [model(numbered(group.rank)).sum()])


WAITS_FOR_OTHERS = threading.Event()
"""At worker0: its last step has come to DDP, which waits for the other trainers."""


def look_up_and_hold_back_gradients(indices):
    """Their gradients reach the table only when this worker is a step ahead of who calls."""
    rows = TABLE(indices)
    rows.register_hook(lambda _: None if WAITS_FOR_OTHERS.wait(30) else pytest.fail("worker0 is not ahead"))
    return rows


def table_rref():
    return rpc.RRef(TABLE.weight)


@pytest.mark.parametrize("table_has", ["nothing", "hook", "optimizer"])
def test_trainer_that_waits_in_ddp_keeps_nothing_from_the_others(group, table_has):
    """worker0 waits in the DDP of its last step while the others' last but one still needs its table."""
    WAITS_FOR_OTHERS.clear()
    model = DistributedDataParallel(head())
    num_steps = 0

    def note_step(_):
        nonlocal num_steps
        num_steps += 1
        if num_steps == 3:
            WAITS_FOR_OTHERS.set()

    next(model.parameters()).register_post_accumulate_grad_hook(note_step)
    handle = None
    if group.rank == 0 and table_has == "hook":
        handle = TABLE.weight.register_post_accumulate_grad_hook(lambda _: None)
    if group.rank == 0 and table_has == "optimizer":
        parameters = [rpc.RRef(parameter) for parameter in (TABLE.weight, *model.parameters())]
        DistributedOptimizer(torch.optim.SGD, parameters, lr=0.0)
    group.barrier()
    table = rpc.remote("worker0", table_rref).to_here()
    optimizer = DistributedOptimizer(torch.optim.SGD, [table], lr=0.0)
    for step in range(3):  # before the second, DDP's trainers meet to sort their gradients anew
        is_held_back = group.rank > 0 and step == 1
        function = look_up_and_hold_back_gradients if is_held_back else look_up
        with autograd.context() as context_id:
            rows = rpc.rpc_sync("worker0", function, args=(batch(group.rank),))
            autograd.backward(context_id, [model(rows).square().sum()])
            if is_held_back:
                optimizer.step(context_id)
    group.barrier()
    if handle is not None:
        handle.remove()
