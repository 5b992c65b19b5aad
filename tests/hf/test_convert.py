"""Conversion both ways against transformers' own models: logits, bits, names, configs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, GenerationConfig

from megagrid.checkpoint import entries, find_checkpoint, save
from megagrid.config.dump import dump
from megagrid.config.load import load as load_config
from megagrid.errors import CheckpointError
from megagrid.hf.incoming import from_hf
from megagrid.hf.outgoing import to_hf
from megagrid.nn.layout import parameter_shards
from tests.hf.models import (
    MODELS,
    edit_config,
    loaded,
    our_logits,
    ours,
    raw_config,
    tensors,
    their_logits,
)

LOGITS = 1e-5

MATTERS = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "dtype"),
    *("intermediate_size", "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_parameters"),
    *("max_position_embeddings", "tie_word_embeddings", "hidden_act", "attention_bias"),
    *("sliding_window", "use_sliding_window", "layer_types", "model_type", "architectures"),
    *("n_inner", "layer_norm_epsilon", "activation_function", "initializer_range"),
    *("bos_token_id", "eos_token_id", "attn_pdrop", "resid_pdrop", "embd_pdrop"),
)
"""Keys of config.json that a round trip must keep."""


def copied(folder: Path, target: Path) -> Path:
    """A copy to be spoilt."""
    return Path(shutil.copytree(folder, target))


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_a_converted_model_equal_transformers(saved, tmp_path, name):
    from_hf(saved(name), tmp_path / "ours")
    difference = our_logits(tmp_path / "ours") - their_logits(loaded(saved(name)))
    assert difference.abs().max() <= LOGITS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_a_round_trip_is_bitwise_equal(saved, tmp_path, name, dtype):
    """Tensors, their names, and all of the config that matters."""
    folder = saved(name, dtype)
    from_hf(folder, tmp_path / "ours")
    to_hf(tmp_path / "ours", tmp_path / "theirs")
    before, after = tensors(folder), tensors(tmp_path / "theirs")
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert after[key].dtype == dtype
        assert torch.equal(after[key], tensor), key
    one, other = (
        AutoConfig.from_pretrained(path).to_dict() for path in (folder, tmp_path / "theirs")
    )
    for key in MATTERS:
        assert one.get(key) == other.get(key), key
    assert GenerationConfig.from_pretrained(tmp_path / "theirs") is not None


@pytest.mark.parametrize("name", ["llama 3.1", "mistral", "qwen2 tied", "qwen3", "gpt2 untied"])
def test_transformers_computes_what_our_own_model_does(saved, tmp_path, name):
    """A checkpoint without any trace of Hugging Face: the config is written from [model] alone."""
    from_hf(saved(name), tmp_path / "first")
    config, model = ours(tmp_path / "first")
    recipe = load_config(tmp_path / "first/config.toml")
    own = save(tmp_path / "own", entries(parameter_shards(model)), {"step": 1}, config=dump(recipe))
    to_hf(own, tmp_path / "theirs")
    theirs = loaded(tmp_path / "theirs")
    assert (our_logits(own) - their_logits(theirs)).abs().max() <= LOGITS
    assert theirs.config.max_position_embeddings == config.max_seq_length
    assert theirs.config.vocab_size == config.vocab_size


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("direction", ["from", "to"])
def test_weights_in_several_files_are_as_good_as_in_one(saved, tmp_path, name, direction):
    folder = saved(name)
    if direction == "from":
        folder = tmp_path / "sharded"
        loaded(saved(name)).save_pretrained(folder, max_shard_size="12KB")
        assert len(list(folder.glob("*.safetensors"))) > 2
    made = from_hf(folder, tmp_path / "ours", max_shard_bytes=12_000)
    assert made.files > 2
    to_hf(tmp_path / "ours", tmp_path / "theirs", max_shard_bytes=12_000)
    index = json.loads((tmp_path / "theirs/model.safetensors.index.json").read_text())
    after = tensors(tmp_path / "theirs")
    assert index["weight_map"].keys() == after.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in after.values())
    for path in (tmp_path / "theirs").glob("*.safetensors"):
        held = [n for n, file in index["weight_map"].items() if file == path.name]
        assert len(held) == 1 or sum(after[n].nbytes for n in held) <= 12_000
    for key, tensor in tensors(saved(name)).items():
        assert torch.equal(after[key], tensor), key
    difference = their_logits(loaded(tmp_path / "theirs")) - their_logits(loaded(saved(name)))
    assert difference.abs().max() == 0


@pytest.mark.parametrize(
    ("dtype", "code"), [(torch.bfloat16, "bfloat16"), (torch.float16, "float16")]
)
def test_an_export_in_another_dtype_says_so(saved, tmp_path, dtype, code):
    from_hf(saved("llama"), tmp_path / "ours")
    to_hf(tmp_path / "ours", tmp_path / "theirs", dtype=dtype)
    after = tensors(tmp_path / "theirs")
    assert {t.dtype for t in after.values()} == {dtype}
    assert raw_config(tmp_path / "theirs")["torch_dtype"] == code
    for key, tensor in tensors(saved("llama")).items():
        assert torch.equal(after[key], tensor.to(dtype)), key


def test_a_converted_checkpoint_is_a_sound_one(saved, tmp_path):
    """Verified by its checksums, sampled and compared like any other."""
    from_hf(saved("qwen2"), tmp_path / "ours")
    found = find_checkpoint(str(tmp_path / "ours"), tmp_path, key="CHECKPOINT")
    assert found.path == tmp_path / "ours"


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_names_without_the_inner_models_prefix_are_read(saved, tmp_path, name):
    """As in the files that GPT-2 was released in, with buffers of its masks."""
    folder = copied(saved(name), tmp_path / "bare")
    prefix = {"gpt2": "transformer.", "llama": "model."}[name]
    bare = {key.removeprefix(prefix): tensor for key, tensor in tensors(folder).items()}
    if name == "gpt2":
        bare["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)
        bare["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(bare, folder / "model.safetensors", {"format": "pt"})
    from_hf(folder, tmp_path / "ours")
    difference = our_logits(tmp_path / "ours") - their_logits(loaded(saved(name)))
    assert difference.abs().max() <= LOGITS


def test_a_tied_head_that_is_stored_all_the_same_must_be_the_embedding(saved, tmp_path):
    folder = copied(saved("qwen2 tied"), tmp_path / "tied")
    held = tensors(folder)
    embedding = held["model.embed_tokens.weight"]
    save_file(
        held | {"lm_head.weight": embedding.clone()}, folder / "model.safetensors", {"format": "pt"}
    )
    from_hf(folder, tmp_path / "ours")
    save_file(held | {"lm_head.weight": embedding + 1}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_head.weight isn't model.embed_tokens.weight"):
        from_hf(folder, tmp_path / "others")


def test_configs_of_older_transformers_mean_the_same(saved, tmp_path):
    """rope_theta and rope_scaling at the top, torch_dtype."""
    folder = copied(saved("llama 3.1"), tmp_path / "old")
    rope = dict(raw_config(folder)["rope_parameters"])
    theta = rope.pop("rope_theta")
    edit_config(
        folder,
        rope_parameters=...,
        rope_scaling=rope,
        rope_theta=theta,
        dtype=...,
        torch_dtype="float32",
    )
    from_hf(saved("llama 3.1"), tmp_path / "one")
    from_hf(folder, tmp_path / "other")
    assert load_config(tmp_path / "one/config.toml").model == (
        load_config(tmp_path / "other/config.toml").model
    )
    assert torch.equal(our_logits(tmp_path / "one"), our_logits(tmp_path / "other"))


def test_what_is_not_megagrids_is_carried_there_and_back(saved, tmp_path):
    folder = copied(saved("llama"), tmp_path / "model")
    edit_config(folder, eos_token_id=[7, 9], bos_token_id=5, pad_token_id=3)
    texts = {
        "tokenizer.json": "{}",
        "tokenizer_config.json": '{"a": 1}',
        "chat_template.jinja": "{{ x }}",
        "generation_config.json": '{"eos_token_id": [7, 9], "temperature": 0.5}',
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "README.md").write_text("not carried")
    from_hf(folder, tmp_path / "ours")
    to_hf(tmp_path / "ours", tmp_path / "theirs")
    for name, text in texts.items():
        assert (tmp_path / "theirs" / name).read_text() == text
    assert not (tmp_path / "theirs/README.md").exists()
    config = raw_config(tmp_path / "theirs")
    assert (config["eos_token_id"], config["bos_token_id"], config["pad_token_id"]) == (
        [7, 9],
        5,
        3,
    )


def test_a_conversion_that_fails_leaves_nothing(saved, tmp_path):
    folder = copied(saved("llama"), tmp_path / "model")
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(2000)
    with pytest.raises(CheckpointError):
        from_hf(folder, tmp_path / "ours")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_no_more_than_a_tensor_is_held(saved, tmp_path, monkeypatch):
    """Each is written before the next is read."""
    from megagrid.hf.weights import Weights

    written_before: list[int] = []
    read = Weights.read

    def noting(self, name, rectangle=None):
        partial = tmp_path / "ours.partial"
        written_before.append(sum(p.stat().st_size for p in partial.glob("*.safetensors")))
        return read(self, name, rectangle)

    monkeypatch.setattr(Weights, "read", noting)
    from_hf(saved("llama"), tmp_path / "ours")
    assert len(written_before) == len(tensors(saved("llama")))
    assert written_before == sorted(set(written_before))
