"""Stochastic gradient descent with momentum, on the shards that this rank owns."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megagrid.config.schema import OptimizerConfig
from megagrid.nn.layout import ParameterShard


class SGD:
    """SGDW (Loshchilov & Hutter 2019, algorithm 1, with torch.optim.SGD's momentum):

        m <- momentum m + g,    u = g + momentum m under Nesterov, else m
        w <- w - lr (u + weight_decay w)

    Decay is decoupled, hence no part of m, where torch.optim.SGD adds it to the gradient.
    """

    state_names = ("momentum",)

    def __init__(self, shards: Sequence[ParameterShard], config: OptimizerConfig) -> None:
        self.shards = shards
        self._config = config
        self._momentum = [torch.zeros_like(shard.tensor) for shard in shards]

    def states(self, name: str) -> list[Tensor]:
        """The states `name` ("momentum") of all shards, in their order."""
        return {"momentum": self._momentum}[name]

    def set_step(self, step: int) -> None:
        """No update depends on how many there were."""

    def step(self, lr: float) -> None:
        """Update the parameters at learning rate `lr`, and drop their gradients."""
        found = [
            (shard, momentum, shard.grad)
            for shard, momentum in zip(self.shards, self._momentum, strict=True)
            if shard.grad is not None
        ]
        if not found:
            return
        shards, momenta, grads = zip(*found, strict=True)
        decay_weights(shards, lr * self._config.weight_decay)
        for shard, update in zip(shards, add_momentum(momenta, grads, self._config), strict=True):
            shard.tensor.add_(update, alpha=-lr)
            shard.parameter.grad = None


def decay_weights(shards: Sequence[ParameterShard], share: float) -> None:
    """Take `share` of each decayed weight off it."""
    decayed = [shard.tensor for shard in shards if shard.decay]
    if decayed and share:
        torch._foreach_mul_(decayed, 1.0 - share)


def add_momentum(
    momenta: Sequence[Tensor], grads: Sequence[Tensor], config: OptimizerConfig
) -> Sequence[Tensor]:
    """Take the gradients into the momenta, in place; returns the updates, for which the memory of
    either is used."""
    torch._foreach_mul_(momenta, config.momentum)
    torch._foreach_add_(momenta, grads)
    if not config.nesterov:
        return momenta
    torch._foreach_add_(grads, momenta, alpha=config.momentum)
    return grads
