"""The weights and the tokens that all systems start from, made from a seed. Imports no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from benchmarks.peers.spec import ModelShape, Recipe


def parameters(shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...], float]]:
    """Name, shape and initial standard deviation of each tensor, by Hugging Face's names.

    A deviation of 0 stands for ones: the norms. The two projections that write to the residual
    stream are divided by sqrt(2 L), as in GPT-2.
    """
    h, ffn, std = shape.hidden_size, shape.ffn_hidden_size, shape.init_std
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    residual = std / math.sqrt(2 * shape.num_layers)
    yield "model.embed_tokens.weight", (shape.vocab_size, h), std
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (h,), 0.0
        yield prefix + "self_attn.q_proj.weight", (q, h), std
        yield prefix + "self_attn.k_proj.weight", (kv, h), std
        yield prefix + "self_attn.v_proj.weight", (kv, h), std
        yield prefix + "self_attn.o_proj.weight", (h, q), residual
        yield prefix + "post_attention_layernorm.weight", (h,), 0.0
        yield prefix + "mlp.gate_proj.weight", (ffn, h), std
        yield prefix + "mlp.up_proj.weight", (ffn, h), std
        yield prefix + "mlp.down_proj.weight", (h, ffn), residual
    yield "model.norm.weight", (h,), 0.0
    yield "lm_head.weight", (shape.vocab_size, h), std


def write_checkpoint(folder: Path, shape: ModelShape, recipe: Recipe) -> None:
    """config.json and model.safetensors, as `LlamaForCausalLM.from_pretrained` reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(recipe.seed)
    tensors = {
        name: generator.standard_normal(size, dtype=np.float32) * np.float32(std)
        if std
        else np.ones(size, np.float32)
        for name, size, std in parameters(shape)
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": recipe.seq_length,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def write_tokens(path: Path, shape: ModelShape, recipe: Recipe) -> None:
    """Token batches that a model can learn: int64 [steps, global_batch_size, seq_length + 1].

    Three tokens in four are the fixed successor of the one before, the fourth is drawn from a
    Zipf law: the loss first falls towards the skew of the tokens, then towards the successors.
    """
    generator = np.random.default_rng(recipe.seed + 1)
    vocab = shape.vocab_size
    successor = generator.permutation(vocab)
    zipf = 1.0 / np.arange(1, vocab + 1)
    size = (recipe.steps, recipe.global_batch_size, recipe.seq_length + 1)
    tokens = generator.choice(vocab, size=size, p=zipf / zipf.sum())
    follows = generator.random(size) < 0.75
    for position in range(1, size[-1]):
        tokens[..., position] = np.where(
            follows[..., position], successor[tokens[..., position - 1]], tokens[..., position]
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, tokens)
