"""GPT-2 and GPT-3 (Radford et al. 2019, Brown et al. 2020): learned positions, LayerNorm before
each branch, GELU, biases everywhere, dropout, usually a tied head."""

from __future__ import annotations

from megagrid.model.decoder import Architecture
from megagrid.nn.mlp import GeluMLP
from megagrid.nn.norm import LayerNorm

GPT = Architecture(norm=LayerNorm, mlp=GeluMLP, bias=True, learned_positions=True)
