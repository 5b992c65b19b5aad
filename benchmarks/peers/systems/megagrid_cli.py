"""megagrid as a system: a recipe, and the arguments of `megagrid train`. Imports no torch."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

from benchmarks.peers.spec import Job


def missing() -> str | None:
    """Why megagrid can't take part; None if it can."""
    for module in ("megagrid.cli", "megagrid.train.build"):
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            found = None
        if found is None:
            return f"{module} doesn't exist"
    # TODO: drop this line once `starting_point` hands over the weights and the tokens.
    return "it can't be started from the common weights and tokens yet"


def arguments(job: Job) -> list[str]:
    """Writes `run_dir/recipe.toml` and returns what follows `megagrid` on the command line."""
    path = Path(job.run_dir) / "recipe.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_toml(_sections(job)))
    return ["train", str(path)]


def starting_point(job: Job) -> dict[str, dict[str, object]]:
    """The keys that make a run start from `job.checkpoint` and read `job.tokens` in order.

    Two things are to be handed over, and both may need a file written here first:
    the weights (Hugging Face's layout; converted to a checkpoint of step 0, then resumed), and the
    tokens (each of the steps x global_batch_size rows is one sample of seq_length + 1 tokens;
    the order must be the file's, so that all systems see the same batch at the same step).
    """
    return {"data": {"paths": [job.tokens], "valid_fraction": 0.0}}


def _sections(job: Job) -> dict[str, dict[str, object]]:
    shape, layout, recipe = job.shape, job.layout, job.recipe
    sections: dict[str, dict[str, object]] = {
        "model": {
            "family": "llama",
            "num_layers": shape.num_layers,
            "hidden_size": shape.hidden_size,
            "ffn_hidden_size": shape.ffn_hidden_size,
            "num_heads": shape.num_heads,
            "num_kv_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "vocab_size": shape.vocab_size,
            "max_seq_length": recipe.seq_length,
            "norm_eps": shape.norm_eps,
            "rope_theta": shape.rope_theta,
        },
        "parallel": {
            "tensor_parallel_size": layout.tp,
            "pipeline_parallel_size": layout.pp,
            "data_parallel_size": layout.dp,
            "sequence_parallel": recipe.sequence_parallel and layout.tp > 1,
            "sharding_strategy": recipe.sharding,
        },
        "train": {
            "seq_length": recipe.seq_length,
            "micro_batch_size": recipe.micro_batch_size,
            "global_batch_size": recipe.global_batch_size,
            "steps": recipe.steps,
            "seed": recipe.seed,
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
        "checkpoint": {"save_at_end": False},
        "logging": {"run_dir": job.run_dir},
    }
    for section, keys in starting_point(job).items():
        sections.setdefault(section, {}).update(keys)
    return sections


def _toml(sections: dict[str, dict[str, object]]) -> str:
    """Numbers, strings, booleans and flat lists are written the same in JSON and in TOML."""
    lines = []
    for section, keys in sections.items():
        lines += [f"[{section}]", *(f"{key} = {json.dumps(v)}" for key, v in keys.items()), ""]
    return "\n".join(lines)
