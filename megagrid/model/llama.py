"""Llama 1 to 3 (Touvron et al. 2023, Grattafiori et al. 2024): rotary positions, RMSNorm, SwiGLU,
grouped key/value heads, no biases, no dropout."""

from __future__ import annotations

from megagrid.model.decoder import Architecture
from megagrid.nn.mlp import SwiGLU
from megagrid.nn.norm import RMSNorm

LLAMA = Architecture(norm=RMSNorm, mlp=SwiGLU, bias=False, learned_positions=False)
