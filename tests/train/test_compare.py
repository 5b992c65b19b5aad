"""Where two runs part, told from their digests alone."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace

import pytest

from megagrid.cli import main
from megagrid.errors import DataError
from megagrid.train.compare import compare, default_tolerance, report
from megagrid.train.digest_records import NUMBERS, PASSES, StepDigests, distance
from megagrid.train.metrics import MetricsLog, read_records


def tensor(value: float, count: float = 4.0) -> list[float]:
    """A digest of a tensor of norm 2 whose projections are `value`."""
    return [count, value, 4.0, *[value] * (NUMBERS - 3)]


def step(number: int, *, settings: dict | None = None, **changes: dict) -> StepDigests:
    """Of a model with two places a pass; `changes` by pass."""
    passes = {
        "weights": {"w": tensor(1.0), "v": tensor(1.0)},
        "data": {"tokens": tensor(1.0), "valid tokens": [256.0]},
        "forward": {"embedding": tensor(1.0), "layers.0.output": tensor(1.0), "loss": [4.0]},
        "backward": {"layers.0.output": tensor(1.0), "embedding": tensor(1.0)},
        "gradients": {"w": tensor(1.0), "v": tensor(1.0), "norm of all": [1.0]},
        "update": {"learning rate": [1e-3], "clipping": [1.0], "w": tensor(1.0)},
    }
    for name, change in changes.items():
        passes[name] = {k: v for k, v in (passes[name] | change).items() if v is not None}
    return StepDigests(step=number, settings=settings or {}, passes=passes)


@pytest.mark.parametrize("name", PASSES)
def test_runs_part_at_the_first_place_of_the_first_pass_that_differs(name):
    """What is after it differs too, and isn't named."""
    changes = {}
    for later in list(PASSES)[list(PASSES).index(name) :]:
        changes[later] = dict.fromkeys(list(step(1).passes[later])[1:], tensor(1.5))
        changes[later] |= {p: [7.0] for p, v in step(1).passes[later].items() if len(v) == 1}
    if name == "update":
        changes["update"]["learning rate"] = [1e-3]
    other = step(2, **changes)
    found = compare([step(1), step(2)], [step(1), other], 1e-4)
    number, one = found.parting
    places = list(step(1).passes[name])
    assert (number, one.name, one.first, one.before) == (2, name, places[1], places[0])
    *_, last = report(found, 1e-4)
    assert last == (
        f"A and B part in step 2 in the pass {name} ({PASSES[name]}), at {places[1]}, "
        f"after {places[0]}, which agrees"
    )


def test_equal_runs_are_equal_within_the_tolerance():
    other = step(1, forward={"embedding": tensor(1.0 + 1e-5)})
    found = compare([step(1)], [other], 1e-4)
    assert found.parting is None
    assert found.steps[1][2].largest == (pytest.approx(0.5e-5), "embedding")
    *_, last = report(found, 1e-4)
    assert last == "A and B are equal in 1 step, within 0.0001"
    assert compare([step(1)], [other], 1e-6).parting[1].first == "embedding"


def test_steps_are_those_that_both_have_and_no_number_is_far_from_all():
    nan = step(3, forward={"embedding": tensor(float("nan"))})
    found = compare([step(1), step(3)], [step(2), nan], 1e-4)
    assert list(found.steps) == [3] and found.parting[1].first == "embedding"
    with pytest.raises(DataError, match="A has digests of steps 1, B of steps 2"):
        compare([step(1)], [step(2)], 1e-4)


def test_places_that_one_run_lacks_are_told():
    found = compare([step(1, weights={"v": None})], [step(1, forward={"norm": [1.0]})], 1e-4)
    assert found.only == ["weights: v", "forward: norm"]
    assert found.parting is None


def test_what_is_in_layers_is_left_out_where_one_run_has_compiled_them():
    inside, outside = "layers.0.attention", "layers.0.output"
    a = step(1, forward={inside: tensor(1.0), outside: tensor(2.0)}, settings={})
    b = step(1, forward={outside: tensor(2.0)}, settings={"train.compile": True})
    found = compare([a], [b], 1e-4)
    assert not found.only and found.parting is None
    assert any("compiled" in line for line in report(found, 1e-4))
    assert compare([a], [replace(b, settings={})], 1e-4).only == [f"forward: {inside}"]


def test_parameters_whose_gradients_are_rounding_are_left_out_and_said_to_be():
    """They part, as AdamW makes whole steps of them, but the runs don't."""

    def with_noise(sign: float) -> StepDigests:
        noise = [4.0, sign * 1e-9, 1e-18, *[sign * 1e-9] * (NUMBERS - 3)]
        return step(1, gradients={"v": noise}, update={"v": tensor(sign)})

    found = compare([with_noise(1.0)], [with_noise(-1.0)], 1e-4)
    assert found.parting is None
    told = [line.strip() for line in report(found, 1e-4) if "left out" in line]
    assert told == ["1 left out, whose gradients are too small to tell from rounding: v"] * 2


def test_settings_that_differ_are_told_and_grids_are_none():
    a = step(1, settings={"grid": "tp 1", "optimizer.lr": 1e-3, "train.precision": "fp32"})
    b = step(1, settings={"grid": "tp 2", "optimizer.lr": 2e-3, "train.precision": "bf16"})
    found = compare([a], [b], 1e-4)
    assert list(found.settings) == ["optimizer.lr", "train.precision"]
    lines = list(report(found, 1e-4))
    assert lines[0] == "settings: 2 keys differ"
    assert lines[1] == "  optimizer.lr     0.001  0.002"
    assert default_tolerance([a], [b]) == default_tolerance([b], [a]) == 0.1


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([1.0], [1.0], 0.0),
        ([1.0], [0.5], 0.5),
        ([0.0], [0.0], 0.0),
        (["NaN"], [1.0], float("inf")),
        (tensor(1.0), tensor(2.0), 0.5),
        (tensor(1.0), tensor(1.0, count=5.0), float("inf")),
        (tensor(1.0), [1.0], float("inf")),
    ],
    ids=str,
)
def test_distance_is_relative_to_the_larger(a, b, expected):
    assert distance(a, b) == expected


def test_a_file_of_digests_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "digests.jsonl"
    written = [step(1, settings={"train.precision": "fp32"}), step(2, forward={"loss": [5.0]})]
    log = MetricsLog(path, 0, StepDigests)
    for one in written:
        log.write(one)
    log.write(step(3, forward={"loss": [float("nan")]}))
    log.close()
    *read, last = read_records(path, StepDigests)
    assert read == written
    assert last.passes["forward"]["loss"] == ["NaN"]
    assert compare([last], [last], 1e-4).parting is None


@pytest.mark.parametrize(
    "line", ['{"step": 1, "passes": {"data": {"x": [1, 2]}}}', '{"step": "a"}']
)
def test_a_line_that_is_no_digest_is_named(tmp_path, line, capsys):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "digests.jsonl").write_text(f'{line}\n{{"step": 2}}\n')
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    assert "digests.jsonl:1: not a step's digest's record" in capsys.readouterr().err


def test_the_exit_code_says_whether_they_are_equal(tmp_path, capsys):
    for name, loss in (("a", 4.0), ("b", 4.0), ("c", 5.0)):
        (tmp_path / name).mkdir()
        line = json.dumps({"step": 1, "passes": {"forward": {"loss": [loss]}}})
        (tmp_path / name / "digests.jsonl").write_text(line + "\n")
    a, b, c = (str(tmp_path / name) for name in "abc")
    assert main(["compare", a, b]) == 0
    assert main(["compare", a, c]) == 1
    assert main(["compare", a, c, "--tolerance", "0.5"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["{run}"], "is a run: name another"),
        (["{run}", "nowhere.toml"], "can't read recipe nowhere.toml"),
        (["{run}", "{empty}"], "train with logging.digest_interval=N"),
        (["{run}", "{run}", "train.seed=1"], "train.seed=1 is for a recipe, and A is the run"),
        (["{run}", "{run}", "--steps", "0"], "choose at least 1"),
        (["{run}", "{run}", "--tolerance", "-1"], "must be 0 or more"),
        (["{run}", "{recipe}", "--b", "train.step=1"], "did you mean train.steps"),
        (["{recipe}", "--b", "train.step=1"], "did you mean train.steps"),
        (["{recipe}", "--b", "parallel.pipeline_parallel_size=99"], "makes 99 stages"),
        (["{recipe}", "--b", 'data.paths=["nowhere/x"]'], "megagrid data prepare"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_answered_in_a_line(tmp_path, arguments, told, capsys, monkeypatch):
    """Before any recipe is run."""
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a recipe was run"))
    run, empty = tmp_path / "run", tmp_path / "empty"
    run.mkdir()
    empty.mkdir()
    (run / "digests.jsonl").write_text('{"step": 1, "passes": {"forward": {"loss": [1.0]}}}\n')
    recipe = tmp_path / "r.toml"
    recipe.write_text(
        '[model]\npreset = "tiny-llama"\n[train]\nseq_length = 8\nglobal_batch_size = 1\n'
        'steps = 1\n[data]\npaths = ["synthetic"]\n[logging]\nrun_dir = "unused"\n'
    )
    words = [word.format(run=run, empty=empty, recipe=recipe) for word in arguments]
    assert main(["compare", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and told in line
