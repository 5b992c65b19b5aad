"""Memory that is too small and peers that are gone are told in a line; a fault keeps its own."""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from megagrid.cli import main
from megagrid.comm.collectives import all_reduce
from megagrid.comm.p2p import Message, post
from megagrid.config.schema import Config
from megagrid.errors import ConfigError, MegagridError, PeerError
from megagrid.grid import bootstrap
from megagrid.grid.bootstrap import RankEnvironment
from megagrid.grid.grid import Grid, build_grid
from megagrid.grid.placement import Placement
from megagrid.plan.memory import persistent_bytes
from megagrid.train.faults import check_memory, told_in_a_line
from tests.config import recipe
from tests.end_to_end.t0 import DP2, PP2, TP2, TP2DP2, strategy, t0

CPU = torch.device("cpu")

# ------------------------------------------------------------------------------------------------
# Memory


def states(config: Config, placement: Placement, ranks: range) -> int:
    """Weights, gradients and two moments of `ranks`."""
    kept = [persistent_bytes(config, placement, placement.coordinate(rank)) for rank in ranks]
    return sum(one.total + dict(one.states)["exp_avg"] for one in kept)


@pytest.mark.parametrize("local", [1, 2, 4])
@pytest.mark.parametrize("sharding", ["FULL_SHARD", "NO_SHARD"])
def test_states_of_all_ranks_on_a_machine_must_fit_into_it(monkeypatch, sharding, local):
    config = t0("unused", TP2DP2, strategy(sharding))
    rank = local // 2
    grid = SimpleNamespace(device=CPU, placement=TP2DP2, rank=rank)
    room = states(config, TP2DP2, range(local))
    monkeypatch.setattr(bootstrap, "memory_bytes", lambda: room)
    check_memory(config, grid, range(local))
    monkeypatch.setattr(bootstrap, "memory_bytes", lambda: room - 1)
    with pytest.raises(ConfigError) as refused:
        check_memory(config, grid, range(local))
    message = str(refused.value)
    assert "\n" not in message
    for words in ("model.num_layers=4", "model.hidden_size=32", "on this machine", "more machines"):
        assert words in message


@pytest.mark.parametrize("key", ["hidden_size", "ffn_hidden_size", "vocab_size"])
def test_an_absurd_shape_is_one_line_before_anything_is_made(tmp_path, capsys, monkeypatch, key):
    monkeypatch.chdir(tmp_path)
    path = str(recipe.write(tmp_path))
    assert main(["train", path, "train.device=cpu", f"model.{key}={8 * 10**15}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: weights, gradients and optimizer states of model.")
    assert f"model.{key}=8000000000000000" in line
    assert not (tmp_path / "runs").exists()


def test_memory_that_ends_on_the_way_is_one_line_with_peak_and_remedies():
    config = t0("unused")
    with pytest.raises(MegagridError) as told, told_in_a_line(config, RankEnvironment()):
        torch.empty(2**55, dtype=torch.uint8)
    message = str(told.value)
    assert message.startswith("rank 0 (pp0 dp0 cp0 tp0) is out of memory on cpu for 3602879")
    for words in ("GB at most", "train.micro_batch_size=2", "more machines"):
        assert words in message
    assert "\n" not in message


@pytest.mark.gpu
def test_memory_of_an_accelerator_that_ends_is_one_line_too():
    device = torch.accelerator.current_accelerator()
    with pytest.raises(MegagridError) as told, told_in_a_line(t0("unused"), RankEnvironment()):
        torch.empty(2**50, dtype=torch.uint8, device=device)
    message = str(told.value)
    assert f"out of memory on {device.type}:0 for " in message
    assert "parallel.tensor_parallel_size" in message
    assert "\n" not in message


def test_states_of_a_rank_must_fit_into_its_device(monkeypatch):
    config = t0("unused", TP2DP2)
    device = torch.device("cuda", 1)
    grid = SimpleNamespace(device=device, placement=TP2DP2, rank=3)
    room = states(config, TP2DP2, range(3, 4))
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda asked: (0, room - 1))
    with pytest.raises(ConfigError) as refused:
        check_memory(config, grid, [2, 3])
    for words in ("on rank 3's cuda:1, which has", "raise parallel.tensor_parallel_size"):
        assert words in str(refused.value)


# ------------------------------------------------------------------------------------------------
# Compilers


def compile_without_a_compiler() -> str:
    """What is told of it."""
    import torch._inductor.config as settings

    compiled = torch.compile(torch.nn.functional.silu)
    config = t0("unused", Placement(), {"train": {"compile": True}})
    try:
        with (
            settings.patch({"cpp.cxx": ("/nowhere/g++",), "force_disable_caches": True}),
            told_in_a_line(config, RankEnvironment()),
        ):
            compiled(torch.ones(8))
    except ConfigError as error:
        return str(error)
    return "nothing"


def test_a_machine_without_a_compiler_is_told_with_key_and_remedies(ranks):
    (told,) = ranks.run(compile_without_a_compiler, world_size=1)
    assert told.startswith("train.compile=true: No working C++ compiler found in ")
    assert told.endswith("install g++, or name a compiler by CXX, or set train.compile=false")
    assert "\n" not in told


# ------------------------------------------------------------------------------------------------
# Peers


def reduce_along_tp(grid: Grid) -> None:
    all_reduce(torch.ones(4), grid.tp)


def receive_along_pp(grid: Grid) -> None:
    (pending,) = post([Message(torch.ones(4), peer=1, is_send=False)], grid.pp)
    pending.wait()


def gather_along_dp(grid: Grid) -> None:
    layer = torch.nn.Linear(4, 4)
    fully_shard(layer, mesh=DeviceMesh.from_group(grid.dp.group, "cpu"))
    layer(torch.ones(1, 4))


def leave_or_work(config: Config, placement: Placement, work: Callable[[Grid], None]) -> str | None:
    """Rank 1 leaves; rank 0 works, and returns what it is told."""
    grid = build_grid(placement, dist.get_rank(), "cpu", config.model.num_kv_heads)
    if grid.rank == 1:
        del grid
        dist.destroy_process_group()
        gc.collect()
        return None
    try:
        with told_in_a_line(config, RankEnvironment(0, 2)):
            work(grid)
    except PeerError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("placement", "work", "axis"),
    [(TP2, reduce_along_tp, "tp"), (PP2, receive_along_pp, "pp"), (DP2, gather_along_dp, "dp")],
    ids=["tp", "pp", "dp"],
)
def test_a_rank_that_is_left_alone_says_who_it_is_and_along_what(ranks, placement, work, axis):
    told, _ = ranks.run(leave_or_work, t0("unused", placement), placement, work, world_size=2)
    assert told.startswith(f"rank 0 (pp0 dp0 cp0 tp0) lost a peer along {axis}: ")
    assert "\n" not in told


def test_a_run_of_one_has_no_peers_to_lose():
    fault = RuntimeError("Connection closed by peer")
    with pytest.raises(RuntimeError) as raised, told_in_a_line(t0("unused"), RankEnvironment()):
        raise fault
    assert raised.value is fault


@pytest.mark.parametrize(
    "fault", [RuntimeError("shapes differ"), ZeroDivisionError(), MegagridError("a=1 is wrong")]
)
def test_any_other_fault_stays_what_it_is(fault):
    config = t0("unused", TP2)
    with pytest.raises(type(fault)) as raised, told_in_a_line(config, RankEnvironment(1, 2)):
        raise fault
    assert raised.value is fault


@pytest.mark.parametrize(
    ("number", "name", "is_told"),
    [
        (errno.ENOSPC, None, True),
        (errno.EACCES, "unused/metrics.jsonl", True),
        (errno.EACCES, "elsewhere/data.bin", False),
        (errno.EACCES, "unused-too/metrics.jsonl", False),
        (errno.ENOENT, "unused/metrics.jsonl", False),
    ],
)
def test_a_run_folder_that_cannot_be_written_to_is_told_in_a_line(number, name, is_told):
    error = OSError(number, os.strerror(number), name)
    with (
        pytest.raises(MegagridError if is_told else OSError) as told,
        told_in_a_line(t0("unused"), RankEnvironment(host="node01")),
    ):
        raise error
    if is_told:
        assert str(told.value) == (
            'rank 0 (pp0 dp0 cp0 tp0) on node01: logging.run_dir="unused" can\'t be written to '
            f"({os.strerror(number)}); make room there, or name another"
        )
