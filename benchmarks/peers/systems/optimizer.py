"""The optimizer that the systems without one of their own share."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor

from benchmarks.peers.spec import Recipe


def adamw(parameters: Iterable[torch.nn.Parameter], recipe: Recipe) -> torch.optim.AdamW:
    """Fused AdamW; matrices decay, norm weights don't.

    One group for each (decays, device mesh): a fused update takes DTensors of one mesh at a time.
    """
    groups: dict[tuple[bool, object], list[torch.nn.Parameter]] = {}
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault((parameter.ndim >= 2, mesh), []).append(parameter)
    return torch.optim.AdamW(
        [
            {"params": members, "weight_decay": recipe.weight_decay if decays else 0.0}
            for (decays, _), members in groups.items()
        ],
        lr=recipe.lr,
        betas=(recipe.beta1, recipe.beta2),
        eps=recipe.eps,
        fused=True,
    )
