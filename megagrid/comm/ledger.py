"""What a step communicates: every collective and message of one rank, counted by axis and bytes.

A ledger watches torch's dispatcher while it is entered, so it sees what really is issued, whoever
issued it: the layers, fully_shard, autograd's backward, a library. Outside the `with` it costs
nothing, and the code that it watches doesn't know it.

    ledger = Ledger(grid.axes.values())
    with ledger:
        train_step()
    print(ledger.table())

Bytes are of the buffer of the whole group's message, as the planner counts them
(`megagrid.plan.comm`): for all-reduce and reduce-scatter the local input, for all-gather the local
output, for a send or receive the message. What that means on the wire depends on the algorithm.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.table import Table
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode

from megagrid.grid.grid import Axis


class Call(NamedTuple):
    """A kind of call: along which axis, what, and the bytes of one such call."""

    axis: str
    collective: str
    bytes: int


class Traffic(NamedTuple):
    """How often, and how much together."""

    calls: int
    bytes: int


class Op(NamedTuple):
    """A dispatcher op that communicates.

    Attributes:
        collective: what it is called here.
        counted: name of its argument, or "result", whose bytes are counted.
    """

    collective: str
    counted: str


OPS: dict[str, dict[str, Op]] = {
    # What torch.distributed's functions and fully_shard issue.
    "c10d": {
        "allreduce_": Op("all_reduce", "tensors"),
        "allreduce_coalesced_": Op("all_reduce", "tensors"),
        "allgather_": Op("all_gather", "output_tensors"),
        "_allgather_base_": Op("all_gather", "output_tensor"),
        "allgather_coalesced_": Op("all_gather", "output_lists"),
        "allgather_into_tensor_coalesced_": Op("all_gather", "outputs"),
        "reduce_scatter_": Op("reduce_scatter", "input_tensors"),
        "_reduce_scatter_base_": Op("reduce_scatter", "input_tensor"),
        "reduce_scatter_tensor_coalesced_": Op("reduce_scatter", "inputs"),
        "alltoall_": Op("all_to_all", "input_tensors"),
        "alltoall_base_": Op("all_to_all", "input"),
        "broadcast_": Op("broadcast", "tensors"),
        "reduce_": Op("reduce", "tensors"),
        "gather_": Op("gather", "input_tensors"),
        "scatter_": Op("scatter", "output_tensors"),
        "send": Op("send", "tensors"),
        "recv_": Op("recv", "tensors"),
        "recv_any_source_": Op("recv", "tensors"),
        "barrier": Op("barrier", ""),
        "monitored_barrier_": Op("barrier", ""),
    },
    # What functional collectives, and so DTensor and compiled code, issue.
    "_c10d_functional": {
        "all_reduce": Op("all_reduce", "input"),
        "all_reduce_": Op("all_reduce", "input"),
        "all_reduce_coalesced": Op("all_reduce", "inputs"),
        "all_reduce_coalesced_": Op("all_reduce", "inputs"),
        "all_gather_into_tensor": Op("all_gather", "result"),
        "all_gather_into_tensor_out": Op("all_gather", "result"),
        "all_gather_into_tensor_coalesced": Op("all_gather", "result"),
        "reduce_scatter_tensor": Op("reduce_scatter", "input"),
        "reduce_scatter_tensor_out": Op("reduce_scatter", "input"),
        "reduce_scatter_tensor_coalesced": Op("reduce_scatter", "inputs"),
        "all_to_all_single": Op("all_to_all", "input"),
        "broadcast": Op("broadcast", "input"),
        "broadcast_": Op("broadcast", "input"),
        "isend": Op("send", "tensor"),
        "irecv": Op("recv", "tensor"),
        "batch_p2p_ops": Op("send_recv", "tensors"),
    },
}
"""Every op that communicates; others of these namespaces wait, check or wrap. A functional op calls
a c10d op inside itself, where the ledger doesn't look, so nothing is counted twice."""


class Ledger(TorchDispatchMode):
    """Counts while entered; enter it again to go on counting.

    Args:
        axes: the axes of the grid. A call is put down to the axis whose process group it was made
            on, else to the first whose ranks are the same (fully_shard makes groups of its own),
            else to the group's ranks in words.

        on_call: told of each call that counts, once it has been issued, and of the tensors whose
            bytes are counted.

    Attributes:
        calls: how often each kind of call was made, on groups of more than one rank.

    Only the thread that entered it is watched, and the backward that it starts.
    """

    supports_higher_order_operators = True
    """Compiled code has some around attention that is computed again; none communicates."""

    def __init__(
        self,
        axes: Iterable[Axis],
        on_call: Callable[[Call, Sequence[torch.Tensor]], None] = lambda call, tensors: None,
    ) -> None:
        super().__init__()
        self._on_call = on_call
        self.calls: Counter[Call] = Counter()
        self._axes = [axis for axis in axes if axis.group is not None]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run the op, then count it."""
        result = func(*args, **(kwargs or {}))
        if not isinstance(func, torch._ops.OpOverload):
            return result
        op = OPS.get(func.namespace, {}).get(func._schema.name.partition("::")[2])
        if op is not None:
            names = (argument.name for argument in func._schema.arguments)
            values = dict(zip(names, args, strict=False)) | (kwargs or {}) | {"result": result}
            self._count(op, values)
        return result

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Watch what compiled code issues as it runs, rather than have it run uncompiled."""
        return True

    def totals(self) -> dict[tuple[str, str], Traffic]:
        """Calls and bytes by (axis, collective), in order of axis and collective."""
        totals: dict[tuple[str, str], Traffic] = {}
        for call, times in sorted(self.calls.items()):
            key = (call.axis, call.collective)
            calls, size = totals.get(key, (0, 0))
            totals[key] = Traffic(calls + times, size + times * call.bytes)
        return totals

    def table(self) -> Table:
        """What was counted, for the console."""
        table = Table("axis", "collective")
        for title in ("calls", "bytes each", "bytes"):
            table.add_column(title, justify="right")
        for call, times in sorted(self.calls.items()):
            numbers = (times, call.bytes, times * call.bytes)
            table.add_row(call.axis, call.collective, *(f"{number:,}" for number in numbers))
        return table

    def _count(self, op: Op, values: dict[str, Any]) -> None:
        # c10d ops take the group boxed for TorchScript, functional ones take its name.
        group = values.get("process_group", values.get("group_name"))
        if isinstance(group, str):
            group = _resolve_process_group(group)
        elif isinstance(group, torch.ScriptObject):
            group = dist.ProcessGroup.unbox(group)
        if group.size() > 1:
            tensors = list(_tensors(values.get(op.counted)))
            call = Call(self._axis_name(group), op.collective, sum(map(_num_bytes, tensors)))
            self.calls[call] += 1
            self._on_call(call, tensors)

    def _axis_name(self, group: dist.ProcessGroup) -> str:
        for axis in self._axes:
            if axis.group is group:
                return axis.name
        ranks = tuple(dist.get_process_group_ranks(group))
        for axis in self._axes:
            if axis.ranks == ranks:
                return axis.name
        return "ranks " + ",".join(map(str, ranks))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _num_bytes(tensor: torch.Tensor) -> int:
    return math.prod(tensor.shape) * tensor.element_size()
