"""megagrid as a system: the recipe that `megagrid train` runs. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.peers.spec import Job


def write_recipe(job: Job) -> Path:
    """Writes `run_dir/recipe.toml`: everything stated that bears on speed or on the result."""
    path = Path(job.run_dir) / "recipe.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    # Numbers, strings, booleans and flat lists are written the same in JSON and in TOML.
    lines = []
    for section, keys in _sections(job).items():
        lines += [f"[{section}]", *(f"{key} = {json.dumps(v)}" for key, v in keys.items()), ""]
    path.write_text("\n".join(lines))
    return path


def _sections(job: Job) -> dict[str, dict[str, object]]:
    shape, layout, recipe = job.shape, job.layout, job.recipe
    return {
        "model": {
            "family": "llama",
            "num_layers": shape.num_layers,
            "hidden_size": shape.hidden_size,
            "ffn_hidden_size": shape.ffn_hidden_size,
            "num_heads": shape.num_heads,
            "num_kv_heads": shape.num_kv_heads,
            "vocab_size": shape.vocab_size,
            "max_seq_length": recipe.seq_length,
            "norm_eps": shape.norm_eps,
            "rope_theta": shape.rope_theta,
        },
        "parallel": {
            "tensor_parallel_size": layout.tp,
            "pipeline_parallel_size": layout.pp,
            "data_parallel_size": layout.dp,
            "pipeline_schedule": "1F1B",
            "sequence_parallel": recipe.sequence_parallel and layout.tp > 1,
            "sharding_strategy": recipe.sharding,
        },
        "train": {
            "seq_length": recipe.seq_length,
            "micro_batch_size": recipe.micro_batch_size,
            "global_batch_size": recipe.global_batch_size,
            "steps": recipe.steps,
            "seed": recipe.seed,
            "precision": "fp32",
            "device": "cpu",
        },
        "optimizer": {
            "lr": recipe.lr,
            "beta1": recipe.beta1,
            "beta2": recipe.beta2,
            "eps": recipe.eps,
            "weight_decay": recipe.weight_decay,
            "clip_grad": recipe.clip_grad,
        },
        "lr_schedule": {"kind": "constant"},
        # The same samples in each step: the loss falls from the first update on, so that an error
        # in an update shows in the next loss.
        "data": {"paths": [f"synthetic:{recipe.global_batch_size}"], "valid_fraction": 0.0},
        "checkpoint": {"save_at_end": False},
        "logging": {"run_dir": job.run_dir},
    }
