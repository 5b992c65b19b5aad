"""The weights and the tokens that all systems start from: those of megagrid's recipe.

megagrid's initial weights are functions of seed, name and index, and its synthetic samples of seed
and number, whatever the grid; so it needs no files, and the others get theirs from here.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.peers.spec import Job, ModelShape, Recipe
from benchmarks.peers.systems.megagrid_recipe import write_recipe
from megagrid.config.load import load
from megagrid.config.schema import Config
from megagrid.data import build as build_data
from megagrid.nn.init import initialise
from megagrid.nn.layout import parameter_shards
from megagrid.train.build import build_whole_model

HUGGING_FACE_NAMES = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
"""Of a tensor, without its layer and without `.weight`."""


def write_inputs(job: Job) -> None:
    """Fills `job.checkpoint` and `job.tokens`."""
    config = load(write_recipe(job))
    folder = Path(job.checkpoint)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(initial_weights(config), folder / "model.safetensors", metadata={"format": "pt"})
    settings = hugging_face_config(job.shape, job.recipe)
    (folder / "config.json").write_text(json.dumps(settings, indent=1))
    np.save(job.tokens, token_batches(config))


def initial_weights(config: Config) -> dict[str, torch.Tensor]:
    """The whole model's tensors, by Hugging Face's names."""
    model = build_whole_model(config.model, torch.float32, torch.device("cpu"))
    shards = parameter_shards(model)
    initialise(shards, config.train.seed)
    return {
        hugging_face_name(piece.name): shard.tensor[rows].clone()
        for shard in shards
        for piece, rows in shard.boxes
    }


def hugging_face_name(name: str) -> str:
    """layers.3.mlp.up.weight -> model.layers.3.mlp.up_proj.weight."""
    layer, place = re.fullmatch(r"(layers\.\d+\.)?(.+)\.weight", name).groups()
    return f"{'model.' + layer if layer else ''}{HUGGING_FACE_NAMES[place]}.weight"


def token_batches(config: Config) -> np.ndarray:
    """int64 [steps, global_batch_size, seq_length + 1], in the order in which megagrid reads."""
    data, train = config.data, config.train
    samples = build_data(
        data.paths,
        data.weights,
        train.seq_length,
        train.seed,
        data.valid_fraction,
        data.repeat,
        data.cache_dir,
        config.model.vocab_size,
    ).train
    count = train.total_steps * train.global_batch_size
    rows = np.stack([samples[number] for number in range(count)])
    return rows.reshape(train.total_steps, train.global_batch_size, train.seq_length + 1)


def hugging_face_config(shape: ModelShape, recipe: Recipe) -> dict[str, object]:
    """What `LlamaForCausalLM.from_pretrained` reads as config.json."""
    return {
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
