"""Layers to stages, so that the slowest rank is as fast as can be in the memory it has. Pure.

    5 layers, 2 ranks, head as dear as 2 layers     rank 0: 0 1 2 3      rank 1: 4 + head
    the same in 4 stages that go round the ranks    rank 0: 0 1 | 3      rank 1: 2 | 4 + head

**Cost.** A stage's is the multiply-adds of its forward per token: its layers', and the head's on
the last. (The embedding is a look-up and has none.) A rank works off all its stages, so what bounds
the step is the dearest *rank*; of the splits that are equal in this, a cheaper dearest stage fills
the pipeline sooner.

**Memory.** `parallel.stage_memory_gb` caps what a process keeps from step to step of its stages:
each parameter, its gradient and the optimizer's states, the last in a dtype of their own,

    states(rank) = (2 x bytes + states x bytes of a state) x elements of its stages' layers and
                   ends, as split over tp and dp

with the vocabulary's padding, and dim 0 rounded up to a multiple of the ranks that split it as
fully_shard does (`megagrid.config.sharding` has them: under ZERO1 others for the moments than for
the rest). If layers differ in what `parallel.unsharded_modules` keeps whole of them, each counts
like the heaviest. Not in it: activations (`megagrid schedule` says of how many microbatches a rank
holds them), and gathered parameters, which pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megagrid.config.dump import toml_value
from megagrid.config.schema import Config, ModelConfig
from megagrid.config.sharding import Sharding
from megagrid.errors import ConfigError
from megagrid.grid.placement import Placement
from megagrid.plan.parameters import MASTER_BYTES, ModelShare, Unit, is_split, state_bytes

GB = 10**9


def stage_layers(config: Config, grid: Placement, ranks: Sequence[int]) -> list[range]:
    """The numbers of the layers of each stage, first to last.

    They are as the recipe states them, or else balanced.

    Args:
        ranks: the pipeline rank of each stage.

    Raises:
        ConfigError: the layers don't fit the stages, or the stages' states not into
            `parallel.stage_memory_gb`; names what would.
    """
    counts = config.parallel.layers_per_stage
    if counts is None:
        counts = _balanced_in_memory(config, grid, ranks)
    else:
        _check_stated(config, grid, ranks)
    firsts = [sum(counts[:stage]) for stage in range(len(counts))]
    return [range(first, first + count) for first, count in zip(firsts, counts, strict=True)]


def balanced(
    model: ModelConfig, ranks: Sequence[int], room: Sequence[int] | None = None
) -> list[int] | None:
    """Layers of each stage, at least one, that minimise the dearest rank's cost, and of those that
    do the dearest stage's; None if the layers don't fit.

    Args:
        ranks: the pipeline rank of each stage.
        room: the most layers of each rank; None: no limit.

    Raises:
        ConfigError: there are fewer layers than stages.
    """
    if len(ranks) > model.num_layers:
        raise ConfigError(
            f"{len(ranks)} pipeline stages can't share model.num_layers={model.num_layers}; use at "
            f"most {model.num_layers} stages, or state parallel.layers_per_stage with zeros"
        )
    extra = [0] * (len(ranks) - 1) + [head_cost(model)]
    return _fill(model.num_layers, ranks, layer_cost(model), extra, room)


def layer_cost(model: ModelConfig) -> int:
    """Multiply-adds of a layer's forward per token: matrices, and attention at full length."""
    attention_width = model.num_heads * model.head_dim
    projections = model.hidden_size * (
        2 * attention_width + 2 * model.num_kv_heads * model.head_dim
    )
    matrices = 3 if model.family == "llama" else 2
    scores = model.max_seq_length * attention_width
    return projections + matrices * model.hidden_size * model.ffn_hidden_size + scores


def head_cost(model: ModelConfig) -> int:
    """Multiply-adds of the output head per token."""
    return model.hidden_size * model.vocab_size


@dataclass(frozen=True)
class StateBytes:
    """What a process keeps from step to step, in bytes.

    Attributes:
        layer: for a layer.
        ends: for each stage, beside its layers: embedding, positions, last norm, head.
    """

    layer: int
    ends: tuple[int, ...]

    @classmethod
    def of(cls, config: Config, grid: Placement, num_stages: int) -> StateBytes:
        """Those of the recipe on the fullest rank of each stage."""
        parallel, model = config.parallel, config.model
        share = ModelShare(model, grid.tp, 0, parallel.sequence_parallel)
        sharding = Sharding.of(config, grid)

        def of_unit(unit: Unit, prefix: str = "") -> int:
            total = 0
            for parameter in unit:
                splits = (sharding.split, sharding.states_split)
                if not is_split(config, prefix + parameter.module):
                    splits = (1, 1)
                sizes = (
                    2 * MASTER_BYTES[config.train.precision],  # a weight, its gradient
                    len(parameter.states(config.optimizer.name)) * state_bytes(config),
                )
                for size, split in zip(sizes, splits, strict=True):
                    total += size * (parameter.gathered(split) // split)
            return total

        last = num_stages - 1
        ends = (share.ends(is_first=s == 0, is_last=s == last) for s in range(num_stages))
        layer, numbers = share.layer(), range(model.num_layers if parallel.unsharded_modules else 1)
        heaviest = max(of_unit(layer, f"layers.{number}.") for number in numbers)
        return cls(heaviest, tuple(map(of_unit, ends)))

    def by_rank(self, ranks: Sequence[int], counts: Sequence[int]) -> list[int]:
        """What each pipeline rank keeps, with `counts` layers in the stages."""
        held = [0] * (max(ranks) + 1)
        for rank, count, ends in zip(ranks, counts, self.ends, strict=True):
            held[rank] += count * self.layer + ends
        return held


def _fill(
    num_layers: int,
    ranks: Sequence[int],
    layer: int,
    extra: Sequence[int],
    room: Sequence[int] | None = None,
) -> list[int] | None:
    """One layer for each stage, then layer after layer to where it weighs least: to the lightest
    rank that has room, and there to the lightest stage; to the first of several.

    All layers weigh the same, so taking a layer from where it went and giving it to another rank
    would make that one at least as heavy: no split has a lighter heaviest rank. Ranks choose among
    each other only where they weigh the same, and then by their stages, hence the second minimum.

    Args:
        layer: what a layer weighs.
        extra: what each stage weighs without layers.
    """
    counts = [1] * len(ranks)
    stage_load = [layer + more for more in extra]
    rank_load, rank_layers = [0] * (max(ranks) + 1), [0] * (max(ranks) + 1)
    for stage, rank in enumerate(ranks):
        rank_load[rank] += stage_load[stage]
        rank_layers[rank] += 1
    if room is not None and any(n > most for n, most in zip(rank_layers, room, strict=True)):
        return None
    for _ in range(num_layers - len(ranks)):
        able = [s for s, r in enumerate(ranks) if room is None or rank_layers[r] < room[r]]
        if not able:
            return None
        stage = min(able, key=lambda s: (rank_load[ranks[s]], stage_load[s]))
        counts[stage] += 1
        stage_load[stage] += layer
        rank_load[ranks[stage]] += layer
        rank_layers[ranks[stage]] += 1
    return counts


def _balanced_in_memory(config: Config, grid: Placement, ranks: Sequence[int]) -> list[int]:
    cap = config.parallel.stage_memory_gb
    states = StateBytes.of(config, grid, len(ranks))
    room = None
    if cap is not None:
        without_layers = states.by_rank(ranks, [0] * len(ranks))
        room = [max(0, int(cap * GB) - held) // states.layer for held in without_layers]
    counts = balanced(config.model, ranks, room)
    if counts is not None:
        return counts
    lightest = _fill(config.model.num_layers, ranks, states.layer, states.ends)
    held = states.by_rank(ranks, lightest)
    rank = held.index(max(held))
    raise ConfigError(
        f"parallel.stage_memory_gb={cap} can't hold model.num_layers={config.model.num_layers} on "
        f"parallel.pipeline_parallel_size={len(held)}: however they are split, one rank's "
        f"parameters, gradients and optimizer states take {_gigabytes(held[rank])} GB or more "
        f"(pipeline rank {rank}'s with layers_per_stage={toml_value(lightest)}); set it to "
        f"{_gigabytes(held[rank])}, or raise one of the parallel sizes"
    )


def _check_stated(config: Config, grid: Placement, ranks: Sequence[int]) -> None:
    """Whether the layers that the recipe states for each stage are all layers, and fit."""
    parallel, model = config.parallel, config.model
    counts, cap = parallel.layers_per_stage, parallel.stage_memory_gb
    key = f"parallel.layers_per_stage={toml_value(counts)}"
    if len(counts) != len(ranks) or sum(counts) != model.num_layers:
        raise ConfigError(
            f"{key} must have {len(ranks)} numbers that add up to "
            f"model.num_layers={model.num_layers}"
        )
    held = StateBytes.of(config, grid, len(ranks)).by_rank(ranks, counts)
    if cap is not None and max(held) > cap * GB:
        rank = held.index(max(held))
        raise ConfigError(
            f"{key} makes pipeline rank {rank}'s parameters, gradients and optimizer states "
            f"{_gigabytes(held[rank])} GB, more than parallel.stage_memory_gb={cap}; set that to "
            f"{_gigabytes(held[rank])}, or give the rank fewer layers"
        )


def _gigabytes(size: int) -> str:
    """Rounded up, so that a cap of so many is enough: three digits after the point, or six."""
    digits = 3 if size >= GB // 100 else 6
    unit = GB // 10**digits
    return f"{-(-size // unit) / 10**digits:g}"
