"""Rules of data, checkpoints and folders."""

from __future__ import annotations

import re

from megagrid.config.dump import toml_value
from megagrid.config.rules.remedies import choice, multiples_near
from megagrid.config.schema import Config
from megagrid.errors import ConfigError


def weights_blend_the_paths(config: Config) -> None:
    """One share for each path, and not all of them zero."""
    paths, weights = config.data.paths, config.data.weights
    if weights is None:
        return
    if len(weights) != len(paths):
        raise ConfigError(
            f"data.weights={toml_value(weights)} has {len(weights)} entries for {len(paths)} "
            "data.paths; state one for each"
        )
    if not sum(weights) > 0:
        raise ConfigError(
            f"data.weights={toml_value(weights)} draws from none of the data.paths; make one "
            "larger than 0"
        )


def masked_ids_are_in_the_vocabulary(config: Config) -> None:
    """An id beyond it is a typing error: no label could be it. With all of it masked nothing would
    be learnt."""
    size, ids = config.model.vocab_size, config.data.mask_token_ids
    if ids and max(ids) >= size:
        raise ConfigError(
            f"data.mask_token_ids has {max(ids)}, and model.vocab_size={size} ends before it; "
            f"choose ids below {size}"
        )
    if len(set(ids)) == size:
        raise ConfigError(
            f"data.mask_token_ids has all ids below model.vocab_size={size}, which leaves nothing "
            "to learn; leave those out that are text"
        )


def paths_are_distinct(config: Config) -> None:
    """The same documents twice would be drawn twice as often, unseen."""
    for index, path in enumerate(config.data.paths):
        if not path:
            raise ConfigError(f'data.paths[{index}]="" is empty; write a prefix or "synthetic"')
        if path in config.data.paths[:index]:
            raise ConfigError(
                f"data.paths names {toml_value(path)} twice; keep one, and give it more of "
                "data.weights"
            )


def synthetic_stands_alone(config: Config) -> None:
    """Made-up tokens have no size to blend by, and no tokenizer to agree with."""
    paths = config.data.paths
    is_one_source = len(paths) == 1 and re.fullmatch(r"synthetic(:0*[1-9]\d*)?", paths[0])
    if config.data.is_synthetic and not is_one_source:
        raise ConfigError(
            f'data.paths={toml_value(paths)}: made-up tokens are one path alone, "synthetic" or '
            '"synthetic:N" for N samples'
        )


def documents_are_of_files(config: Config) -> None:
    """Made-up tokens are one document without end."""
    data = config.data
    for key in ("document_mask", "reset_positions"):
        if getattr(data, key) and data.is_synthetic:
            raise ConfigError(
                f"data.{key}=true has nothing to act on: data.paths={toml_value(data.paths)} has "
                "no documents; set it to false, or name files of `megagrid data prepare`"
            )


def evaluation_has_documents(config: Config) -> None:
    """An evaluation that is asked for needs documents that training leaves out."""
    interval, fraction = config.evaluation.interval, config.data.valid_fraction
    if interval and not fraction:
        raise ConfigError(
            f"evaluation.interval={interval} has nothing to evaluate on with data.valid_fraction="
            f"{fraction}; make it larger than 0, or evaluation.interval=0"
        )


def kept_checkpoints_are_saved_ones(config: Config) -> None:
    """What is kept of old checkpoints is so because of its step, and others go."""
    settings = config.checkpoint
    every, interval = settings.keep_every, settings.save_interval
    if every and not settings.keep_last:
        raise ConfigError(
            f"checkpoint.keep_every={every} keeps nothing that checkpoint.keep_last=0 doesn't keep "
            "anyway; choose keep_last=1 or more, or keep_every=0"
        )
    if every and interval and every % interval:
        raise ConfigError(
            f"checkpoint.keep_every={every} must be a multiple of checkpoint.save_interval="
            f"{interval}; choose {choice(multiples_near(every, interval))}"
        )


def export_needs_a_last_checkpoint(config: Config) -> None:
    """The exported folder is made of it."""
    settings = config.checkpoint
    if settings.export_hf is not None and not settings.save_at_end:
        raise ConfigError(
            f"checkpoint.export_hf={toml_value(settings.export_hf)} needs the checkpoint of the "
            "last step; set checkpoint.save_at_end=true"
        )


def run_has_a_folder(config: Config) -> None:
    """Everything that the run writes lies below one folder."""
    if not config.logging.run_dir.strip():
        raise ConfigError('logging.run_dir="" names no folder; write one, e.g. "runs/first"')
