"""torch.compile of a stage's blocks.

    Block.forward, of all layers          a graph for training, one for evaluation
    ------------------------------        --------------------------------------------------------
    enter, matrices, attention, …   ->    inputs, parameters and dropout keys in, no constants of a
    leave, …                              layer, a step or a sample; collectives are nodes of it

What differs between calls must be a tensor, and what differs between layers a parameter: anything
else would be compiled anew, again and again. Embedding, head and loss are left as they are, so is
what passes between ranks of the pipeline. fully_shard comes after it: its hooks lie outside.

What a block keeps for its backward is the compiler's choice: what is cheap it computes again. Of a
region that is to be recomputed (`megagrid.nn.recompute`) it keeps what is kept uncompiled.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch

from megagrid.model.decoder import Block, DecoderStage
from megagrid.nn.split_backward import LateWeightGradients


def compile_blocks(stage: DecoderStage, backend: str) -> None:
    """Compile each block of `stage` when it is first called; names and parameters stay.

    Args:
        backend: as torch.compile knows it.
    """
    logging.getLogger("torch._higher_order_ops.wrap").addFilter(_is_of_interest)
    for block in stage.layers.values():
        # A break in the graph is an error rather than a slow path that nobody sees. Shapes are the
        # same in every call of a run.
        block.compile(backend=backend, fullgraph=True, dynamic=False)


def put_off_by_slots(blocks: Iterable[Block], late: LateWeightGradients) -> None:
    """Have the backward of compiled `blocks` put weight gradients off to `late`."""

    @torch.compiler.disable
    def lend(block: Block, inputs: tuple) -> tuple | None:
        if not torch.is_grad_enabled():
            return None
        s, b, _ = inputs[0].shape
        tokens = (s * (block.axes.tp.size if block.axes.sequence_parallel else 1), b)
        return *inputs, late.slots([layer.weight for layer in block.products], tokens)

    for block in blocks:
        # Outside of what is compiled, and after that of fully_shard, so that weights are whole.
        block.register_forward_pre_hook(lend)


def _is_of_interest(record: logging.LogRecord) -> bool:
    """Of whatever is said of regions: a warning of operators that work in place, which a compiler
    has replaced by others before it comes to the regions, isn't."""
    return "context_fn is passed" not in record.msg
