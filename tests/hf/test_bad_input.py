"""Folders that can't be converted: one line on stderr, exit code 2, nothing written or run."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megagrid.cli import main
from tests.hf.models import edit_config, tensors

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


class Payload:
    """Unpickled, it touches a file."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self):
        return (Path.touch, (self.canary,))


def pickled(folder: Path) -> bytes:
    return pickle.dumps(Payload(folder.parent / "CANARY"))


def rewritten(folder: Path, **changes: torch.Tensor | None) -> None:
    """The weights anew, with tensors added, replaced or taken out (None)."""
    names = {name.replace("__", "."): tensor for name, tensor in changes.items()}
    held = {n: t for n, t in (tensors(folder) | names).items() if t is not None}
    save_file(held, folder / WEIGHTS, {"format": "pt"})


def in_two_files(folder: Path) -> dict[str, str]:
    """The weights in two files with an index; returns its map."""
    held = sorted(tensors(folder).items())
    (folder / WEIGHTS).unlink()
    weight_map = {}
    for number, part in enumerate((held[:5], held[5:]), start=1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file(dict(part), folder / file, {"format": "pt"})
        weight_map |= {name: file for name, _ in part}
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def config_of_text(folder: Path) -> None:
    (folder / "config.json").write_text("model_type: llama")


def config_that_is_a_list(folder: Path) -> None:
    (folder / "config.json").write_text("[1]")


def generation_config_of_text(folder: Path) -> None:
    (folder / "generation_config.json").write_text("temperature: 0.5")


def config_of_another_shape(folder: Path) -> None:
    edit_config(folder, intermediate_size=64)


def config_with_more_layers(folder: Path) -> None:
    edit_config(folder, num_hidden_layers=4)


def config_that_is_tied(folder: Path) -> None:
    edit_config(folder, tie_word_embeddings=True)


def unknown_architecture(folder: Path) -> None:
    edit_config(folder, model_type="mamba", architectures=["MambaForCausalLM"])


def rope_upside_down(folder: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8}
    scaling |= {"low_freq_factor": 4.0, "high_freq_factor": 1.0}
    edit_config(folder, rope_parameters=..., rope_scaling=scaling)


def absurd_heads(folder: Path) -> None:
    edit_config(folder, num_attention_heads=5, head_dim=..., num_key_value_heads=2)


def absurd_depth(folder: Path) -> None:
    edit_config(folder, num_hidden_layers=9999)


def absurd_width(folder: Path) -> None:
    edit_config(folder, vocab_size=2**62)


def absurd_number(folder: Path) -> None:
    edit_config(folder, rms_norm_eps=10**400)


def no_weights(folder: Path) -> None:
    (folder / WEIGHTS).unlink()


def weights_in_a_pickle(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickled(folder))


def a_pickle_by_the_name_of_safetensors(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(pickled(folder))


def a_pickle_in_the_index(folder: Path) -> None:
    weight_map = in_two_files(folder)
    (folder / "pytorch_model.bin").write_bytes(pickled(folder))
    write_index(folder, weight_map | {"lm_head.weight": "pytorch_model.bin"})


def cut_off(folder: Path) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: len(content) // 2])


def missing_tensor(folder: Path) -> None:
    rewritten(folder, model__norm__weight=None)


def tensor_besides(folder: Path) -> None:
    rewritten(folder, model__layers__0__self_attn__q_proj__bias=torch.ones(32))


def wrong_shape(folder: Path) -> None:
    rewritten(folder, model__norm__weight=torch.ones(31))


def tensor_of_another_kind(folder: Path) -> None:
    rewritten(folder, model__norm__weight=torch.ones(32, dtype=torch.float8_e4m3fn))


def a_pipe(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")


def missing_shard(folder: Path) -> None:
    in_two_files(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def index_that_lies(folder: Path) -> None:
    weight_map = in_two_files(folder)
    write_index(folder, weight_map | {"lm_head.weight": "model-00002-of-00002.safetensors"})


def index_out_of_the_folder(folder: Path) -> None:
    weight_map = in_two_files(folder)
    shutil.copy(folder / "model-00001-of-00002.safetensors", folder.parent / "x.safetensors")
    write_index(folder, weight_map | {"lm_head.weight": "../x.safetensors"})


def index_of_nothing(folder: Path) -> None:
    in_two_files(folder)
    write_index(folder, None)


def index_of_text(folder: Path) -> None:
    in_two_files(folder)
    (folder / INDEX).write_text("{")


BAD: dict[Callable[[Path], None], tuple[str, ...]] = {
    no_config: ("config.json is missing", "Hugging Face's layout"),
    config_of_text: ("config.json isn't JSON",),
    config_that_is_a_list: ("config.json must be a JSON object",),
    generation_config_of_text: ("generation_config.json isn't JSON", "mend it"),
    config_of_another_shape: (
        "it has other shapes",
        "gate_proj.weight (48, 32) instead of (64, 32)",
    ),
    config_with_more_layers: ("it lacks", "model.layers.3.self_attn.q_proj.weight"),
    config_that_is_tied: ("lm_head.weight isn't model.embed_tokens.weight",),
    unknown_architecture: ('model_type="mamba"', "llama, mistral, qwen2, qwen3, gpt2"),
    rope_upside_down: ("model.rope_low_freq_factor=4.0", "must be below"),
    absurd_heads: ("head_dim must be stated",),
    no_weights: ("has neither model.safetensors nor model.safetensors.index.json",),
    weights_in_a_pickle: ("pytorch_model.bin, a pickle, which megagrid never reads", "safetensors"),
    a_pickle_by_the_name_of_safetensors: ("model.safetensors isn't a safetensors file",),
    a_pickle_in_the_index: ("'pytorch_model.bin', which isn't a safetensors file",),
    cut_off: ("model.safetensors isn't a safetensors file",),
    missing_tensor: ("it lacks model.norm.weight",),
    tensor_besides: ("it has besides model.layers.0.self_attn.q_proj.bias",),
    wrong_shape: ("model.norm.weight (31,) instead of (32,)",),
    tensor_of_another_kind: ("model.norm.weight F8_E4M3 instead of one of", "F32"),
    absurd_depth: ("holds 30 tensors", "9999 layers"),
    absurd_width: ("no such model can be made",),
    absurd_number: ("rms_norm_eps=1000", "must be"),
    a_pipe: ("model.safetensors isn't a regular file",),
    missing_shard: ("model-00002-of-00002.safetensors is missing", "names it"),
    index_that_lies: ("model-00002-of-00002.safetensors lacks lm_head.weight",),
    index_out_of_the_folder: ("'../x.safetensors'", "isn't the name of a file in the folder"),
    index_of_nothing: ('has no "weight_map"',),
    index_of_text: ("model.safetensors.index.json isn't JSON",),
}


def mistake(capsys: pytest.CaptureFixture, *arguments: str | Path) -> str:
    """The one line that a command is told off with."""
    capsys.readouterr()
    assert main([str(a) for a in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    return line


@pytest.mark.parametrize("spoil", BAD, ids=lambda spoil: spoil.__name__)
def test_a_folder_that_cannot_be_read_is_one_line_and_exit_2(saved, tmp_path, capsys, spoil):
    folder = tmp_path / "model"
    shutil.copytree(saved("llama"), folder)
    spoil(folder)
    line = mistake(capsys, "convert", "from-hf", folder, tmp_path / "ours")
    for words in BAD[spoil]:
        assert words in line
    assert not (tmp_path / "CANARY").exists()
    assert not list(tmp_path.glob("ours*"))


def test_the_payload_works(tmp_path):
    """Else the tests above would show nothing."""
    pickle.loads(pickled(tmp_path / "model"))
    assert (tmp_path / "CANARY").exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("from-hf", "nowhere", "ours"), "nowhere/config.json is missing"),
        (("from-hf", "nowhere"), "required: CHECKPOINT"),
        (("from-hf", "", "ours"), '"" names nothing'),
        (("from-hf", "nowhere", ""), '"" names nothing'),
        (("to-hf", "nowhere", "theirs"), 'CHECKPOINT="nowhere" doesn\'t exist'),
        (("to-hf", "nowhere", "theirs", "--dtype", "fp8"), "invalid choice: 'fp8'"),
        (("from-hf", "nowhere", "ours", "--max-shard-size", "big"), "--max-shard-size big"),
        (("recipe", "nowhere"), "nowhere/config.json is missing"),
        ((), "required: VERB"),
        (("from-gguf", "a", "b"), "from-gguf"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_bad_argument_is_one_line_and_exit_2(tmp_path, capsys, monkeypatch, arguments, told):
    monkeypatch.chdir(tmp_path)
    assert told in mistake(capsys, "convert", *arguments)


def test_an_export_says_which_checkpoints_it_passes_over(saved, tmp_path, capsys):
    newer = tmp_path / "checkpoints" / "step-00000009"
    for name in ("step-00000003", newer.name):
        arguments = [str(saved("llama")), str(tmp_path / "checkpoints" / name)]
        assert main(["convert", "from-hf", *arguments]) == 0
    shard = next(newer.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    capsys.readouterr()
    assert main(["convert", "to-hf", str(tmp_path), str(tmp_path / "theirs")]) == 0
    assert f"passed over: {newer} is damaged" in capsys.readouterr().err
    assert "is a file" in mistake(capsys, "convert", "to-hf", shard, tmp_path / "other")


def test_what_is_there_already_is_not_overwritten(saved, tmp_path, capsys):
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "mine").touch()
    line = mistake(capsys, "convert", "from-hf", saved("llama"), taken)
    assert "is there already" in line
    assert main(["convert", "from-hf", str(saved("llama")), str(tmp_path / "ours")]) == 0
    line = mistake(capsys, "convert", "to-hf", tmp_path / "ours", taken)
    assert "is there already" in line
    assert sorted(path.name for path in taken.iterdir()) == ["mine"]
