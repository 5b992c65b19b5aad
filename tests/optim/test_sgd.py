"""SGD on shards: torch's own update, but for the decay, which is decoupled."""

from __future__ import annotations

import pytest
import torch

from megagrid.config.schema import OptimizerConfig
from megagrid.optim.optimizer import OPTIMIZERS, make_optimizer
from megagrid.optim.sgd import SGD
from megagrid.plan.parameters import OPTIMIZER_STATES
from tests.optim.test_adamw import give_gradients, shard

CONFIG = OptimizerConfig(name="sgd", momentum=0.8, nesterov=False, weight_decay=0.0)


def config_of(**keys) -> OptimizerConfig:
    return CONFIG.model_copy(update=keys)


@pytest.mark.parametrize("nesterov", [False, True])
def test_update_without_decay_is_that_of_torch(nesterov):
    ours, theirs = ([shard(1, 4, 3), shard(2, 5, decay=False)] for _ in range(2))
    optimizer = SGD(ours, config_of(nesterov=nesterov))
    reference = torch.optim.SGD(
        [one.parameter for one in theirs], lr=1e-2, momentum=0.8, nesterov=nesterov
    )
    for step, lr in enumerate([1e-2, 5e-3, 2e-2]):
        for shards in (ours, theirs):
            give_gradients(shards, step)
        optimizer.step(lr)
        reference.param_groups[0]["lr"] = lr
        reference.step()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.tensor, other.parameter.detach(), rtol=0, atol=1e-7)


def test_decay_is_decoupled_and_of_decayed_weights_alone():
    """A step takes lr x decay x w off, the momentum of the next knows nothing of it."""
    results = []
    for weight_decay in (0.0, 0.5):
        shards = [shard(1, 4, 3), shard(2, 5, decay=False)]
        before = [one.tensor.clone() for one in shards]
        optimizer = SGD(shards, config_of(weight_decay=weight_decay))
        give_gradients(shards, 1)
        optimizer.step(1e-2)
        results.append(([one.tensor for one in shards], optimizer.states("momentum")))
    ((plain, norm), momentum), ((decayed, undecayed), with_decay) = results
    assert torch.equal(norm, undecayed)
    assert all(map(torch.equal, momentum, with_decay))
    torch.testing.assert_close(plain - decayed, 1e-2 * 0.5 * before[0], rtol=0, atol=1e-7)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_are_those_that_plans_and_checkpoints_reckon_with(name):
    shards = [shard(1, 4, 3), shard(2, 5)]
    optimizer = make_optimizer(shards, OptimizerConfig(name=name))
    for state in OPTIMIZER_STATES[name][False]:
        assert [values.shape for values in optimizer.states(state)] == [(4, 3), (5,)]
        assert not any(values.any() for values in optimizer.states(state))
    planned = {state for states in OPTIMIZER_STATES[name].values() for state in states}
    assert set(optimizer.state_names) == planned


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_gradients_are_dropped_and_a_rank_may_own_no_rows_or_nothing(name):
    shards = [shard(1, 0, 3), shard(2, 5)]
    give_gradients(shards, 1)
    make_optimizer(shards, OptimizerConfig(name=name)).step(1e-2)
    assert [one.grad for one in shards] == [None, None]
    nothing = make_optimizer([], OptimizerConfig(name=name))
    nothing.set_step(3)
    nothing.step(1e-2)
    assert [nothing.states(state) for state in nothing.state_names] == [
        [] for _ in nothing.state_names
    ]
