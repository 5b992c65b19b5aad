"""Rules that tie keys together, each checked once, before ranks start.

A rule is a function that returns nothing, or raises a ConfigError that names the keys, their values
and what would work. `RULES` is the list; a new rule is a new function and a new row.
"""

from __future__ import annotations

from collections.abc import Callable

from megagrid.config.rules.files import (
    documents_are_of_files,
    evaluation_has_documents,
    export_needs_a_last_checkpoint,
    kept_checkpoints_are_saved_ones,
    masked_ids_are_in_the_vocabulary,
    paths_are_distinct,
    run_has_a_folder,
    synthetic_stands_alone,
    weights_blend_the_paths,
)
from megagrid.config.rules.grid import (
    fewest_ranks_are_no_more_than_all,
    placement,
    topology_file_orders_ranks,
)
from megagrid.config.rules.model import (
    dropout_is_for_gpt,
    gpt_has_no_keys_of_llama,
    kv_heads_divide_heads,
    rope_needs_even_head_dim,
    rope_scaling_is_stated_whole,
)
from megagrid.config.rules.pipeline import (
    every_stage_has_layers,
    layers_per_stage_adds_up,
    schedule_fits_the_chunks,
)
from megagrid.config.rules.precision import (
    float8_is_for_bf16,
    float8_multiplies_sixteens,
    guard_fills_its_window,
    loss_scale_begins_above_its_least,
    moments_can_be_rounded,
    recompute_interval_is_of_whole_layers,
    rollback_has_checkpoints,
)
from megagrid.config.rules.run import (
    batch_is_whole_microbatches,
    device_computes_the_precision,
    final_decay_fits_the_run,
    optimizer_reads_its_keys,
    run_has_one_length,
    schedule_can_be_written_down,
    width_scaling_is_adams,
)
from megagrid.config.rules.sharding import (
    gathered_weights_are_kept_or_dropped,
    reshard_size_divides_the_shards,
    shard_size_divides_the_ranks,
    shard_size_is_of_hybrid_shard,
    tied_table_stays_in_its_stage,
    units_are_smaller_than_the_model,
    unsharded_modules_exist,
)
from megagrid.config.rules.tensor import (
    context_parallel_splits_the_sequence,
    positions_reach_the_sequence,
    ring_keeps_all_probabilities,
    sequence_parallel_splits_the_sequence,
    tensor_parallel_splits_the_layer,
    ulysses_splits_the_heads,
)
from megagrid.config.schema import Config

__all__ = ["RULES", "check", "placement"]


def check(config: Config, world_size: int | None = None) -> None:
    """Hold `config` against every rule.

    Args:
        world_size: ranks that will run it. Without it and without parallel.data_parallel_size,
            rules about the dp axis are left for later.

    Raises:
        ConfigError: the first rule that is broken.
        GridError: the grid doesn't have `world_size` ranks.
    """
    if world_size is not None:
        config = _with_data_parallel_size(config, world_size)
    for rule in RULES:
        rule(config)


def _with_data_parallel_size(config: Config, world_size: int) -> Config:
    dp = placement(config, world_size).dp
    parallel = config.parallel.model_copy(update={"data_parallel_size": dp})
    return config.model_copy(update={"parallel": parallel})


RULES: tuple[Callable[[Config], None], ...] = (
    kv_heads_divide_heads,
    rope_needs_even_head_dim,
    dropout_is_for_gpt,
    gpt_has_no_keys_of_llama,
    rope_scaling_is_stated_whole,
    tensor_parallel_splits_the_layer,
    context_parallel_splits_the_sequence,
    ulysses_splits_the_heads,
    ring_keeps_all_probabilities,
    positions_reach_the_sequence,
    sequence_parallel_splits_the_sequence,
    schedule_fits_the_chunks,
    every_stage_has_layers,
    layers_per_stage_adds_up,
    fewest_ranks_are_no_more_than_all,
    topology_file_orders_ranks,
    shard_size_is_of_hybrid_shard,
    shard_size_divides_the_ranks,
    gathered_weights_are_kept_or_dropped,
    reshard_size_divides_the_shards,
    units_are_smaller_than_the_model,
    tied_table_stays_in_its_stage,
    unsharded_modules_exist,
    batch_is_whole_microbatches,
    schedule_can_be_written_down,
    run_has_one_length,
    final_decay_fits_the_run,
    width_scaling_is_adams,
    optimizer_reads_its_keys,
    device_computes_the_precision,
    recompute_interval_is_of_whole_layers,
    moments_can_be_rounded,
    float8_is_for_bf16,
    float8_multiplies_sixteens,
    loss_scale_begins_above_its_least,
    rollback_has_checkpoints,
    guard_fills_its_window,
    weights_blend_the_paths,
    masked_ids_are_in_the_vocabulary,
    paths_are_distinct,
    synthetic_stands_alone,
    documents_are_of_files,
    evaluation_has_documents,
    export_needs_a_last_checkpoint,
    kept_checkpoints_are_saved_ones,
    run_has_a_folder,
)
