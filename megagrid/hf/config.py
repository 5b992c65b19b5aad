"""config.json to [model] and back.

A key that may change what the model computes is honoured or refused, never passed over: what isn't
in the family's table is refused too, unless the user vouches for it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from megagrid.config.schema import ModelConfig
from megagrid.errors import CheckpointError
from megagrid.hf.carried import GENERATION
from megagrid.hf.families import FAMILIES, ROPE_KEYS, Family, Raw

FILE_NAME = "config.json"

THEIR_ROPE = {
    "default": ("none", {}),
    "linear": ("linear", {"factor": "rope_scaling_factor"}),
    "llama3": (
        "llama3",
        {
            "factor": "rope_scaling_factor",
            "low_freq_factor": "rope_low_freq_factor",
            "high_freq_factor": "rope_high_freq_factor",
            "original_max_position_embeddings": "rope_original_max_seq_length",
        },
    ),
    "yarn": (
        "yarn",
        {
            "factor": "rope_scaling_factor",
            "beta_slow": "rope_low_freq_factor",
            "beta_fast": "rope_high_freq_factor",
            "original_max_position_embeddings": "rope_original_max_seq_length",
            "attention_factor": "rope_attention_factor",
        },
    ),
}
"""rope_type -> (model.rope_scaling, its numbers: their key -> key of [model])."""

ROPE_DEFAULTS = {"beta_slow": 1.0, "beta_fast": 32.0}
"""What it means not to state one of them."""
ROPE_OPTIONS = ("attention_factor",)
"""Those that need no value."""

REFUSED = {
    "quantization_config": "its weights are quantised; save the model without",
    "auto_map": "its code is its own; megagrid runs none but its own",
}
"""Keys of any family that say that this isn't one of the models here, and why."""


@dataclass(frozen=True)
class Described:
    """What a config.json describes."""

    family: Family
    model: ModelConfig


def read_raw(path: Path) -> dict[str, object]:
    """The JSON object in the file `path`.

    Raises:
        CheckpointError: there is none.
    """
    try:
        raw = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing; name a folder in Hugging Face's layout: config.json and "
            "safetensors files"
        ) from None
    except OSError as error:
        raise CheckpointError(
            f"{path} can't be read ({error.strerror}); name a folder in Hugging Face's layout"
        ) from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} isn't JSON: {error}; mend it, or get it anew") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} must be a JSON object, not {_shown(raw)[:60]}")
    return raw


def described(folder: Path, ignored: Collection[str] = ()) -> Described:
    """What the config.json in `folder` describes.

    Raises:
        CheckpointError: see `describe`; or what goes along with it is no JSON, and would be handed
            on to every checkpoint and export.
    """
    path = folder / FILE_NAME
    if (generation := folder / GENERATION).is_file():
        read_raw(generation)
    return describe(read_raw(path), str(path), ignored)


def describe(raw: Raw, name: str, ignored: Collection[str] = ()) -> Described:
    """The model that a config.json describes.

    Args:
        raw: its content.
        name: how errors call it.
        ignored: unknown keys that the user says don't matter.

    Raises:
        CheckpointError: the model isn't one of those here; names key, value and remedy.
    """
    family = _family(raw, name)
    for key, why in REFUSED.items():
        if raw.get(key) is not None:
            raise CheckpointError(f"{name}: {key}={_shown(raw[key])[:60]}: {why}")
    _check_fixed(raw, name, family)
    if hindrance := family.hindrance(raw):
        raise CheckpointError(f"{name}: {hindrance}")
    _check_known(raw, name, family, ignored)
    values: dict[str, object] = dict(family.model)
    for ours, theirs in family.keys.items():
        value = raw.get(theirs)
        if value is None and theirs in family.defaults:
            value = family.defaults[theirs](raw)
        if value is None:
            raise CheckpointError(f"{name}: {theirs} must be stated; add it as the model has it")
        values[ours] = value
    if family.is_rotated:
        values |= _read_rope(raw, name)
    else:
        values |= _as_many_key_heads(values, name, family)
    return Described(family, _validated(values, name, family))


def _family(raw: Raw, name: str) -> Family:
    kinds = {family.model_type: family for family in FAMILIES}
    family = kinds.get(str(raw.get("model_type")))
    if family is None:
        raise CheckpointError(
            f"{name}: model_type={_shown(raw.get('model_type'))} isn't one that is converted; "
            f"there are {', '.join(kinds)}"
        )
    architectures = raw.get("architectures") or [family.architecture]
    if not isinstance(architectures, list) or family.architecture not in architectures:
        raise CheckpointError(
            f"{name}: architectures={_shown(architectures)} isn't {family.architecture}, the one "
            f"of {family.model_type} that is converted; save the model as one"
        )
    return family


def _check_fixed(raw: Raw, name: str, family: Family) -> None:
    for key, allowed in (*family.fixed.items(), *family.unwritten.items()):
        value = raw.get(key)
        if value is not None and value not in allowed:
            remedy = "set it to that: it matters to training alone"
            if "dropout" not in key:
                remedy = "such a model can't be converted"
            raise CheckpointError(
                f"{name}: {key}={_shown(value)} isn't {' or '.join(map(_shown, allowed))}, what "
                f"megagrid's {family.model['family']} has; {remedy}"
            )


def _check_known(raw: Raw, name: str, family: Family, ignored: Collection[str]) -> None:
    known = {*family.keys.values(), *family.fixed, *family.unwritten, *family.harmless, *ignored}
    if family.is_rotated:
        known |= ROPE_KEYS
    for key, value in raw.items():
        if key not in known and value is not None:
            raise CheckpointError(
                f"{name}: {key}={_shown(value)[:60]} isn't known of a {family.model_type}, and may "
                f"change what it computes; if it doesn't, take the key out of the file, or add "
                f"--ignore {key} to megagrid convert"
            )


def _as_many_key_heads(
    values: Mapping[str, object], name: str, family: Family
) -> dict[str, object]:
    """GPT-2 has a key/value head for each head, and heads share the hidden size."""
    hidden, heads = values["hidden_size"], values["num_heads"]
    if not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1:
        return {"num_kv_heads": heads, "head_dim": 1}  # which is told when they are validated
    if hidden % heads:
        raise CheckpointError(
            f"{name}: {family.keys['hidden_size']}={hidden} must be a multiple of "
            f"{family.keys['num_heads']}={heads}"
        )
    return {"num_kv_heads": heads, "head_dim": hidden // heads}


def _validated(values: dict[str, object], name: str, family: Family) -> ModelConfig:
    # JSON doesn't tell 10000 from 10000.0.
    for key, value in values.items():
        wants_float = "float" in str(ModelConfig.model_fields[key].annotation)
        if wants_float and type(value) is int and abs(value) < 2**63:
            values[key] = float(value)
    try:
        return ModelConfig(**values)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
    ours = str(fault["loc"][0])
    theirs = family.keys.get(ours, ours)
    expected = fault["msg"].replace("Input should", "must", 1)
    raise CheckpointError(f"{name}: {theirs}={_shown(fault['input'])} {expected}")


# --- RoPE ----------------------------------------------------------------------------------------


def _read_rope(raw: Raw, name: str) -> dict[str, object]:
    """RoPE's keys of [model]: from rope_theta and rope_scaling, as transformers wrote them up to
    version 4, or from rope_parameters, as it does since."""
    keys = ("rope_scaling", "rope_parameters")
    scalings = {key: raw[key] for key in keys if raw.get(key) not in (None, {})}
    if len(scalings) > 1 and scalings["rope_scaling"] != scalings["rope_parameters"]:
        raise CheckpointError(f"{name}: rope_scaling and rope_parameters differ; keep one of them")
    key, scaling = next(iter(scalings.items()), ("rope_scaling", {}))
    if not isinstance(scaling, dict):
        raise CheckpointError(f"{name}: {key}={_shown(scaling)} must be a JSON object")
    stated = [
        value["rope_theta"] for value in (scaling, raw) if value.get("rope_theta") is not None
    ]
    theta = stated[0] if stated else 10000.0
    if stated and stated[-1] != theta:
        raise CheckpointError(
            f"{name}: rope_theta={_shown(raw['rope_theta'])} and {key}.rope_theta={_shown(theta)} "
            "differ; keep one of them"
        )
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if not isinstance(kind, str) or kind not in THEIR_ROPE:
        raise CheckpointError(
            f"{name}: {key}.rope_type={_shown(kind)} isn't computed here; there are "
            f"{', '.join(THEIR_ROPE)}"
        )
    ours, numbers = THEIR_ROPE[kind]
    for holder, value in ((f"{key}.", scaling), ("", raw)):
        partial = value.get("partial_rotary_factor")
        if partial not in (None, 1.0):
            raise CheckpointError(
                f"{name}: {holder}partial_rotary_factor={_shown(partial)} isn't 1.0: megagrid "
                "rotates heads whole"
            )
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *numbers}
    for other, value in scaling.items():
        if other not in known and value is not None:
            raise CheckpointError(
                f'{name}: {key}.{other}={_shown(value)} isn\'t known of rope_type="{kind}"'
            )
    values: dict[str, object] = {"rope_theta": theta, "rope_scaling": ours}
    for theirs, our_key in numbers.items():
        value = scaling.get(theirs)
        if value is None and theirs == "original_max_position_embeddings":
            value = raw.get("max_position_embeddings")
        if value is None:
            value = ROPE_DEFAULTS.get(theirs)
        if value is None and theirs in ROPE_OPTIONS:
            continue
        if value is None:
            raise CheckpointError(f'{name}: {key}.{theirs} must be stated for rope_type="{kind}"')
        values[our_key] = value
    return values


def _rope(model: ModelConfig) -> dict[str, object]:
    """RoPE's keys of config.json, in the form that every version of transformers reads."""
    kinds = {ours: (kind, numbers) for kind, (ours, numbers) in THEIR_ROPE.items()}
    kind, numbers = kinds[model.rope_scaling]
    values = {theirs: getattr(model, ours) for theirs, ours in numbers.items()}
    scaling = {theirs: value for theirs, value in values.items() if value is not None}
    return {
        "rope_theta": model.rope_theta,
        "rope_scaling": {"rope_type": kind, **scaling} if scaling else None,
    }


# --- Writing -------------------------------------------------------------------------------------


def config_of(
    model: ModelConfig, dtype: str, former: Raw | None, tokens: Mapping[str, int | None]
) -> tuple[Family, dict[str, object]]:
    """The family and the config.json that describe `model`.

    Args:
        dtype: of the tensors, as torch calls it.
        former: the config.json that the weights once came with: what of it doesn't bear on the
            function is kept.
        tokens: ids by their key of config.json, in place of those of the former one.

    Raises:
        CheckpointError: no family computes what the model does.
    """
    if model.mup_base_width is not None:
        raise CheckpointError(
            f"no model of transformers has the multipliers of model.mup_base_width="
            f"{model.mup_base_width}"
        )
    former = former or {}
    ids = {key: value for key, value in former.items() if key.endswith("_token_id")}
    families = sorted(FAMILIES, key=lambda f: f.model_type != former.get("model_type"))
    for family in families:
        if any(getattr(model, key) != value for key, value in family.model.items()):
            continue
        is_former = former.get("model_type") == family.model_type
        # What the weights came with may contradict what they have become: then without it.
        for kept in (former, ids) if is_former else (ids,):
            config = _written(model, family, dtype, {**kept, **tokens})
            try:
                found = describe(config, FILE_NAME, ignored=kept)
            except CheckpointError:
                continue
            if not differences(model, found.model):
                return family, config
    raise CheckpointError(
        "no model of transformers computes what this one does: it has "
        + ", ".join(f"model.{key}={_shown(getattr(model, key))}" for key in _DISTINGUISHING)
        + "; there are "
        + ", ".join(family.architecture for family in FAMILIES)
    )


_DISTINGUISHING = (
    *("family", "qkv_bias", "qk_norm", "hidden_size", "num_heads", "num_kv_heads", "head_dim"),
)


def _written(model: ModelConfig, family: Family, dtype: str, kept: Raw) -> dict[str, object]:
    """`model` as the family's keys, on top of what is `kept`."""
    stale = ROPE_KEYS | {"dtype", "torch_dtype"}
    config: dict[str, object] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **{key: allowed[0] for key, allowed in family.fixed.items()},
        **{key: value for key, value in kept.items() if key not in stale},
        "torch_dtype": dtype,
    }
    for ours, theirs in family.keys.items():
        config[theirs] = getattr(model, ours)
    if family.is_rotated:
        config |= _rope(model)
    if "sliding_window" in family.harmless:
        config.setdefault("sliding_window", None)  # left out, it would mean 4096
    if "embd_pdrop" in family.harmless:
        config["embd_pdrop"] = model.dropout
    if kept.get("model_type") == family.model_type:
        for theirs, default in family.defaults.items():
            # As it was: null or unstated, where that says it.
            if kept.get(theirs) is None and default(config) == config[theirs]:
                config = {**config, theirs: None} if theirs in kept else _without(config, theirs)
    return config


def _without(config: Raw, key: str) -> dict[str, object]:
    return {other: value for other, value in config.items() if other != key}


UNRELATED = frozenset(
    {"preset", "make_vocab_size_divisible_by", "init_std", "dropout", "attention_dropout"}
)
"""Keys of [model] that don't change what trained weights compute."""


def differences(wanted: ModelConfig, found: ModelConfig) -> list[str]:
    """A phrase for each key in which `found` computes something else than `wanted`."""
    keys = [key for key in ModelConfig.model_fields if key not in UNRELATED]
    return [
        f"model.{key}={_shown(getattr(wanted, key))} instead of {_shown(getattr(found, key))}"
        for key in keys
        if getattr(wanted, key) != getattr(found, key)
    ]


def _shown(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
