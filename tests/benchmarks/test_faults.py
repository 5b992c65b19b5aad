"""Ten random faults, and what the benchmark makes of what it sees."""

from __future__ import annotations

import pytest

from benchmarks.faults import GRIDS, Fault, Outcome, Setting, harass, markdown, summary
from benchmarks.hosts import why_no_hosts
from benchmarks.peers.spec import Layout

PP2DP2, TP2PP2 = Layout(pp=2, dp=2), Layout(tp=2, pp=2)
ON_ONE_HOST = Setting(faults=5, per_run=5, seed=59, grids=(TP2PP2,), hosts=(1,))
ON_TWO_HOSTS = Setting(faults=5, per_run=5, seed=5, grids=(PP2DP2,), hosts=(2,))


def test_a_seed_draws_the_same_faults_and_cables_are_pulled_between_hosts_alone():
    setting = Setting(faults=100)
    assert setting.campaigns == Setting(faults=100).campaigns
    assert sum(len(campaign.faults) for campaign in setting.campaigns) == 100
    assert {campaign.layout for campaign in setting.campaigns} == set(GRIDS)
    drawn = {(c.hosts, fault.kind) for c in setting.campaigns for fault in c.faults}
    assert {kind for hosts, kind in drawn if hosts == 2} == {"kill", "stop", "term", "cut"}
    assert {kind for hosts, kind in drawn if hosts == 1} == {"kill", "stop", "term"}


def test_the_ten_below_are_of_all_kinds():
    drawn = [f for s in (ON_ONE_HOST, ON_TWO_HOSTS) for c in s.campaigns for f in c.faults]
    assert {fault.kind for fault in drawn} == {"kill", "stop", "term", "cut"}
    assert {fault.victim for fault in drawn} == {"rank", "launcher", "host"}


def test_the_table_has_a_row_for_each_fault():
    setting = Setting(faults=3, per_run=2)
    found = [
        (campaign, [Outcome(fault, "restarted", 4, 4, 1, 9.5, "told") for fault in campaign.faults])
        for campaign in setting.campaigns
    ]
    facts = summary(found)
    assert (facts["faults"], facts["runs"], facts["longest_seconds"]) == (3, 2, 9.5)
    text = markdown(setting, found)
    assert sum(line.startswith("| tp2xpp2") for line in text.splitlines()) == 3


def assert_all_are_met(setting: Setting, folder) -> None:
    """That nothing was lost or left is why `harass` returns."""
    found = harass(setting, folder)
    met: list[Fault] = [outcome.fault for _, outcomes in found for outcome in outcomes]
    assert met == [fault for campaign in setting.campaigns for fault in campaign.faults]


@pytest.mark.slow
def test_five_faults_on_one_host_cost_no_step_of_a_checkpoint_and_leave_nothing(tmp_path):
    assert_all_are_met(ON_ONE_HOST, tmp_path)


@pytest.mark.slow
def test_five_faults_on_two_hosts_cost_no_step_of_a_checkpoint_and_leave_nothing(tmp_path):
    if reason := why_no_hosts():
        pytest.skip(reason)
    assert_all_are_met(ON_TWO_HOSTS, tmp_path)
