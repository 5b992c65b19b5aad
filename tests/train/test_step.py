"""One step, and one evaluation, against what autograd makes of the whole batch at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from megagrid.data import IGNORE, Batch
from megagrid.grid.grid import build_grid
from megagrid.grid.placement import Placement
from megagrid.nn.layout import parameter_shards
from megagrid.train.build import Engine, build_engine, build_whole_model
from megagrid.train.metrics import Stopwatch
from megagrid.train.step import (
    News,
    StepResult,
    apply_gradients,
    compute_gradients,
    evaluate,
)
from tests.end_to_end.t0 import DP2, DROPOUT, GPT, PP2, TP2, Sections, merged, name_of, t0

SEQ, VOCAB = 32, 61


def engine_of(*parts: Sections) -> Engine:
    """T0 on this process, which is a grid of one."""
    config = t0("unused", Placement(), *parts)
    return build_engine(config, build_grid(Placement(), 0, "cpu", config.model.num_kv_heads))


def whole_batch(samples: int = 8, valid: Callable[[int], int] = lambda sample: SEQ) -> Batch:
    """Random tokens; `valid` says how many labels of each sample count."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, (samples, SEQ + 1), dtype=np.int64)
    labels = tokens[:, 1:].copy()
    for sample in range(samples):
        labels[sample, valid(sample) :] = IGNORE
    return Batch(tokens[:, :-1].copy(), labels, np.arange(samples, dtype=np.int64))


def cut(batch: Batch, size: int) -> list[Batch]:
    """Microbatches of `size` samples."""
    starts = range(0, len(batch.tokens), size)
    return [
        Batch(*(array[i : i + size] for array in (batch.tokens, batch.labels, batch.sample_ids)))
        for i in starts
    ]


def step(engine: Engine, batch: Batch, number: int = 1) -> StepResult:
    batches = cut(batch, engine.config.train.micro_batch_size)
    return compute_gradients(engine, batches, number, Stopwatch())


def dense_loss_and_norm(engine: Engine, batch: Batch) -> tuple[float, float]:
    """By torch's own cross-entropy on the logits of the whole batch."""
    model = build_whole_model(engine.config.model, torch.float32, torch.device("cpu"))
    for mine, theirs in zip(parameter_shards(model), engine.shards, strict=True):
        mine.tensor.copy_(theirs.tensor)
    logits: Tensor = model(torch.from_numpy(batch.tokens))  # (s, b, v)
    labels = torch.from_numpy(batch.labels).t().flatten()
    loss = F.cross_entropy(logits.flatten(0, 1)[:, :VOCAB], labels, ignore_index=IGNORE)
    loss.backward()
    return loss.item(), torch.nn.utils.get_total_norm(p.grad for p in model.parameters()).item()


@pytest.mark.parametrize("family", [{}, GPT], ids=["llama", "gpt"])
@pytest.mark.parametrize("micro", [1, 2, 8])
def test_a_step_is_the_mean_over_the_tokens_of_the_batch(family, micro):
    """Samples differ in how many labels count, one has none: no mean of means is right."""
    engine = engine_of(family, {"train": {"micro_batch_size": micro}})
    batch = whole_batch(valid=lambda sample: (sample * 11) % 32)
    result = step(engine, batch)
    loss, norm = dense_loss_and_norm(engine, batch)
    assert result.valid_tokens == sum((sample * 11) % 32 for sample in range(8))
    assert result.loss == pytest.approx(loss, abs=1e-5)
    assert result.grad_norm == pytest.approx(norm, rel=1e-4)
    assert len(result.peak_memory_bytes) == 1


def test_a_z_loss_is_told_apart_from_the_cross_entropy():
    batch = whole_batch(valid=lambda sample: (sample * 11) % 32)
    plain, engine = engine_of(), engine_of({"train": {"z_loss": 0.01}})
    model = build_whole_model(engine.config.model, torch.float32, torch.device("cpu"))
    for mine, theirs in zip(parameter_shards(model), engine.shards, strict=True):
        mine.tensor.copy_(theirs.tensor)
    log_z = model(torch.from_numpy(batch.tokens))[..., :VOCAB].logsumexp(dim=-1).t()
    counted = log_z[torch.from_numpy(batch.labels) != IGNORE]
    without, result = step(plain, batch), step(engine, batch)
    assert result.z_loss == pytest.approx(0.01 * counted.square().mean().item(), rel=1e-5)
    assert (result.loss, without.z_loss) == (without.loss, 0.0)
    assert evaluate(engine, [cut(batch, 2)]) == evaluate(plain, [cut(batch, 2)])


def tell_and_hear(placement: Placement, news: Mapping[int, News]) -> News:
    """A step in which ranks have news."""
    config = t0("unused", placement)
    engine = build_engine(config, build_grid(placement, dist.get_rank(), "cpu", 2))
    batches = cut(whole_batch(8 // placement.dp), 2)
    mine = news.get(dist.get_rank(), News())
    return compute_gradients(engine, batches, 1, Stopwatch(), None, lambda: mine).news


@pytest.mark.parametrize("placement", [TP2, PP2, DP2], ids=name_of)
@pytest.mark.parametrize(
    "news",
    [{}, {1: News(stop=True)}, {0: News(save_failed=True)}, {0: News(True), 1: News(True, True)}],
    ids=["none", "stop", "save failed", "both"],
)
def test_what_one_rank_tells_all_hear_at_the_end_of_the_step(ranks, placement, news):
    told = news.values()
    expected = News(any(one.stop for one in told), any(one.save_failed for one in told))
    assert ranks.run(tell_and_hear, placement, news, world_size=2) == [expected] * 2


def test_a_step_without_a_valid_token_has_no_gradient():
    engine = engine_of()
    result = step(engine, whole_batch(valid=lambda sample: 0))
    assert (result.loss, result.grad_norm, result.valid_tokens) == (0.0, 0.0, 0)
    apply_gradients(engine, result.grad_norm, lr=1e-3)
    assert all(torch.isfinite(shard.tensor).all() for shard in engine.shards)


def test_gradients_are_of_this_step_alone():
    engine, batch = engine_of(), whole_batch()
    first = step(engine, batch)
    apply_gradients(engine, first.grad_norm, lr=0.0)
    assert all(shard.grad is None for shard in engine.shards)
    assert step(engine, batch).grad_norm == first.grad_norm


def test_clipping_scales_what_is_above_and_nothing_else():
    for largest, clipped in ((0.0, False), (1e6, False), (1e-3, True)):
        engine = engine_of({"optimizer": {"clip_grad": largest}})
        norm = step(engine, whole_batch()).grad_norm
        moments = engine.optimizer.states("exp_avg")
        apply_gradients(engine, norm, lr=1e-3)
        after = torch.nn.utils.get_total_norm(moments).item() / (1 - 0.9)
        assert after == pytest.approx(largest if clipped else norm, rel=1e-4)


def test_dropout_follows_step_and_sample_and_no_state():
    """The same step again drops the same; another one, or an evaluation, doesn't."""
    engine, batch = engine_of(GPT, DROPOUT), whole_batch()
    losses = [step(engine, batch, number).loss for number in (1, 1, 2)]
    assert losses[0] == losses[1] != losses[2]
    swapped = Batch(batch.tokens, batch.labels, batch.sample_ids[::-1].copy())
    assert step(engine, swapped, 1).loss != losses[0]


@pytest.mark.parametrize("family", [{}, merged(GPT, DROPOUT)], ids=["llama", "gpt with dropout"])
def test_an_evaluation_is_the_mean_over_all_its_tokens(family):
    engine = engine_of(family)
    first, second = whole_batch(), whole_batch(valid=lambda sample: sample)
    loss = evaluate(engine, [cut(first, 2), cut(second, 2)])
    both = Batch(
        *(
            np.concatenate([getattr(batch, name) for batch in (first, second)])
            for name in ("tokens", "labels", "sample_ids")
        )
    )
    assert loss == pytest.approx(dense_loss_and_norm(engine, both)[0], abs=1e-5)
    assert all(shard.grad is None for shard in engine.shards)


def test_an_evaluation_without_a_valid_token_has_no_loss():
    batches = cut(whole_batch(valid=lambda sample: 0), 2)
    assert evaluate(engine_of(), [batches]) is None
    assert evaluate(engine_of(), []) is None
