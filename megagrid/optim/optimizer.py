"""What the rest of a run knows of an optimizer, and which there are.

    name     updates                                       states of a parameter
    adamw    all parameters                                exp_avg, exp_avg_sq
    sgd      all parameters                                momentum
    muon     hidden matrices, with their ranks together    momentum
             all others, as AdamW                          exp_avg, exp_avg_sq

All are given the shards that this rank owns, and work on those local tensors, whatever wraps the
parameters that they belong to. Weight decay is decoupled in all of them (Loshchilov & Hutter 2019):
a step takes lr x weight_decay x w off each decayed weight, and gradients never see it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megagrid.config.schema import OptimizerConfig
from megagrid.grid.grid import Axis
from megagrid.nn.layout import ParameterShard
from megagrid.optim.adamw import AdamW
from megagrid.optim.muon import Muon
from megagrid.optim.sgd import SGD
from megagrid.plan.matrices import Holders


class Optimizer(Protocol):
    """Turns gradients into new weights.

    Attributes:
        shards: what it updates.
        state_names: of all states that it keeps of any parameter. A state has the shape of its
            shard, so a checkpoint cuts and joins it like the weight.
    """

    shards: Sequence[ParameterShard]
    state_names: tuple[str, ...]

    def states(self, name: str) -> list[Tensor | None]:
        """The states `name` of all shards, in their order; None where a shard has no such state."""

    def set_step(self, step: int) -> None:
        """Number of updates made so far."""

    def step(self, lr: float) -> None:
        """Update the parameters at learning rate `lr`, and drop their gradients."""


@dataclass(frozen=True)
class Peers:
    """The ranks that hold boxes of the same parameters, this one among them.

    Attributes:
        axis: all of them.
        holders: how many they are along dp and tp.
        device: where they communicate.
    """

    axis: Axis
    holders: Holders
    device: torch.device


ALONE = Peers(Axis.single("stage"), Holders(), torch.device("cpu"))

Make = Callable[[Sequence[ParameterShard], OptimizerConfig, Peers, float], Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda shards, config, peers, hidden_lr: AdamW(shards, config, hidden_lr),
    "sgd": lambda shards, config, peers, hidden_lr: SGD(shards, config),
    "muon": lambda shards, config, peers, hidden_lr: Muon(
        shards, config, peers.axis, peers.holders, peers.device
    ),
}


def make_optimizer(
    shards: Sequence[ParameterShard],
    config: OptimizerConfig,
    peers: Peers = ALONE,
    hidden_lr: float = 1.0,
) -> Optimizer:
    """The recipe's optimizer of `shards`, by itself or, if it needs them, with its peers.

    Args:
        hidden_lr: factor of hidden matrices' learning rate; other than 1 for AdamW alone.
    """
    return OPTIMIZERS[config.name](shards, config, peers, hidden_lr)
