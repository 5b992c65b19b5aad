"""transformers' models with this project's weights: an implementation by other people."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from megagrid.config.schema import ModelConfig
from megagrid.nn.loss import IGNORE

Tensors = dict[str, Tensor]


def oracle(model: ModelConfig, weights: Tensors) -> PreTrainedModel:
    """The model in float64, computing attention by its definition, without dropout.

    Args:
        weights: whole tensors by global name.
    """
    built, renamed = {"llama": _llama, "gpt": _gpt2}[model.family](model, weights)
    built = built.double().eval()
    missing, unexpected = built.load_state_dict(renamed, strict=False)
    tied = {"lm_head.weight"} if model.tied_embeddings else set()
    assert set(missing) <= tied and not unexpected, (missing, unexpected)
    built.tie_weights()
    return built


def loss_of(built: PreTrainedModel, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Logits (b, s, V), and the cross-entropy summed over labels that aren't ignored."""
    logits = built(input_ids=tokens).logits
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum"
    )
    return logits, loss


def _llama(model: ModelConfig, weights: Tensors) -> tuple[PreTrainedModel, Tensors]:
    if model.qk_norm:
        config_class, model_class = Qwen3Config, Qwen3ForCausalLM
    elif model.qkv_bias:
        config_class, model_class = Qwen2Config, Qwen2ForCausalLM
    else:
        config_class, model_class = LlamaConfig, LlamaForCausalLM
    config = config_class(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.ffn_hidden_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        max_position_embeddings=model.max_seq_length,
        rms_norm_eps=model.norm_eps,
        rope_parameters=_rope(model),
        tie_word_embeddings=model.tied_embeddings,
        attn_implementation="eager",
    )
    names = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
    for n in range(model.num_layers):
        ours, theirs = f"layers.{n}", f"model.layers.{n}"
        names |= {
            f"{ours}.attention_norm": f"{theirs}.input_layernorm",
            f"{ours}.attention.wq": f"{theirs}.self_attn.q_proj",
            f"{ours}.attention.wk": f"{theirs}.self_attn.k_proj",
            f"{ours}.attention.wv": f"{theirs}.self_attn.v_proj",
            f"{ours}.attention.wo": f"{theirs}.self_attn.o_proj",
            f"{ours}.attention.q_norm": f"{theirs}.self_attn.q_norm",
            f"{ours}.attention.k_norm": f"{theirs}.self_attn.k_norm",
            f"{ours}.mlp_norm": f"{theirs}.post_attention_layernorm",
            f"{ours}.mlp.gate": f"{theirs}.mlp.gate_proj",
            f"{ours}.mlp.up": f"{theirs}.mlp.up_proj",
            f"{ours}.mlp.down": f"{theirs}.mlp.down_proj",
        }
    renamed = {f"{names[_stem(n)]}.{n.rpartition('.')[2]}": w for n, w in weights.items()}
    return model_class(config), renamed


def _rope(model: ModelConfig) -> dict[str, object]:
    """The rotations, as transformers 5 has them in a config."""
    numbers = {
        "factor": model.rope_scaling_factor,
        "low_freq_factor": model.rope_low_freq_factor,
        "high_freq_factor": model.rope_high_freq_factor,
        "original_max_position_embeddings": model.rope_original_max_seq_length,
    }
    if model.rope_scaling == "yarn":
        low, high = numbers.pop("low_freq_factor"), numbers.pop("high_freq_factor")
        numbers |= {"beta_slow": low, "beta_fast": high}
        numbers["attention_factor"] = model.rope_attention_factor
    kind = "default" if model.rope_scaling == "none" else model.rope_scaling
    stated = {key: value for key, value in numbers.items() if value is not None}
    return {"rope_type": kind, "rope_theta": model.rope_theta, **stated}


def _gpt2(model: ModelConfig, weights: Tensors) -> tuple[PreTrainedModel, Tensors]:
    config = GPT2Config(
        vocab_size=model.vocab_size,
        n_positions=model.max_seq_length,
        n_embd=model.hidden_size,
        n_layer=model.num_layers,
        n_head=model.num_heads,
        n_inner=model.ffn_hidden_size,
        activation_function="gelu_new",
        layer_norm_epsilon=model.norm_eps,
        tie_word_embeddings=model.tied_embeddings,
        attn_implementation="eager",
    )
    names = {
        "embedding": "transformer.wte",
        "position_embedding": "transformer.wpe",
        "norm": "transformer.ln_f",
        "head": "lm_head",
    }
    for n in range(model.num_layers):
        ours, theirs = f"layers.{n}", f"transformer.h.{n}"
        names |= {
            f"{ours}.attention_norm": f"{theirs}.ln_1",
            f"{ours}.attention.wo": f"{theirs}.attn.c_proj",
            f"{ours}.mlp_norm": f"{theirs}.ln_2",
            f"{ours}.mlp.up": f"{theirs}.mlp.c_fc",
            f"{ours}.mlp.down": f"{theirs}.mlp.c_proj",
        }
    renamed = {}
    for name, weight in weights.items():
        kind = name.rpartition(".")[2]
        if _stem(name) in names:
            is_linear = kind == "weight" and (".mlp." in name or name.endswith("wo.weight"))
            # Conv1D keeps a linear layer's weight transposed.
            renamed[f"{names[_stem(name)]}.{kind}"] = weight.t() if is_linear else weight
    for n in range(model.num_layers):
        for kind in ("weight", "bias"):
            qkv = [weights[f"layers.{n}.attention.{w}.{kind}"] for w in ("wq", "wk", "wv")]
            fused = torch.cat(qkv)
            renamed[f"transformer.h.{n}.attn.c_attn.{kind}"] = (
                fused.t() if kind == "weight" else fused
            )
    return GPT2LMHeadModel(config), renamed


def _stem(name: str) -> str:
    return name.rpartition(".")[0]
