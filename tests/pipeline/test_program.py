"""From a recipe to its program: by name, or from a file that fits the run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megagrid.config.load import load as load_config
from megagrid.config.rules import placement
from megagrid.errors import ConfigError
from megagrid.pipeline.program import evaluation_program, training_program
from megagrid.pipeline.schedules import (
    ScheduleError,
    forward_only,
    generate,
    lower,
    save,
    verify,
)
from tests.config import recipe


def program(tmp_path, *keys: str):
    """Of the tests' recipe, 8 microbatches on two ranks, with other keys."""
    config = load_config(recipe.write(tmp_path), ["parallel.pipeline_parallel_size=2", *keys])
    return training_program(config, placement(config))


def from_file(tmp_path, written, *keys: str):
    path = tmp_path / "mine.txt"
    save(written, path)
    return program(tmp_path, f"parallel.pipeline_schedule_file={path}", *keys)


def test_a_program_is_the_named_schedule_lowered(tmp_path):
    keys = ["parallel.pipeline_schedule=ZBV", "parallel.virtual_pipeline_size=2"]
    assert program(tmp_path, *keys) == lower(generate("ZBV", 2, 8))
    tied = program(tmp_path, *keys, "model.tied_embeddings=true")
    assert tied == lower(generate("ZBV", 2, 8), tied=True)


def test_microbatches_are_those_of_one_data_parallel_rank(tmp_path):
    keys = ["parallel.data_parallel_size=2", "train.micro_batch_size=2"]
    assert program(tmp_path, *keys) == lower(generate("1F1B", 2, 2))


@pytest.mark.parametrize("lowered", [False, True])
def test_a_file_gives_the_program_that_it_holds(tmp_path, lowered):
    schedule = replace(generate("ZB1P", 2, 8), name="mine")
    expected = lower(schedule)
    assert from_file(tmp_path, expected if lowered else schedule) == expected


THREE_STAGES = replace(
    forward_only(num_stages=3, num_microbatches=8, placement=(0, 1, 0)), forward_only=False
)

MISFITS = {
    "ranks": (generate("1F1B", 4, 8), (), "is for 4 ranks, .* is 2; set it to 4"),
    "stages": (generate("ZBV", 2, 8), (), "has 4 stages, .* makes 2; set parallel.virtual_.* to 2"),
    "odd stages": (THREE_STAGES, (), "has 3 stages, .* makes 2; it must have a multiple of"),
    "microbatches": (
        generate("1F1B", 2, 3),
        ("train.micro_batch_size=2",),
        "is for 3 microbatches, train.global_batch_size=8 makes 4; set it to 6",
    ),
    "evaluation": (
        forward_only(num_stages=2, num_microbatches=8, placement=(0, 1)),
        (),
        "has forwards alone; nothing would be trained",
    ),
    "tied": (
        lower(generate("1F1B", 2, 8), tied=True),
        (),
        "says tied: yes, model.tied_embeddings is false; make them agree",
    ),
}


@pytest.mark.parametrize(("written", "keys", "message"), MISFITS.values(), ids=MISFITS)
def test_a_file_for_another_run_is_refused_with_what_would_do(tmp_path, written, keys, message):
    with pytest.raises(ConfigError, match=message) as refused:
        from_file(tmp_path, written, *keys)
    assert "\n" not in str(refused.value)


KEY = "parallel.pipeline_schedule_file"


def test_a_file_that_breaks_a_rule_is_refused_with_key_path_and_place(tmp_path):
    written = generate("1F1B", 2, 8)
    late = written.orders[1][1:]
    with pytest.raises(ScheduleError) as refused:
        from_file(tmp_path, replace(written, orders=(written.orders[0], late)))
    path = tmp_path / "mine.txt"
    assert str(refused.value).startswith(f'{KEY}="{path}": ')
    assert "1F0 is missing" in str(refused.value)
    assert refused.value.rule and "▶" in refused.value.drawing


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "mine.txt: can't be read as a schedule"),
        ("schedule: mine\nhello\n", "mine.txt:2: 'hello' is no `key: value`"),
        ("schedule: mine\nmicrobatches: 1\nplacement: 0\nrank 0: 0X0\n", "mine.txt:4: '0X0' is no"),
    ],
    ids=["missing", "no field", "no action"],
)
def test_a_file_that_is_no_schedule_is_named_with_its_key(tmp_path, text, told):
    path = tmp_path / "mine.txt"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ScheduleError) as refused:
        program(tmp_path, f"{KEY}={path}")
    assert str(refused.value).startswith(f"{KEY}: {tmp_path}/{told}")


@pytest.mark.parametrize("name", ["1F1B", "ZBV"])
def test_an_evaluation_has_the_forwards_of_the_same_stages(name):
    training = lower(generate(name, 2, 5), tied=True)
    evaluation = evaluation_program(training)
    assert evaluation.placement == training.placement
    assert evaluation.num_microbatches == 5
    report = verify(evaluation)
    assert report.messages == training.num_microbatches * (2 if name == "ZBV" else 1)
