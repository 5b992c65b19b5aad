from xml.etree import ElementTree

import pytest

from megagrid.pipeline.schedules import (
    Action,
    Costs,
    Kind,
    Span,
    generate,
    lower,
    render_charts,
    render_text,
    simulate,
)


def timeline(name, ranks, microbatches, **costs):
    program = lower(generate(name, ranks, microbatches))
    return simulate(program, Costs.of(program.num_stages, **costs)).timeline


def test_a_column_is_what_the_shortest_action_takes():
    drawing = render_text(timeline("1F1B", 2, 1, forward=2, input_grad=2, weight_grad=4))
    assert drawing.splitlines() == [
        "rank 0  F0 .  .  .  .  B0------",
        "rank 1  .  F0 B0------ .  .  .",
    ]


def test_two_digit_microbatches_and_ranks_keep_the_columns():
    lines = render_text(timeline("GPipe", 11, 11)).splitlines()
    assert lines[0].startswith("rank 0   F0  F1  ")
    assert lines[10].startswith("rank 10  .   .   ")


def test_a_measured_run_is_drawn_however_uneven():
    row = (Span(Action(0, Kind.F, 0), 0.0, 1e-6), Span(Action(0, Kind.B, 0), 1.0, 3.0))
    drawing = render_text((row,))
    assert len(drawing) < 1000
    assert "F0" in drawing and "B0-" in drawing


def test_svg_has_a_box_for_each_action_and_a_legend_of_the_kinds():
    drawn = timeline("ZB1P", 3, 4)
    root = ElementTree.fromstring(render_charts([("ZB1P <3 ranks>", drawn)]).svg())
    boxes = root.findall(".//{*}rect/{*}title")
    assert len(boxes) == sum(map(len, drawn)) == 3 * 4 * 3
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"F forward", "I input gradient", "W weight gradient", "ZB1P <3 ranks>"} <= set(texts)
    assert "B backward" not in texts


def test_charts_share_one_scale_of_time():
    """So that an action that takes as long is as wide, in whichever chart."""
    short, long = timeline("1F1B", 2, 2), timeline("1F1B", 2, 8, forward=2)
    root = ElementTree.fromstring(render_charts([("short", short), ("long", long)]).svg())
    widths = {}
    for box in root.iter("{http://www.w3.org/2000/svg}rect"):
        title = box.find("{*}title")
        if title is not None:
            action = title.text.partition(":")[0]
            widths.setdefault(action, []).append(float(box.get("width")))
    assert widths["0B0"][0] == widths["0B0"][1] > 0
    assert widths["0F0"][1] == pytest.approx(2 * widths["0F0"][0], abs=0.02)  # of a pixel
