"""Rules of what data-parallel ranks split, and in which units."""

from __future__ import annotations

import re

from megagrid.config import suggest
from megagrid.config.dump import toml_value
from megagrid.config.modules import end_modules, is_unsharded, layer_modules, matches
from megagrid.config.rules.grid import placement
from megagrid.config.rules.remedies import choice, divisors
from megagrid.config.schema import Config
from megagrid.config.sharding import STRATEGIES, Sharding
from megagrid.errors import ConfigError


def shard_size_is_of_hybrid_shard(config: Config) -> None:
    """The others split over all ranks that there are, or over none."""
    parallel = config.parallel
    if parallel.shard_size is not None and parallel.sharding_strategy != "HYBRID_SHARD":
        raise ConfigError(
            f"parallel.shard_size={parallel.shard_size} isn't read under "
            f'parallel.sharding_strategy="{parallel.sharding_strategy}"; clear it with none, or '
            'choose "HYBRID_SHARD"'
        )


def shard_size_divides_the_ranks(config: Config) -> None:
    """The ranks with the same parameters fall into groups of it."""
    parallel = config.parallel
    size, dp, cp = parallel.shard_size, parallel.data_parallel_size, parallel.context_parallel_size
    if size is not None and dp is not None and dp * cp % size:
        times = f" x parallel.context_parallel_size={cp} = {dp * cp}" if cp > 1 else ""
        raise ConfigError(
            f"parallel.shard_size={size} must divide parallel.data_parallel_size={dp}{times}; "
            f"choose {choice(divisors(dp * cp))}"
        )


def gathered_weights_are_kept_or_dropped(config: Config) -> None:
    """The two keys about them agree with each other and with the strategy."""
    parallel = config.parallel
    after, hold, name = (
        parallel.reshard_after_forward,
        parallel.hold_for_step,
        parallel.sharding_strategy,
    )
    stated = {"reshard_after_forward": after, "hold_for_step": hold}
    for key, value in stated.items():
        if value is not None and not STRATEGIES[name].shards:
            raise ConfigError(
                f"parallel.{key}={toml_value(value)} has nothing to act on: under "
                f'parallel.sharding_strategy="{name}" every rank has whole parameters; clear it '
                'with none, or choose "FULL_SHARD"'
            )
    if hold and after not in (None, False):
        raise ConfigError(
            f"parallel.hold_for_step=true keeps what parallel.reshard_after_forward="
            f"{toml_value(after)} lets go of; set one of them to false"
        )
    if name == "SHARD_GRAD_OP" and (hold is False or after not in (None, False)):
        key = "hold_for_step" if hold is False else "reshard_after_forward"
        raise ConfigError(
            f"parallel.{key}={toml_value(stated[key])} contradicts "
            'parallel.sharding_strategy="SHARD_GRAD_OP", which keeps parameters gathered for a '
            'step; choose "FULL_SHARD"'
        )


def reshard_size_divides_the_shards(config: Config) -> None:
    """An integer parallel.reshard_after_forward lies between one rank and all that split."""
    parallel = config.parallel
    size, dp = parallel.reshard_after_forward, parallel.data_parallel_size
    if size is None or isinstance(size, bool) or dp is None:
        return
    split = Sharding.of(config, placement(config)).split
    sizes = divisors(split)[1:-1]
    if size not in sizes:
        others = "true (let go of) or false (kept)"
        raise ConfigError(
            f"parallel.reshard_after_forward={size} must divide the {split} ranks that split a "
            "parameter, and be neither 1 nor all; choose "
            + (f"{', '.join(map(str, sizes))}, {others}" if sizes else others)
        )


def units_are_smaller_than_the_model(config: Config) -> None:
    """Everything in one unit would be gathered whole, and nothing saved."""
    blocks, layers = config.parallel.blocks_per_unit, config.model.num_layers
    if blocks > layers:
        raise ConfigError(
            f"parallel.blocks_per_unit={blocks} is more than model.num_layers={layers}; choose at "
            f"most {layers}"
        )


def tied_table_stays_in_its_stage(config: Config) -> None:
    """A table that is embedding and head of one stage is needed from its begin to its end."""
    model, parallel = config.model, config.parallel
    for key in ("wrap_embedding", "wrap_head"):
        if getattr(parallel, key) and model.tied_embeddings and parallel.num_stages == 1:
            raise ConfigError(
                f"parallel.{key}=true has nothing to act on: under model.tied_embeddings=true the "
                "one stage needs the table from begin to end; set it to false, or make two or more "
                "stages"
            )


def unsharded_modules_exist(config: Config) -> None:
    """Each pattern names some of the model's modules, and together they leave something to split.

    A name that is nowhere would silently be sharded.
    """
    model, parallel = config.model, config.parallel
    patterns, name = parallel.unsharded_modules, parallel.sharding_strategy
    if not patterns:
        return
    if not STRATEGIES[name].shards:
        raise ConfigError(
            f"parallel.unsharded_modules={toml_value(patterns)} has nothing to act on under "
            f'parallel.sharding_strategy="{name}"; clear it with [], or choose "FULL_SHARD"'
        )
    of_layer = list(layer_modules(model))
    modules = [*end_modules(model)]
    modules += [f"layers.{n}.{module}" for n in range(model.num_layers) for module in of_layer]
    for index, pattern in enumerate(patterns):
        if not any(matches(module, [pattern]) for module in modules):
            known = [*end_modules(model), *(f"layers.*.{module}" for module in of_layer)]
            near = suggest.closest(re.sub(r"\d+", "*", pattern), known)
            last = model.num_layers - 1
            layer = re.match(r"layers\.(\d+)\b", pattern)
            if layer and int(layer[1]) > last:
                raise ConfigError(
                    f"parallel.unsharded_modules[{index}]={toml_value(pattern)} names no module: "
                    f"layers end at {last} with model.num_layers={model.num_layers}"
                )
            raise ConfigError(
                f"parallel.unsharded_modules[{index}]={toml_value(pattern)} names no module; "
                + (f"did you mean {toml_value(near)}? " if near else "")
                + f"there are {', '.join(known)}"
            )
    if all(is_unsharded(module, model, patterns) for module in modules):
        raise ConfigError(
            f"parallel.unsharded_modules={toml_value(patterns)} leaves nothing to shard; name "
            'fewer, or choose parallel.sharding_strategy="NO_SHARD"'
        )
