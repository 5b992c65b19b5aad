"""Rules of the pipeline: schedules, stages and their layers."""

from __future__ import annotations

from megagrid.config.dump import toml_value
from megagrid.config.rules.remedies import more_or_fewer, times
from megagrid.config.schema import Config
from megagrid.errors import ConfigError


def schedule_fits_the_chunks(config: Config) -> None:
    """Interleaved1F1B takes two or more chunks a rank, ZBV two, the others one."""
    schedule, chunks = config.parallel.pipeline_schedule, config.parallel.virtual_pipeline_size
    if config.parallel.pipeline_schedule_file is not None:
        return
    if schedule == "Interleaved1F1B":
        if chunks < 2:
            raise ConfigError(
                f"parallel.virtual_pipeline_size={chunks} leaves "
                'parallel.pipeline_schedule="Interleaved1F1B" nothing to interleave; choose 2 or '
                'more, or parallel.pipeline_schedule="1F1B"'
            )
        return
    needed = 2 if schedule == "ZBV" else 1
    if chunks != needed:
        raise ConfigError(
            f"parallel.virtual_pipeline_size={chunks} doesn't fit parallel.pipeline_schedule="
            f'"{schedule}", which has {needed} a rank; choose {needed}, or '
            'parallel.pipeline_schedule="Interleaved1F1B"'
        )


def every_stage_has_layers(config: Config) -> None:
    """Without `layers_per_stage`: whoever wants an empty stage says so there."""
    parallel, layers = config.parallel, config.model.num_layers
    if parallel.layers_per_stage is None and parallel.num_stages > layers:
        chunks = parallel.virtual_pipeline_size
        raise ConfigError(
            f"parallel.pipeline_parallel_size={parallel.pipeline_parallel_size}{times(chunks)} "
            f"makes {parallel.num_stages} stages for model.num_layers={layers}; choose at most "
            f"{max(1, layers // chunks)} ranks, or state parallel.layers_per_stage with zeros"
        )


def layers_per_stage_adds_up(config: Config) -> None:
    """One entry a stage, zeros included, and no layer lost or invented."""
    parallel, layers = config.parallel, config.model.num_layers
    stated = parallel.layers_per_stage
    if stated is None:
        return
    if len(stated) != parallel.num_stages:
        raise ConfigError(
            f"parallel.layers_per_stage={toml_value(stated)} has {len(stated)} entries for "
            f"parallel.pipeline_parallel_size={parallel.pipeline_parallel_size}"
            f"{times(parallel.virtual_pipeline_size)} = {parallel.num_stages} stages; state one "
            "for each"
        )
    if sum(stated) != layers:
        raise ConfigError(
            f"parallel.layers_per_stage={toml_value(stated)} adds up to {sum(stated)}, not "
            f"model.num_layers={layers}; {more_or_fewer(layers - sum(stated))}"
        )
