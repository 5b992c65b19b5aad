"""The closed form of what layers keep, against what they do keep, on every rank."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from megagrid.config.schema import Config
from megagrid.data_parallel.sharding import COMPUTE_DTYPES
from megagrid.grid.grid import Axis
from megagrid.grid.placement import Placement
from megagrid.model.decoder import ModelAxes, StageShare
from megagrid.model.zoo import build_stage
from megagrid.nn.context import Context
from megagrid.nn.dropout import DropoutStreams
from megagrid.plan.activations import layer_activations, stage_activations
from tests.kept import Kept
from tests.nn import dense
from tests.plan.test_comm import DROPOUT, QWEN, SP, recompute, run

S, B, LAYERS = 16, 2, 3


def kept_on_rank(config: Config, planned: int) -> int:
    """Bytes that a stage's layers keep of a microbatch."""
    dtype = COMPUTE_DTYPES[config.train.precision]
    axis = dense.axis_of_all()
    kv = dense.neighbours(max(1, axis.size // config.model.num_kv_heads))
    single = (Axis.single(name) for name in ("embedding", "cp"))
    axes = ModelAxes(axis, kv, *single, config.parallel.sequence_parallel)
    stage = build_stage(config.model, StageShare(range(LAYERS), False, False), axes).to(dtype)
    for parameter in stage.parameters():
        nn.init.normal_(parameter, std=0.1)
    stage.recompute(config.memory.recompute, config.memory.recompute_interval)
    received = torch.randn(stage.hidden_shape(B, S), dtype=dtype, requires_grad=True)
    streams = DropoutStreams(1, 1, torch.arange(B)) if config.model.dropout else None
    keys = stage._dropout_keys("0", streams)
    places = stage._places(received)
    rope = stage._rope(places.unsqueeze(1), dtype) if stage.rotated else None
    context = Context(stage._share(places), rope, None)
    others = [tensor for tensor in (received, keys, places, rope) if tensor is not None]
    with Kept([*stage.parameters(), *others]) as kept:
        x = received.clone()
        for layer in stage.layers.values():
            x = layer(x, context, keys)
        edge = get_gradient_edge(x)
        del x
    # The threads of gloo let go of a message's tensors a moment after it.
    begun = time.monotonic()
    while kept.bytes() != planned and time.monotonic() < begun + 2.0:
        time.sleep(0.01)
    found = kept.bytes()
    del edge
    return found


@dataclass(frozen=True)
class Case:
    family: str = "llama"
    tp: int = 1
    keys: tuple = ()

    def __str__(self) -> str:
        values = (f"{key.partition('__')[2]}={value}" for key, value in dict(self.keys).items())
        return "-".join([self.family, f"tp{self.tp}", *values])


def case(family: str = "llama", tp: int = 1, **keys) -> Case:
    return Case(family, tp, tuple(keys.items()))


BF16, FP64 = {"train__precision": "bf16"}, {"train__precision": "fp64"}

CASES = [
    case(),
    case(**BF16),
    case(**FP64),
    case(**QWEN),
    case(**QWEN, **BF16),
    case("gpt"),
    case("gpt", **BF16),
    case("gpt", **DROPOUT),
    case("gpt", **FP64, model__dropout=0.1),
    case(tp=2),
    case(tp=2, **SP),
    case(tp=2, **SP, **BF16),
    case("gpt", tp=2, **SP, **DROPOUT),
    case(tp=2, model__num_kv_heads=1),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_layers_keep_what_the_closed_form_says(ranks, case):
    placement = Placement(tp=case.tp)
    bytes_of = {}
    for kind, interval in (("none", 1), ("selective", 1), ("full", 1), ("full", 2)):
        keys = dict(case.keys) | recompute(kind, interval) | {"model__num_layers": LAYERS}
        config = run(placement, case.family, **keys)
        planned = stage_activations(config, placement, range(LAYERS))
        for kept in ranks.run(kept_on_rank, config, planned, world_size=case.tp):
            assert kept == planned, f"{kind}, {interval}"
        bytes_of[kind, interval] = planned
    none, selective, full, every_other = bytes_of.values()
    assert none > selective > full
    assert none > every_other > full


def test_korthikantis_layer_is_reproduced():
    """34 + 5 a s / h bytes of s b h in 16 bits, and 34 without the attention core (arXiv
    2205.05198, equations 1 and 4), where masks are bytes and not of the compute dtype, norms' own
    numbers are left out, and queries, keys and values are kept once."""
    s, b, h, a = 2048, 4, 12288, 96
    placement = Placement()
    model = {"hidden_size": h, "ffn_hidden_size": 4 * h, "num_heads": a, "num_kv_heads": a}
    model |= {"head_dim": h // a, "max_seq_length": s, "dropout": 0.1, "attention_dropout": 0.1}
    config = run(
        placement,
        "gpt",
        **{f"model__{key}": value for key, value in model.items()},
        train__seq_length=s,
        train__micro_batch_size=b,
        train__global_batch_size=b,
        train__precision="bf16",
    )
    rows = layer_activations(config, placement, "none")
    del rows["norms' own"]
    # Ours: two masks of 2 bytes; softmax, its mask and their product of 2 bytes each; a mask of
    # bytes for what is to come, without a batch.
    assert sum(rows.values()) == s * b * h * (34 + 2) + (5 + 1) * a * s * s * b + s * s
