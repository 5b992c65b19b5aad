"""Shapes of published models, and how many parameters a shape has. Pure arithmetic, no torch.

A row holds the shape alone: what defines the network, nothing about how it is trained. Sources:
GPT-2 (Radford et al. 2019, released checkpoints), GPT-3 (Brown et al. 2020, table 2.1), Llama 2
(Touvron et al. 2023), Llama 3 (Grattafiori et al. 2024, table 3), 3.1 and 3.2, Mistral 7B v0.3
(Jiang et al. 2023), Qwen2.5 (Yang et al. 2024), Qwen3 (Yang et al. 2025), each as its released
config.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from megagrid.config.schema import ModelConfig

Shape = Mapping[str, str | int | float | bool]


def _gpt(layers: int, hidden: int, heads: int, *, vocab: int = 50257, context: int = 1024) -> Shape:
    """A GPT: four times as wide inside the MLP, one key/value head per head, tied head."""
    return {
        "family": "gpt",
        "num_layers": layers,
        "hidden_size": hidden,
        "ffn_hidden_size": 4 * hidden,
        "num_heads": heads,
        "vocab_size": vocab,
        "max_seq_length": context,
        "tied_embeddings": True,
    }


def _llama(
    layers: int,
    hidden: int,
    ffn: int,
    heads: int,
    kv_heads: int,
    *,
    vocab: int,
    context: int,
    rope_theta: float = 10000.0,
    **others: str | int | float | bool,
) -> Shape:
    """A Llama, or a model of its kind: the width of its SwiGLU follows no formula, so it is
    stated."""
    return {
        "family": "llama",
        "num_layers": layers,
        "hidden_size": hidden,
        "ffn_hidden_size": ffn,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "vocab_size": vocab,
        "max_seq_length": context,
        "rope_theta": rope_theta,
        **others,
    }


def _longer(factor: float) -> Shape:
    """Llama 3.1's way from 8192 tokens to 131072."""
    return {
        "vocab": 128256,
        "context": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": "llama3",
        "rope_scaling_factor": factor,
        "rope_low_freq_factor": 1.0,
        "rope_high_freq_factor": 4.0,
        "rope_original_max_seq_length": 8192,
    }


_LLAMA2 = {"vocab": 32000, "context": 4096}
_LLAMA3 = {"vocab": 128256, "context": 8192, "rope_theta": 500000.0}
_TIED = {"tied_embeddings": True}
_QWEN = {"rope_theta": 1000000.0, "norm_eps": 1e-6}
_QWEN2 = {**_QWEN, "qkv_bias": True}
_QWEN3 = {**_QWEN, "vocab": 151936, "context": 40960, "head_dim": 128, "qk_norm": True}

PRESETS: Mapping[str, Shape] = MappingProxyType(
    {
        # name                 layers hidden   ffn  heads kv
        "tiny-gpt": _gpt(5, 64, 8, vocab=101, context=64),
        "tiny-llama": _llama(5, 64, 160, 8, 2, vocab=101, context=64),
        "quickstart": _llama(6, 192, 512, 6, 2, vocab=2048, context=256),
        "gpt2": _gpt(12, 768, 12),
        "gpt2-medium": _gpt(24, 1024, 16),
        "gpt2-large": _gpt(36, 1280, 20),
        "gpt2-xl": _gpt(48, 1600, 25),
        "gpt3-175b": _gpt(96, 12288, 96, context=2048),
        "llama2-7b": _llama(32, 4096, 11008, 32, 32, **_LLAMA2),
        "llama2-13b": _llama(40, 5120, 13824, 40, 40, **_LLAMA2),
        "llama2-70b": _llama(80, 8192, 28672, 64, 8, **_LLAMA2),
        "llama3-8b": _llama(32, 4096, 14336, 32, 8, **_LLAMA3),
        "llama3-70b": _llama(80, 8192, 28672, 64, 8, **_LLAMA3),
        "llama3-405b": _llama(126, 16384, 53248, 128, 8, **_LLAMA3),
        "llama3.1-8b": _llama(32, 4096, 14336, 32, 8, **_longer(8.0)),
        "llama3.1-70b": _llama(80, 8192, 28672, 64, 8, **_longer(8.0)),
        "llama3.2-1b": _llama(16, 2048, 8192, 32, 8, **_longer(32.0), **_TIED),
        "llama3.2-3b": _llama(28, 3072, 8192, 24, 8, **_longer(32.0), **_TIED),
        "mistral-7b": _llama(32, 4096, 14336, 32, 8, vocab=32768, context=32768, rope_theta=1e6),
        "qwen2.5-0.5b": _llama(
            24, 896, 4864, 14, 2, vocab=151936, context=32768, **_QWEN2, **_TIED
        ),
        "qwen2.5-7b": _llama(28, 3584, 18944, 28, 4, vocab=152064, context=131072, **_QWEN2),
        "qwen3-0.6b": _llama(28, 1024, 3072, 16, 8, **_QWEN3, **_TIED),
        "qwen3-8b": _llama(36, 4096, 12288, 32, 8, **_QWEN3),
    }
)
"""The zoo. The tiny shapes exist for tests: a vocabulary that no tp divides, fewer key/value heads
than heads, a layer count that no pp divides."""


def parameter_count(model: ModelConfig) -> int:
    """Trainable numbers of the model, exactly: a tied embedding once, no padding of the vocabulary.

    With h hidden, f ffn, q = heads x head_dim, k = kv_heads x head_dim, V vocabulary, S positions:

        llama   layer  h(q + 2k) + qh + 3hf + 2h                              ends  2Vh + h
        gpt     layer  (h + 1)(q + 2k) + (q + 1)h + (h + 1)f + (f + 1)h + 4h  ends  2Vh + Sh + 2h

    and Vh less at the ends if the output head is tied. A llama's layer has q + 2k more with
    `qkv_bias`, and 2 head_dim more with `qk_norm`.
    """
    h, f = model.hidden_size, model.ffn_hidden_size
    q, k = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    embeddings = model.vocab_size * h * (1 if model.tied_embeddings else 2)
    if model.family == "llama":
        layer = h * (q + 2 * k) + q * h + 3 * h * f + 2 * h
        layer += (q + 2 * k) * model.qkv_bias + 2 * model.head_dim * model.qk_norm
        return embeddings + model.num_layers * layer + h
    layer = (h + 1) * (q + 2 * k) + (q + 1) * h + (h + 1) * f + (f + 1) * h + 4 * h
    return embeddings + model.max_seq_length * h + model.num_layers * layer + 2 * h
