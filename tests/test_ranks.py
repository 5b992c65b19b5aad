"""The pool of ranks keeps its promises: order, isolation, tracebacks, timeouts, no orphans."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests import ranks as pool_module
from tests.ranks import RanksError


def whoami() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def sum_of_ranks(scale: float) -> float:
    x = torch.tensor(float(dist.get_rank() * scale))
    dist.all_reduce(x)
    return x.item()


def pid() -> int:
    return os.getpid()


def leave_groups_and_state_behind() -> None:
    dist.new_group([0, 1])
    torch.set_default_dtype(torch.float64)
    os.environ["LEFT_BEHIND"] = "1"
    os.chdir("/")
    signal.signal(signal.SIGUSR1, lambda *_: None)


def state() -> tuple[object, ...]:
    return (
        torch.get_default_dtype(),
        os.environ.get("LEFT_BEHIND"),
        os.getcwd(),
        signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL,
        torch.rand(()).item(),
        torch.get_num_threads(),
    )


def raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("the culprit")
    dist.all_reduce(torch.zeros(1))


def raise_on_while_others_sleep(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("the culprit")
    time.sleep(60)


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.zeros(1))


def crash() -> None:
    os.abort()


def exit_on(rank: int) -> None:
    if dist.get_rank() == rank:
        sys.exit(3)


def hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        wait_for_a_message_that_never_comes()


def wait_for_a_message_that_never_comes() -> None:
    dist.recv(torch.zeros(1), src=1 - dist.get_rank())


def change(x: torch.Tensor) -> float:
    x += dist.get_rank() + 1
    dist.barrier()
    return x.item()


def return_what_does_not_pickle() -> object:
    return lambda: None


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_results_come_in_rank_order_from_a_world_of_the_size_asked_for(ranks, world_size):
    assert ranks.run(whoami, world_size=world_size) == [(r, world_size) for r in range(world_size)]


def test_collectives_reach_the_ranks_of_the_call(ranks):
    assert ranks.run(sum_of_ranks, 10, world_size=4) == [60.0] * 4
    assert ranks.run(sum_of_ranks, scale=1, world_size=2) == [1.0] * 2


def test_processes_live_on_from_call_to_call(ranks):
    assert ranks.run(pid, world_size=2) == ranks.run(pid, world_size=4)[:2]


def test_a_call_sees_nothing_that_another_left_behind(ranks):
    before = ranks.run(state, world_size=2)
    ranks.run(leave_groups_and_state_behind, world_size=2)
    assert ranks.run(state, world_size=2) == before


def test_ranks_do_not_share_the_memory_of_an_argument(ranks):
    assert ranks.run(change, torch.zeros(()), world_size=2) == [1.0, 2.0]


def test_an_exception_comes_back_with_its_remote_traceback_and_frees_its_peers(ranks):
    before = ranks.run(pid, world_size=4)
    with pytest.raises(RanksError, match="ValueError: the culprit") as caught:
        ranks.run(raise_on, 2, world_size=4)
    assert "--- rank 2: Traceback" in str(caught.value)
    assert len(re.findall(r"--- then rank \d: RuntimeError", str(caught.value))) == 3
    assert "in raise_on" in caught.value.failures[2]
    assert ranks.run(pid, world_size=4) == before


def test_ranks_that_do_not_notice_a_failure_are_replaced_and_say_where_they_were(
    ranks, monkeypatch
):
    monkeypatch.setattr(pool_module, "GRACE_SECONDS", 2.0)
    before = ranks.run(pid, world_size=2)
    with pytest.raises(RanksError, match="the culprit") as caught:
        ranks.run(raise_on_while_others_sleep, 0, world_size=2)
    assert "in raise_on_while_others_sleep" in caught.value.failures[1]
    after = ranks.run(pid, world_size=2)
    assert after[0] == before[0]
    assert after[1] != before[1]


def test_a_killed_rank_fails_the_call_and_is_replaced(ranks):
    before = ranks.run(pid, world_size=2)
    with pytest.raises(RanksError, match=r"rank 1: the process died \(signal SIGKILL\)"):
        ranks.run(die_on, 1, world_size=2)
    after = ranks.run(pid, world_size=2)
    assert after[0] == before[0]
    assert after[1] != before[1]


def test_a_crash_shows_where_it_happened(ranks):
    with pytest.raises(RanksError, match=r"(?s)SIGABRT.*in crash"):
        ranks.run(crash, world_size=1)


def test_leaving_by_sys_exit_is_a_failure(ranks):
    with pytest.raises(RanksError, match="SystemExit: 3"):
        ranks.run(exit_on, 1, world_size=2)


def test_a_timeout_shows_the_stack_of_the_rank_that_hangs(ranks):
    with pytest.raises(RanksError, match=r"did not finish in 3 s") as caught:
        ranks.run(hang_on, 1, world_size=2, timeout=3)
    assert list(caught.value.failures) == [1]
    assert "in wait_for_a_message_that_never_comes" in caught.value.failures[1]
    assert ranks.run(whoami, world_size=2) == [(0, 2), (1, 2)]


def test_a_result_that_does_not_pickle_is_a_failure(ranks):
    with pytest.raises(RanksError, match="pickle"):
        ranks.run(return_what_does_not_pickle, world_size=1)


def test_a_function_that_does_not_pickle_is_refused(ranks):
    with pytest.raises(TypeError, match="top of a module"):
        ranks.run(lambda: None, world_size=1)


@pytest.mark.parametrize("world_size", [0, 9])
def test_a_world_that_does_not_fit_the_pool_is_refused(ranks, world_size):
    with pytest.raises(ValueError, match=f"world_size={world_size}"):
        ranks.run(whoami, world_size=world_size)


HOLDER = """
import sys, time
from tests.ranks import Ranks
from tests.test_ranks import whoami
if __name__ == "__main__":
    pool = Ranks()
    pool.run(whoami, world_size=2)
    print(*pool.pids().values(), flush=True)
    time.sleep(600) if sys.argv[1] == "sleep" else None
"""


@pytest.mark.parametrize("end", ["killed", "returned"])
def test_no_rank_outlives_the_test_process(tmp_path, end):
    script = tmp_path / "holder.py"
    script.write_text(HOLDER)
    root = Path(__file__).parent.parent
    holder = subprocess.Popen(
        [sys.executable, str(script), "sleep" if end == "killed" else "return"],
        env=os.environ | {"PYTHONPATH": str(root)},
        stdout=subprocess.PIPE,
        text=True,
    )
    with holder:
        pids = [int(word) for word in holder.stdout.readline().split()]
        assert len(pids) == 2
        if end == "killed":
            holder.kill()
    for rank_pid in pids:
        wait_until_gone(rank_pid)


def wait_until_gone(rank_pid: int) -> None:
    for _ in range(300):
        try:
            os.kill(rank_pid, 0)
        except ProcessLookupError:
            return
        if Path(f"/proc/{rank_pid}/stat").read_text().rsplit(")", 1)[-1].split()[0] == "Z":
            return  # dead; whoever adopted it hasn't collected it yet
        time.sleep(0.1)
    pytest.fail(f"rank process {rank_pid} is still there 30 s after its parent ended")
