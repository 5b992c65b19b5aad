"""The comparison itself: it sees what differs, and leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.peers.compare import CurvesDifferError, check_curves
from benchmarks.peers.launch import RunError, execute, marked
from benchmarks.peers.report import Run, ratios
from benchmarks.peers.spec import Job, Layout, ModelShape, Recipe
from benchmarks.peers.systems import SYSTEMS, Entry


def records(*pairs: tuple[float, float]) -> list[dict[str, float]]:
    return [
        {"step": step, "loss": loss, "grad_norm": norm}
        for step, (loss, norm) in enumerate(pairs, start=1)
    ]


def job(folder: Path, layout: Layout | None = None) -> Job:
    return Job(ModelShape(), layout or Layout(), Recipe(), "", "", str(folder))


@pytest.mark.parametrize("text", ["one", "tp2", "tp2xpp2", "tp2xpp2xdp4"])
def test_a_layout_reads_what_it_writes(text):
    assert str(Layout.parse(text)) == text


@pytest.mark.parametrize("text", ["", "tp", "tp0", "tp2xtp2", "cp2", "tp2x", "2x2", "onextp2"])
def test_other_layouts_are_refused(text):
    with pytest.raises(ValueError, match="layout"):
        Layout.parse(text)


@pytest.mark.parametrize(
    ("layout", "rule"),
    [
        (Layout(tp=4), "KV heads: 4 doesn't divide 2"),
        (Layout(pp=3), "layers: 3 doesn't divide 8"),
        (Layout(dp=3), "batch size: 3 doesn't divide 8"),
        (Layout(pp=4, dp=4), "2 microbatches don't fill 4 stages"),
    ],
)
def test_a_layout_that_does_not_fit_names_rule_and_numbers(tmp_path, layout, rule):
    with pytest.raises(ValueError, match=rule):
        job(tmp_path, layout).check()


def test_a_job_survives_its_file(tmp_path):
    written = job(tmp_path, Layout(tp=2))
    assert Job.load(written.save()) == written


CURVE = records((9.0, 2.0), (8.0, 1.0))


@pytest.mark.parametrize(
    "other",
    [
        records((9.0, 2.0), (8.0002, 1.0)),
        records((9.0, 2.0), (8.0, 1.001)),
        records((9.0, 2.0), (float("nan"), 1.0)),
        records((9.0, 2.0), (8.0, float("nan"))),
        records((9.0, 2.0)),
    ],
    ids=["loss", "norm", "nan loss", "nan norm", "fewer steps"],
)
def test_curves_that_part_are_told(other):
    with pytest.raises(CurvesDifferError):
        check_curves("other", other, "first", CURVE)


def test_curves_within_rounding_agree():
    check_curves("other", records((9.00001, 2.00001), (7.99999, 1.00001)), "first", CURVE)


def test_ratios_are_taken_within_a_round():
    def run(system: str, number: int, speed: float) -> Run:
        return Run("tp2", system, number, 2, 1, 0.0, [], speed, 0.0, [], [], [], 0.0)

    runs = [run("a", 1, 20.0), run("b", 1, 10.0), run("a", 2, 3.0), run("b", 2, 1.0)]
    assert ratios(runs, "tp2", "a", "b") == [2.0, 3.0]


@pytest.mark.slow
def test_a_run_over_its_time_is_ended_with_all_its_ranks(tmp_path, monkeypatch):
    monkeypatch.setattr("uuid.UUID.hex", "mark-of-this-test")
    sleeper = Entry("timeit", ["-n", "1", "-r", "1", "import time; time.sleep(600)"])
    with pytest.raises(RunError, match="no end after 10 s"):
        execute(job(tmp_path, Layout(tp=2)), sleeper, threads=1, time_limit_s=10)
    assert list(marked("mark-of-this-test")) == []


@pytest.mark.slow
def test_a_run_that_fails_shows_the_end_of_its_log(tmp_path):
    with pytest.raises(RunError, match="NameError: name 'nonsense'"):
        execute(job(tmp_path), Entry("timeit", ["nonsense"]), threads=1, time_limit_s=60)


@pytest.mark.slow
def test_all_systems_train_alike_on_two_axes():
    """The command of the README, tiny: it fails unless all losses and norms agree."""
    pytest.importorskip("transformers")
    options = ["--smoke", "--rounds", "1", "--layouts", "tp2xpp2", "--threads", "1"]
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.peers", *options],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    for system in SYSTEMS:
        assert f"| tp2xpp2 | {system} |" in result.stdout
