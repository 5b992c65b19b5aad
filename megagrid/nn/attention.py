"""Causal self-attention with its heads split over the tp axis: MHA, GQA and MQA.

tp may exceed the number of key/value heads. Then neighbours share one:

    8 heads, 2 kv heads, tp 4     rank 0   rank 1   rank 2   rank 3
                        query      0 1      2 3      4 5      6 7
                        kv          0        0        1        1
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from megagrid.grid.grid import Axis
from megagrid.grid.zigzag import Spans
from megagrid.nn.blockwise import blockwise_attention, visible
from megagrid.nn.context import Context, context_parallel_attention, tokens_of
from megagrid.nn.dropout import attention_dropout
from megagrid.nn.init import Init
from megagrid.nn.linear import ColumnParallelLinear, Part, RowParallelLinear
from megagrid.nn.norm import HeadNorm, no_norm
from megagrid.nn.recompute import Recomputing
from megagrid.nn.rope import rotate


class Attention(Recomputing):
    """softmax(q k^T / sqrt(d)) v under a causal mask, from column- to row-parallel layer.

    Args:
        axis: tp.
        kv_axis: the ranks of tp that hold the same key/value head; of size 1 if each has its own.
        cp_axis: the ranks that have the other tokens of the same samples.
        exchange: how those get what attention takes, a row of `megagrid.nn.context.EXCHANGES`.
        bias: of all four projections.
        qkv_bias: of the first three even without it.
        qk_norm_eps: queries and keys are normalised head by head, with this eps; None: they aren't.
        query_scale: what queries are multiplied by beside the 1 / sqrt(d).

    Shape: (s, b, h) -> same; (s / axis.size, b, h) -> same with `sequence_parallel`. Of a sample of
    S tokens s is S / cp_axis.size.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        axis: Axis,
        kv_axis: Axis,
        cp_axis: Axis,
        *,
        exchange: str,
        bias: bool,
        dropout: float,
        init: Init,
        out_init: Init,
        sequence_parallel: bool,
        qkv_bias: bool = False,
        qk_norm_eps: float | None = None,
        query_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.cp_axis = cp_axis
        self.exchange = exchange
        self.head_dim = head_dim
        self.heads = num_heads // axis.size
        self.kv_heads = num_kv_heads * kv_axis.size // axis.size
        self.first_head = axis.rank * self.heads
        self.dropout = dropout
        self.query_scale = query_scale
        self.qkv = ColumnParallelLinear(
            hidden_size,
            [
                Part("wq", num_heads * head_dim),
                Part("wk", num_kv_heads * head_dim, copies=kv_axis),
                Part("wv", num_kv_heads * head_dim, copies=kv_axis),
            ],
            axis,
            bias=bias or qkv_bias,
            init=init,
            sequence_parallel=sequence_parallel,
        )
        self.q_norm = self.k_norm = None
        if qk_norm_eps is not None:
            self.q_norm = HeadNorm("q_norm", head_dim, axis, eps=qk_norm_eps)
            self.k_norm = HeadNorm("k_norm", head_dim, axis, eps=qk_norm_eps)
        self.wo = RowParallelLinear(
            "wo",
            num_heads * head_dim,
            hidden_size,
            axis,
            bias=bias,
            init=out_init,
            sequence_parallel=sequence_parallel,
        )

    def forward(
        self,
        x: Tensor,
        context: Context,
        dropout_keys: Tensor | None,
        norm: Callable[[Tensor], Tensor] = no_norm,
    ) -> Tensor:
        """
        Args:
            x: (s, b, h) or its share of s.
            dropout_keys: (b,), of the probabilities; None switches dropout off.
            norm: what `x` goes through first; of one region with the layer that takes it.
        """
        qkv = self.region(lambda x: self.qkv(norm(x)), x)
        return self.region(self._attend, qkv, context, dropout_keys)

    def _attend(self, qkv: Tensor, context: Context, dropout_keys: Tensor | None) -> Tensor:
        """From queries, keys and values, (s, b, this rank's heads), to the layer's output."""
        s, b, _ = qkv.shape
        heads = qkv.view(s, b, -1, self.head_dim)
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], dim=2)
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if context.rope is not None:
            q, k = rotate(q, context.rope), rotate(k, context.rope)
        if self.query_scale != 1.0:
            q = q * self.query_scale
        attend = partial(self._attend_here, documents=context.documents, dropout_keys=dropout_keys)
        y = context_parallel_attention(
            q, k, v, self.cp_axis, self.exchange, attend, context.documents
        )
        return self.wo(y.reshape(s, b, -1))

    def _attend_here(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        queries: Spans,
        first_head: int,
        *,
        documents: Tensor | None,
        dropout_keys: Tensor | None,
    ) -> Tensor:
        """Some queries to all keys: a row for `megagrid.nn.context.Attend`."""
        # (s, b, heads, d) -> (b, heads, s, d), by strides alone.
        q, k, v = (heads.permute(1, 2, 0, 3) for heads in (q, k, v))
        keys = range(k.shape[2])
        if self.dropout and dropout_keys is not None:
            first_head += self.first_head
            y = self._attend_with_dropout(q, k, v, queries, first_head, documents, dropout_keys)
        elif documents is None and queries == (keys,):
            y = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads
            )
        else:
            y = blockwise_attention(q, k, v, queries, (keys,), documents)
        return y.permute(2, 0, 1, 3)

    def _attend_with_dropout(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        queries: Spans,
        first_head: int,
        documents: Tensor | None,
        dropout_keys: Tensor,
    ) -> Tensor:
        """Attention with the probabilities in sight: the fused kernels draw masks of their own."""
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        keys = range(k.shape[2])
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.head_dim)
        seen = torch.cat([visible(run, keys, documents, q.device) for run in queries], dim=2)
        probabilities = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
        rows = tokens_of(queries, q.device)
        return attention_dropout(probabilities, self.dropout, dropout_keys, first_head, rows) @ v
