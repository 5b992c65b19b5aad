"""What the ranks with the same parameters split among them, and when it is put together. Pure.

Those ranks are dp's, times cp's. Of d of them, d and s (`parallel.shard_size`) being numbers:

    strategy        weights, gradients        optimizer states   gathered
    FULL_SHARD      over d                    over d             each microbatch, each way
    SHARD_GRAD_OP   over d                    over d             once a step
    HYBRID_SHARD    over s, d / s times       over s             each microbatch, each way
    ZERO1           whole                     over d             the new weights, once a step
    NO_SHARD        whole                     whole              never

When weights are gathered is stated by two keys, of which a strategy is a preset:

    reshard_after_forward   hold_for_step
    true                    false           FULL_SHARD: gathered for each forward and backward
    n                       false           between the two they lie split over n neighbours
    false                   false           a backward finds what its forward has gathered
    false                   true            SHARD_GRAD_OP: stay until the step's last backward
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megagrid.config.schema import Config
from megagrid.grid.placement import Coordinate, Placement

Over = Literal["all", "node", "none"]


@dataclass(frozen=True)
class Strategy:
    """A row of the table above.

    Attributes:
        weights, states: over which ranks weights and gradients, and optimizer states, are split.
        holds: whether gathered weights stay for the step, where the recipe doesn't say.
    """

    weights: Over
    states: Over
    holds: bool

    @property
    def shards(self) -> bool:
        """Whether weights are split at all."""
        return self.weights != "none"


STRATEGIES = {
    "FULL_SHARD": Strategy("all", "all", holds=False),
    "SHARD_GRAD_OP": Strategy("all", "all", holds=True),
    "HYBRID_SHARD": Strategy("node", "node", holds=False),
    "ZERO1": Strategy("none", "all", holds=True),
    "NO_SHARD": Strategy("none", "none", holds=True),
}


@dataclass(frozen=True)
class Sharding:
    """The keys of a recipe about it, resolved for a grid.

    Attributes:
        axis: name of the axis of all ranks with the same parameters.
        ranks: along it.
        split: ranks that split a weight and its gradient: neighbours along the axis, which has
            ranks / split groups of them.
        states_split: ranks that split the optimizer's states.
        after_forward: what becomes of gathered weights: let go of (True), kept (False), or split
            over so many.
        hold: whether they are kept from a step's first forward to its last backward.
    """

    axis: str
    ranks: int
    split: int
    states_split: int
    after_forward: bool | int
    hold: bool

    @classmethod
    def of(cls, config: Config, placement: Placement) -> Sharding:
        """That of `config`. Without `parallel.shard_size` all ranks are taken for one node's."""
        parallel = config.parallel
        strategy = STRATEGIES[parallel.sharding_strategy]
        ranks = placement.dp * placement.cp
        over = {"all": ranks, "node": parallel.shard_size or ranks, "none": 1}
        hold = holds(config)
        after = parallel.reshard_after_forward
        return cls(
            axis="dp" if placement.cp == 1 else "dp_cp",
            ranks=ranks,
            split=over[strategy.weights],
            states_split=over[strategy.states],
            after_forward=not hold if after is None else after,
            hold=hold,
        )

    @property
    def split_axis(self) -> str:
        """Name of the axis that a weight is split over."""
        return self.axis if self.split == self.ranks else "dp_shard"

    @property
    def replica_axis(self) -> str:
        """Name of the axis along which ranks hold the same rows."""
        return self.axis if self.split == 1 else "dp_replicate"

    @property
    def replicas(self) -> int:
        """Ranks that hold the same rows."""
        return self.ranks // self.split

    def index(self, placement: Placement, coordinate: Coordinate) -> int:
        """Where along the axis a rank is."""
        return coordinate.dp * placement.cp + coordinate.cp


def holds(config: Config) -> bool:
    """`parallel.hold_for_step` as it is stated, or as the strategy and the other key imply it."""
    parallel = config.parallel
    if parallel.hold_for_step is not None:
        return parallel.hold_for_step
    if parallel.reshard_after_forward not in (None, False):
        return False
    return STRATEGIES[parallel.sharding_strategy].holds
