"""Muon: momentum whose singular values are all made about 1 (Jordan et al. 2024), for hidden
matrices; AdamW for embedding, head, norms and biases.

    m <- momentum m + g,    u = g + momentum m under Nesterov, else m
    w <- w - lr (scale orthogonal(u) + weight_decay w)

A matrix is a global tensor, wq or gate or down, whatever stack it lies in and however ranks cut it.
Its update is a function of all of u, so boxes of u are sent to the rank that is to orthogonalise
it, and boxes of the result come back; `megagrid.plan.matrices` says who that is and what is sent:

    holders of 4 matrices        to the owners              each its own          back
    0:  a b c d, boxes   ->      0:  a  whole      ->       orthogonal(a)    ->   0:  boxes of all 4
    1:  a b c d          ->      1:  b             ->       orthogonal(b)    ->   1:  …
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megagrid.comm.collectives import exchange
from megagrid.config.schema import OptimizerConfig
from megagrid.grid.grid import Axis
from megagrid.nn.layout import Layout, ParameterShard, Piece
from megagrid.optim.adamw import AdamW
from megagrid.optim.sgd import add_momentum, decay_weights
from megagrid.plan.matrices import Holders, Matrix, deal, splits

COEFFICIENTS = 3.4445, -4.7750, 2.0315
"""Of the quintic. They don't converge to 1: singular values end between about 0.7 and 1.2, from
further below than with others (Jordan et al. 2024)."""

SCALES: dict[str, Callable[[int, int], float]] = {
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}
"""What the orthogonal matrix is multiplied by. The second gives its elements the size that AdamW's
updates have, so that AdamW's learning rates serve (Liu et al. 2025, arXiv 2502.16982, section
2)."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Of the iteration; one in float64 keeps the weights' dtype."""


@dataclass(frozen=True)
class _Held:
    """This rank's part of a matrix.

    Attributes:
        shard: index of the shard that has it.
        rows: of the shard's tensor; none if all are other ranks'.
    """

    matrix: Matrix
    shard: int
    rows: slice


class Muon:
    """Muon on `shards`' hidden matrices, AdamW on the others.

    Args:
        axis: the ranks with boxes of the same matrices, numbered as `holders` are.
        device: where they communicate and orthogonalise, wherever the shards lie.
    """

    state_names = ("momentum", *AdamW.state_names)

    def __init__(
        self,
        shards: Sequence[ParameterShard],
        config: OptimizerConfig,
        axis: Axis,
        holders: Holders,
        device: torch.device,
    ) -> None:
        self.shards = shards
        self._config = config
        self._axis = axis
        self._holders = holders
        self._device = device
        self._rest = AdamW([shard for shard in shards if not shard.hidden], config)
        self._rest_lr = 1.0 if config.adamw_lr is None else config.adamw_lr / config.lr
        self._hidden = [shard for shard in shards if shard.hidden]
        self._momentum = [torch.zeros_like(shard.tensor) for shard in self._hidden]
        self._held = [
            _Held(matrix, index, _rows(shard, piece))
            for index, shard in enumerate(self._hidden)
            for matrix, piece in zip(
                matrices(shard.layout, holders.tp, shard.split), shard.layout.pieces, strict=True
            )
        ]
        self._buckets = deal([held.matrix for held in self._held], holders)

    def states(self, name: str) -> list[Tensor | None]:
        """The states `name` of all shards, in their order: momentum of hidden matrices alone,
        AdamW's of the others."""
        is_hidden = name == "momentum"
        values = iter(self._momentum if is_hidden else self._rest.states(name))
        return [next(values) if shard.hidden is is_hidden else None for shard in self.shards]

    def set_step(self, step: int) -> None:
        """Number of updates made so far, which AdamW depends on."""
        self._rest.set_step(step)

    def step(self, lr: float) -> None:
        """Update the parameters at learning rate `lr`, and drop their gradients."""
        self._rest.step(lr * self._rest_lr)
        if not self._hidden:
            return
        grads = [
            torch.zeros_like(shard.tensor) if shard.grad is None else shard.grad
            for shard in self._hidden
        ]
        updates = add_momentum(self._momentum, grads, self._config)
        decay_weights(self._hidden, lr * self._config.weight_decay)
        for bucket in self._buckets:
            self._update([self._held[index] for index in bucket], updates, lr)
        for shard in self._hidden:
            shard.parameter.grad = None

    def _update(self, bucket: Sequence[_Held], updates: Sequence[Tensor], lr: float) -> None:
        """Orthogonalise the update of each of the bucket's matrices on its owner, and apply it."""
        whole = self._gather(bucket, [updates[held.shard][held.rows] for held in bucket])
        if whole is not None:
            whole = self._orthogonal(whole)
        for held, box in zip(bucket, self._return(bucket, whole), strict=True):
            scale = SCALES[self._config.muon_scale](*held.matrix.shape)
            weights = self._hidden[held.shard].tensor[held.rows]
            weights.add_(box.view_as(weights).to(weights.device), alpha=-lr * scale)

    def _gather(self, bucket: Sequence[_Held], boxes: Sequence[Tensor]) -> Tensor | None:
        """Send this rank's boxes to the owners; the whole of the matrix that is its own, if one."""
        matrices = [held.matrix for held in bucket]
        shares, parts = splits(matrices, self._holders, self._axis.rank, gather=True)
        sent = [box.reshape(-1) for box, share in zip(boxes, shares, strict=False) if share]
        message = torch.cat(sent) if sent else boxes[0].new_empty(0)
        got = exchange(message.to(self._device), shares, parts, self._axis)
        if self._axis.rank >= len(bucket):
            return None
        matrix = matrices[self._axis.rank]
        whole = got.new_empty(matrix.shape)
        for rank, part in enumerate(got.split(parts)):
            if part.numel():
                view = _view(whole, matrix, self._holders, rank)
                view.copy_(part.view_as(view))
        return whole

    def _return(self, bucket: Sequence[_Held], whole: Tensor | None) -> Sequence[Tensor]:
        """Send boxes of this rank's own matrix to its holders; this rank's boxes of all."""
        matrices = [held.matrix for held in bucket]
        shares, parts = splits(matrices, self._holders, self._axis.rank, gather=False)
        if whole is None:
            message = self._momentum[0].new_empty(0, device=self._device)
        else:
            matrix = matrices[self._axis.rank]
            views = [_view(whole, matrix, self._holders, g) for g in range(self._holders.size)]
            message = torch.cat([view.reshape(-1) for view in views])
        return exchange(message, parts, shares, self._axis).split(shares)[: len(bucket)]

    def _orthogonal(self, matrix: Tensor) -> Tensor:
        dtype = matrix.dtype if matrix.dtype == torch.float64 else DTYPES[self._config.muon_dtype]
        result = orthogonal(matrix.to(dtype), self._config.muon_steps)
        return result.to(matrix.dtype)


def orthogonal(x: Tensor, steps: int) -> Tensor:
    """About U V^T of x = U S V^T, by `steps` of Newton and Schulz's iteration:

        x <- a x + (b x x^T + c (x x^T)^2) x,    from x / |x|

    Whatever factor x has, the result is the same.
    """
    a, b, c = COEFFICIENTS
    is_tall = x.shape[0] > x.shape[1]
    if is_tall:
        x = x.T
    x = x / x.norm().clamp(min=torch.finfo(x.dtype).tiny)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def matrices(layout: Layout, tp: int, cuts: int) -> list[Matrix]:
    """The pieces of a local stack, as all of their holders see them.

    Each rank of tp has an equal part of each, cut along one dim, in the order of the ranks.
    """
    found, top = [], 0
    for piece in layout.pieces:
        rows, columns = (
            whole // part for whole, part in zip(piece.shape, piece.box.sizes, strict=True)
        )
        assert tp % (rows * columns) == 0, f"{piece.name} isn't cut evenly over tp {tp}"
        found.append(Matrix(piece.shape, (rows, columns), top, layout.local_shape[0], cuts))
        top += piece.local_rows
    return found


def _rows(shard: ParameterShard, piece: Piece) -> slice:
    """Of `shard`'s tensor, the rows that are of `piece`; none if others have them."""
    mine = (rows for part, rows in shard.boxes if part.name == piece.name)
    return next(mine, slice(0, 0))


def _view(whole: Tensor, matrix: Matrix, holders: Holders, rank: int) -> Tensor:
    rows, columns = matrix.box(holders, rank)
    return whole[rows.start : rows.stop, columns.start : columns.stop]
