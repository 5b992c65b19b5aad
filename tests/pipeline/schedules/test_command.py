import argparse

import pytest

from megagrid.cli import main
from megagrid.pipeline.schedules import ScheduleError, command


def run(line):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(line.split()))


def test_drawn_schedule_comes_with_its_numbers(capsys):
    assert run("ZB1P --stages 4 --microbatches 8 --draw") == 0
    output = capsys.readouterr().out
    assert "ZB1P: 4 stages on 4 ranks, 8 microbatches" in output
    assert "in flight, per rank      4 4 4 4   (until the input gradient: 4 3 2 1)" in output
    assert "makespan                 27 " in output
    assert "bubble                   11.1% " in output
    assert "rank 3  .  .  .  F0 I0 F1 I1" in output


def test_saved_schedule_is_run_from_its_file(capsys, tmp_path):
    run(f"Interleaved1F1B --stages 2 --microbatches 4 --virtual 2 --save {tmp_path}/saved")
    first = capsys.readouterr().out
    run(f"--file {tmp_path}/saved --svg {tmp_path}/drawing.svg --png {tmp_path}/drawing.png")
    assert capsys.readouterr().out == first
    assert (tmp_path / "drawing.svg").read_text().startswith("<svg")
    assert (tmp_path / "drawing.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_costs_change_the_time(capsys):
    run("1F1B --stages 2 --microbatches 1 --cost 1 1 1 1/2")
    assert "makespan                 7 " in capsys.readouterr().out


def test_what_can_not_run_is_drawn_and_refused(capsys, tmp_path):
    path = tmp_path / "mine"
    path.write_text("schedule: mine\nmicrobatches: 1\nplacement: 0\nrank 0: 0B0 0F0\n")
    assert main(["schedule", "--file", str(path)]) == 2
    *drawing, error = capsys.readouterr().err.splitlines()
    assert drawing == ["  rank 0: ▶0B0◀  0F0"]
    assert "0B0 comes before 0F0" in error


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "state a schedule"),
        ("GPipe --file x", "state a schedule"),
        ("GPipe --stages 0", "must be 1 or more"),
        ("GPipe --svg /nowhere/x.svg", "/nowhere/x.svg: can't be written"),
        ("GPipe --microbatches 1000000000", "stay within 100000"),
        ("GPipe --cost 0 1 1 1", "forward=0 must be above 0"),
    ],
)
def test_mistakes_are_named(line, message):
    with pytest.raises(ScheduleError, match=message):
        run(line)


def test_a_picture_of_another_format_is_one_line(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["schedule", "1F1B", "--svg", "x.pdf"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--svg: 'x.pdf' must end in .svg; there is --png for .png" in line
    assert not list(tmp_path.iterdir())


def test_sizes_beside_a_file_are_refused(tmp_path):
    run(f"GPipe --save {tmp_path}/saved")
    with pytest.raises(ScheduleError, match="says its sizes"):
        run(f"--file {tmp_path}/saved --microbatches 3")
