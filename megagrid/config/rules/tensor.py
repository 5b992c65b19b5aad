"""Rules of tensor, sequence and context parallelism: what ranks can share out."""

from __future__ import annotations

import math

from megagrid.config.rules.remedies import (
    choice,
    divide,
    divisors,
    multiples_near,
    tensor_parallel_sizes,
)
from megagrid.config.schema import Config
from megagrid.errors import ConfigError


def tensor_parallel_splits_the_layer(config: Config) -> None:
    """tp ranks share heads, MLP columns and key/value heads evenly.

    With more ranks than key/value heads, tp / num_kv_heads ranks hold a copy of the same one.
    """
    model, tp = config.model, config.parallel.tensor_parallel_size
    choices = f"choose {choice(tensor_parallel_sizes(model))}"
    for key in ("num_heads", "ffn_hidden_size"):
        if getattr(model, key) % tp:
            raise ConfigError(
                f"parallel.tensor_parallel_size={tp} must divide model.{key}="
                f"{getattr(model, key)}; {choices}"
            )
    if not divide(tp, model.num_kv_heads):
        raise ConfigError(
            f"parallel.tensor_parallel_size={tp} must divide model.num_kv_heads="
            f"{model.num_kv_heads} or be a multiple of it; {choices}"
        )


def sequence_parallel_splits_the_sequence(config: Config) -> None:
    """Each tp rank holds the same number of positions: the shards are exchanged whole."""
    seq, tp = config.train.seq_length, config.parallel.tensor_parallel_size
    if config.parallel.sequence_parallel and seq % tp:
        raise ConfigError(
            f"train.seq_length={seq} must be a multiple of parallel.tensor_parallel_size={tp} "
            f"under parallel.sequence_parallel=true; choose {choice(multiples_near(seq, tp))}, "
            "or set it to false"
        )


def context_parallel_splits_the_sequence(config: Config) -> None:
    """Each cp rank has two chunks of a sample, whose length is the same for all; under sequence
    parallelism its tp ranks share those out."""
    seq, parallel = config.train.seq_length, config.parallel
    cp, tp = parallel.context_parallel_size, parallel.tensor_parallel_size
    shares = tp if parallel.sequence_parallel else 1
    unit = cp * math.lcm(2, shares)
    if cp > 1 and seq % unit:
        under = f" and parallel.tensor_parallel_size={tp}" if shares > 1 else ""
        longest = config.model.max_seq_length
        lengths = [length for length in multiples_near(seq, unit) if length <= longest]
        raise ConfigError(
            f"train.seq_length={seq} must be a multiple of {unit} for parallel."
            f"context_parallel_size={cp}{under}; choose "
            + (f"{choice(lengths)}, or " if lengths else "")
            + "a smaller context_parallel_size"
        )


def ulysses_splits_the_heads(config: Config) -> None:
    """Each cp rank gets as many of its tp rank's heads; key/value heads are shared out as evenly,
    or several ranks get the same one."""
    model, parallel = config.model, config.parallel
    cp, tp = parallel.context_parallel_size, parallel.tensor_parallel_size
    if cp == 1 or parallel.context_parallel != "ulysses":
        return

    def fits(size: int) -> bool:
        of_tp_rank = max(1, model.num_kv_heads // tp)
        return model.num_heads % (tp * size) == 0 and divide(size, of_tp_rank)

    if not fits(cp):
        others = [size for size in divisors(model.num_heads // tp) if fits(size)]
        raise ConfigError(
            f'parallel.context_parallel_size={cp} under parallel.context_parallel="ulysses" must '
            f"share out model.num_heads={model.num_heads} and model.num_kv_heads="
            f"{model.num_kv_heads} of parallel.tensor_parallel_size={tp} evenly; choose "
            f'{choice(others)}, or parallel.context_parallel="all_gather" or "ring"'
        )


def ring_keeps_all_probabilities(config: Config) -> None:
    """A ring's parts of a softmax are put together by their sums, which dropout isn't part of."""
    model, parallel = config.model, config.parallel
    is_ring = parallel.context_parallel_size > 1 and parallel.context_parallel == "ring"
    if is_ring and model.attention_dropout:
        raise ConfigError(
            f"model.attention_dropout={model.attention_dropout} isn't computed by "
            'parallel.context_parallel="ring"; choose "all_gather" or "ulysses", or set it to 0'
        )


def positions_reach_the_sequence(config: Config) -> None:
    """Learned positions end there; RoPE was meant for no more."""
    seq, longest = config.train.seq_length, config.model.max_seq_length
    if seq > longest:
        raise ConfigError(
            f"train.seq_length={seq} is longer than model.max_seq_length={longest}; choose at most "
            f"{longest}, or raise model.max_seq_length"
        )
