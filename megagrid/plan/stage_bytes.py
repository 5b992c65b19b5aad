"""Sizes of what a stage of a rank holds in the course of a step, in closed form. Pure.

At its ends, beside its layers (`megagrid.plan.activations`), a stage keeps of each microbatch

    input                e n' h                     as it was received; the first layer's own
    last norm            e n' h + its own + e n h   input, output
    loss                 r n V                      the probabilities, V columns of a rank
    … in chunks of c     e n h + r V h              its gradients, made along with it, in place of
                                                    the norm's output

with n, n', e as there and r the bytes of the master dtype. With `memory.activation_offload` the
host has what the layers keep, with `memory.cpu_offload` this rank's shards.
"""

from __future__ import annotations

from functools import cached_property

from megagrid.config.schema import Config, Recompute
from megagrid.config.sharding import Sharding
from megagrid.grid.placement import Coordinate, Placement
from megagrid.plan.activations import layer_activations
from megagrid.plan.comm import COMPUTE_BYTES
from megagrid.plan.flops import recomputed_layers
from megagrid.plan.parameters import MASTER_BYTES, ModelShare
from megagrid.plan.units import REST, PlannedUnit, stage_units


class StageBytes:
    """Of a stage of the rank at `coordinate`.

    Args:
        layers: the stage's, by their numbers in the model.
        fused_norms: an RMSNorm is one kernel, as on CUDA.

    Attributes:
        element, master: bytes of what computes, and of what is reduced and updated.
        narrow: `element`, or 0 where nothing is cast.
        tokens, shared: n, n'.
        chain: the units that are gathered one after the other; `rest` is there throughout.
    """

    def __init__(
        self,
        config: Config,
        placement: Placement,
        coordinate: Coordinate,
        layers: range,
        *,
        is_first: bool,
        is_last: bool,
        fused_norms: bool,
    ) -> None:
        self.config, self.placement = config, placement
        self.layers, self.is_first, self.is_last = layers, is_first, is_last
        self.fused_norms = fused_norms
        self._rows: dict[Recompute, dict[str, int]] = {}
        self.sharding = Sharding.of(config, placement)
        self._index = self.sharding.index(placement, coordinate) % self.sharding.split
        self.share = ModelShare(
            config.model, placement.tp, coordinate.tp, config.parallel.sequence_parallel
        )
        self.element = COMPUTE_BYTES[config.train.precision]
        self.master = MASTER_BYTES[config.train.precision]
        self.narrow = self.element if self.element < self.master else 0
        self.tokens = config.train.seq_length // placement.cp * config.train.micro_batch_size
        splits = config.parallel.sequence_parallel and placement.tp > 1
        self.shared = self.tokens // placement.tp if splits else self.tokens
        units = stage_units(config, self.share, layers, is_first=is_first, is_last=is_last)
        self.chain = [unit for unit in units if unit.name != REST]
        self.rest = next((unit for unit in units if unit.name == REST), PlannedUnit(REST, (), ()))

    # --- Parameters, and their gradients ----------------------------------------------------------

    @property
    def is_wrapped(self) -> bool:
        """Whether fully_shard has the stage."""
        return self.sharding.ranks > 1 or self.narrow > 0 or self.config.memory.cpu_offload

    def unit_of(self, layer: int) -> int:
        """Where in the chain the unit of that layer is."""
        first = sum(unit.name == "embedding" for unit in self.chain)
        return first + (layer - self.layers.start) // self.config.parallel.blocks_per_unit

    def gathered(self, *units: PlannedUnit) -> int:
        """What units take when they are gathered, or cast."""
        return self.element * sum(map(self._elements, units)) if self.is_wrapped else 0

    def buffers(self, *units: PlannedUnit) -> int:
        """Of the messages that they are gathered by; one rank has none."""
        return self.gathered(*units) if self.sharding.split > 1 else 0

    def reduced(self, *units: PlannedUnit) -> int:
        """What their gradients are reduced from."""
        return self.master * sum(map(self._elements, units)) if self.is_wrapped else 0

    def _elements(self, unit: PlannedUnit) -> int:
        split = sum(parameter.gathered(self.sharding.split) for parameter in unit.split)
        return split + sum(parameter.gathered(1) for parameter in unit.whole)

    def gradients(self, *units: PlannedUnit, are_shards: bool = False) -> int:
        """Of whole parameters, or of this rank's shards, on the device."""
        if are_shards and self.config.memory.cpu_offload:
            return 0
        split, index = (self.sharding.split, self._index) if are_shards else (1, 0)
        elements = sum(p.held(split, index) for unit in units for p in unit.split)
        return self.master * (elements + sum(p.held(1, 0) for unit in units for p in unit.whole))

    @cached_property
    def layer_elements(self) -> int:
        """Of a layer's parameters."""
        return sum(parameter.held(1, 0) for parameter in self.share.layer())

    @property
    def is_tied(self) -> bool:
        """Whether one table of the stage is embedding and head."""
        return self.config.model.tied_embeddings and self.is_first and self.is_last

    @cached_property
    def head_elements(self) -> int:
        """Of the table that makes logits, if it is in the last unit of all."""
        table = "embedding" if self.is_tied else "head"
        return sum(p.held(1, 0) for p in self.rest.parameters if p.module == table)

    # --- Activations ------------------------------------------------------------------------------

    @cached_property
    def hidden(self) -> int:
        """A microbatch's hidden states, between layers."""
        return self.element * self.shared * self.config.model.hidden_size

    @property
    def input(self) -> int:
        """What the stage before has sent."""
        return 0 if self.is_first else self.hidden

    def recompute(self, layer: int) -> Recompute:
        """What that layer does."""
        memory = self.config.memory
        one = range(layer, layer + 1)
        is_again = recomputed_layers(one, memory.recompute, memory.recompute_interval)
        return memory.recompute if is_again else "none"

    def rows(self, recompute: Recompute) -> dict[str, int]:
        """What a layer keeps."""
        if recompute not in self._rows:
            self._rows[recompute] = layer_activations(
                self.config, self.placement, recompute, fused_norms=self.fused_norms
            )
        return self._rows[recompute]

    def kept(self, layer: int) -> int:
        """What that layer keeps, beside the stage's input."""
        rows = self.rows(self.recompute(layer))
        is_input = layer == self.layers.start and not self.is_first
        return sum(rows.values()) - (rows.get("input", 0) if is_input else 0)

    @cached_property
    def all_layers(self) -> int:
        """What all of them keep."""
        return sum(map(self.kept, self.layers))

    @property
    def hosts_layers(self) -> bool:
        """Whether that lies on the host between their forward and their backward."""
        return self.config.memory.activation_offload

    def passed(self, layer: int) -> int:
        """On the device of what layers keep, when a forward or a backward is in that one: of all
        from the first to it; of it and the one before, if the others' lies on the host."""
        first = self.layers.start
        if self.hosts_layers:
            first = max(first, layer - 1)
        return sum(map(self.kept, range(first, layer + 1)))

    @cached_property
    def in_flight(self) -> int:
        """On the device, of a microbatch between its forward and its backward."""
        of_layers = 0 if self.hosts_layers else self.all_layers
        return self.input + of_layers + self.last_norm + self.loss

    @cached_property
    def last_norm(self) -> int:
        """What it keeps: its output, too, if that is what the head's product needs later."""
        if not self.is_last:
            return 0
        rows = self.rows("none")
        kept = rows.get("input", 0) + rows["norms' own"] // 2
        return kept if self.config.train.loss_chunk_tokens else kept + self.entered

    @cached_property
    def entered(self) -> int:
        """What a column-parallel product takes: all tokens of a norm's output."""
        return self.element * self.tokens * self.config.model.hidden_size

    @cached_property
    def loss(self) -> int:
        """What it keeps: the probabilities or, where it is made in chunks, the gradients of its
        input and of the head."""
        if not self.is_last:
            return 0
        columns = self.share.vocab_rows
        if self.config.train.loss_chunk_tokens:
            return self.entered + self.master * columns * self.config.model.hidden_size
        return self.master * self.tokens * columns

    @cached_property
    def late_layer(self) -> int:
        """Of one microbatch, from the half of a layer's backward to the other: of each product, its
        input and its output's gradient."""
        model, t, e = self.config.model, self.placement.tp, self.element
        h, f = model.hidden_size, model.ffn_hidden_size // t
        up = f * (2 if model.family == "llama" else 1)
        q = model.num_heads * model.head_dim // t
        k = model.num_kv_heads * self.share.kv_copies * model.head_dim // t
        return e * self.tokens * ((h + q + 2 * k) + (q + h) + (h + up) + (f + h))

    @cached_property
    def late_head(self) -> int:
        """The same of the head."""
        is_late = not self.is_tied and not self.config.train.loss_chunk_tokens
        if not (self.is_last and is_late):
            return 0
        return self.entered + self.element * self.tokens * self.share.vocab_rows

    @cached_property
    def late(self) -> int:
        """The same of the whole stage."""
        return len(self.layers) * self.late_layer + self.late_head
