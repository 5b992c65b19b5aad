"""The ledger sees every call of torch.distributed, whoever makes it, once, under its axis."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from rich.console import Console
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from megagrid.comm.ledger import OPS, Call, Ledger, Traffic
from megagrid.grid.grid import Axis

FLOAT = 4


def axis_of_all(name: str, group: dist.ProcessGroup | None = None) -> Axis:
    """All ranks, on `group` or a group of their own."""
    ranks = tuple(range(dist.get_world_size()))
    return Axis(name, ranks, dist.get_rank(), group or dist.new_group(ranks))


# ------------------------------------------------------------------------------------------------
# On the ranks


def issue_one_of_each() -> list[tuple[str, Counter]]:
    """Each function of torch.distributed on 6 floats a rank: its name, and what was counted."""
    axis = axis_of_all("tp")
    group, size, rank = axis.group, axis.size, axis.rank
    one, all_ = torch.ones(6), torch.ones(6 * size)
    peer = axis.ranks[1 - rank]

    def exchange() -> None:
        ops = [(dist.isend, one), (dist.irecv, torch.empty(6))]
        for work in dist.batch_isend_irecv([dist.P2POp(f, x, peer, group) for f, x in ops]):
            work.wait()

    def send_or_receive() -> None:
        if rank == 0:
            dist.send(one, peer, group)
        else:
            dist.recv(torch.empty(6), peer, group)

    def coalesced() -> None:
        with dist._coalescing_manager(group, async_ops=True) as works:
            dist.all_reduce(one, group=group)
            dist.all_reduce(all_, group=group)
        works.wait()

    parts = [torch.ones(6) for _ in range(size)]
    calls = {
        "all_reduce": lambda: dist.all_reduce(one, group=group),
        "all_reduce of bf16": lambda: dist.all_reduce(one.bfloat16(), group=group),
        "async": lambda: dist.all_reduce(one, group=group, async_op=True).wait(),
        "coalesced": coalesced,
        "all_gather": lambda: dist.all_gather(parts, one, group=group),
        "all_gather_single": lambda: dist.all_gather_single(all_, one, group=group),
        "reduce_scatter_single": lambda: dist.reduce_scatter_single(one, all_, group=group),
        "all_to_all_single": lambda: dist.all_to_all_single(
            torch.empty(6), torch.ones(6), group=group
        ),
        "broadcast": lambda: dist.broadcast(one, 0, group=group),
        "reduce": lambda: dist.reduce(one, 0, group=group),
        "barrier": lambda: dist.barrier(group),
        "send or recv": send_or_receive,
        "exchange": exchange,
        "functional all_reduce": lambda: functional.all_reduce(one, "sum", group).sum().item(),
        "functional all_gather": lambda: functional.all_gather_tensor(one, 0, group).sum().item(),
        "functional reduce_scatter": lambda: (
            functional.reduce_scatter_tensor(all_, "sum", 0, group).sum().item()
        ),
    }
    counted = []
    for name, call in calls.items():
        with Ledger([axis]) as ledger:
            call()
        counted.append((name, ledger.calls))
    return counted


class SumAcrossRanks(torch.autograd.Function):
    """Identity forward, all-reduce backward."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


def backward_of_an_autograd_function() -> Counter:
    axis = axis_of_all("tp")
    x = torch.ones(3, 5, requires_grad=True)
    y = SumAcrossRanks.apply(x, axis.group).sum()
    with Ledger([axis]) as ledger:
        y.backward()
    return ledger.calls


def step_of_fully_shard(replicate: bool, on_axis_group: bool) -> Counter:
    """Forward and backward of two units: 5 x 3 + 5 and 2 x 5 + 2 floats."""
    size = dist.get_world_size()
    axis = axis_of_all("dp")
    if replicate:
        mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("replicate", "shard"))
    elif on_axis_group:
        mesh = DeviceMesh.from_group(axis.group, "cpu", mesh_dim_names=("dp",))
    else:
        mesh = DeviceMesh("cpu", list(axis.ranks), mesh_dim_names=("dp",))
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    for unit in model:
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with Ledger([axis]) as ledger:
        model(torch.ones(4, 3)).sum().backward()
    return ledger.calls


def groups_with_equal_ranks() -> Counter:
    """Axes of the same two ranks, and a group that no axis has."""
    pp, embedding = axis_of_all("pp"), axis_of_all("embedding")
    world = axis_of_all("world", dist.group.WORLD)
    alone = Axis("cp", (dist.get_rank(),), 0, None)
    strangers = dist.new_group([0, 1])
    mine = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    ledger = Ledger([alone, pp, embedding, world])
    with ledger:
        for group in (pp.group, embedding.group, None, strangers, mine):
            dist.all_reduce(torch.ones(1), group=group)
    with Ledger([alone]) as other:
        dist.all_reduce(torch.ones(1))
    dist.all_reduce(torch.ones(1))
    return ledger.calls + other.calls


def count_twice() -> tuple[dict, str]:
    axis = axis_of_all("tp")
    ledger = Ledger([axis])
    for size in (2, 3):
        with ledger:
            dist.all_reduce(torch.ones(size * 1000), group=axis.group)
    console = Console(record=True, width=80, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(ledger.table())
    return ledger.totals(), console.export_text()


# ------------------------------------------------------------------------------------------------
# The claims


@pytest.fixture(scope="module")
def one_of_each(ranks):
    return [dict(counted) for counted in ranks.run(issue_one_of_each, world_size=2)]


EXPECTED = {
    "all_reduce": ("all_reduce", 6 * FLOAT),
    "all_reduce of bf16": ("all_reduce", 6 * 2),
    "async": ("all_reduce", 6 * FLOAT),
    "coalesced": ("all_reduce", 18 * FLOAT),
    "all_gather": ("all_gather", 12 * FLOAT),
    "all_gather_single": ("all_gather", 12 * FLOAT),
    "reduce_scatter_single": ("reduce_scatter", 12 * FLOAT),
    "all_to_all_single": ("all_to_all", 6 * FLOAT),
    "broadcast": ("broadcast", 6 * FLOAT),
    "reduce": ("reduce", 6 * FLOAT),
    "barrier": ("barrier", 0),
    "functional all_reduce": ("all_reduce", 6 * FLOAT),
    "functional all_gather": ("all_gather", 12 * FLOAT),
    "functional reduce_scatter": ("reduce_scatter", 12 * FLOAT),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_collective_is_counted_once_with_its_bytes(one_of_each, name):
    collective, size = EXPECTED[name]
    for counted in one_of_each:
        assert counted[name] == {Call("tp", collective, size): 1}


def test_messages_are_counted_on_both_ends(one_of_each):
    sent, received = Call("tp", "send", 6 * FLOAT), Call("tp", "recv", 6 * FLOAT)
    assert [counted["send or recv"] for counted in one_of_each] == [{sent: 1}, {received: 1}]
    assert [counted["exchange"] for counted in one_of_each] == [{sent: 1, received: 1}] * 2


def test_collectives_of_a_backward_are_seen(ranks):
    expected = {Call("tp", "all_reduce", 15 * FLOAT): 1}
    assert ranks.run(backward_of_an_autograd_function, world_size=2) == [expected] * 2


@pytest.mark.parametrize("on_axis_group", [True, False])
def test_fully_shard_gathers_both_ways_and_scatters_once_padded_to_the_ranks(ranks, on_axis_group):
    # Rows 5 and 2 are cut over 2 ranks: 5 is padded to 6. Gathered are 6 x 3 + 6 and 2 x 5 + 2.
    expected = {
        Call("dp", "all_gather", 24 * FLOAT): 2,
        Call("dp", "all_gather", 12 * FLOAT): 2,
        Call("dp", "reduce_scatter", 24 * FLOAT): 1,
        Call("dp", "reduce_scatter", 12 * FLOAT): 1,
    }
    assert ranks.run(step_of_fully_shard, False, on_axis_group, world_size=2) == [expected] * 2


def test_fully_shard_over_replicas_only_reduces_each_unit_once(ranks):
    expected = {
        Call("dp", "all_reduce", 20 * FLOAT): 1,
        Call("dp", "all_reduce", 12 * FLOAT): 1,
    }
    assert ranks.run(step_of_fully_shard, True, False, world_size=2) == [expected] * 2


def test_the_group_decides_the_axis_then_its_ranks_and_size_one_is_no_traffic(ranks):
    expected = {
        Call("pp", "all_reduce", FLOAT): 2,  # its own, and the group that no axis has
        Call("embedding", "all_reduce", FLOAT): 1,
        Call("world", "all_reduce", FLOAT): 1,
        Call("ranks 0,1", "all_reduce", FLOAT): 1,
    }
    assert ranks.run(groups_with_equal_ranks, world_size=2) == [expected] * 2


def test_counting_goes_on_when_entered_again_and_is_shown(ranks):
    for totals, table in ranks.run(count_twice, world_size=2):
        assert totals == {("tp", "all_reduce"): Traffic(2, 5000 * FLOAT)}
        assert "12,000" in table and "8,000" in table


def test_every_op_of_torch_that_communicates_is_known():
    names = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    silent = {"c10d::check_for_nan", "_c10d_functional::wait_tensor"}
    silent |= {name for name in names if name.startswith("_c10d_functional::_wrap")}
    ours = {f"{namespace}::{op}" for namespace, ops in OPS.items() for op in ops}
    torchs = {name for name in names if name.startswith(("c10d::", "_c10d_functional::"))}
    assert torchs - silent == ours


def test_counted_argument_is_one_that_the_op_has():
    for namespace, ops in OPS.items():
        for name, op in ops.items():
            schema = getattr(getattr(torch.ops, namespace), name).default._schema
            arguments = {argument.name for argument in schema.arguments}
            assert op.counted in arguments | {"result", ""}
            assert arguments & {"process_group", "group_name"}
