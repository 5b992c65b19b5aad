"""muP: activations and updates keep their size as the model grows wider."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megagrid.data import Batch
from megagrid.model.width import WidthScaling, width_scaling
from megagrid.train.build import Engine
from megagrid.train.metrics import Stopwatch
from megagrid.train.step import apply_gradients, compute_gradients
from tests.equivalence.case import LLAMA, Case, Keys
from tests.equivalence.trainer import batches_of, engine_of, rank_grid

STEPS, LR = 8, 3e-3


def of_width(width: int, *keys: tuple[str, object]) -> Case:
    """A model that grows by heads of 8 channels."""
    shape: Keys = (
        ("model.hidden_size", width),
        ("model.ffn_hidden_size", 2 * width),
        ("model.num_heads", width // 8),
        ("model.num_kv_heads", width // 8),
        ("model.head_dim", 8),
        ("optimizer.clip_grad", 0.0),
    )
    return Case(LLAMA.having(*shape, *keys), micro_batch=8)


def outputs_of(engine: Engine, batch: Batch) -> torch.Tensor:
    """What the last layer puts out."""
    (stage,) = engine.executor.stages.values()
    *_, last = stage.module.layers.values()
    found = []
    handle = last.register_forward_hook(lambda module, inputs, output: found.append(output))
    with torch.no_grad():
        stage.module(torch.from_numpy(batch.tokens))
    handle.remove()
    return found[0].double()


def changes(cases: list[Case]) -> list[float]:
    """By how much a few steps change an activation, root mean square, in each case."""
    found = []
    for case in cases:
        engine = engine_of(case, rank_grid(case.placement, case.config.model.num_kv_heads))
        (batch,) = batches_of(engine, STEPS + 1)
        before = outputs_of(engine, batch)
        for step in range(1, STEPS + 1):
            result = compute_gradients(engine, batches_of(engine, step), step, Stopwatch())
            apply_gradients(engine, result.grad_norm, LR)
        found.append((outputs_of(engine, batch) - before).square().mean().sqrt().item())
    return found


def test_updates_move_activations_alike_at_every_width_with_mup_and_more_and_more_without(ranks):
    """The coordinate check of Yang et al. 2022, arXiv 2203.03466, appendix D.1."""
    widths, mup = (32, 64, 128, 256), ("model.mup_base_width", 32)
    cases = [of_width(width) for width in widths] + [of_width(width, mup) for width in widths]
    (found,) = ranks.run(changes, cases, world_size=1)
    ordinary, scaled = np.array(found[:4]), np.array(found[4:])
    assert ordinary[0] == scaled[0]  # at the base width the two are one
    assert (ordinary[1:] / ordinary[:-1] > 1.5).all()
    assert scaled.max() / scaled.min() < 1.15


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, WidthScaling()),
        ({"mup_base_width": 32}, WidthScaling()),
        ({"mup_base_width": 8}, WidthScaling(hidden_std=0.5, hidden_lr=0.25, logits=0.25)),
        (
            {"mup_base_width": 32, "mup_base_head_dim": 1},
            WidthScaling(queries=0.5),
        ),
    ],
    ids=str,
)
def test_factors_are_those_of_the_table(keys, expected):
    model = Case(LLAMA).config.model.model_copy(update=keys)
    assert width_scaling(model) == expected
