"""What every system is given, so that only the system differs. Plain data: imports no torch."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ModelShape:
    """A Llama: RMSNorm, rotary positions, SwiGLU, grouped queries, untied head, no biases."""

    hidden_size: int = 512
    num_layers: int = 8
    num_heads: int = 8
    num_kv_heads: int = 2
    ffn_hidden_size: int = 1408
    vocab_size: int = 8192
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


_LAYOUT = re.compile(r"one|(?:(?:tp|pp|dp)\d+)(?:x(?:tp|pp|dp)\d+)*")


@dataclass(frozen=True)
class Layout:
    """A grid of ranks, tensor parallel innermost, then data parallel, pipeline outermost."""

    tp: int = 1
    pp: int = 1
    dp: int = 1

    @classmethod
    def parse(cls, text: str) -> Layout:
        """`one`, or axes joined by `x`: `tp2`, `tp2xpp2`. ValueError for anything else."""
        if not _LAYOUT.fullmatch(text):
            raise ValueError(f"layout {text!r} is neither `one` nor axes such as tp2 or tp2xpp2")
        if text == "one":
            return cls()
        sizes = {part[:2]: int(part[2:]) for part in text.split("x")}
        if len(sizes) != text.count("x") + 1 or min(sizes.values()) < 1:
            raise ValueError(f"layout {text!r} names an axis twice, or one of size 0")
        return cls(**sizes)

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    def __str__(self) -> str:
        axes = {"tp": self.tp, "pp": self.pp, "dp": self.dp}
        return "x".join(f"{name}{size}" for name, size in axes.items() if size > 1) or "one"


@dataclass(frozen=True)
class Recipe:
    """The work, and the knobs that all systems share. Learning rate constant, precision fp32."""

    steps: int = 6
    seq_length: int = 512
    global_batch_size: int = 8
    micro_batch_size: int = 1
    """Samples of one forward. 1 gives the pipeline eight microbatches."""
    sharding: str = "FULL_SHARD"
    """Over dp: FULL_SHARD reshards after each forward, SHARD_GRAD_OP stays gathered."""
    sequence_parallel: bool = False
    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    """On matrices, embeddings included; never on norm weights."""
    clip_grad: float = 1.0
    seed: int = 1234

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.seq_length


@dataclass(frozen=True)
class Job:
    """One run of one system on one layout; a rank reads it from `run_dir/job.json`."""

    shape: ModelShape
    layout: Layout
    recipe: Recipe
    checkpoint: str
    """Folder with config.json and model.safetensors, in Hugging Face's layout."""
    tokens: str
    """.npy, int64 [steps, global_batch_size, seq_length + 1]; labels are the tokens, one later."""
    run_dir: str

    @property
    def micro_batches(self) -> int:
        """Microbatches of one data-parallel rank in a step."""
        return self.recipe.global_batch_size // (self.layout.dp * self.recipe.micro_batch_size)

    @property
    def metrics(self) -> Path:
        return Path(self.run_dir) / "metrics.jsonl"

    def check(self) -> None:
        """ValueError if the shape or the batch doesn't split over the layout."""
        shape, recipe, layout = self.shape, self.recipe, self.layout
        for whole, part, rule in (
            (
                recipe.global_batch_size,
                layout.dp * recipe.micro_batch_size,
                "dp x micro batch size must divide the global batch size",
            ),
            (shape.num_layers, layout.pp, "pp must divide the number of layers"),
            (shape.num_kv_heads, layout.tp, "tp must divide the number of KV heads"),
            (shape.ffn_hidden_size, layout.tp, "tp must divide the ffn width"),
            (shape.vocab_size, layout.tp, "tp must divide the vocabulary"),
        ):
            if whole % part:
                raise ValueError(f"layout {layout}: {rule}: {part} doesn't divide {whole}")
        if self.micro_batches < layout.pp:
            raise ValueError(
                f"layout {layout}: {self.micro_batches} microbatches don't fill {layout.pp} stages"
            )

    def save(self) -> Path:
        path = Path(self.run_dir) / "job.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1))
        return path

    @classmethod
    def load(cls, path: str | Path) -> Job:
        raw: dict[str, Any] = json.loads(Path(path).read_text())
        parts = {"shape": ModelShape, "layout": Layout, "recipe": Recipe}
        return cls(**{key: parts[key](**v) if key in parts else v for key, v in raw.items()})
