"""A decoder-only transformer, as the share of it that one rank holds: some layers of one stage,
their heads and columns of one tp rank.

                token ids                                   labels
                    |                                          |
    first stage: embedding -> layers 0 … k | layers k+1 … -> norm -> head -> loss :last stage
                                           ^
                                 (s, b, h) sent, or (s / tp, b, h) under SP

GPT and Llama differ in the rows of `Architecture`, nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megagrid.comm import regions
from megagrid.config.schema import ModelConfig
from megagrid.grid import zigzag
from megagrid.grid.grid import Axis
from megagrid.model.width import width_scaling
from megagrid.nn.attention import Attention
from megagrid.nn.context import Context, tokens_of
from megagrid.nn.dropout import DropoutStreams, dropout
from megagrid.nn.embedding import (
    PositionEmbedding,
    VocabParallelEmbedding,
    padded_vocab_size,
    vocab_layout,
)
from megagrid.nn.float8 import Multiply
from megagrid.nn.init import Init
from megagrid.nn.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    SplitBackward,
    empty_parameter,
)
from megagrid.nn.loss import chunked_losses, token_losses
from megagrid.nn.mlp import GeluMLP, SwiGLU
from megagrid.nn.norm import LayerNorm, RMSNorm
from megagrid.nn.offload import HostedForward, Lane
from megagrid.nn.recompute import Recomputing, set_regions
from megagrid.nn.rope import LinearScaling, Llama3Scaling, Scaling, YarnScaling, rotation
from megagrid.nn.split_backward import LateWeightGradients, Slot, linear


@dataclass(frozen=True)
class Architecture:
    """What distinguishes one family of decoders from another.

    Attributes:
        norm, mlp: the classes of its layers.
        bias: whether linear layers have biases.
        learned_positions: a vector added per position; otherwise queries and keys are rotated.
    """

    norm: type[RMSNorm] | type[LayerNorm]
    mlp: type[SwiGLU] | type[GeluMLP]
    bias: bool
    learned_positions: bool


@dataclass(frozen=True)
class ModelAxes:
    """The axes that a model's layers are split over.

    Attributes:
        tp: heads, columns and vocabulary.
        kv: ranks of tp with the same key/value head.
        embedding: first and last stage, if a tied table lies on both.
        cp: tokens of each sample.
        sequence_parallel: whether what lies between parallel layers is split along the sequence.
        context_parallel: how attention is computed over cp, see `megagrid.nn.context`.
    """

    tp: Axis
    kv: Axis
    embedding: Axis
    cp: Axis
    sequence_parallel: bool = False
    context_parallel: str = "all_gather"


@dataclass(frozen=True)
class StageShare:
    """Which part of the model a stage has: the numbers of its layers, and the ends it holds."""

    layers: range
    is_first: bool
    is_last: bool


class Block(Recomputing):
    """x + attention(norm(x)), then x + mlp(norm(x)).

    Nothing in a block but its parameters tells it from the stage's others: compiled, they are one.

    Shape: (s, b, h) -> same, or (s / tp, b, h) -> same under sequence parallelism.
    """

    DROPS = ("attention.probabilities", "attention", "mlp")
    """The places in a block that drop, by their names in it."""

    def __init__(self, model: ModelConfig, architecture: Architecture, axes: ModelAxes) -> None:
        super().__init__()
        self.dropout = model.dropout
        self.axes = axes
        # Residual branches add up 2 L times; scaled so, the sum keeps its variance (GPT-2).
        scaling = width_scaling(model)
        std = model.init_std * scaling.hidden_std
        init, out_init = Init(std=std), Init(std=std / math.sqrt(2 * model.num_layers))
        common = {"sequence_parallel": axes.sequence_parallel}
        linear = {"bias": architecture.bias, "init": init, "out_init": out_init, **common}
        norm = {"eps": model.norm_eps, **common}
        self.attention_norm = architecture.norm(
            "attention_norm", model.hidden_size, axes.tp, **norm
        )
        self.attention = Attention(
            model.hidden_size,
            model.num_heads,
            model.num_kv_heads,
            model.head_dim,
            axes.tp,
            axes.kv,
            axes.cp,
            exchange=axes.context_parallel,
            dropout=model.attention_dropout,
            qkv_bias=model.qkv_bias,
            qk_norm_eps=model.norm_eps if model.qk_norm else None,
            query_scale=scaling.queries,
            **linear,
        )
        self.mlp_norm = architecture.norm("mlp_norm", model.hidden_size, axes.tp, **norm)
        self.mlp = architecture.mlp(model.hidden_size, model.ffn_hidden_size, axes.tp, **linear)
        self.products = [layer for layer in self.modules() if isinstance(layer, SplitBackward)]

    def forward(
        self,
        x: Tensor,
        context: Context,
        dropout_keys: Tensor | None,
        slots: Sequence[Slot] | None = None,
    ) -> Tensor:
        """
        Args:
            dropout_keys: (3, b), of the places in `DROPS`; None switches dropout off.
            slots: of `products`, if their weights' gradients are put off and this is compiled.
        """
        if slots is not None:
            self._lend(slots)
        of_probabilities, of_attention, of_mlp = (
            (None, None, None) if dropout_keys is None else dropout_keys.unbind()
        )
        x, branch = self.region(self._to_last_product, x, context, of_probabilities, of_attention)
        if slots is not None:
            self._lend([None] * len(slots))
        return x + dropout(branch, self.dropout, of_mlp, context.places)

    def _lend(self, slots: Sequence[Slot | None]) -> None:
        for layer, slot in zip(self.products, slots, strict=True):
            layer.slot = slot

    def _to_last_product(
        self,
        x: Tensor,
        context: Context,
        of_probabilities: Tensor | None,
        of_attention: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        branch = self.attention(x, context, of_probabilities, self.attention_norm)
        x = x + dropout(branch, self.dropout, of_attention, context.places)
        return x, self.mlp(x, self.mlp_norm)


class DecoderStage(nn.Module):
    """One stage of a decoder on one tp rank.

    Attributes:
        embedding, position_embedding: on the first stage (and the table of a tied head).
        layers: by their number in the whole model, so that names are global.
        norm, head: on the last stage; no head if it is tied and the embedding is here.
        z_loss: the coefficient.
        loss_chunk: tokens of which logits exist at a time; 0: all.
        lane: to the host, where what layers keep goes; None: it stays.
    """

    z_loss: float = 0.0
    loss_chunk: int = 0
    lane: Lane | None = None

    def __init__(
        self,
        model: ModelConfig,
        architecture: Architecture,
        share: StageShare,
        axes: ModelAxes,
    ) -> None:
        super().__init__()
        self.model = model
        self.share = share
        self.axes = axes
        self.rotated = not architecture.learned_positions
        padded = padded_vocab_size(model.vocab_size, model.make_vocab_size_divisible_by, axes.tp)
        init = Init(std=model.init_std)
        both_ends_here = share.is_first and share.is_last
        split_tie = axes.embedding if model.tied_embeddings and not both_ends_here else None
        if share.is_first:
            self.embedding = VocabParallelEmbedding(
                "embedding",
                model.vocab_size,
                padded,
                model.hidden_size,
                axes.tp,
                init=init,
                sequence_parallel=axes.sequence_parallel,
                shared_over=split_tie,
            )
            if architecture.learned_positions:
                self.position_embedding = PositionEmbedding(
                    "position_embedding",
                    model.max_seq_length,
                    model.hidden_size,
                    axes.tp,
                    init=init,
                    sequence_parallel=axes.sequence_parallel,
                )
        self.layers = nn.ModuleDict(
            {str(n): Block(model, architecture, axes) for n in share.layers}
        )
        if share.is_last:
            self.norm = architecture.norm(
                "norm",
                model.hidden_size,
                axes.tp,
                eps=model.norm_eps,
                sequence_parallel=axes.sequence_parallel,
            )
            if not (model.tied_embeddings and both_ends_here):
                self.head = Head(model, padded, axes, init=init, shared_over=split_tie)

    def forward(
        self,
        x: Tensor,
        labels: Tensor | None = None,
        streams: DropoutStreams | None = None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """
        Args:
            x: token ids (b, s) on the first stage, else the stage before's output. Of samples that
                are split over cp, s is this rank's tokens (`megagrid.grid.zigzag`).
            labels: (b, s) token ids, -100 where none is trained on; the last stage needs them
                for the loss, without them it returns logits.
            streams: of dropout; None switches it off.
            positions: (b, s) of the tokens; None: their places in the sample.
            documents: (b, s cp) the number of each token's document, in whole samples: tokens see
                no other's; None: they see all before them.

        Returns:
            hidden states (s, b, h), or (s / tp, b, h) under SP; on the last stage (2,), the losses
            of `megagrid.nn.loss` summed over tokens, in float32 or wider, or this rank's columns of
            the logits (s, b, V / tp).
        """
        places = self._places(x)
        positions = places.unsqueeze(1) if positions is None else positions.t()
        share = self._share(places)
        if self.share.is_first:
            x = self._embed(x.t(), self._share(positions), share, streams)
        rope = self._rope(positions, x.dtype) if self.rotated and len(self.layers) else None
        context = Context(share, rope, documents)
        x = self._through_layers(x, context, streams)
        if not self.share.is_last:
            return x
        x = self.norm(x)
        if (scale := width_scaling(self.model).logits) != 1.0:
            x = x * scale
        x = regions.enter(x, self.axes.tp, sequence_parallel=self.axes.sequence_parallel)
        if labels is None:
            return self._head(x)
        return self._losses(x.flatten(0, 1), labels.t().reshape(-1))

    def _through_layers(
        self, x: Tensor, context: Context, streams: DropoutStreams | None
    ) -> Tensor:
        hosted = None
        if self.lane is not None and torch.is_grad_enabled():
            received = None if self.share.is_first else x  # the stage has it anyhow
            of_all = (received, context.places, context.rope, context.documents)
            hosted = HostedForward(self.lane, [tensor for tensor in of_all if tensor is not None])
        for number, layer in self.layers.items():
            keys = self._dropout_keys(number, streams)
            with hosted.layer(layer) if hosted else nullcontext():
                x = layer(x, context, keys)
        if hosted:
            hosted.end()
        return x

    def hidden_shape(self, batch: int, seq_length: int) -> tuple[int, int, int]:
        """Shape of what stages pass on for a microbatch of `batch` samples."""
        share = self.axes.tp.size if self.axes.sequence_parallel else 1
        return (seq_length // share, batch, self.model.hidden_size)

    def _places(self, x: Tensor) -> Tensor:
        """Where in their samples the tokens of this cp rank lie, (s,)."""
        cp, tp = self.axes.cp, self.axes.tp
        is_share = self.axes.sequence_parallel and not self.share.is_first
        length = x.shape[1] if self.share.is_first else x.shape[0] * (tp.size if is_share else 1)
        return tokens_of(zigzag.spans(length * cp.size, cp.size, cp.rank), x.device)

    def _share(self, of_tokens: Tensor) -> Tensor:
        """(s, …) -> what this rank has of it between parallel layers."""
        if not self.axes.sequence_parallel:
            return of_tokens
        return of_tokens.chunk(self.axes.tp.size)[self.axes.tp.rank]

    def _embed(
        self, token_ids: Tensor, positions: Tensor, places: Tensor, streams: DropoutStreams | None
    ) -> Tensor:
        """Of whole token ids, and of this rank's share of positions and places."""
        x = self.embedding(token_ids)
        if not self.rotated:
            x = x + self.position_embedding(positions)
        keys = None if streams is None else streams.of("embedding")
        return dropout(x, self.model.dropout, keys, places)

    def _dropout_keys(self, layer: str, streams: DropoutStreams | None) -> Tensor | None:
        """Of the layer with that number: made here, as a tensor, so that a block knows neither its
        number nor the step."""
        if streams is None:
            return None
        return torch.stack([streams.of(f"layers.{layer}.{place}") for place in Block.DROPS])

    def _rope(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        model, scaling = self.model, rope_scaling(self.model)
        return rotation(positions, model.head_dim, model.rope_theta, dtype, scaling)

    def _head(self, x: Tensor, losses: Callable[[Tensor, Tensor], Tensor] | None = None) -> Tensor:
        """(…, h) -> this rank's columns of the logits, (…, padded vocabulary / tp), or what
        `losses` makes of x and the head's matrix."""
        if hasattr(self, "head"):
            return self.head(x, losses)
        return losses(x, self.embedding.weight) if losses else F.linear(x, self.embedding.weight)

    def _losses(self, x: Tensor, labels: Tensor) -> Tensor:
        """(n, h), (n,) -> (2,), see `megagrid.nn.loss`."""

        def of_logits(logits: Tensor, labels: Tensor) -> Tensor:
            return token_losses(logits, labels, self.model.vocab_size, self.axes.tp, self.z_loss)

        def of_chunks(x: Tensor, weight: Tensor) -> Tensor:
            return chunked_losses(x, weight, labels, self.loss_chunk, of_logits)

        return self._head(x, of_chunks) if self.loss_chunk else of_logits(self._head(x), labels)

    def recompute(self, kind: str, interval: int) -> None:
        """From now on backward computes again what `kind` has it, see `megagrid.nn.recompute`.

        Args:
            interval: of so many layers of the model, counted from its first, one does so.
        """
        for number, layer in self.layers.items():
            if int(number) % interval == 0:
                set_regions(layer, kind)

    def multiply_by(self, multiply: Multiply) -> None:
        """From now on the layers' matrices are multiplied by `multiply`; the head's isn't."""
        for layer in self.modules():
            if isinstance(layer, ColumnParallelLinear | RowParallelLinear):
                layer.multiply = multiply

    def put_off_weight_gradients(self) -> LateWeightGradients:
        """From now on backward leaves the gradients of matrices to what this returns.

        A head that shares its matrix with an embedding in this same stage isn't among them: that
        matrix has its gradient from two places, and waits for both.
        """
        late = LateWeightGradients()
        for layer in self.modules():
            if isinstance(layer, SplitBackward):
                layer.late = late
        return late


ROPE_SCALINGS: dict[str, Callable[[ModelConfig], Scaling | None]] = {
    "none": lambda model: None,
    "linear": lambda model: LinearScaling(model.rope_scaling_factor),
    "llama3": lambda model: Llama3Scaling(
        model.rope_scaling_factor,
        model.rope_low_freq_factor,
        model.rope_high_freq_factor,
        model.rope_original_max_seq_length,
    ),
    "yarn": lambda model: YarnScaling(
        model.rope_scaling_factor,
        model.rope_low_freq_factor,
        model.rope_high_freq_factor,
        model.rope_original_max_seq_length,
        model.rope_theta,
        model.rope_attention_factor,
    ),
}


def rope_scaling(model: ModelConfig) -> Scaling | None:
    """What the recipe does to RoPE's frequencies; None: nothing."""
    return ROPE_SCALINGS[model.rope_scaling](model)


class Head(SplitBackward):
    """Logits from hidden states, the vocabulary's rows split over tp.

    Args:
        shared_over: the axis whose other rank holds the same matrix as embedding, if tied.

    Shape: (…, h) -> (…, padded vocabulary / tp).
    """

    def __init__(
        self,
        model: ModelConfig,
        padded_size: int,
        axes: ModelAxes,
        *,
        init: Init,
        shared_over: Axis | None,
    ) -> None:
        super().__init__()
        name = "head.weight" if shared_over is None else "embedding.weight"
        layout = vocab_layout(name, model.vocab_size, padded_size, model.hidden_size, axes.tp, init)
        if shared_over is not None:
            layout = layout.replicated(shared_over, partial=True)
        self.layouts = {"weight": layout}
        self.weight = empty_parameter(layout)

    def forward(
        self, x: Tensor, losses: Callable[[Tensor, Tensor], Tensor] | None = None
    ) -> Tensor:
        """`losses`: what is wanted of x and the matrix in place of logits."""
        return losses(x, self.weight) if losses else linear(x, self.weight, None, self.late)
