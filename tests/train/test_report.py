"""`megagrid report`: a step whose actions take what they take on average is its own simulation."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from megagrid.cli import main
from megagrid.grid.placement import Placement
from megagrid.pipeline.schedules import Action, Costs, Kind, Span, generate, lower, simulate
from megagrid.train.report_command import mean_costs
from megagrid.train.trace import TraceLog

GRID = Placement(pp=2, dp=2)
EPOCH = 1_764_500_000.0


def write(run, program, timeline, placement=GRID, late: float = 0.0):
    """The trace of step 3 where each pipeline ran `timeline`, those of dp 1 in twice the time."""
    for rank in range(placement.world_size):
        at = placement.coordinate(rank)
        scale = 1 + at.dp
        log = TraceLog(run, interval=1, placement=placement, rank=rank, program=program)
        start = EPOCH + late * at.pp
        spans = [
            Span(s.action, start + float(s.start) * scale, start + float(s.end) * scale)
            for s in timeline[at.pp]
        ]
        log.write(3, spans)
        log.close()


def made(run, schedule="1F1B", microbatches=4, **costs):
    program = lower(generate(schedule, 2, microbatches))
    simulation = simulate(program, Costs.of(program.num_stages, **costs))
    write(run, program, simulation.timeline)
    return simulation


def report(capsys, *arguments) -> str:
    assert main(["report", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def figures(text: str, name: str) -> list[str]:
    (line,) = re.findall(rf"^ +{re.escape(name)}  +(.*)$", text, re.MULTILINE)
    return re.split(r"  +", line)


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "ZB1P", "ZBV"])
def test_measured_equals_simulated_where_every_action_takes_its_mean(tmp_path, capsys, schedule):
    uneven = [2.0, 1.0, 1.5, 3.0] if schedule == "ZBV" else [2.0, 3.0]
    simulation = made(tmp_path, schedule, forward=uneven, input_grad=2.0, weight_grad=1.0)
    text = report(capsys, tmp_path)
    bubble = f"{simulation.bubble_rate:.1%}"
    assert figures(text, "bubble")[:2] == [bubble, bubble]
    for rank, rate in enumerate(simulation.bubble_rates):
        assert figures(text, f"rank {rank}")[:2] == [f"{rate:.1%}"] * 2
    assert figures(text, "first start to last end")[:2] == [f"{simulation.makespan:.3g} s"] * 2


def test_unit_costs_show_the_bubble_of_the_formula(tmp_path, capsys):
    """(p-1) / (m+p-1) = 1/5, whatever actions really took."""
    made(tmp_path, forward=[5.0, 0.1])
    assert figures(report(capsys, tmp_path), "bubble")[2] == "20.0%"


def test_what_the_simulation_knows_nothing_of_shows_as_a_larger_bubble(tmp_path, capsys):
    program = lower(generate("1F1B", 2, 4))
    timeline = simulate(program, Costs.of(2, p2p=1)).timeline
    write(tmp_path, program, timeline)
    measured, simulated, unit = figures(report(capsys, tmp_path), "bubble")
    assert simulated == unit == "20.0%"
    assert float(measured[:-1]) > 20.0


def test_both_charts_are_drawn_at_one_scale(tmp_path, capsys):
    made(tmp_path, microbatches=2, forward=1.0, input_grad=1.0, weight_grad=1.0)
    rows = re.findall(r"^rank .*$", report(capsys, tmp_path), re.MULTILINE)
    assert (
        rows
        == [
            "rank 0  F0 F1 .  .  B0--- .  B1---",
            "rank 1  .  F0 B0--- F1 B1--- .  .",
        ]
        * 2
    )


def test_the_picture_has_the_measured_step_above_the_simulated_one(tmp_path, capsys):
    made(tmp_path / "run")
    report(capsys, tmp_path / "run", "--svg", tmp_path / "step.svg")
    root = ElementTree.parse(tmp_path / "step.svg").getroot()
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    titles = [text for text in texts if text.startswith("step 3")]
    assert [re.search(r"measured|simulated", title)[0] for title in titles] == [
        "measured",
        "simulated",
    ]
    boxes = root.findall(".//{*}rect/{*}title")
    assert len(boxes) == 2 * 2 * 2 * 4  # charts, ranks, kinds, microbatches


def test_each_pipeline_of_the_grid_can_be_shown(tmp_path, capsys):
    simulation = made(tmp_path, forward=1.0, input_grad=1.0, weight_grad=1.0)
    for dp in range(2):
        text = report(capsys, tmp_path, "--pipeline", f"{dp},0", "--step", "3")
        length = (1 + dp) * simulation.makespan
        assert figures(text, "first start to last end")[0] == f"{length:.3g} s"


def test_clocks_that_contradict_the_order_of_actions_are_told(tmp_path, capsys):
    program = lower(generate("1F1B", 2, 4))
    timeline = simulate(program).timeline
    write(tmp_path, program, timeline, late=-0.25)
    assert "rank 1 began 1F0 250 ms before 0F0 had ended" in report(capsys, tmp_path)
    write(tmp_path, program, timeline)
    assert "warning" not in report(capsys, tmp_path)


def test_means_are_by_stage_and_a_whole_backward_is_halved():
    row = (
        Span(Action(0, Kind.F, 0), 0.0, 1.0),
        Span(Action(0, Kind.F, 1), 1.0, 4.0),
        Span(Action(1, Kind.F, 0), 4.0, 5.0),
        Span(Action(1, Kind.B, 0), 5.0, 8.0),
        Span(Action(0, Kind.I, 0), 8.0, 9.0),
        Span(Action(0, Kind.W, 0), 9.0, 9.5),
    )
    costs = mean_costs((row,), num_stages=2)
    assert costs.forward == (2.0, 1.0)
    assert (costs.input_grad, costs.weight_grad) == ((1.0, 1.5), (0.5, 1.5))
    assert costs.p2p == (0,)


MISTAKES = {
    "no such run": (["nowhere"], r"nowhere: no such folder"),
    "never traced": (["."], r"no traces; train with logging\.trace_interval"),
    "no such step": (["run", "--step", "9"], r"has no step 9; it has 3"),
    "no such pipeline": (["run", "--pipeline", "2,0"], r"pipeline 2,0 isn't in a grid of dp 2"),
    "no coordinates": (["run", "--pipeline", "zero"], r"'zero' must be two coordinates"),
    "unwritable": (["run", "--svg", "no/such/folder.svg"], r"folder\.svg: can't be written"),
    "another format": (["run", "--png", "step.gif"], r"gif. must end in \.png; there is --svg"),
}


@pytest.mark.parametrize(("arguments", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    made(tmp_path / "run")
    assert main(["report", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line)
