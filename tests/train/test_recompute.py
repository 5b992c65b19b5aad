"""What backward computes again, counted in a model, against the table that HFU is made of."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from megagrid.config.schema import ModelConfig
from megagrid.nn.dropout import DropoutStreams
from megagrid.plan.flops import token_flops
from megagrid.train.build import build_whole_model

S, B = 16, 2
MODEL = ModelConfig(
    family="gpt",
    num_layers=5,
    hidden_size=32,
    ffn_hidden_size=48,
    num_heads=8,
    num_kv_heads=8,
    head_dim=4,
    vocab_size=64,
    make_vocab_size_divisible_by=1,
    max_seq_length=S,
    dropout=0.1,
    attention_dropout=0.1,  # so that attention is made of products that the counter knows
)


def counted(kind: str, interval: int) -> int:
    """FLOPs of a forward and backward."""
    model = build_whole_model(MODEL, torch.float32, torch.device("cpu"))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    model.recompute(kind, interval)
    tokens = torch.zeros(B, S, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens, DropoutStreams(1, 1, torch.arange(B))).sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize(
    ("kind", "interval"), [("none", 1), ("selective", 1), ("full", 1), ("full", 2)]
)
def test_products_of_a_step_are_those_that_hfu_counts(kind, interval):
    flops = token_flops(MODEL, S, recompute=kind, recompute_interval=interval)
    assert counted(kind, interval) == S * B * flops.hardware
