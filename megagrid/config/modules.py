"""The modules of a model by their global names, which recipes choose from. Pure.

    embedding  position_embedding  layers.0.attention_norm  layers.0.attention.qkv  …  norm  head

A name stands for itself and for all below it: "layers.3" is a whole layer. A pattern may have `*`
(anything, dots included), `?` and `[…]`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from megagrid.config.schema import ModelConfig


def layer_modules(model: ModelConfig) -> Iterator[str]:
    """The modules of a layer that have parameters of their own, by their names in it."""
    yield "attention_norm"
    if model.qk_norm:
        yield from ("attention.q_norm", "attention.k_norm")
    yield from ("attention.qkv", "attention.wo", "mlp_norm")
    yield from ("mlp.gate_up", "mlp.down") if model.family == "llama" else ("mlp.up", "mlp.down")


def end_modules(model: ModelConfig) -> Iterator[str]:
    """The modules outside the layers."""
    yield "embedding"
    if model.family == "gpt":
        yield "position_embedding"
    yield "norm"
    if not model.tied_embeddings:
        yield "head"


def matches(module: str, patterns: Sequence[str]) -> bool:
    """Whether any of `patterns` is a name of `module`, or of a module around it."""
    parts = module.split(".")
    around = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    return any(fnmatchcase(name, pattern) for name in around for pattern in patterns)


def is_unsharded(module: str, model: ModelConfig, patterns: Sequence[str]) -> bool:
    """Whether `module` is kept out of sharding by `parallel.unsharded_modules`=`patterns`.

    A tied head is the embedding: where a pipeline has them in two stages, their gradients are added
    up row by row, so both are cut alike.
    """
    if module == "head" and model.tied_embeddings:
        module = "embedding"
    return matches(module, patterns)
