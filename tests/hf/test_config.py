"""config.json: the published ones are the presets, and what megagrid doesn't compute is refused."""

from __future__ import annotations

import pytest

from megagrid.config.presets import PRESETS
from megagrid.config.schema import ModelConfig
from megagrid.errors import CheckpointError
from megagrid.hf.config import config_of, describe, differences

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0",
    "use_cache": True,
    "vocab_size": 128256,
}

LLAMA32_ROPE = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}

QWEN = {
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}

PUBLISHED = {
    "llama3.2-1b": LLAMA | {"rope_theta": 500000.0, "rope_scaling": LLAMA32_ROPE, "head_dim": 64},
    "llama2-7b": {
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 11008,
        "max_position_embeddings": 4096,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "vocab_size": 32000,
    },
    "mistral-7b": {
        "architectures": ["MistralForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "vocab_size": 32768,
    },
    "qwen2.5-0.5b": QWEN
    | {
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 896,
        "intermediate_size": 4864,
        "max_position_embeddings": 32768,
        "max_window_layers": 24,
        "model_type": "qwen2",
        "num_attention_heads": 14,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "sliding_window": 32768,
        "use_mrope": False,
    },
    "qwen3-0.6b": QWEN
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "head_dim": 128,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
        "max_window_layers": 28,
        "model_type": "qwen3",
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
    },
    "gpt2": {
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.1,
        "bos_token_id": 50256,
        "embd_pdrop": 0.1,
        "eos_token_id": 50256,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05,
        "model_type": "gpt2",
        "n_ctx": 1024,
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "n_positions": 1024,
        "resid_pdrop": 0.1,
        "summary_activation": None,
        "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True,
        "summary_type": "cls_index",
        "summary_use_proj": True,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        "vocab_size": 50257,
    },
}
"""The config.json of released weights, by the preset that is that model."""


def preset(name: str) -> ModelConfig:
    shape = dict(PRESETS[name])
    shape.setdefault("num_kv_heads", shape["num_heads"])
    shape.setdefault("head_dim", shape["hidden_size"] // shape["num_heads"])
    return ModelConfig(**shape)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_the_preset(name):
    assert differences(preset(name), describe(PUBLISHED[name], name).model) == []


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_a_config(name):
    """One that describes the preset again."""
    model = preset(name)
    family, config = config_of(model, "bfloat16", None, {"eos_token_id": 2})
    assert config["eos_token_id"] == 2
    found = describe(config, name)
    assert found.family == family
    assert differences(model, found.model) == []


def test_what_the_weights_came_with_is_kept_unless_it_contradicts():
    former = PUBLISHED["mistral-7b"] | {"eos_token_id": 2, "sliding_window": 32768, "mine": 1}
    model = preset("mistral-7b")
    _, config = config_of(model, "bfloat16", former, {})
    assert (config["model_type"], config["eos_token_id"], config["mine"]) == ("mistral", 2, 1)
    _, config = config_of(model, "bfloat16", former, {"eos_token_id": 7})
    assert (config["model_type"], config["eos_token_id"], config["mine"]) == ("mistral", 7, 1)
    longer = model.model_copy(update={"max_seq_length": 65536})
    _, config = config_of(longer, "bfloat16", former, {})
    assert config["sliding_window"] is None, "it would be in effect"
    assert (config["model_type"], config["eos_token_id"]) == ("mistral", 2)


def test_a_model_that_transformers_lacks_is_told_with_what_it_has():
    model = preset("qwen3-0.6b").model_copy(update={"qkv_bias": True})
    with pytest.raises(CheckpointError, match=r"model.qkv_bias=true, model.qk_norm=true.*Qwen3For"):
        config_of(model, "float32", None, {})


def without(raw: dict, *keys: str) -> dict:
    return {key: value for key, value in raw.items() if key not in keys}


LLAMA32, GPT2 = PUBLISHED["llama3.2-1b"], PUBLISHED["gpt2"]
MISTRAL, QWEN2, QWEN3 = (PUBLISHED[n] for n in ("mistral-7b", "qwen2.5-0.5b", "qwen3-0.6b"))

REFUSED = {
    "unknown type": (
        LLAMA32 | {"model_type": "gemma2"},
        ('model_type="gemma2"', "llama, mistral, qwen2, qwen3, gpt2"),
    ),
    "no type": (without(LLAMA32, "model_type"), ("model_type=null", "llama, mistral")),
    "another head": (
        LLAMA32 | {"architectures": ["LlamaForSequenceClassification"]},
        ("LlamaForSequenceClassification", "isn't LlamaForCausalLM"),
    ),
    "missing shape": (without(LLAMA32, "num_hidden_layers"), ("num_hidden_layers must be stated",)),
    "missing key heads of a mistral": (
        without(MISTRAL, "num_key_value_heads"),
        ("num_key_value_heads must be stated",),
    ),
    "text for a number": (
        LLAMA32 | {"hidden_size": "2048"},
        ('hidden_size="2048"', "must be a valid integer"),
    ),
    "no layers": (LLAMA32 | {"num_hidden_layers": 0}, ("num_hidden_layers=0", "greater than 0")),
    "quantised": (
        LLAMA32 | {"quantization_config": {"bits": 4}},
        ("quantization_config=", "save the model without"),
    ),
    "its own code": (LLAMA32 | {"auto_map": {"AutoModel": "x.y"}}, ("auto_map=", "its own")),
    "another activation": (LLAMA32 | {"hidden_act": "gelu"}, ('hidden_act="gelu"', '"silu"')),
    "biases everywhere": (
        LLAMA32 | {"attention_bias": True},
        ("attention_bias=true isn't false", "can't be converted"),
    ),
    "biases in the mlp": (LLAMA32 | {"mlp_bias": True}, ("mlp_bias=true isn't false",)),
    "dropout": (
        LLAMA32 | {"attention_dropout": 0.1},
        ("attention_dropout=0.1", "set it to that: it matters to training alone"),
    ),
    "experts": (
        MISTRAL | {"num_local_experts": 8},
        ("num_local_experts=8 isn't known of a mistral", "--ignore num_local_experts"),
    ),
    "scaled logits": (LLAMA32 | {"logit_scale": 0.06}, ("logit_scale=0.06 isn't known",)),
    "an old rope of another kind": (
        LLAMA32 | {"rope_scaling": {"type": "longrope", "factor": 4.0}},
        ('rope_scaling.rope_type="longrope"', "default, linear, llama3, yarn"),
    ),
    "a new rope of another kind": (
        without(LLAMA32, "rope_scaling", "rope_theta")
        | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        ('rope_parameters.rope_type="dynamic"', "default, linear, llama3"),
    ),
    "rope without its factor": (
        LLAMA32 | {"rope_scaling": {"rope_type": "linear"}},
        ("rope_scaling.factor must be stated",),
    ),
    "rope with a number of another kind": (
        LLAMA32 | {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta_fast": 32}},
        ("rope_scaling.beta_fast=32 isn't known",),
    ),
    "yarn with another amplitude": (
        LLAMA32 | {"rope_scaling": YARN | {"mscale": 0.7}},
        ("rope_scaling.mscale=0.7 isn't known",),
    ),
    "two thetas": (
        without(LLAMA32, "rope_scaling")
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        ("rope_theta=500000.0 and rope_parameters.rope_theta=10000.0 differ",),
    ),
    "two scalings": (
        LLAMA32 | {"rope_parameters": {"rope_type": "default"}},
        ("rope_scaling and rope_parameters differ",),
    ),
    "rotated in pairs of neighbours": (
        LLAMA32 | {"rope_interleaved": True},
        ("rope_interleaved=true isn't false",),
    ),
    "rotated in part": (
        LLAMA32 | {"partial_rotary_factor": 0.5},
        ("partial_rotary_factor=0.5 isn't 1.0",),
    ),
    "a window in effect": (
        MISTRAL | {"sliding_window": 4096},
        ("sliding_window=4096", "max_position_embeddings=32768", "to 4096"),
    ),
    "a window that isn't stated": (
        without(MISTRAL, "sliding_window"),
        ("sliding_window=4096", "hides tokens"),
    ),
    "a window of a qwen2": (
        QWEN2 | {"use_sliding_window": True},
        ("use_sliding_window=true isn't false",),
    ),
    "a window of some layers": (
        QWEN3 | {"layer_types": ["full_attention", "sliding_attention"]},
        ('layer_types has "sliding_attention"',),
    ),
    "gelu of another form": (
        GPT2 | {"activation_function": "gelu"},
        ('activation_function="gelu"', '"gelu_new"'),
    ),
    "scores scaled by layer": (
        GPT2 | {"scale_attn_by_inverse_layer_idx": True},
        ("scale_attn_by_inverse_layer_idx=true isn't false",),
    ),
    "cross attention": (GPT2 | {"add_cross_attention": True}, ("add_cross_attention=true",)),
    "two rates": (
        GPT2 | {"embd_pdrop": 0.0},
        ("embd_pdrop=0.0 and resid_pdrop=0.1", "make them equal"),
    ),
    "heads that don't share the width": (
        GPT2 | {"n_head": 7},
        ("n_embd=768 must be a multiple of n_head=7",),
    ),
}


@pytest.mark.parametrize(("raw", "told"), REFUSED.values(), ids=REFUSED)
def test_what_megagrid_does_not_compute_is_refused_by_key_and_value(raw, told):
    with pytest.raises(CheckpointError) as caught:
        describe(raw, "config.json")
    message = str(caught.value)
    assert message.startswith("config.json: ")
    assert "\n" not in message
    for words in told:
        assert words in message


def test_an_unknown_key_passes_if_the_user_vouches_for_it_or_it_is_null():
    assert describe(LLAMA32 | {"mine": 1}, "config.json", ignored=["mine"]).model
    assert describe(LLAMA32 | {"mine": None}, "config.json").model


def test_keys_that_others_leave_behind_are_no_obstacle():
    left = {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"a": 1}}
    assert describe(LLAMA32 | left, "config.json").model
    left = {"n_special": 0, "predict_special_tokens": True, "_num_labels": 1}
    assert describe(GPT2 | left, "config.json").model


def test_yarn_means_what_isnt_stated_of_it():
    model = describe(LLAMA | {"rope_theta": 5e5, "rope_scaling": YARN}, "config.json").model
    assert (model.rope_low_freq_factor, model.rope_high_freq_factor) == (1.0, 32.0)
    assert model.rope_attention_factor is None
    _, written = config_of(model, "float32", None, {})
    assert written["rope_scaling"] == YARN | {"beta_slow": 1.0, "beta_fast": 32.0}
