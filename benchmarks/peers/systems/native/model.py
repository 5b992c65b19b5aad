"""A Llama in plain torch, cut into pipeline stages. Knows nothing of ranks.

Submodules carry Hugging Face's names, and layers keep their global index, so a stage's parameters
are found in `model.safetensors` by name. Shapes: b samples, s tokens, h hidden, n heads, k KV
heads, d head width, v vocabulary; n, k and v are the local share under tensor parallelism.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.peers.spec import ModelShape


def rotary_table(length: int, head_dim: int, theta: float) -> Tensor:
    """cos and sin of position times frequency, fp32 [2, length, head_dim] (Su et al. 2021)."""
    frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Rotates the pairs (i, i + d/2) of x [b, s, heads, d] by the table [2, s, d]."""
    cos, sin = rotary[:, :, None, :]
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Causal self-attention with grouped queries: [b, s, h] -> [b, s, h]."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        # -1 heads: a tensor-parallel projection returns this rank's heads only.
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, rotary), rotate(k, rotary)
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            is_causal=True,
            enable_gqa=True,
        )
        return self.o_proj(out.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020): [b, s, h] -> [b, s, h]."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.ffn_hidden_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.ffn_hidden_size, bias=False)
        self.down_proj = nn.Linear(shape.ffn_hidden_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """A pre-norm transformer layer: [b, s, h] -> [b, s, h]."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotary)
        return x + self.mlp(self.post_attention_layernorm(x))


class Trunk(nn.Module):
    """What Hugging Face calls `model`: embedding, layers, last norm; None where another stage's."""

    def __init__(self, shape: ModelShape, stage: int, stages: int) -> None:
        super().__init__()
        per_stage = shape.num_layers // stages
        mine = range(stage * per_stage, (stage + 1) * per_stage)
        first, last = stage == 0, stage == stages - 1
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size) if first else None
        self.layers = nn.ModuleDict({str(index): Block(shape) for index in mine})
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_eps) if last else None

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        if self.embed_tokens is not None:
            x = self.embed_tokens(x)
        for block in self.layers.values():
            x = block(x, rotary)
        return x if self.norm is None else self.norm(x)


class LlamaStage(nn.Module):
    """Stage `stage` of `stages`: token ids [b, s] or activations [b, s, h] in,
    activations or logits [b, s, v] out."""

    def __init__(self, shape: ModelShape, seq_length: int, stage: int, stages: int) -> None:
        super().__init__()
        self.model = Trunk(shape, stage, stages)
        last = stage == stages - 1
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False) if last else None
        # Made on the CPU even when the stage is built on the meta device: it is no parameter, so
        # loading wouldn't fill it.
        with torch.device("cpu"):
            table = rotary_table(seq_length, shape.head_dim, shape.rope_theta)
        self.register_buffer("rotary", table, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.model(x, self.rotary)
        return x if self.lm_head is None else self.lm_head(x)
