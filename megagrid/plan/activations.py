"""What a layer keeps of a microbatch from its forward to its backward, in closed form. Pure.

With n = s b tokens of a cp rank; n' = n / t of them where sequence parallelism splits them, else
n' = n; of a rank q, k columns of queries and of keys, a heads, f columns of the MLP; e bytes an
element, r of a sum over elements:

    what                       bytes                     none  selective  full
    input                      e n' h                     x        x       x
    residual, between branches e n' h                     x        x
    norms' own                 see `_norm`                x
    norms' outputs             2 e n h                    x
    qkv                        e n (q + 2k)               x        x
    head norms' own            see `_norm`                x
    rotated queries and keys   e n (q + k)                x
    context                    e n q                      x
    softmax's sums             r n a                      x
    activation's input         e n f (2f with a gate)     x        x
    activation                 e n f                      x
    mask of attention          e n' h, under dropout      x        x
    mask of MLP                e n' h, under dropout      x        x       x

A norm's output is kept as its linear layer takes it: whole, if that has gathered it. A context that
is computed without a fused kernel, for attention dropout, needs copies of queries, keys and values
in place of qkv, and three matrices of all pairs of tokens:

    attention                  4 e n q + (3 e a b + 1) s^2    x

Documents and context parallelism have attention kernels of their own, whose tensors aren't counted:
with them "none" is a lower bound. The rest is what torch 2.13 keeps of `megagrid.nn`'s layers, on a
CPU or, with fused norms, on CUDA; Korthikanti et al. 2022 (arXiv 2205.05198, section 4) count the
same of a GPT whose masks are bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from megagrid.config.schema import Config, Recompute
from megagrid.grid.placement import Placement
from megagrid.plan.comm import COMPUTE_BYTES
from megagrid.plan.flops import recomputed_layers

MASKS = ("mask of attention", "mask of MLP")

KEPT: dict[Recompute, tuple[str, ...]] = {
    "selective": ("input", "residual", "qkv", "activation's input", *MASKS),
    "full": ("input", MASKS[-1]),
}
"""Which rows of the table above, where something is recomputed."""


@dataclass(frozen=True)
class _Layer:
    """A layer of a rank, and the microbatch that goes through it.

    Attributes:
        tokens, shared: n, n'.
        heads, kv_heads: on the rank.
        ffn: columns on the rank.
        fused_norms: RMSNorm is one kernel, as on CUDA.
    """

    config: Config
    tokens: int
    shared: int
    heads: int
    kv_heads: int
    ffn: int
    fused_norms: bool

    @classmethod
    def of(cls, config: Config, placement: Placement, *, fused_norms: bool) -> _Layer:
        model, train, t = config.model, config.train, placement.tp
        tokens = train.seq_length // placement.cp * train.micro_batch_size
        return cls(
            config,
            tokens,
            tokens // t if config.parallel.sequence_parallel else tokens,
            model.num_heads // t,
            max(1, model.num_kv_heads // t),
            model.ffn_hidden_size // t,
            fused_norms,
        )

    def rows(self) -> dict[str, int]:
        """Bytes by what they are, nothing recomputed."""
        model = self.config.model
        e, n = COMPUTE_BYTES[self.config.train.precision], self.tokens
        hidden = e * self.shared * model.hidden_size
        q, k = self.heads * model.head_dim, self.kv_heads * model.head_dim
        is_llama = model.family == "llama"
        rows = {
            "input": hidden,
            "residual": hidden,
            "norms' own": 2 * self._norm(self.shared, model.hidden_size),
            "norms' outputs": 2 * e * n * model.hidden_size,
            "activation's input": e * n * self.ffn * (2 if is_llama else 1),
            "activation": e * n * self.ffn,
            "qkv": e * n * (q + 2 * k),
        }
        if model.attention_dropout:
            b, s = self.config.train.micro_batch_size, self.config.train.seq_length
            rows["attention"] = 4 * e * n * q + (3 * e * self.heads * b + 1) * s * s
        else:
            rows["context"] = e * n * q
            rows["softmax's sums"] = self._reduced * n * self.heads
        if model.qk_norm:
            rows["head norms' own"] = self._norm(n * (self.heads + self.kv_heads), model.head_dim)
        if is_llama:
            rows["rotated queries and keys"] = e * n * (q + k)
        if model.dropout:
            rows |= dict.fromkeys(MASKS, hidden)
        return rows

    @property
    def copied(self) -> tuple[str, ...]:
        """Rows in place of which copies are kept where nothing is recomputed: in the dtype that
        norms compute in, and in the order that attention's products take."""
        model, e = self.config.model, COMPUTE_BYTES[self.config.train.precision]
        of_norms = model.family == "llama" and e < self._reduced and not self.fused_norms
        of_attention = model.attention_dropout > 0
        return ("input", "residual") * of_norms + ("qkv",) * of_attention

    @property
    def _reduced(self) -> int:
        """Bytes of a sum over elements of the compute dtype."""
        return max(4, COMPUTE_BYTES[self.config.train.precision])

    def _norm(self, rows: int, width: int) -> int:
        """What a norm keeps beside its input: a number a row; a LayerNorm two. An RMSNorm that is
        composed of operators, as on a CPU, also keeps the quotients x / rms; in bf16 in fp32, and
        its input too."""
        e, r = COMPUTE_BYTES[self.config.train.precision], self._reduced
        if self.config.model.family == "gpt":
            return 2 * rows * (r if self.fused_norms else e)
        copies = 0 if self.fused_norms else 1 if e == r else 2
        return r * rows * (1 + copies * width)


def layer_activations(
    config: Config, placement: Placement, recompute: Recompute, *, fused_norms: bool = False
) -> dict[str, int]:
    """Bytes that a layer keeps of one microbatch, by what they are.

    Args:
        fused_norms: on CUDA.
    """
    layer = _Layer.of(config, placement, fused_norms=fused_norms)
    rows = layer.rows()
    kept = KEPT.get(recompute, tuple(what for what in rows if what not in layer.copied))
    return {what: size for what, size in rows.items() if what in kept}


def stage_activations(
    config: Config, placement: Placement, layers: range, *, fused_norms: bool = False
) -> int:
    """Bytes that those layers keep of one microbatch, as `[memory]` has it."""
    memory = config.memory
    again = recomputed_layers(layers, memory.recompute, memory.recompute_interval)
    counts: dict[Recompute, int] = {"none": len(layers) - again}
    if again:
        counts[memory.recompute] = again
    return sum(
        count * sum(layer_activations(config, placement, kind, fused_norms=fused_norms).values())
        for kind, count in counts.items()
    )
