"""Compiled blocks compute what they did, as one graph for all layers, microbatches and steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters

from megagrid.grid.placement import Placement
from megagrid.train.build import Engine
from megagrid.train.step import evaluate
from tests.equivalence.case import (
    SP,
    TIED,
    Case,
    Keys,
    Variant,
    exchange,
    schedule,
    strategy,
)
from tests.equivalence.test_recompute import assert_same_bits
from tests.equivalence.trainer import batches_of

LLAMA = Variant("llama", steps=3)
GPT = Variant("gpt", steps=3).having(("model.dropout", 0.3), ("model.attention_dropout", 0.2))
DOCUMENTS = LLAMA.having(("data.document_mask", True))
COMPILED: Keys = (("train.compile", True),)
TRACED: Keys = (*COMPILED, ("train.compile_backend", "aot_eager"))
"""Traced as for inductor, which takes longer to make code."""
ZBV: Keys = (schedule("ZBV"), ("parallel.virtual_pipeline_size", 2))
EXCHANGES = ("all_gather", "ring", "ulysses")
RECOMPUTED = ("memory.recompute", "full")
OFFLOAD = ("memory.activation_offload", True)
SELECTIVE = ("memory.recompute", "selective")


@contextmanager
def compiled_once(engine: Engine) -> Iterator[None]:
    """One graph for three steps of all layers and microbatches, and one more for evaluations."""
    torch._dynamo.reset()
    counters.clear()
    yield
    assert counters["stats"]["unique_graphs"] == 1
    for step in (8, 9):
        assert evaluate(engine, [batches_of(engine, step)]) > 0
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]


def case(variant: Variant, placement: Placement, *keys: tuple[str, object]) -> Case:
    return Case(variant, placement, 8 // (2 * placement.dp), keys)


CASES = {
    "alone": [case(LLAMA, Placement()), case(GPT, Placement())],
    "tp": [
        case(variant, Placement(tp=2), *keys) for variant in (LLAMA, GPT) for keys in ((), (SP,))
    ],
    "pp": [case(variant, Placement(pp=2)) for variant in (LLAMA, GPT)],
    "dp": [
        case(LLAMA, Placement(dp=2), strategy("FULL_SHARD")),
        case(GPT, Placement(dp=2), strategy("SHARD_GRAD_OP"), ("parallel.blocks_per_unit", 2)),
    ],
    "cp": [
        *(case(LLAMA, Placement(cp=2), exchange(way)) for way in EXCHANGES),
        case(DOCUMENTS, Placement(cp=2), exchange("ring")),
    ],
    "two axes": [
        case(LLAMA, Placement(tp=2, dp=2), SP),
        case(GPT, Placement(tp=2, pp=2), SP),
        case(DOCUMENTS, Placement(tp=2, dp=2)),
    ],
    "cp and another": [
        case(LLAMA, Placement(tp=2, cp=2), exchange("ring"), SP),
        case(LLAMA, Placement(pp=2, cp=2), exchange("all_gather")),
        case(GPT, Placement(dp=2, cp=2), exchange("ulysses"), RECOMPUTED),
        case(DOCUMENTS, Placement(cp=4), exchange("all_gather")),
    ],
    "documents": [
        case(DOCUMENTS, Placement(tp=2), SP),
        case(DOCUMENTS, Placement(pp=2)),
        case(DOCUMENTS, Placement(dp=2), RECOMPUTED),
    ],
    "recompute": [
        case(LLAMA, Placement(tp=2), SP, RECOMPUTED),
        case(GPT, Placement(tp=2), RECOMPUTED),
    ],
    "split backward": [
        case(LLAMA, Placement(pp=2), schedule("ZB1P")),
        case(GPT.having(TIED), Placement(pp=2), *ZBV, SELECTIVE),
    ],
    "split backward and another axis": [
        case(LLAMA, Placement(tp=2, pp=2), schedule("ZB1P"), SP, SELECTIVE),
        case(LLAMA, Placement(pp=2, dp=2), schedule("ZB1P"), RECOMPUTED),
        case(DOCUMENTS, Placement(pp=2, cp=2), *ZBV, exchange("ring")),
    ],
    "selective": [
        case(GPT, Placement(tp=2), SELECTIVE),
        case(LLAMA, Placement(tp=2), SP, SELECTIVE),
        case(GPT, Placement(pp=2), SELECTIVE),
        case(LLAMA, Placement(dp=2), SELECTIVE),
        case(DOCUMENTS, Placement(cp=2), exchange("ring"), SELECTIVE),
    ],
}


@pytest.mark.parametrize("cases", CASES.values(), ids=CASES)
def test_compiled_blocks_change_nothing_and_are_one_graph(equivalence, cases):
    equivalence.check(
        [replace(case, keys=(*case.keys, *TRACED)) for case in cases], under=compiled_once
    )


@pytest.mark.parametrize(
    ("variant", "placement", "keys"),
    [
        (GPT, Placement(tp=2), (SP,)),
        (LLAMA, Placement(pp=2), (schedule("ZB1P"),)),
        (LLAMA, Placement(dp=2), (RECOMPUTED, ("parallel.blocks_per_unit", 2))),
        (DOCUMENTS, Placement(cp=2), (exchange("ring"), SELECTIVE)),
    ],
    ids=["tp", "pp", "dp", "cp"],
)
def test_what_compiled_layers_keep_on_the_host_changes_no_bit(
    equivalence, variant, placement, keys
):
    cases = [case(variant, placement, *keys, *TRACED, *more) for more in ((), (OFFLOAD,))]
    without, hosted = equivalence.check(cases, under=compiled_once)
    assert_same_bits(hosted, without)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "placement", "keys"),
    [
        (GPT, Placement(tp=2), (SP, SELECTIVE)),
        (LLAMA, Placement(dp=2), ()),
        (DOCUMENTS, Placement(cp=2), (exchange("ring"),)),
        (LLAMA, Placement(pp=2), (schedule("ZB1P"), RECOMPUTED)),
    ],
    ids=["gpt-tp2-sp-selective", "llama-dp2", "documents-cp2-ring", "llama-pp2-zb"],
)
def test_generated_code_changes_nothing(equivalence, variant, placement, keys):
    """Among it the masks of dropout, whose integers overflow."""
    equivalence.check([case(variant, placement, *keys, *COMPILED)], under=compiled_once)


@pytest.mark.gpu
def test_generated_code_of_an_accelerator_drops_the_same():
    from megagrid.nn.dropout import DropoutStreams, dropout

    device = torch.accelerator.current_accelerator()
    keys = DropoutStreams(1, 2, torch.arange(4)).of("place")
    x = torch.ones(64, 4, 128)
    compiled = torch.compile(dropout, fullgraph=True)
    assert torch.equal(
        compiled(x.to(device), 0.3, keys.to(device), 7).cpu() > 0, dropout(x, 0.3, keys, 7) > 0
    )
