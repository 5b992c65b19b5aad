"""What `megagrid convert to-hf` makes of a checkpoint that a grid has saved.

Rows H2, H3 and H4 of the faults that other trainers have had.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from tests.end_to_end.t0 import SP, TIED, TP2PP2, Training

PADDED = {"model": {"make_vocab_size_divisible_by": 128}}
"""61 words are 256 rows on two tp ranks."""


@pytest.fixture(scope="module", params=[{}, TIED], ids=["untied", "tied"])
def trained(request, trainer) -> Training:
    """A run on tp 2 × pp 2."""
    return trainer.train(TP2PP2, SP, PADDED, request.param, {"train": {"steps": 1}})


def exported(cli, training: Training, *options: str) -> Path:
    folder = cli.folder / "export"
    ended = cli("convert", "to-hf", str(training.checkpoint(1)), str(folder), *options)
    assert ended.code == 0, ended.err
    return folder


def headers(folder: Path) -> dict[str, tuple[str, list[int], str]]:
    """File, shape and dtype of each tensor in any file of weights, by its name."""
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no dict
                assert name not in found
                tensor = file.get_slice(name)
                found[name] = (path.name, tensor.get_shape(), tensor.get_dtype())
    return found


def config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def test_the_index_of_a_sharded_export_is_what_the_files_hold(cli, trained):
    """H2: a tied head is in none of them, an untied one is in one."""
    folder = exported(cli, trained, "--max-shard-size", "20KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    held = headers(folder)
    assert len({file for file, _, _ in held.values()}) > 2
    assert index["weight_map"] == {name: file for name, (file, _, _) in held.items()}
    is_tied = trained.config.model.tied_embeddings
    assert ("lm_head.weight" in held) == (not is_tied)
    assert config(folder)["tie_word_embeddings"] == is_tied
    model = AutoModelForCausalLM.from_pretrained(folder)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    assert (head.weight is embedding.weight) == is_tied


def test_an_export_in_bf16_says_so_and_keeps_the_longest_input(cli, trained):
    """H3."""
    folder = exported(cli, trained, "--dtype", "bf16")
    assert {dtype for _, _, dtype in headers(folder).values()} == {"BF16"}
    assert config(folder)["torch_dtype"] == "bfloat16"
    assert config(folder)["max_position_embeddings"] == trained.config.model.max_seq_length


def test_rows_that_pad_the_vocabulary_are_not_exported(cli, trained):
    """H4."""
    folder = exported(cli, trained)
    held = headers(folder)
    assert config(folder)["vocab_size"] == 61
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert name not in held or held[name][1] == [61, 32]
