"""Where a local parameter lies in the model. One fact with four readers: initialisation, the
gradient norm, the optimizer's groups and the checkpoint.

A layer's local tensor is a stack, along dim 0, of *pieces*; each piece is a rectangular box of one
global tensor. A fused QKV projection under tensor parallelism, for example, is three of them:

    local  (q + 2 kv, h)        global tensors
    +-----------+
    |  wq rows  |   <---   box of layers.3.attention.wq.weight   (heads * head_dim, h)
    +-----------+
    |  wk rows  |   <---   box of layers.3.attention.wk.weight   (kv_heads * head_dim, h)
    +-----------+
    |  wv rows  |   <---   box of layers.3.attention.wv.weight   (kv_heads * head_dim, h)
    +-----------+

FSDP then cuts the local tensor along dim 0 over the dp axis; `Layout.rows` says which boxes such a
cut holds. Global names and shapes know nothing of the grid, so neither does a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megagrid.grid.grid import Axis
from megagrid.nn.init import Init


@dataclass(frozen=True)
class Box:
    """A rectangle of a global tensor: `offsets` (where it begins) and `sizes`, one per dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


@dataclass(frozen=True)
class Piece:
    """A part of a local parameter: `box` of the global tensor `name`.

    Attributes:
        name: a layer states it relative to its parent module; `parameter_shards` makes it global.
        shape: of the global tensor, without padding.
        box: the part of it that lies here.
        local_rows: rows along dim 0 of the local parameter that the box fills. More than
            `box.sizes[0]` where the vocabulary is padded: those rows are zero, get no gradient and
            are never saved.
        init: how its values begin, see `megagrid.nn.init`.
        replicas: the axes along which other ranks hold the same box. It is counted, and written,
            by the rank whose index is 0 along all of them.
        partial: those axes of `replicas` along which each rank's gradient is only a summand.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    local_rows: int
    init: Init
    replicas: tuple[Axis, ...] = ()
    partial: tuple[Axis, ...] = ()

    @property
    def is_counted_here(self) -> bool:
        """Whether this rank is the one that speaks for the box."""
        return all(axis.rank == 0 for axis in self.replicas)


@dataclass(frozen=True)
class Layout:
    """A local parameter as a stack of pieces along dim 0.

    Attributes:
        decay: whether weight decay applies to it.
        hidden: whether its pieces are matrices from hidden units to hidden units: not tables, norms
            or biases.
    """

    pieces: tuple[Piece, ...]
    decay: bool
    hidden: bool = False

    @property
    def local_shape(self) -> tuple[int, ...]:
        rows = sum(piece.local_rows for piece in self.pieces)
        return (rows, *self.pieces[0].box.sizes[1:])

    def named(self, parent: str) -> Layout:
        """The same with global names: the pieces' names below the module path `parent`."""
        named = (replace(piece, name=f"{parent}{piece.name}") for piece in self.pieces)
        return replace(self, pieces=tuple(named))

    def replicated(self, axis: Axis, *, partial: bool = False) -> Layout:
        """The same, held by every rank of `axis`."""
        pieces = tuple(
            replace(
                piece,
                replicas=(*piece.replicas, axis),
                partial=(*piece.partial, axis) if partial else piece.partial,
            )
            for piece in self.pieces
        )
        return replace(self, pieces=pieces)

    def rows(self, start: int, stop: int) -> Iterator[tuple[Piece, slice]]:
        """What rows [start, stop) of the local parameter hold.

        Yields:
            each piece cut down to those rows, and the slice that it fills, counted from `start`.
            Padding, and pieces of which nothing is left, are passed over.
        """
        top = 0
        for piece in self.pieces:
            first = max(start, top)
            last = min(stop, top + piece.box.sizes[0])
            if first < last:
                offsets = (piece.box.offsets[0] + first - top, *piece.box.offsets[1:])
                box = Box(offsets, (last - first, *piece.box.sizes[1:]))
                cut = replace(piece, box=box, local_rows=last - first)
                yield cut, slice(first - start, last - start)
            top += piece.local_rows


@dataclass(frozen=True)
class ParameterShard:
    """What this rank owns of one parameter: the rows that optimizer, norm and checkpoint work on.

    Attributes:
        name: of the parameter in its stage.
        parameter: what the module holds: a plain tensor, or FSDP's DTensor.
        tensor: the local rows of it, sharing its storage.
        boxes: for each box of the model among those rows, its piece and slice of `tensor`.
        layout: of the whole local parameter.
        rows: which of the rows that lie here `tensor` is; None: all.
        split: ranks that have some rows each.
    """

    name: str
    parameter: nn.Parameter
    tensor: Tensor
    boxes: tuple[tuple[Piece, slice], ...]
    layout: Layout
    rows: slice | None = None
    split: int = 1

    @property
    def module(self) -> str:
        """Path of the module that holds the parameter."""
        return self.name.rpartition(".")[0]

    @property
    def decay(self) -> bool:
        """Whether weight decay applies."""
        return self.layout.decay

    @property
    def hidden(self) -> bool:
        """Whether it is rows of matrices from hidden units to hidden units."""
        return self.layout.hidden

    @property
    def grad(self) -> Tensor | None:
        """The local rows of the gradient, sharing its storage; None if there is none."""
        grad = self.parameter.grad
        if grad is None:
            return None
        return local(grad) if self.rows is None else local(grad)[self.rows]


@dataclass(frozen=True)
class Sharing:
    """How the ranks with the same model share a parameter.

    Attributes:
        split: the axis whose ranks have some rows each; of size 1 if none is split.
        replicas: the axis whose ranks have the same.
    """

    split: Axis
    replicas: Axis


def parameter_shards(
    model: nn.Module,
    sharing: Callable[[str], Sharing] | None = None,
    *,
    cut: bool = False,
) -> list[ParameterShard]:
    """All parameters that `model` trains, in the order of their names in it; a tied one once.

    A layer states where its parameters lie in `layouts: dict[parameter name, Layout]`, which
    fully_shard leaves in place.

    Args:
        sharing: from the path of a module to how its parameters are shared; None: they aren't.
        cut: what `model` holds isn't split yet, and the rows are wanted that the axis `split` would
            leave here. Else they are what is here.
    """
    shards = []
    for path, module in model.named_modules():
        parent = path[: path.rfind(".") + 1]
        for name, layout in getattr(module, "layouts", {}).items():
            layout = layout.named(parent)
            split = None
            if sharing is not None:
                shared = sharing(path)
                split = shared.split if cut else None
                if shared.replicas.size > 1:
                    layout = layout.replicated(shared.replicas)
            parameter = getattr(module, name)
            here, rows = local(parameter.detach()), None
            first = _first_row(parameter)
            if split is not None:
                # Nothing has cut it yet.
                held = here.shape[0]
                first = first_of_shard(split.rank, split.size, held)
                rows = slice(first, first_of_shard(split.rank + 1, split.size, held))
                here = here[rows]
            shards.append(
                ParameterShard(
                    name=f"{path}.{name}",
                    parameter=parameter,
                    tensor=here,
                    boxes=tuple(layout.rows(first, first + here.shape[0])),
                    layout=layout,
                    rows=rows,
                    split=shared.split.size if sharing is not None else 1,
                )
            )
    return shards


def local(tensor: Tensor) -> Tensor:
    """What of `tensor` lies on this rank, sharing its storage."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _first_row(parameter: Tensor) -> int:
    """Where what FSDP left here begins in the whole: along the one dim of its mesh, if any, that
    cuts rows; along another, ranks hold the same."""
    if not isinstance(parameter, DTensor):
        return 0
    mesh, rows = parameter.device_mesh, parameter.shape[0]
    for dim, placement in enumerate(parameter.placements):
        if placement.is_shard(0):
            return first_of_shard(mesh.get_local_rank(dim), mesh.size(dim), rows)
    return 0


def first_of_shard(shard: int, shards: int, rows: int) -> int:
    """FSDP cuts dim 0 into chunks of ceil(rows / shards); the last ones may be short or empty."""
    return min(shard * -(-rows // shards), rows)
