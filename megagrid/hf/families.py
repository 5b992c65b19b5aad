"""The families of models that are converted, one table each: tensors by name, keys of config.json.

Conversion reads a table in either direction. A new family is a new row of `FAMILIES`.

    ours                                theirs
    layers.3.attention.wk.weight        llama   model.layers.3.self_attn.k_proj.weight
                                        gpt2    transformer.h.3.attn.c_attn.weight, transposed,
                                                the second third of its output features
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

Raw = Mapping[str, object]
"""The content of a config.json."""


@dataclass(frozen=True)
class Row:
    """A tensor of ours, and where it lies in theirs.

    Attributes:
        ours, theirs: names; {n} stands for the number of a layer.
        transposed: theirs has (in, out) features, ours (out, in).
        part: (i, k): ours is the i-th of the k equal parts that theirs is fused of, along the
            output features.
    """

    ours: str
    theirs: str
    transposed: bool = False
    part: tuple[int, int] = (0, 1)

    def of_layer(self, number: int) -> Row:
        """The row with the layer's number in its names."""
        names = {"ours": self.ours, "theirs": self.theirs}
        return replace(self, **{key: name.format(n=number) for key, name in names.items()})


@dataclass(frozen=True)
class Family:
    """A family of models as transformers has it.

    Attributes:
        model_type, architecture: how config.json calls it.
        prefix: of all names but the head's; some files are without.
        rows: the tensors. A model has those whose names of ours it has.
        buffers: pattern of tensors that some files hold and that are no weights.
        model: keys of [model] whose values make a model of this family.
        keys: key of [model] -> key of config.json with the same meaning.
        defaults: key of config.json -> what it means not to state it, given the others.
        fixed: key of config.json -> the values under which the model computes what ours does. The
            first is the default, and written.
        unwritten: the same, of keys that are old or seldom.
        hindrance: what else would change the function, as a phrase, or None.
        harmless: keys that don't change what is computed.
        is_rotated: RoPE's keys are read.
    """

    model_type: str
    architecture: str
    prefix: str
    rows: tuple[Row, ...]
    buffers: str
    model: Mapping[str, object]
    keys: Mapping[str, str]
    defaults: Mapping[str, Callable[[Raw], object]]
    fixed: Mapping[str, tuple[object, ...]]
    unwritten: Mapping[str, tuple[object, ...]]
    hindrance: Callable[[Raw], str | None]
    harmless: frozenset[str]
    is_rotated: bool


# --- Tensors -------------------------------------------------------------------------------------


def _rows(
    prefix: str, layer: str, names: Mapping[str, str], layer_names: Mapping[str, str], *kinds: str
) -> tuple[Row, ...]:
    """Rows of modules by name; each has a tensor of every kind."""
    modules = {ours: f"{prefix}{theirs}" for ours, theirs in names.items()}
    modules |= {f"layers.{{n}}.{o}": f"{prefix}{layer}.{{n}}.{t}" for o, t in layer_names.items()}
    return tuple(
        Row(f"{ours}.{kind}", f"{theirs}.{kind}")
        for ours, theirs in modules.items()
        for kind in kinds
    )


_HEAD = Row("head.weight", "lm_head.weight")

_LLAMA_ROWS = (
    *_rows(
        "model.",
        "layers",
        {"embedding": "embed_tokens"},
        {
            "attention_norm": "input_layernorm",
            "attention.wq": "self_attn.q_proj",
            "attention.wk": "self_attn.k_proj",
            "attention.wv": "self_attn.v_proj",
            "attention.wo": "self_attn.o_proj",
            "mlp_norm": "post_attention_layernorm",
            "mlp.gate": "mlp.gate_proj",
            "mlp.up": "mlp.up_proj",
            "mlp.down": "mlp.down_proj",
        },
        "weight",
    ),
    *_rows("model.", "layers", {"norm": "norm"}, {}, "weight"),
    _HEAD,
)

_QKV = {f"attention.w{x}": f"self_attn.{x}_proj" for x in "qkv"}
_QK_NORM = {f"attention.{x}_norm": f"self_attn.{x}_norm" for x in "qk"}

_GPT2_ROWS = (
    *_rows("transformer.", "h", {"embedding": "wte", "position_embedding": "wpe"}, {}, "weight"),
    *_rows("transformer.", "h", {}, {"attention_norm": "ln_1", "mlp_norm": "ln_2"}, "weight"),
    *_rows("transformer.", "h", {}, {"attention_norm": "ln_1", "mlp_norm": "ln_2"}, "bias"),
    *(
        Row(
            f"layers.{{n}}.attention.w{x}.{kind}",
            f"transformer.h.{{n}}.attn.c_attn.{kind}",
            t,
            part,
        )
        for kind, t in (("weight", True), ("bias", False))
        for x, part in (("q", (0, 3)), ("k", (1, 3)), ("v", (2, 3)))
    ),
    *(
        Row(f"layers.{{n}}.{ours}.{kind}", f"transformer.h.{{n}}.{theirs}.{kind}", transposed)
        for ours, theirs in (
            ("attention.wo", "attn.c_proj"),
            ("mlp.up", "mlp.c_fc"),
            ("mlp.down", "mlp.c_proj"),
        )
        for kind, transposed in (("weight", True), ("bias", False))
    ),
    *_rows("transformer.", "h", {"norm": "ln_f"}, {}, "weight", "bias"),
    _HEAD,
)


# --- Keys of config.json -------------------------------------------------------------------------

_LLAMA_KEYS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "max_seq_length": "max_position_embeddings",
    "tied_embeddings": "tie_word_embeddings",
    "norm_eps": "rms_norm_eps",
    "init_std": "initializer_range",
}

_GPT2_KEYS = {
    "num_layers": "n_layer",
    "hidden_size": "n_embd",
    "ffn_hidden_size": "n_inner",
    "num_heads": "n_head",
    "vocab_size": "vocab_size",
    "max_seq_length": "n_positions",
    "tied_embeddings": "tie_word_embeddings",
    "norm_eps": "layer_norm_epsilon",
    "init_std": "initializer_range",
    "dropout": "resid_pdrop",
    "attention_dropout": "attn_pdrop",
}

ROPE_KEYS = frozenset({"rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"})

_HARMLESS = frozenset(
    " ".join(
        (
            # What it is called and was made by.
            "_name_or_path name_or_path architectures model_type transformers_version",
            "is_llama_config transformers.js_config unsloth_version unsloth_fixed",
            # How it is stored and computed, not what.
            "dtype torch_dtype use_cache pretraining_tp gradient_checkpointing torchscript",
            "_attn_implementation attn_implementation _attn_implementation_autoset",
            "chunk_size_feed_forward return_dict use_return_dict is_decoder",
            "output_attentions output_hidden_states",
            # Its text, and what it would be for other tasks.
            "bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id prefix",
            "tokenizer_class id2label label2id num_labels problem_type finetuning_task",
            "task_specific_params",
            # How text is drawn from it.
            "do_sample max_length max_new_tokens temperature top_k top_p num_beams",
        )
    ).split()
)

_UNWRITTEN = {
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({},),
    "use_mrope": (False,),
    "rope_interleaved": (False,),
}


def _width_of_heads(raw: Raw) -> object:
    hidden, heads = raw.get("hidden_size"), raw.get("num_attention_heads")
    if not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1 or hidden % heads:
        return None
    return hidden // heads


def _four_times_as_wide(raw: Raw) -> object:
    hidden = raw.get("n_embd")
    return 4 * hidden if isinstance(hidden, int) else None


def _nothing(raw: Raw) -> str | None:
    return None


def _window_of_all_layers(raw: Raw) -> str | None:
    """Mistral's window, 4096 where config.json doesn't state one: without effect if no input is
    longer."""
    window, longest = raw.get("sliding_window", 4096), raw.get("max_position_embeddings")
    if window is None or not isinstance(longest, int) or not isinstance(window, int):
        return None
    if window >= longest:
        return None
    return (
        f"sliding_window={window} hides tokens from each other in inputs up to "
        f"max_position_embeddings={longest}; set max_position_embeddings to {window}, within which "
        "it hides nothing"
    )


def _window_of_some_layers(raw: Raw) -> str | None:
    """Qwen's window, of the layers that `layer_types` or `max_window_layers` name."""
    types = raw.get("layer_types") or []
    if isinstance(types, list) and any(kind != "full_attention" for kind in types):
        other = next(kind for kind in types if kind != "full_attention")
        return f'layer_types has "{other}"; megagrid has "full_attention" alone'
    return None


def _two_rates(raw: Raw) -> str | None:
    embedding, residual = raw.get("embd_pdrop", 0.1), raw.get("resid_pdrop", 0.1)
    if embedding == residual:
        return None
    return (
        f"embd_pdrop={embedding} and resid_pdrop={residual} are one rate in megagrid; make them "
        "equal, they matter to training alone"
    )


def _llama_kind(
    model_type: str,
    architecture: str,
    rows: tuple[Row, ...],
    model: Mapping[str, bool],
    *,
    fixed: Mapping[str, tuple[object, ...]],
    defaults: Mapping[str, Callable[[Raw], object]] | None = None,
    hindrance: Callable[[Raw], str | None] = _nothing,
    harmless: tuple[str, ...] = (),
) -> Family:
    """A family of Llama's kind: its modules by its names."""
    return Family(
        model_type=model_type,
        architecture=architecture,
        prefix="model.",
        rows=rows,
        buffers=r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
        model={"family": "llama", "qkv_bias": False, "qk_norm": False, **model},
        keys=_LLAMA_KEYS,
        defaults={
            "head_dim": _width_of_heads,
            "tie_word_embeddings": lambda raw: False,
            "initializer_range": lambda raw: 0.02,
            **(defaults or {}),
        },
        fixed={"hidden_act": ("silu",), "attention_dropout": (0.0,), **fixed},
        unwritten=_UNWRITTEN,
        hindrance=hindrance,
        harmless=_HARMLESS.union(harmless),
        is_rotated=True,
    )


LLAMA = _llama_kind(
    "llama",
    "LlamaForCausalLM",
    _LLAMA_ROWS,
    {},
    fixed={"attention_bias": (False,), "mlp_bias": (False,)},
    defaults={"num_key_value_heads": lambda raw: raw.get("num_attention_heads")},
)

MISTRAL = _llama_kind(
    "mistral",
    "MistralForCausalLM",
    _LLAMA_ROWS,
    {},
    fixed={},
    hindrance=_window_of_all_layers,
    harmless=("sliding_window",),
)

QWEN2 = _llama_kind(
    "qwen2",
    "Qwen2ForCausalLM",
    (*_LLAMA_ROWS, *_rows("model.", "layers", {}, _QKV, "bias")),
    {"qkv_bias": True},
    fixed={"use_sliding_window": (False,)},
    hindrance=_window_of_some_layers,
    harmless=("sliding_window", "max_window_layers", "layer_types"),
)

QWEN3 = _llama_kind(
    "qwen3",
    "Qwen3ForCausalLM",
    (*_LLAMA_ROWS, *_rows("model.", "layers", {}, _QK_NORM, "weight")),
    {"qk_norm": True},
    fixed={"attention_bias": (False,), "use_sliding_window": (False,)},
    defaults={"head_dim": lambda raw: 128},
    hindrance=_window_of_some_layers,
    harmless=("sliding_window", "max_window_layers", "layer_types"),
)

GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    prefix="transformer.",
    rows=_GPT2_ROWS,
    buffers=r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias",
    model={"family": "gpt"},
    keys=_GPT2_KEYS,
    defaults={
        "n_inner": _four_times_as_wide,
        "tie_word_embeddings": lambda raw: True,
        "initializer_range": lambda raw: 0.02,
        "resid_pdrop": lambda raw: 0.1,
        "attn_pdrop": lambda raw: 0.1,
    },
    fixed={
        # Two names of the same form of gelu.
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
    },
    unwritten=_UNWRITTEN,
    hindrance=_two_rates,
    harmless=_HARMLESS.union(
        ("embd_pdrop", "n_ctx", "reorder_and_upcast_attn"),
        ("summary_activation", "summary_first_dropout", "summary_proj_to_labels"),
        ("summary_type", "summary_use_proj"),
        ("n_special", "predict_special_tokens", "output_past", "_num_labels"),
    ),
    is_rotated=False,
)

FAMILIES: tuple[Family, ...] = (LLAMA, MISTRAL, QWEN2, QWEN3, GPT2)
"""A model that nothing says more of is written as the first that it fits."""
