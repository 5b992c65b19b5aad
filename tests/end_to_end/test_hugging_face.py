"""Runs that begin with a Hugging Face folder's weights, and end in one, against transformers."""

from __future__ import annotations

import contextlib
import io
import textwrap
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer

from megagrid.checkpoint.layout import Entry, entries
from megagrid.cli import main
from megagrid.config.dump import dump
from megagrid.config.load import load
from megagrid.config.schema import Config
from megagrid.data import Loader, Sampler, SyntheticDataset
from megagrid.data.tokenizer import load_tokenizer
from megagrid.errors import CheckpointError
from megagrid.grid.grid import build_grid
from megagrid.hf.config import described
from megagrid.hf.incoming import from_hf
from megagrid.hf.outgoing import to_hf
from megagrid.hf.tensors import Source
from megagrid.hf.weights import Weights
from megagrid.nn.loss import IGNORE
from megagrid.train.run import Run
from tests.end_to_end.t0 import (
    ALONE,
    PP2DP2,
    SP,
    TIED,
    TP2,
    TP2DP2,
    TP2PP2,
    TP4,
    Sections,
    merged,
    strategy,
    t0,
)
from tests.hf.models import Saved, saver, tensors
from tests.model.oracle import loss_of


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """The folder of a model that transformers has made, by name."""
    return saver(tmp_path_factory.mktemp("hf"))


FAMILIES: dict[str, Sections] = {
    "llama": {
        "model": {
            "rope_scaling": "llama3",
            "rope_scaling_factor": 4.0,
            "rope_low_freq_factor": 1.0,
            "rope_high_freq_factor": 2.0,
            "rope_original_max_seq_length": 8,
        }
    },
    "qwen2": merged(TIED, {"model": {"qkv_bias": True}}),
    "qwen3": {"model": {"qk_norm": True, "head_dim": 6}},
    "gpt2": merged(TIED, {"model": {"family": "gpt", "num_kv_heads": 8}}),
}

LOSS = 1e-5


def their_loss(folder: Path, config: Config, step: int) -> float:
    """What transformers makes of a step's batch: the mean over its tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    train = config.train
    data = SyntheticDataset(config.model.vocab_size, train.seq_length, train.seed)
    size = train.global_batch_size
    (batch,) = Loader(data, Sampler(size, size, 1), 0).step(size * (step - 1))
    labels = torch.from_numpy(batch.labels)
    with torch.no_grad():
        _, total = loss_of(model, torch.from_numpy(batch.tokens), labels)
    return total.item() / (labels != IGNORE).sum().item()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_checkpoint_of_a_grid_has_transformers_loss(trainer, tmp_path, name):
    """Trained on 2 x 2 for two steps; the third step's loss is that of these weights."""
    saves = {"checkpoint": {"save_interval": 2}, "train": {"steps": 3}}
    training = trainer.train(TP2PP2, SP, FAMILIES[name], saves)
    to_hf(training.checkpoint(2), tmp_path / "theirs")
    expected = their_loss(tmp_path / "theirs", training.config, step=3)
    assert training.records[2].loss == pytest.approx(expected, abs=LOSS)


def begins(folder: Path | str) -> Sections:
    return {"checkpoint": {"initialize_from": str(folder)}}


def model_of(folder: Path) -> Sections:
    """[model] of a Hugging Face folder."""
    return {"model": described(folder).model.model_dump()}


GRIDS = {
    "llama 3.1": (TP4, SP),
    "qwen2 tied": (TP2PP2, SP),
    "qwen3": (TP2DP2, strategy("FULL_SHARD")),
    "gpt2": (PP2DP2, strategy("NO_SHARD")),
}


@pytest.mark.parametrize("name", GRIDS)
def test_a_run_begins_with_the_weights_of_a_folder(trainer, saved, tmp_path, name):
    placement, keys = GRIDS[name]
    folder = saved(name)
    no_dropout = {"model": {"dropout": 0.0, "attention_dropout": 0.0}}
    training = trainer.train(
        placement, model_of(folder), no_dropout, keys, begins(folder), {"train": {"steps": 1}}
    )
    expected = their_loss(folder, training.config, step=1)
    assert training.records[0].loss == pytest.approx(expected, abs=LOSS)
    assert f"began with the weights of {folder}" in training.ranks[0].output
    # What was carried goes on to the folder that comes of it.
    to_hf(training.checkpoint(1), tmp_path / "theirs")
    assert described(tmp_path / "theirs").family == described(folder).family
    assert tensors(tmp_path / "theirs").keys() == tensors(folder).keys()


def begin_and_count(config: Config) -> tuple[list[Entry], int]:
    """The weights of a run that begins on this rank of the pool, and how many numbers it read."""
    numbers = []

    def counting(self: Weights, name: str, rectangle=None) -> torch.Tensor:
        values = read(self, name, rectangle)
        numbers.append(values.numel())
        return values

    read = Weights.read
    with patch.object(Weights, "read", counting):
        run = Run(config, build_grid(TP2PP2, dist.get_rank(), "cpu", config.model.num_kv_heads))
    held = entries(run.engine.shards)
    return [replace(entry, tensor=entry.tensor.clone()) for entry in held], sum(numbers)


@pytest.mark.parametrize("name", ["gpt2 untied", "qwen2"])
def test_a_rank_reads_its_own_slices_and_no_others(ranks, saved, tmp_path, name):
    """Out of fused and transposed tensors too."""
    model = described(saved(name))
    source = Source(Weights(saved(name)), model.family, model.model)
    config = t0(tmp_path / "run", TP2PP2, model_of(saved(name)), begins(saved(name)))
    for held, numbers in ranks.run(begin_and_count, config, world_size=4):
        assert numbers == sum(entry.box.numel for entry in held)
        for entry in held:
            region = tuple(
                slice(first, first + size)
                for first, size in zip(entry.box.offsets, entry.box.sizes, strict=True)
            )
            assert torch.equal(entry.tensor, source.read(entry.name)[region]), entry.name


def test_weights_of_a_checkpoint_begin_another_run(trainer, tmp_path):
    """Of another grid; step 0, fresh moments, no identity to keep."""
    first = trainer.train(TP2, {"train": {"steps": 2}})
    again = trainer.train(PP2DP2, begins(first.folder), {"train": {"steps": 1}})
    to_hf(first.checkpoint(2), tmp_path / "theirs")
    expected = their_loss(tmp_path / "theirs", again.config, step=1)
    assert again.records[0].loss == pytest.approx(expected, abs=LOSS)
    assert again.records[0].step == 1


def test_a_model_that_computes_something_else_is_warned_of(trainer, saved):
    folder = saved("llama")
    other = {"model": {"rope_theta": 10000.0}}
    training = trainer.train(TP2, model_of(folder), other, begins(folder), {"train": {"steps": 1}})
    output = training.ranks[0].output
    assert "warning: model.rope_theta=10000.0 instead of 500000.0" in output


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"num_layers": 2}, "it has besides model.layers.2."),
        ({"ffn_hidden_size": 64}, "(48, 32) instead of (64, 32)"),
        ({"qk_norm": True}, "is a llama, which needs model.qk_norm=false"),
    ],
    ids=str,
)
def test_a_folder_of_another_model_is_told_by_all_ranks_alike(trainer, saved, keys, told):
    folder = saved("llama")
    training = trainer.attempt(TP2, model_of(folder), {"model": keys}, begins(folder))
    (error,) = training.errors
    assert told in error
    assert f"megagrid convert recipe {folder}" in error


def begin_where_a_rank_fails(config: Config) -> str:
    """What a rank is told if rank 1's disk fails while it reads."""

    def failing(self: Weights, name: str, rectangle=None) -> torch.Tensor:
        raise OSError(5, "Input/output error")

    grid = build_grid(TP2, dist.get_rank(), "cpu", config.model.num_kv_heads)
    with patch.object(Weights, "read", failing if grid.rank == 1 else Weights.read):
        try:
            Run(config, grid)
        except CheckpointError as error:
            return str(error)
    return ""


def test_a_disk_that_fails_on_one_rank_is_told_by_all(ranks, saved, tmp_path):
    """Nobody is left waiting."""
    config = t0(tmp_path / "run", TP2, model_of(saved("llama")), begins(saved("llama")))
    told = ranks.run(begin_where_a_rank_fails, config, world_size=2)
    assert len(set(told)) == 1
    assert "rank 1" in told[0] and "Input/output error" in told[0]


# ------------------------------------------------------------------------------------------------
# The commands


def test_a_run_from_a_folder_to_a_folder_by_the_commands(cli, saved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ended = cli("convert", "from-hf", str(saved("qwen2")), "start")
    assert ended.code == 0, ended.err
    assert "Qwen2ForCausalLM" in ended.out
    assert "megagrid train start/recipe.toml" in ended.out
    keys = ("train.steps=1", "train.seq_length=32", "train.precision=fp32")
    export = ("checkpoint.export_hf=out", "checkpoint.export_hf_dtype=bf16")
    ended = cli("train", "start/recipe.toml", *keys, *export)
    assert ended.code == 0, ended.err
    after = tensors(tmp_path / "out")
    assert {t.dtype for t in after.values()} == {torch.bfloat16}
    assert after.keys() == tensors(saved("qwen2")).keys()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.model_type == "qwen2"
    # Told before anything is trained again.
    assert 'checkpoint.export_hf="out" is there already' in cli.mistake(
        "train", "start/recipe.toml", *keys, *export
    )


def test_a_checkpoint_of_weights_alone_is_no_run_to_resume(cli, saved, tmp_path):
    from_hf(saved("llama"), tmp_path / "start")
    line = cli.mistake("train", cli.recipe(ALONE), f"checkpoint.resume={tmp_path / 'start'}")
    assert "it is of weights alone, which a run begins with by checkpoint.initialize_from" in line


def test_a_recipe_is_printed_that_trains_from_the_folder_itself(cli, saved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ended = cli("convert", "recipe", str(saved("gpt2")))
    assert ended.code == 0
    (tmp_path / "mine.toml").write_text(ended.out)
    assert load(tmp_path / "mine.toml").model.family == "gpt"
    ended = cli("train", "mine.toml", "train.steps=1", "train.precision=fp32")
    assert ended.code == 0, ended.err


def test_a_folder_that_is_no_model_is_told_before_ranks_start(cli, tmp_path):
    missing = str(tmp_path / "missing")
    recipe = cli.recipe(TP2)
    assert "isn't a folder" in cli.mistake("train", recipe, f"checkpoint.initialize_from={missing}")
    (tmp_path / "file").touch()
    nowhere = f"{tmp_path}/file/models/mine"
    assert f'checkpoint.export_hf="{nowhere}" can\'t be written to' in cli.mistake(
        "train", recipe, f"checkpoint.export_hf={nowhere}"
    )
    assert "no model of transformers computes" in cli.mistake(
        "train",
        recipe,
        "model.qkv_bias=true",
        "model.qk_norm=true",
        f"checkpoint.export_hf={missing}",
    )


CORPUS = Path(textwrap.__file__).read_text() + "größer, naïve, 模型 — \u2581\n" * 20
"""Varied enough for a tokenizer."""


@pytest.fixture(scope="module", params=["sentencepiece", "bytes"])
def trained(request, tmp_path_factory) -> Path:
    """The folder of a run on text, with a tokenizer of ours."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "corpus.txt").write_text(CORPUS)
    corpus = str(folder / "corpus")
    tokenizer = ["--tokenizer", "bytes"]
    if request.param == "sentencepiece":
        tokenizer = ["--train-tokenizer", "--vocab-size", "600"]
    config = t0(
        folder / "run",
        ALONE,
        {"model": {"vocab_size": 601}, "train": {"steps": 1}, "data": {"paths": [corpus]}},
    )
    (folder / "recipe.toml").write_text(dump(config))
    with contextlib.redirect_stdout(io.StringIO()):
        prepare = ["--input", f"{corpus}.txt", "--output", corpus, *tokenizer, "--workers", "1"]
        assert main(["data", "prepare", *prepare]) == 0
        assert main(["train", str(folder / "recipe.toml")]) == 0
    return folder


TEXTS = [
    "def f1(x):\n    return x",
    "  two spaces, größer — 模型 \t end ",
    "x" * 50,
    "12345 + 67",
    "",
]


def test_our_tokenizer_is_one_that_transformers_loads(trained, tmp_path):
    to_hf(trained / "run", tmp_path / "theirs")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "theirs")
    mine = load_tokenizer(trained / "corpus.tokenizer.model")
    for text in TEXTS:
        ids = mine.encode(text)
        assert theirs(text)["input_ids"] == ids, text
        assert theirs.decode(ids) == text
    assert theirs.eos_token_id == mine.eod_id
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    assert model.generation_config.eos_token_id == mine.eod_id


def test_a_converted_model_writes_text_if_its_tokenizer_is_sentencepieces(cli, trained, tmp_path):
    to_hf(trained / "run", tmp_path / "theirs")
    from_hf(tmp_path / "theirs", tmp_path / "back")
    arguments = ("sample", str(tmp_path / "back"), "--prompt", "def ", "--tokens", "3")
    if (tmp_path / "theirs/tokenizer.model").exists():
        ended = cli(*arguments)
        assert ended.code == 0, ended.err
        assert ended.out.startswith("def ")
    else:
        line = cli.mistake(*arguments)
        assert "has its tokenizer as tokenizer.json" in line
