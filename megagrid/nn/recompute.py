"""What backward computes again in place of keeping it.

A *region* is a function of tensors that ends in a matrix product. Of one that is run by `recompute`
autograd keeps nothing but the inputs; backward runs it once more, as far as the last tensor that it
lacks. That is the product's own input: the product isn't repeated, nor is what follows it, such as
the collective of a row-parallel layer.

                            kept, elements a token                again in backward
    none       x, norm(x), qkv, q, k, context, x, norm(x),        nothing
               up, act(up)
    selective  x      norm -> [enter ->] qkv's product            the norms, the attention core and
               qkv    attention core -> wo's product              the activation; with sequence
               x      norm -> [enter ->] up's product             parallelism the gathers of `enter`
               up     activation -> down's product
    full       x      the whole block, to down's product          all that is before it

(selective: Korthikanti et al. 2022, arXiv 2205.05198, section 5, with norms and activations added;
full: Chen et al. 2016, arXiv 1604.06174.) The second run computes the same bits: dropout's masks
are functions of their place, so there is no random state to keep. `megagrid.plan.activations` has
the bytes, `megagrid.plan.flops` the products and `megagrid.plan.comm` the collectives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

Region = Callable[..., Any]
"""Called with a function and its arguments; returns what the function does."""


def keep(function: Callable, *inputs: Any) -> Any:
    """function(*inputs), as autograd has it."""
    return function(*inputs)


def recompute(function: Callable, *inputs: Any) -> Any:
    """function(*inputs), of which only `inputs` is kept for backward."""
    if not torch.is_grad_enabled():
        return function(*inputs)
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)


def recompute_alone(function: Callable, *inputs: Any) -> Any:
    """The same, of a region among others that are compiled with it.

    A compiler is free to compute what lies between two regions, a residual, again as well, and what
    the first returns with it: its product, and the collective behind that. Those it is told to keep
    or to let go of, but never to repeat.
    """
    if not torch.is_grad_enabled() or not torch.compiler.is_compiling():
        return recompute(function, *inputs)
    return checkpoint(function, *inputs, use_reentrant=False, context_fn=_never_twice)


_NEVER_TWICE = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_mm.default,
    torch.ops._c10d_functional.all_reduce.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
}
"""What regions end in; the products of attention's core, in batches, aren't among them."""


def _never_twice() -> tuple[Any, Any]:
    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        once = op in _NEVER_TWICE
        return CheckpointPolicy.MUST_SAVE if once else CheckpointPolicy.MUST_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Recomputing(nn.Module):
    """A module that runs some of its work in regions.

    Attributes:
        region: how.
    """

    region: Region = staticmethod(keep)


@dataclass(frozen=True)
class Regions:
    """A row of the table above.

    Attributes:
        of_block: the whole block as one.
        of_layers: those of the layers in it.
    """

    of_block: Region
    of_layers: Region


REGIONS = {
    "none": Regions(of_block=keep, of_layers=keep),
    "selective": Regions(of_block=keep, of_layers=recompute_alone),
    "full": Regions(of_block=recompute, of_layers=keep),
}


def set_regions(block: Recomputing, kind: str) -> None:
    """Have `block` recompute as the row `kind` of `REGIONS` says."""
    regions = REGIONS[kind]
    for module in block.modules():
        if isinstance(module, Recomputing):
            module.region = regions.of_block if module is block else regions.of_layers
