"""From a recipe to the program that its pipeline runs. Pure, no torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megagrid.config.dump import toml_value
from megagrid.config.schema import Config
from megagrid.errors import ConfigError
from megagrid.grid.placement import Placement
from megagrid.pipeline.schedules import (
    Program,
    Schedule,
    ScheduleError,
    forward_only,
    generate,
    load,
    lower,
    verify,
)

FILE_KEY = "parallel.pipeline_schedule_file"


def microbatches(config: Config, placement: Placement) -> int:
    """Microbatches of one data-parallel rank in one step."""
    return config.train.global_batch_size // (config.train.micro_batch_size * placement.dp)


def training_program(config: Config, placement: Placement) -> Program:
    """What the pipeline's ranks do in a step: the recipe's schedule, lowered and verified.

    Raises:
        ScheduleError: the schedule can't run; says why, and draws it.
        ConfigError: see `training_schedule`.
    """
    schedule = training_schedule(config, placement)
    with _naming(_key(config)):
        if isinstance(schedule, Schedule):
            schedule = lower(schedule, tied=is_tied_over_stages(config))
        verify(schedule)
    return schedule


def training_schedule(config: Config, placement: Placement) -> Schedule | Program:
    """The schedule of the recipe, by name or from its file.

    Raises:
        ScheduleError: there is none of that name, or the file can't be read.
        ConfigError: the file's is for another pipeline or number of microbatches.
    """
    parallel = config.parallel
    if parallel.pipeline_schedule_file is None:
        return generate(
            parallel.pipeline_schedule,
            num_ranks=placement.pp,
            num_microbatches=microbatches(config, placement),
            virtual_stages=parallel.virtual_pipeline_size,
        )
    with _naming(FILE_KEY):  # `load` names the file
        schedule = load(Path(parallel.pipeline_schedule_file))
    _check_fit(config, placement, schedule)
    return schedule


def evaluation_program(training: Program) -> Program:
    """The forwards of the same stages on the same ranks, for as many microbatches."""
    return lower(
        forward_only(
            num_stages=training.num_stages,
            num_microbatches=training.num_microbatches,
            placement=training.placement,
        )
    )


def is_tied_over_stages(config: Config) -> bool:
    """Whether a tied embedding has its two ends in two stages."""
    return config.model.tied_embeddings and config.parallel.num_stages > 1


@contextmanager
def _naming(key: str) -> Iterator[None]:
    """What is wrong with the schedule in the block is told of the key that it comes from."""
    try:
        yield
    except ScheduleError as error:
        raise ScheduleError(f"{key}: {error}", error.rule, error.drawing) from None


def _key(config: Config) -> str:
    """The key that says what the schedule is, and its value."""
    parallel = config.parallel
    if parallel.pipeline_schedule_file is None:
        return f'parallel.pipeline_schedule="{parallel.pipeline_schedule}"'
    return f"{FILE_KEY}={toml_value(parallel.pipeline_schedule_file)}"


def _check_fit(config: Config, placement: Placement, schedule: Schedule | Program) -> None:
    """Whether a schedule from a file is for this run."""
    key, parallel = _key(config), config.parallel
    number = microbatches(config, placement)
    if schedule.num_ranks != placement.pp:
        raise ConfigError(
            f"{key} is for {schedule.num_ranks} ranks, parallel.pipeline_parallel_size is "
            f"{placement.pp}; set it to {schedule.num_ranks}"
        )
    if schedule.num_stages != parallel.num_stages:
        chunks, rest = divmod(schedule.num_stages, placement.pp)
        remedy = f"set parallel.virtual_pipeline_size to {chunks}"
        if rest:
            remedy = "it must have a multiple of the ranks"
        raise ConfigError(
            f"{key} has {schedule.num_stages} stages, parallel.pipeline_parallel_size="
            f"{placement.pp} x parallel.virtual_pipeline_size={parallel.virtual_pipeline_size} "
            f"makes {parallel.num_stages}; {remedy}"
        )
    if schedule.num_microbatches != number:
        batch = schedule.num_microbatches * config.train.micro_batch_size * placement.dp
        raise ConfigError(
            f"{key} is for {schedule.num_microbatches} microbatches, "
            f"train.global_batch_size={config.train.global_batch_size} makes {number}; set it to "
            f"{batch}"
        )
    if schedule.forward_only:
        raise ConfigError(f"{key} has forwards alone; nothing would be trained")
    if isinstance(schedule, Program) and schedule.tied != is_tied_over_stages(config):
        raise ConfigError(
            f"{key} says tied: {'yes' if schedule.tied else 'no'}, "
            f"model.tied_embeddings is {str(config.model.tied_embeddings).lower()}; make them agree"
        )
