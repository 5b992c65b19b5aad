"""Causal self-attention with its heads split over the tp axis: MHA, GQA and MQA.

tp may exceed the number of key/value heads. Then neighbours share one:

    8 heads, 2 kv heads, tp 4     rank 0   rank 1   rank 2   rank 3
                        query      0 1      2 3      4 5      6 7
                        kv          0        0        1        1
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from megagrid.grid.grid import Axis
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
        bias: of all four projections.
        qkv_bias: of the first three even without it.
        qk_norm_eps: queries and keys are normalised head by head, with this eps; None: they aren't.

    Shape: (s, b, h) -> same; (s / axis.size, b, h) -> same with `sequence_parallel`.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        axis: Axis,
        kv_axis: Axis,
        *,
        bias: bool,
        dropout: float,
        init: Init,
        out_init: Init,
        sequence_parallel: bool,
        qkv_bias: bool = False,
        qk_norm_eps: float | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.heads = num_heads // axis.size
        self.kv_heads = num_kv_heads * kv_axis.size // axis.size
        self.first_head = axis.rank * self.heads
        self.dropout = dropout
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
        rope: Tensor | None,
        dropout_keys: Tensor | None,
        norm: Callable[[Tensor], Tensor] = no_norm,
    ) -> Tensor:
        """
        Args:
            x: (s, b, h) or its share of s.
            rope: from `megagrid.nn.rope.rotation` for the whole sequence; None: no rotation.
            dropout_keys: (b,), of the probabilities; None switches dropout off.
            norm: what `x` goes through first; of one region with the layer that takes it.
        """
        qkv = self.region(lambda x: self.qkv(norm(x)), x)
        return self.region(self._attend, qkv, rope, dropout_keys)

    def _attend(self, qkv: Tensor, rope: Tensor | None, dropout_keys: Tensor | None) -> Tensor:
        """From queries, keys and values, (s, b, this rank's heads), to the layer's output."""
        s, b, _ = qkv.shape
        heads = qkv.view(s, b, -1, self.head_dim)
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], dim=2)
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = rotate(q, rope), rotate(k, rope)
        # (s, b, heads, d) -> (b, heads, s, d), by strides alone.
        q, k, v = (heads.permute(1, 2, 0, 3) for heads in (q, k, v))
        if self.dropout and dropout_keys is not None:
            context = self._attend_with_dropout(q, k, v, dropout_keys)
        else:
            context = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads
            )
        return self.wo(context.permute(2, 0, 1, 3).reshape(s, b, -1))

    def _attend_with_dropout(self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor) -> Tensor:
        """Attention with the probabilities in sight: the fused kernels draw masks of their own."""
        group = self.heads // self.kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        s = q.shape[-2]
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.head_dim)
        future = torch.ones(s, s, dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
        probabilities = scores.softmax(dim=-1)
        return attention_dropout(probabilities, self.dropout, keys, self.first_head) @ v
