"""The most memory that a rank's tensors take at once within a step, in closed form. Pure.

A rank goes through its actions, one after the other. At the height of one it holds

    weights, optimizer states   always; `megagrid.plan.memory`
    gathered parameters         in the compute dtype: all units of its stages under SHARD_GRAD_OP,
                                else the unit at work, those prefetched, and what the stage has
                                outside its layers
    gradients                   in the master dtype: whole ones from a stage's first backward to its
                                last, then this rank's shards
    activations                 of each microbatch in flight: what the layers keep
                                (`megagrid.plan.activations`), and at the ends

        last norm               e n' h + its own + e n h     input, output
        loss                    r n V                        the probabilities, V columns of a rank
        … in chunks of c        e n h + r V h                its gradients, made along with it;
                                                             r c V come and go in the forward

    temporary                   the larger one of two moments of a backward, less what has been let
                                go of until then:

        loss                    e n V + e n h + e V h        its gradient in the compute dtype, the
                                                             head's two products
        MLP, in the last layer  e n' h + 4 e n f             the residual's gradient; of the
                                (gpt: 2 e n f)               activation's: input, output, products

    communication               messages between stages under way; what is gathered into

with n, n', e, f as in `megagrid.plan.activations`, r the bytes of the master dtype. In flight are
as many microbatches as the schedule has at that action, so the peak is the largest sum over the
actions. It is an estimate: kernels' workspaces and an allocator's fragments come on top, and what
is small beside these (masks, sums over a token, RoPE's angles) is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from megagrid.config.schema import Config
from megagrid.config.sharding import Sharding
from megagrid.grid.placement import Coordinate, Placement
from megagrid.pipeline.partition import stage_layers
from megagrid.pipeline.program import training_program
from megagrid.pipeline.schedules import Action, Kind, Program
from megagrid.plan.activations import layer_activations, stage_activations
from megagrid.plan.comm import COMPUTE_BYTES
from megagrid.plan.flops import recomputed_layers
from megagrid.plan.memory import persistent_bytes
from megagrid.plan.parameters import MASTER_BYTES, ModelShare
from megagrid.plan.units import REST, PlannedUnit, stage_units

MESSAGES_UNDER_WAY = 2
"""Sends that a rank has posted and not seen arrive, times the ranks of the pipeline, on gloo."""


@dataclass(frozen=True)
class PeakBytes:
    """What a rank holds at the height of an action.

    Attributes:
        action: where; the others as in the table above, in bytes.
    """

    action: str
    weights: int
    optimizer_states: int
    gathered_parameters: int
    gradients: int
    activations: int
    temporary: int
    communication: int

    @property
    def total(self) -> int:
        return sum(getattr(self, f.name) for f in fields(self) if f.name != "action")


def peak_bytes(
    config: Config, placement: Placement, coordinate: Coordinate, *, fused_norms: bool = False
) -> PeakBytes:
    """Of the rank at `coordinate`.

    Args:
        fused_norms: an RMSNorm is one kernel, as on CUDA.
    """
    kept = persistent_bytes(config, placement, coordinate)
    rank = _Rank(config, placement, coordinate, fused_norms)
    moments = (
        PeakBytes(weights=kept.weights, optimizer_states=kept.total - kept.weights, **moment)
        for moment in rank.moments()
    )
    return max(moments, key=lambda moment: moment.total)


class _Rank:
    """The walk of one rank through its actions."""

    def __init__(
        self, config: Config, placement: Placement, coordinate: Coordinate, fused_norms: bool
    ) -> None:
        self.config = config
        self.placement = placement
        self.coordinate = coordinate
        self.fused_norms = fused_norms
        self.program: Program = training_program(config, placement)
        self.layers = stage_layers(config, placement, self.program.placement)
        self.sharding = Sharding.of(config, placement)
        self.share = ModelShare(
            config.model, placement.tp, coordinate.tp, config.parallel.sequence_parallel
        )
        self.element = COMPUTE_BYTES[config.train.precision]
        self.master = MASTER_BYTES[config.train.precision]
        self.tokens = config.train.seq_length // placement.cp * config.train.micro_batch_size
        splits = config.parallel.sequence_parallel and placement.tp > 1
        self.shared = self.tokens // placement.tp if splits else self.tokens
        self.stages = self.program.stages_of_rank(coordinate.pp)

    @property
    def hidden(self) -> int:
        """Bytes of a microbatch's hidden states, between layers."""
        return self.element * self.shared * self.config.model.hidden_size

    def moments(self) -> Iterator[dict]:
        """What comes and goes, at the height of each action."""
        order = self.program.compute_order(self.coordinate.pp)
        in_flight = dict.fromkeys(self.stages, 0)
        late = dict.fromkeys(self.stages, 0)
        gradients = dict.fromkeys(self.stages, 0)
        for action in order:
            stage = action.stage
            in_flight[stage] += action.kind is Kind.F
            backward = action.kind in (Kind.B, Kind.I)
            always = {
                "action": str(action),
                "gradients": sum(gradients.values()),
                "activations": sum(in_flight[s] * self.kept(s) for s in self.stages)
                + sum(late[s] * self.kept_late(s) for s in self.stages),
            }
            for moment in self.heights(stage, backward=backward):
                yield always | moment
            in_flight[stage] -= backward
            late[stage] += (action.kind is Kind.I) - (action.kind is Kind.W)
            if action.kind in (Kind.B, Kind.W):
                gradients[stage] = self.gradients(stage, action)

    def units(self, stage: int) -> list[PlannedUnit]:
        ends = {"is_first": stage == 0, "is_last": stage == self.program.num_stages - 1}
        return stage_units(self.config, self.share, self.layers[stage], **ends)

    def gradients(self, stage: int, action: Action) -> int:
        """Of a stage, after a backward of it."""
        is_last = action == self.program.last_gradient(stage)
        split = self.sharding.split if is_last else 1
        index = self.sharding.index(self.placement, self.coordinate) % split
        units = self.units(stage)
        elements = sum(p.held(split, index) for unit in units for p in unit.split)
        return self.master * (elements + sum(p.held(1, 0) for unit in units for p in unit.whole))

    def heights(self, stage: int, *, backward: bool) -> Iterator[dict[str, int]]:
        """Of one action of `stage`: when what is outside its layers is gathered, then in the last
        layer."""
        messages = self.messages()
        units = self.units(stage)
        rest = sum(self._gathered(unit) for unit in units if unit.name == REST)
        layers = sorted((self._gathered(u) for u in units if u.name != REST), reverse=True)
        everything = sum(self._gathered(u) for s in self.stages for u in self.units(s))
        ahead = self.config.parallel.backward_prefetch
        for work in ("", "loss", "mlp") if backward else ("", "chunk"):
            # What is prefetched lies in the buffer of its message until it is needed.
            gathered, buffer = rest, sum(layers[:ahead]) if work else rest
            if work == "mlp":
                gathered += sum(layers[:1])
            if self.sharding.hold:
                gathered, buffer = everything, 0
            yield {
                "gathered_parameters": gathered,
                "temporary": self.temporary(stage, work),
                "communication": messages + buffer,
            }

    def _gathered(self, unit: PlannedUnit) -> int:
        """What a unit takes when it is gathered, or cast."""
        if self.sharding.ranks == 1 and self.element == self.master:
            return 0
        split = sum(parameter.gathered(self.sharding.split) for parameter in unit.split)
        return self.element * (split + sum(parameter.gathered(1) for parameter in unit.whole))

    def kept(self, stage: int) -> int:
        """Of one microbatch, from forward to backward."""
        layers = self.layers[stage]
        kept = stage_activations(self.config, self.placement, layers, fused_norms=self.fused_norms)
        kept += sum(self._kept_at_the_end(stage))
        if stage != 0 and not self._keeps_inputs:
            kept += self.hidden
        return kept

    def _kept_at_the_end(self, stage: int) -> tuple[int, int]:
        """Of the last norm, and of the loss, if they are in `stage`: the probabilities or, where it
        is made in chunks, the gradients of its input and of the head."""
        if stage != self.program.num_stages - 1:
            return 0, 0
        rows = layer_activations(self.config, self.placement, "none", fused_norms=self.fused_norms)
        norm = rows.get("input", 0) + rows["norms' own"] // 2
        output, columns = rows["norms' outputs"] // 2, self.share.vocab_rows
        if self.config.train.loss_chunk_tokens:
            return norm, output + self.master * columns * self.config.model.hidden_size
        return norm + output, self.master * self.tokens * self.share.vocab_rows

    @property
    def _keeps_inputs(self) -> bool:
        """Whether a layer keeps its input as it is: a stage's input is one."""
        kind = self.config.memory.recompute
        rows = layer_activations(self.config, self.placement, kind, fused_norms=self.fused_norms)
        return "input" in rows

    def kept_late(self, stage: int) -> int:
        """Of one microbatch, from the half of its backward to the other: of each product, its input
        and its output's gradient."""
        model, t, e = self.config.model, self.placement.tp, self.element
        h, f = model.hidden_size, model.ffn_hidden_size // t
        up = f * (2 if model.family == "llama" else 1)
        q = model.num_heads * model.head_dim // t
        k = model.num_kv_heads * self.share.kv_copies * model.head_dim // t
        columns = (h + q + 2 * k) + (q + h) + (h + up) + (f + h)
        kept = len(self.layers[stage]) * e * self.tokens * columns
        is_late = not model.tied_embeddings and not self.config.train.loss_chunk_tokens
        if stage == self.program.num_stages - 1 and is_late:
            kept += e * self.tokens * (h + self.share.vocab_rows)
        return kept

    def temporary(self, stage: int, work: str) -> int:
        """In an action of `stage`, less what it has let go of: at the gradient of the loss, or of
        a chunk of it, or at the last layer's activation."""
        model, memory = self.config.model, self.config.memory
        e, n, h = self.element, self.tokens, model.hidden_size
        norm, loss = self._kept_at_the_end(stage)
        columns, chunk = self.share.vocab_rows, self.config.train.loss_chunk_tokens
        narrow = e if e < self.master else 0
        if work == "chunk":
            return (self.master + narrow) * min(chunk, n) * columns if loss else 0
        if work == "loss" and loss and chunk:
            return narrow * columns * h
        if work == "loss" and loss:
            gradient = narrow * n * columns
            products = e * (n * h + columns * h)
            return max(gradient, gradient + products - (loss if gradient else 0))
        if work == "mlp" and self.layers[stage]:
            last = self.layers[stage][-1:]
            is_again = recomputed_layers(last, memory.recompute, memory.recompute_interval)
            recompute = memory.recompute if is_again else "none"
            f = model.ffn_hidden_size // self.placement.tp
            none, kept = (
                layer_activations(self.config, self.placement, kind, fused_norms=self.fused_norms)
                for kind in ("none", recompute)
            )
            again = sum(none.values()) - sum(kept.values()) if recompute == "full" else 0
            activation = none["activation"] if recompute != "selective" else 0
            made = self.hidden + e * n * f * (4 if model.family == "llama" else 2)
            return made + again - activation - norm - loss
        return 0

    def messages(self) -> int:
        """Between stages, under way: one that is received, and those that are sent."""
        pp, most = self.placement.pp, self.program.num_microbatches
        return self.hidden * (min(MESSAGES_UNDER_WAY * pp, most) + 1) if pp > 1 else 0
