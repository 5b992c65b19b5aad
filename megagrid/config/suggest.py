"""What the writer of an unknown key probably meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from types import MappingProxyType

from megagrid.config.schema import Config

KEYS = MappingProxyType(
    {
        section: tuple(field.annotation.model_fields)
        for section, field in Config.model_fields.items()
    }
)
"""Section -> its keys."""

ELSEWHERE = MappingProxyType(
    {
        "batch_size": "train.global_batch_size",
        "context_length": "train.seq_length",
        "dp": "parallel.data_parallel_size",
        "epochs": "train.tokens",
        "grad_clip": "optimizer.clip_grad",
        "gradient_accumulation_steps": "train.global_batch_size",
        "lr_scheduler": "lr_schedule.kind",
        "learning_rate": "optimizer.lr",
        "max_grad_norm": "optimizer.clip_grad",
        "max_lr": "optimizer.lr",
        "max_steps": "train.steps",
        "min_lr": "lr_schedule.min_lr_ratio",
        "n_embd": "model.hidden_size",
        "n_head": "model.num_heads",
        "n_layer": "model.num_layers",
        "num_attention_heads": "model.num_heads",
        "num_hidden_layers": "model.num_layers",
        "num_key_value_heads": "model.num_kv_heads",
        "num_query_groups": "model.num_kv_heads",
        "output_dir": "logging.run_dir",
        "pp": "parallel.pipeline_parallel_size",
        "schedule": "parallel.pipeline_schedule",
        "sequence_length": "train.seq_length",
        "tensor_model_parallel_size": "parallel.tensor_parallel_size",
        "tp": "parallel.tensor_parallel_size",
        "train_iters": "train.steps",
    }
)
"""What other trainers call a key -> where it is here."""


def closest(word: str, choices: Iterable[str]) -> str | None:
    """The choice that `word` most likely misspells, if any is near."""
    normal = word.lower().replace("-", "_")
    matches = get_close_matches(normal, list(choices), n=1, cutoff=0.6)
    return matches[0] if matches else None


def remedy(section: str, key: str) -> str:
    """What to write instead of the unknown `section.key`, as the end of an error.

    `section` is empty for a key that stands outside every section.
    """
    if section and section not in KEYS:
        return _for_section(section, key)
    normal = key.lower().replace("-", "_")
    if normal in KEYS.get(section, ()):
        return f"did you mean {section}.{normal}?"
    homes = [name for name, keys in KEYS.items() if normal in keys]
    if homes:
        written = f"{section}.{key}" if section else key
        return f"it is {' or '.join(f'{home}.{normal}' for home in homes)}, not {written}"
    if normal in ELSEWHERE:
        return f"did you mean {ELSEWHERE[normal]}?"
    if near := closest(normal, KEYS.get(section, ())):
        return f"did you mean {section}.{near}?"
    homes_by_key = {name: home for home, keys in KEYS.items() for name in keys}
    if near := closest(normal, homes_by_key):
        return f"did you mean {homes_by_key[near]}.{near}?"
    if not section:
        return f"a key stands in a section: {', '.join(KEYS)}"
    return f"[{section}] has {', '.join(KEYS[section])}"


def _for_section(section: str, key: str) -> str:
    near = closest(section, KEYS)
    if near is None:
        return f"the sections are {', '.join(KEYS)}"
    return f"did you mean {near}.{key}?" if key in KEYS[near] else f"did you mean [{near}]?"
