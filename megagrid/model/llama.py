"""Llama 1 to 3 (Touvron et al. 2023, Grattafiori et al. 2024): rotary positions, RMSNorm, SwiGLU,
grouped key/value heads, no biases, no dropout.

Mistral (Jiang et al. 2023) is the same. Qwen2 (Yang et al. 2024) has biases on queries, keys and
values, `model.qkv_bias`; Qwen3 (Yang et al. 2025) a norm of each head instead, `model.qk_norm`."""

from __future__ import annotations

from megagrid.model.decoder import Architecture
from megagrid.nn.mlp import SwiGLU
from megagrid.nn.norm import RMSNorm

LLAMA = Architecture(norm=RMSNorm, mlp=SwiGLU, bias=False, learned_positions=False)
