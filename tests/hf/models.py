"""Tiny models of every family, made by transformers, and the same weights in a model of ours."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from megagrid.checkpoint import entries, load
from megagrid.config.load import load as load_config
from megagrid.config.schema import ModelConfig
from megagrid.model.decoder import DecoderStage
from megagrid.nn.layout import parameter_shards
from megagrid.train.build import build_whole_model

VOCAB = 61
"""Prime: nothing divides it, so that any padding would show."""

LLAMA_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
    "rms_norm_eps": 1e-5,
}

GPT2_SHAPE = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 8,
    "n_positions": 64,
    "initializer_range": 0.15,
}

LLAMA31_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 2.0,
    "original_max_position_embeddings": 8,
}

YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_slow": 1.0,
    "beta_fast": 2.0,
    "original_max_position_embeddings": 16,
}

Make = Callable[[], PreTrainedModel]


def _llama(**keys) -> Make:
    return lambda: LlamaForCausalLM(LlamaConfig(**LLAMA_SHAPE | keys))


def _mistral(**keys) -> Make:
    return lambda: MistralForCausalLM(MistralConfig(**LLAMA_SHAPE | keys))


def _qwen2(**keys) -> Make:
    return lambda: Qwen2ForCausalLM(Qwen2Config(**LLAMA_SHAPE | keys))


def _qwen3(**keys) -> Make:
    return lambda: Qwen3ForCausalLM(Qwen3Config(**LLAMA_SHAPE | keys))


def _gpt2(**keys) -> Make:
    return lambda: GPT2LMHeadModel(GPT2Config(**GPT2_SHAPE | keys))


MODELS: dict[str, Make] = {
    "llama": _llama(rope_parameters={"rope_type": "default", "rope_theta": 500000.0}),
    "llama tied mqa": _llama(tie_word_embeddings=True, num_key_value_heads=1),
    "llama 3.1": _llama(rope_parameters=LLAMA31_ROPE, head_dim=8, tie_word_embeddings=True),
    "llama linear": _llama(
        rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    ),
    "llama yarn": _llama(rope_parameters=YARN_ROPE, head_dim=8),
    "mistral": _mistral(sliding_window=None),
    "mistral, a window as long as any input": _mistral(sliding_window=64, head_dim=6),
    "qwen2": _qwen2(),
    "qwen2 tied": _qwen2(tie_word_embeddings=True, rms_norm_eps=0.1),
    "qwen3": _qwen3(head_dim=6),
    "gpt2": _gpt2(),
    "gpt2 untied": _gpt2(tie_word_embeddings=False, n_inner=40, layer_norm_epsilon=0.1),
}


def made(name: str) -> PreTrainedModel:
    """A model with weights that no constant hides, in float32."""
    torch.manual_seed(1)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms begin at one and biases at zero, where a swap of two would go unseen.
            if parameter.ndim == 1:
                parameter += 0.2 * torch.randn_like(parameter)
    return model


Saved = Callable[..., Path]


def saver(folder: Path) -> Saved:
    """A function that gives the folder of a model by name and dtype, and makes it once."""

    @cache
    def save(name: str, dtype: torch.dtype = torch.float32) -> Path:
        path = folder / f"{name} {dtype}"
        made(name).to(dtype).save_pretrained(path)
        return path

    return save


def tokens() -> Tensor:
    """Token ids (3, 20)."""
    return torch.randint(VOCAB, (3, 20), generator=torch.Generator().manual_seed(0))


def their_logits(model: PreTrainedModel) -> Tensor:
    """Of `tokens`, (3, 20, V)."""
    with torch.no_grad():
        return model(input_ids=tokens()).logits


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """What transformers makes of a folder."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", local_files_only=True
    )
    return model.eval()


def ours(checkpoint: Path) -> tuple[ModelConfig, DecoderStage]:
    """What megagrid makes of a checkpoint, in float32."""
    config = load_config(checkpoint / "config.toml").model
    model = build_whole_model(config, torch.float32, torch.device("cpu"))
    load(checkpoint, entries(parameter_shards(model)), weights_only=True)
    return config, model


def our_logits(checkpoint: Path) -> Tensor:
    """Of `tokens`, (3, 20, V)."""
    config, model = ours(checkpoint)
    with torch.no_grad():
        return model(tokens()).transpose(0, 1)[..., : config.vocab_size]


def tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's safetensors files, by name."""
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - no mapping
                assert name not in found, f"{name} is in two files"
                found[name] = file.get_tensor(name)
    return found


def raw_config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def edit_config(folder: Path, **keys: object) -> None:
    """State `keys` of config.json anew; ... takes a key out."""
    config = raw_config(folder) | keys
    stated = {key: value for key, value in config.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(stated))
