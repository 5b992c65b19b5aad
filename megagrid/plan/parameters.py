"""The parameters that a rank holds: their shapes, their units, and which gradients are summands.

Pure arithmetic on the config, made independently of the modules that it describes, so that each
checks the other. Of a layer, with h hidden, f ffn, q = heads x head_dim, k = kv_heads x head_dim,
and t ranks along tp, c of which share each key/value head:

    attention_norm   h                       mlp_norm    h
    qkv              (q + 2kc) / t, h        gate, up    2f / t, h  (gpt: up alone, f / t, h)
    wo               h, q / t                down        h, f / t

A gpt's layer has a bias to each; `model.qkv_bias` gives one to qkv, and `model.qk_norm` a layer two
norms of head_dim, of whose gradient each tp rank has what its own heads add.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megagrid.config.modules import is_unsharded
from megagrid.config.schema import Config, ModelConfig
from megagrid.plan.matrices import Matrix

NO_ROWS = range(0)

MASTER_BYTES = {"fp32": 4, "bf16": 4, "fp16": 4, "fp64": 8}
"""Of an element of parameters at rest, of reduced gradients, of the optimizer's states unless these
are rounded, and of the logits in the loss."""


def state_bytes(config: Config) -> int:
    """Of an element of an optimizer's state."""
    is_rounded = config.optimizer.state_dtype == "bf16"
    return 2 if is_rounded else MASTER_BYTES[config.train.precision]


OPTIMIZER_STATES: dict[str, dict[bool, tuple[str, ...]]] = {
    "adamw": dict.fromkeys((True, False), ("exp_avg", "exp_avg_sq")),
    "sgd": dict.fromkeys((True, False), ("momentum",)),
    "muon": {True: ("momentum",), False: ("exp_avg", "exp_avg_sq")},
}
"""What an optimizer keeps of hidden matrices (True) and of other parameters (False), element by
element."""


@dataclass(frozen=True)
class LocalParameter:
    """A parameter as one tp rank has it, before fully_shard cuts dim 0 over dp.

    Attributes:
        shape: local shape, padding of the vocabulary included.
        module: that holds it, by its name in the layer, or in the model outside layers.
        summands: rows, by axis, of whose gradient each rank of that axis has a summand only.
        matrices: the hidden matrices that it has parts of; a table, norm or bias has none.
    """

    shape: tuple[int, ...]
    module: str
    summands: tuple[tuple[str, range], ...] = ()
    matrices: tuple[Matrix, ...] = ()

    def states(self, optimizer: str) -> tuple[str, ...]:
        """What the optimizer of that name keeps of each element."""
        return OPTIMIZER_STATES[optimizer][bool(self.matrices)]

    def gathered(self, dp: int) -> int:
        """Elements once gathered: dim 0 padded to a multiple of `dp`."""
        rows, *rest = self.shape
        return -(-rows // dp) * dp * math.prod(rest)

    def held(self, dp: int, dp_rank: int) -> int:
        """Elements of the rows that `dp_rank` of `dp` holds."""
        return len(self._rows(dp, dp_rank)) * math.prod(self.shape[1:])

    def summand_elements(self, axis: str, dp: int, dp_rank: int) -> int:
        """Elements, among the rows that `dp_rank` of `dp` holds, that are summed over `axis`."""
        rows = self._rows(dp, dp_rank)
        mine = sum(
            max(0, min(rows.stop, part.stop) - max(rows.start, part.start))
            for name, part in self.summands
            if name == axis
        )
        return mine * math.prod(self.shape[1:])

    def _rows(self, dp: int, dp_rank: int) -> range:
        """Of the chunks that dim 0 is cut into, the one of `dp_rank`: the last are shorter."""
        rows = self.shape[0]
        chunk = -(-rows // dp)
        return range(min(dp_rank * chunk, rows), min((dp_rank + 1) * chunk, rows))


Unit = tuple[LocalParameter, ...]
"""Parameters that belong together: a layer's, or what a stage has beside layers."""


@dataclass(frozen=True)
class ModelShare:
    """How a model is split over the tp axis, as one of its ranks sees it."""

    model: ModelConfig
    tp: int
    tp_rank: int
    sequence_parallel: bool

    @property
    def kv_copies(self) -> int:
        """Ranks of tp that hold the same key/value head."""
        return max(1, self.tp // self.model.num_kv_heads)

    @property
    def vocab_rows(self) -> int:
        """Rows of the padded vocabulary on each rank."""
        unit = self.model.make_vocab_size_divisible_by * self.tp
        return -(-self.model.vocab_size // unit) * unit // self.tp

    def layer(self) -> Unit:
        """The parameters of one layer."""
        model, t = self.model, self.tp
        h, f = model.hidden_size, model.ffn_hidden_size
        q = model.num_heads * model.head_dim // t
        k = model.num_kv_heads * self.kv_copies * model.head_dim // t
        up = f // t * (2 if model.family == "llama" else 1)
        shared = (("kv", range(q, q + 2 * k)),) if self.kv_copies > 1 else ()
        widen = "mlp.gate_up" if model.family == "llama" else "mlp.up"
        kv, apart = model.num_kv_heads * model.head_dim, t // self.kv_copies
        qkv = (
            Matrix((q * t, h), (t, 1), top=0, stack=q + 2 * k),
            Matrix((kv, h), (apart, 1), top=q, stack=q + 2 * k),
            Matrix((kv, h), (apart, 1), top=q + k, stack=q + 2 * k),
        )
        out = (Matrix((h, q * t), (1, t), top=0, stack=h),)
        gate_up = tuple(Matrix((f, h), (t, 1), top, stack=up) for top in range(0, up, f // t))
        down = (Matrix((h, f), (1, t), top=0, stack=h),)
        matrices = (
            LocalParameter((q + 2 * k, h), "attention.qkv", shared, qkv),
            LocalParameter((h, q), "attention.wo", (), out),
            LocalParameter((up, h), widen, (), gate_up),
            LocalParameter((h, f // t), "mlp.down", (), down),
        )
        norms = (*self.norm("attention_norm"), *self.norm("mlp_norm"))
        qkv_bias = LocalParameter((q + 2 * k,), "attention.qkv", shared)
        if model.family == "llama":
            names = ("attention.q_norm", "attention.k_norm") if model.qk_norm else ()
            head_norms = (self._head_norm(name) for name in names)
            biases = (qkv_bias,) * model.qkv_bias
            return (*norms, *head_norms, *matrices, *biases)
        biases = (
            qkv_bias,
            self._whole("attention.wo", h),
            LocalParameter((up,), widen),
            self._whole("mlp.down", h),
        )
        return (*norms, *matrices, *biases)

    def norm(self, module: str) -> Unit:
        """A norm's weight, and its bias if it has one."""
        count = 1 if self.model.family == "llama" else 2
        return (self._whole(module, self.model.hidden_size),) * count

    def positions(self) -> Unit:
        """Learned positions; nothing where they are rotations."""
        if self.model.family == "llama":
            return ()
        rows = self.model.max_seq_length
        return (self._whole("position_embedding", rows, self.model.hidden_size),)

    def table(self, module: str, *, in_two_stages: bool) -> LocalParameter:
        """The embedding or the head. If both are one and lie `in_two_stages`, each stage has a
        summand of the rows that aren't padding."""
        first = self.tp_rank * self.vocab_rows
        rows = max(0, min(self.vocab_rows, self.model.vocab_size - first))
        summands = (("embedding", range(rows)),) if in_two_stages else ()
        return LocalParameter((self.vocab_rows, self.model.hidden_size), module, summands)

    def ends(self, *, is_first: bool, is_last: bool) -> Unit:
        """What a stage has beside its layers."""
        tied = self.model.tied_embeddings
        in_two_stages = tied and not (is_first and is_last)
        found: list[LocalParameter] = []
        if is_first:
            found += [self.table("embedding", in_two_stages=in_two_stages), *self.positions()]
        if is_last:
            found += self.norm("norm")
        if is_last and not (tied and is_first):
            found.append(self.table("head", in_two_stages=in_two_stages))
        return tuple(found)

    def _head_norm(self, module: str) -> LocalParameter:
        """The same on every tp rank, each of which has some heads only."""
        rows = self.model.head_dim
        return LocalParameter((rows,), module, (("tp", range(rows)),) if self.tp > 1 else ())

    def _whole(self, module: str, *shape: int) -> LocalParameter:
        """The same on every tp rank; under sequence parallelism each sees a share of tokens."""
        partial = self.sequence_parallel and self.tp > 1
        return LocalParameter(shape, module, (("tp", range(shape[0])),) if partial else ())


def is_split(config: Config, module: str) -> bool:
    """Whether the strategy's split is that of the module of that global name, which may be kept out
    of it."""
    patterns = config.parallel.unsharded_modules
    return not (patterns and is_unsharded(module, config.model, patterns))
