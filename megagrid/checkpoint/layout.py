"""What a rank holds of the model and its optimizer, as rectangles of global tensors.

This is all that saving and loading know of a run: neither tp, pp nor dp appears beyond this file.

    parameter of this rank           its pieces                         entries
    (FSDP shard: rows 2..5 of 6)     (`Layout.rows`)
    +--------+                       wq rows 2..3 of the local stack -> wq, box (2, 0) + (1, h)
    | ###### | rows 2..5             wk rows 3..5 of the local stack -> wk, box (0, 0) + (2, h)
    +--------+

Names in a checkpoint: a weight has its global name; AdamW's states of it are
`optimizer.exp_avg.<name>`, `optimizer.exp_avg_sq.<name>` and the number `optimizer.step.<name>`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from megagrid.nn.layout import Box, Layout

OPTIMIZER_PREFIX = "optimizer."
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Entry:
    """A rectangle of a global tensor that lies on this rank.

    Attributes:
        name: name of the global tensor in the checkpoint.
        shape: its shape, without padding.
        box: the rectangle.
        tensor: the values, of shape `box.sizes`: a view, which loading writes into.
        is_written_here: whether this rank saves it; of all ranks that hold a box, one does.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    tensor: torch.Tensor
    is_written_here: bool


def entries(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    layouts: Mapping[str, Layout],
    optimizer: torch.optim.Optimizer | None = None,
) -> list[Entry]:
    """The boxes of this rank's parameters, and of AdamW's states if `optimizer` is given.

    States that AdamW hasn't made yet, as before the first step, are made here (zeros), so that
    they can be loaded into. Padding of the vocabulary is in no box. A tied parameter appears once,
    as `named_parameters` and `layouts` have it once.

    Args:
        named_parameters: plain tensors, or DTensors as fully_shard makes them, cut along dim 0.
        layouts: the layout of each, by the same names.
    """
    found: list[Entry] = []
    for name, parameter in named_parameters:
        layout = layouts[name]
        found += _boxes("", parameter, parameter, layout)
        if optimizer is not None:
            found += _adamw_boxes(parameter, layout, optimizer)
    return found


def _boxes(
    prefix: str, values: torch.Tensor, parameter: nn.Parameter, layout: Layout
) -> Iterator[Entry]:
    """Boxes of `values` (the parameter, or a state of its shape), named with `prefix`."""
    start, stop, speaks = _rows_here(parameter)
    local = _local(values)
    for piece, rows in layout.rows(start, stop):
        yield Entry(
            name=prefix + piece.name,
            shape=piece.shape,
            box=piece.box,
            tensor=local[rows],
            is_written_here=speaks and piece.is_counted_here,
        )


def _adamw_boxes(
    parameter: nn.Parameter, layout: Layout, optimizer: torch.optim.Optimizer
) -> Iterator[Entry]:
    """Both moments, box by box, and the count of steps, once per global tensor."""
    state = _adamw_state(parameter, optimizer)
    for moment in MOMENTS:
        yield from _boxes(f"{OPTIMIZER_PREFIX}{moment}.", state[moment], parameter, layout)

    # The count is one number per parameter. Of the ranks that hold a part of a global tensor, the
    # one with its first element writes it; all read it, those with an empty shard as well.
    start, stop, speaks = _rows_here(parameter)
    writes = {
        piece.name
        for piece, _ in layout.rows(start, stop)
        if speaks and piece.is_counted_here and not any(piece.box.offsets)
    }
    for name in dict.fromkeys(piece.name for piece in layout.pieces):
        yield Entry(
            name=f"{OPTIMIZER_PREFIX}step.{name}",
            shape=(),
            box=Box((), ()),
            tensor=state["step"],
            is_written_here=name in writes,
        )


def _adamw_state(
    parameter: nn.Parameter, optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    """AdamW's state of `parameter`, made as AdamW itself would where there is none yet."""
    state = optimizer.state[parameter]
    if not state:
        is_fused = any(
            group["fused"] and any(member is parameter for member in group["params"])
            for group in optimizer.param_groups
        )
        device = parameter.device if is_fused else None
        state["step"] = torch.zeros((), dtype=torch.float32 if is_fused else None, device=device)
        for moment in MOMENTS:
            state[moment] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    return state


def _local(values: torch.Tensor) -> torch.Tensor:
    """The part of `values` on this rank, outside autograd, sharing its memory."""
    values = values.detach()
    return values.to_local() if isinstance(values, DTensor) else values


def _rows_here(parameter: torch.Tensor) -> tuple[int, int, bool]:
    """Rows [start, stop) of the unsharded parameter that lie here, and whether to write them.

    fully_shard cuts dim 0 into chunks of ceil(rows / ranks): the last chunks may be short or empty.
    Where the mesh replicates, the first replica writes.
    """
    start, stop, speaks = 0, parameter.shape[0], True
    if not isinstance(parameter, DTensor):
        return start, stop, speaks
    mesh = parameter.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "a parameter lies on a mesh that this rank isn't part of"
    for size, index, placement in zip(mesh.shape, coordinate, parameter.placements, strict=True):
        match placement:
            case Replicate():
                speaks = speaks and index == 0
            case Shard(dim=0):
                chunk = -(-(stop - start) // size)
                first = start + index * chunk
                start, stop = min(stop, first), min(stop, first + chunk)
            case _:
                raise ValueError(f"a parameter is cut along dim 0 only, not {placement}")
    return start, stop, speaks
