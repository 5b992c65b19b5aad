"""muP: what of a model is scaled so that a learning rate found at one width serves at another.

Of a model that is m times as wide as the base (Yang et al. 2022, arXiv 2203.03466, Table 8, for
Adam; what isn't named is as it was):

    hidden matrices      deviation of the initial values / sqrt(m), learning rate / m
    logits               / m
    attention scores     q k^T sqrt(base head_dim) / head_dim in place of q k^T / sqrt(head_dim)

At the base width all of that is 1, and the model bit by bit the ordinary one. Weight decay isn't
scaled: a step takes as large a share of a weight off at every width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megagrid.config.schema import ModelConfig


@dataclass(frozen=True)
class WidthScaling:
    """Factors, all 1 in an ordinary model.

    Attributes:
        hidden_std: of the initial values of hidden matrices.
        hidden_lr: of their learning rate.
        logits: of logits.
        queries: of queries, and so of attention scores.
    """

    hidden_std: float = 1.0
    hidden_lr: float = 1.0
    logits: float = 1.0
    queries: float = 1.0


def width_scaling(model: ModelConfig) -> WidthScaling:
    """That of the recipe."""
    if model.mup_base_width is None:
        return WidthScaling()
    share = model.mup_base_width / model.hidden_size
    base_head_dim = model.mup_base_head_dim or model.head_dim
    return WidthScaling(
        hidden_std=math.sqrt(share),
        hidden_lr=share,
        logits=share,
        queries=math.sqrt(base_head_dim / model.head_dim),
    )
