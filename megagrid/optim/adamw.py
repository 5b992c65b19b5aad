"""AdamW on the shards that this rank owns: an update is elementwise and knows neither tp nor dp."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megagrid.config.schema import OptimizerConfig
from megagrid.nn.layout import ParameterShard

STATE_DTYPES = {"bf16": torch.bfloat16}
"""Of moments that are rounded after each update; others have the weights' dtype."""


class AdamW:
    """Fused AdamW (Loshchilov & Hutter 2019) with decayed and undecayed parameters apart.

    Args:
        hidden_lr: factor of hidden matrices' learning rate, not of their decay.
    """

    state_names = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        shards: Sequence[ParameterShard],
        config: OptimizerConfig,
        hidden_lr: float = 1.0,
    ) -> None:
        self.shards = shards
        # Leaves of their own over the shards' storage: what autograd and FSDP do to the parameters
        # doesn't concern the optimizer, nor its dispatch them.
        self._leaves = [nn.Parameter(shard.tensor) for shard in shards]
        kinds = {
            (decay, factor): {
                "params": [],
                "factor": factor,
                "weight_decay": config.weight_decay / factor if decay else 0.0,
            }
            for decay in (True, False)
            for factor in (1.0, hidden_lr)
        }
        for leaf, shard in zip(self._leaves, shards, strict=True):
            kinds[shard.decay, hidden_lr if shard.hidden else 1.0]["params"].append(leaf)
        if not shards:
            return  # a stage between the ends that has no layer
        self._adamw = torch.optim.AdamW(
            [group for group in kinds.values() if group["params"]],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
        )
        self._is_rounded = config.state_dtype in STATE_DTYPES
        for leaf in self._leaves:
            dtype = STATE_DTYPES.get(config.state_dtype, leaf.dtype)
            # Made now, as the optimizer would at its first step: memory is known from the start,
            # and a checkpoint has something to load into.
            self._adamw.state[leaf] = {
                "step": torch.zeros((), dtype=torch.float32, device=leaf.device),
                **{name: torch.zeros_like(leaf, dtype=dtype) for name in self.state_names},
            }

    def states(self, name: str) -> list[Tensor]:
        """The states `name` ("exp_avg" or "exp_avg_sq") of all shards, in their order."""
        return [self._adamw.state[leaf][name] for leaf in self._leaves]

    def set_step(self, step: int) -> None:
        """Number of updates made so far, which the moments' bias correction depends on."""
        for leaf in self._leaves:
            self._adamw.state[leaf]["step"].fill_(step)

    def step(self, lr: float) -> None:
        """Update the parameters at learning rate `lr`, and drop their gradients."""
        if not self._leaves:
            return
        for group in self._adamw.param_groups:
            group["lr"] = lr * group["factor"]
        if self._is_rounded:
            for leaf, shard in zip(self._leaves, self.shards, strict=True):
                self._step_rounded(leaf, shard.grad)
        else:
            for leaf, shard in zip(self._leaves, self.shards, strict=True):
                leaf.grad = shard.grad
            self._adamw.step()
        for leaf, shard in zip(self._leaves, self.shards, strict=True):
            leaf.grad = shard.parameter.grad = None

    def _step_rounded(self, leaf: Tensor, grad: Tensor | None) -> None:
        """Update one parameter with its moments in its own dtype, and round them again: only one
        parameter's are so large at a time."""
        rounded = self._adamw.state[leaf]
        exact = {name: rounded[name].to(leaf.dtype) for name in self.state_names}
        self._adamw.state[leaf] = rounded | exact
        leaf.grad = grad
        self._adamw.step()  # the others have no gradient
        leaf.grad = None
        for name, values in exact.items():
            rounded[name].copy_(values)
        self._adamw.state[leaf] = rounded
