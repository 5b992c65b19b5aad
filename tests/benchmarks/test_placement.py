"""The benchmark of placement: its counts agree, and orders of ranks change no number."""

from __future__ import annotations

import json

import pytest

from benchmarks.hosts import why_no_hosts
from benchmarks.peers.spec import Layout
from benchmarks.placement.__main__ import (
    CLUSTERS,
    ORDERS,
    Outcome,
    Setting,
    Turn,
    main,
    markdown,
    parse,
    settings,
)

TINY = dict(hidden=32, layers=2, seq_length=32, micro_batch=1, global_batch=4)


def turn(setting: Setting, order: str, step_s: float) -> Turn:
    closed = Outcome(setting, []).closed_form(order)
    on_wire = [sum(sent[host].on_gloo for sent in closed.values()) for host in range(2)]
    return Turn(order, [step_s] * 3, [1.0], on_wire, on_wire, {}, 0.0)


def test_orders_put_other_axes_on_the_link():
    outcome = Outcome(Setting(Layout(tp=2, dp=2), **TINY), [])
    assert {order: set(outcome.closed_form(order)) for order in ORDERS} == {
        "aware": {"dp", "world"},
        "naive": {"tp", "world"},
    }
    assert CLUSTERS["aware"].node_of_rank == (0, 0, 1, 1)


def test_the_table_has_the_ratio_of_each_round_and_how_far_the_counts_are_apart():
    setting = Setting(Layout(tp=2, dp=2), rounds=2, **TINY)
    times = {"aware": (1.0, 2.0), "naive": (2.0, 6.0)}
    turns = [turn(setting, order, times[order][number]) for number in (0, 1) for order in ORDERS]
    outcome = Outcome(setting, turns)
    assert outcome.ratios == [2.0, 3.0]
    table = markdown([outcome])
    assert "2.50 (2.00 to 3.00)" in table
    assert "the counts are within 0.00% of the closed form" in table


def test_the_command_line_sizes_the_runs():
    (one,) = settings(parse(["--layouts", "tp2xdp2", "--rounds", "2", "--hidden", "128"]))
    assert (one.rounds, one.hidden, str(one.layout)) == (2, 128, "tp2xdp2")
    smoke, _ = settings(parse(["--smoke"]))
    assert (smoke.rounds, smoke.hidden) == (1, 32)


@pytest.mark.slow
def test_bytes_on_the_link_by_interface_ledger_and_closed_form_agree(tmp_path):
    """Small messages, of which gloo's headers and the words of a ledger's ranks are a part."""
    if reason := why_no_hosts():
        pytest.skip(reason)
    assert main(["--smoke", "--layouts", "tp2xdp2", "--out", str(tmp_path)]) == 0
    (written,) = json.loads((tmp_path / "placement.json").read_text())["outcomes"]
    setting = Setting(Layout(tp=2, dp=2), **TINY)
    for one in written["turns"]:
        closed = Outcome(setting, []).closed_form(one["order"])
        for host in range(2):
            expected = sum(sent[host].on_gloo for sent in closed.values())
            assert one["by_ledger"][host] == pytest.approx(expected, rel=1e-9)
            assert one["at_interface"][host] == pytest.approx(expected, rel=0.03)
