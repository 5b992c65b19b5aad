"""Mistakes that people make in recipes, and the one line that each is answered with."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

import pytest

from megagrid.cli import main
from megagrid.config.load import load
from megagrid.config.rules import RULES, check
from megagrid.errors import ConfigError, MegagridError
from tests.config import recipe

REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True)
class Mistake:
    """Something done to the good recipe, and words that the answer must have.

    Attributes:
        told: key, value and remedy, as they appear in the line.
        overrides: given on the command line.
        edit: text of the recipe, and what stands there instead.
        world_size: ranks of the run; None: not known yet.
    """

    told: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    edit: tuple[str, str] = ("", "")
    world_size: int | None = None


def override(*overrides: str, told: tuple[str, ...], world_size: int | None = None) -> Mistake:
    return Mistake(told, overrides=overrides, world_size=world_size)


def edit(old: str, new: str, *, told: tuple[str, ...]) -> Mistake:
    return Mistake(told, edit=(old, new))


TP, PP = "parallel.tensor_parallel_size", "parallel.pipeline_parallel_size"
HYBRID = "parallel.sharding_strategy=HYBRID_SHARD"
CP = "parallel.context_parallel_size"

MISTAKES = {
    # --- Keys
    "misspelt key": edit(
        "lr = 1e-3",
        "lr = 1e-3\nweigth_decay = 0.1",
        told=("recipe.toml:20", "optimizer.weigth_decay", "did you mean optimizer.weight_decay?"),
    ),
    "misspelt key in an override": override(
        "optimizer.weigth_decay=0.1", told=("command line", "did you mean optimizer.weight_decay?")
    ),
    "hyphenated key": edit(
        "global_batch_size",
        "global-batch-size",
        told=("recipe.toml:15", "train.global-batch-size", "did you mean train.global_batch_size?"),
    ),
    "right key in the wrong section": override(
        "train.lr=1e-4", told=("unknown key train.lr", "it is optimizer.lr, not train.lr")
    ),
    "right key in two other sections": override(
        "train.interval=5", told=("evaluation.interval or logging.interval, not train.interval",)
    ),
    "another trainer's name": override(
        "train.learning_rate=1e-4", told=("train.learning_rate", "did you mean optimizer.lr?")
    ),
    "key outside every section": edit(
        "[model]", "lr = 1\n[model]", told=("recipe.toml:1", "key lr", "it is optimizer.lr, not lr")
    ),
    "override without a section": override("lr=1", told=("key lr", "optimizer.lr, not lr")),
    "nothing like any key": override(
        "logging.xyzzy=1", told=("logging.xyzzy", "[logging] has run_dir, interval")
    ),
    "NUL in a path": override(
        r'logging.run_dir="a\u0000b"',
        told=("command line", r'logging.run_dir="a\u0000b"', "NUL character in it; leave it out"),
    ),
    "NUL in a list": override(
        r'data.paths=["a\u0000"]', told=(r'data.paths=["a\u0000"]', "NUL character in it")
    ),
    "misspelt section": edit(
        "[optimizer]", "[optimiser]", told=("recipe.toml:18", "[optimiser]", "mean [optimizer]?")
    ),
    "misspelt section in an override": override(
        "optimiser.lr=1", told=("optimiser.lr", "did you mean optimizer.lr?")
    ),
    "unknown section": edit(
        "[optimizer]", "[kubernetes]", told=("[kubernetes]", "the sections are model, parallel")
    ),
    "section that is a value": edit(
        "[model]",
        "evaluation = 5\n[model]",
        told=("recipe.toml:1", "evaluation=5", "write [evaluation]"),
    ),
    "key below a key": override("optimizer.lr.max=1", told=("optimizer.lr.max", "optimizer.lr")),
    "missing key": edit(
        "seq_length = 32\nglobal", "global", told=("recipe.toml", "train.seq_length", "stated")
    ),
    "missing section": edit(
        '[logging]\nrun_dir = "runs/test"', "", told=("logging.run_dir must be stated",)
    ),
    "missing shape": edit(
        "num_layers = 4", "", told=("model.num_layers", "or model.preset, one of tiny-gpt")
    ),
    "unknown preset": override(
        "model.preset=llama3-8", told=('model.preset="llama3-8"', "did you mean llama3-8b?")
    ),
    # --- Text
    "syntax error": edit(
        "steps = 8", "steps = = 8", told=("recipe.toml:16: not TOML", "Invalid value", "column 9")
    ),
    "unquoted text": edit("= 32\nglobal", "= long\nglobal", told=("recipe.toml:14: not TOML",)),
    "unfinished text": edit('"runs/test"\n', '"runs', told=("recipe.toml:25: not TOML",)),
    "key stated twice": edit(
        "lr = 1e-3", "lr = 1e-3\nlr = 1e-4", told=("recipe.toml:20: not TOML", "overwrite")
    ),
    "override given twice": override(
        "optimizer.lr=1e-4",
        "optimizer.lr=1e-5",
        told=("optimizer.lr is given twice", "0.0001", "1e-5", "keep one"),
    ),
    "override without a value": override(
        "optimizer.lr", told=("'optimizer.lr'", "write section.key=value")
    ),
    "override with an empty value": override(
        "optimizer.lr=", told=("optimizer.lr=", "write none to clear it")
    ),
    # --- Values
    "number in quotes": edit(
        "lr = 1e-3", 'lr = "1e-3"', told=("recipe.toml:19", 'lr="1e-3"', "write 0.001 without")
    ),
    "number without its zero": override("optimizer.lr=.5", told=('optimizer.lr=".5"', "write 0.5")),
    "text for a number": override("optimizer.lr=fast", told=('lr="fast"', "must be a number")),
    "float for an integer": override("train.steps=1e3", told=("train.steps=1000.0", "write 1000")),
    "half a step": override("train.steps=1.5", told=("train.steps=1.5", "must be a whole number")),
    "flag in Python's words": override(
        "parallel.sequence_parallel=True", told=('="True"', "must be true or false")
    ),
    "number for a flag": override("data.repeat=1", told=("data.repeat=1", "true or false")),
    "flag for a number": override("train.steps=true", told=("train.steps=true", "whole number")),
    "list without its quotes": override(
        "data.paths=[a,b]", told=('data.paths="[a,b]"', """'data.paths=["a", "b"]'""")
    ),
    "one path for a list": override("data.paths=a", told=("data.paths=", """'data.paths=["a"]'""")),
    "wrong thing in a list": override(
        'data.paths=["a", 1]', told=("data.paths[1]=1", "must be text")
    ),
    "no path": override("data.paths=[]", told=("data.paths=[]", "must not be empty")),
    "negative rate": override("optimizer.lr=-1e-3", told=("lr=-0.001", "greater than 0")),
    "infinite rate": override("optimizer.lr=inf", told=("optimizer.lr=inf", "finite")),
    "beta of one": override("optimizer.beta2=1", told=("optimizer.beta2=1", "less than 1")),
    "no layers": override("model.num_layers=0", told=("num_layers=0", "greater than 0")),
    "layers without end": override(
        "model.num_layers=1000000000", told=("num_layers=1000000000", "less than or equal to 10000")
    ),
    "more than 64 bits": override(f"train.seed={2**63}", told=("train.seed=", "less than")),
    "required key cleared": override("train.seq_length=none", told=("seq_length=none", "number")),
    "unknown choice": override(
        "parallel.pipeline_schedule=1f1b", told=('pipeline_schedule="1f1b"', "'1F1B'")
    ),
    "unknown precision": override(
        "train.precision=fp8", told=('train.precision="fp8"', "'fp32', 'bf16', 'fp16' or 'fp64'")
    ),
    # --- Precision and guards
    "loss scale below its least": override(
        "loss_scale.min=2",
        "loss_scale.initial=1",
        told=("loss_scale.min=2.0", "loss_scale.initial=1.0", "at most 1.0"),
    ),
    "loss scale that shrinks when it grows": override(
        "loss_scale.growth_factor=1", told=("growth_factor=1", "greater than 1")
    ),
    "rounded moments that would stand still": override(
        "optimizer.state_dtype=bf16",
        "optimizer.beta2=0.999",
        told=("optimizer.beta2=0.999", 'state_dtype="bf16"', "at most 0.99609375"),
    ),
    "rounded moments of another optimizer": override(
        "optimizer.state_dtype=bf16",
        "optimizer.name=muon",
        told=('optimizer.state_dtype="bf16"', 'optimizer.name="muon"', 'choose "fp32"'),
    ),
    "float8 without bf16": override(
        "train.float8=on",
        told=('train.float8="on"', 'train.precision="bf16"', 'not "fp32"', 'train.float8="off"'),
    ),
    "float8 under a schedule that puts its gradients off": override(
        "train.float8=emulated",
        "train.precision=bf16",
        "parallel.pipeline_schedule=ZB1P",
        told=('train.float8="emulated"', 'parallel.pipeline_schedule="ZB1P"', '"1F1B"'),
    ),
    "float8 of odd sides": override(
        "train.float8=on",
        "train.precision=bf16",
        "model.ffn_hidden_size=72",
        told=("multiples of 16", "model.ffn_hidden_size=72", "choose 64 or 80"),
    ),
    "rollback to nothing": override(
        "guard.on_nan=rollback",
        told=('guard.on_nan="rollback"', "checkpoint.save_interval=0", 'guard.on_nan="skip"'),
    ),
    "rollback of spikes to nothing": override(
        "guard.on_spike=rollback", told=('guard.on_spike="rollback"', "save_interval=0")
    ),
    "rollback to a checkpoint after the run": override(
        "guard.on_nan=rollback",
        "checkpoint.save_interval=8",
        told=('guard.on_nan="rollback"', "save_interval=8 saves none in a run of 8 steps"),
    ),
    "window as long as the run": override(
        "guard.on_spike=skip",
        "guard.window=8",
        told=('guard.on_spike="skip" would never act', "guard.window=8", "window below 8"),
    ),
    "loss scale beyond what fp32 holds": override(
        "loss_scale.initial=1e300", told=("loss_scale.initial=1e+300", "less than or equal to")
    ),
    "iterations without end": override(
        "optimizer.muon_steps=101", told=("optimizer.muon_steps=101", "less than or equal to 100")
    ),
    "window of one": override("guard.window=1", told=("guard.window=1", "greater than or equal")),
    # --- Model
    "hidden size that heads can't share": override(
        "model.hidden_size=36",
        told=("model.hidden_size=36", "model.num_heads=8", "choose 32 or 40", "model.head_dim"),
    ),
    "kv heads that don't divide heads": override(
        "model.num_kv_heads=3",
        told=("model.num_kv_heads=3", "model.num_heads=8", "choose 1, 2, 4 or 8"),
    ),
    "odd head dim under rope": override(
        "model.head_dim=5", told=("model.head_dim=5", "even", "choose 6")
    ),
    "dropout in a llama": override(
        "model.dropout=0.1", told=("model.dropout=0.1", 'model.family="llama"', "set it to 0")
    ),
    "bias of queries in a gpt": override(
        "model.family=gpt",
        "model.num_kv_heads=8",
        "model.qkv_bias=true",
        told=("model.qkv_bias=true", 'model.family="gpt"', "set it to false"),
    ),
    "norms of heads in a gpt": override(
        "model.family=gpt", "model.qk_norm=true", told=("model.qk_norm=true", "set it to false")
    ),
    "scaled rotations in a gpt": override(
        "model.family=gpt",
        "model.rope_scaling=linear",
        "model.rope_scaling_factor=2",
        told=('model.rope_scaling="linear"', 'set it to "none"'),
    ),
    "rope scaling without its numbers": override(
        "model.rope_scaling=llama3",
        "model.rope_scaling_factor=8",
        told=('model.rope_scaling="llama3" needs', "model.rope_low_freq_factor", "state it"),
    ),
    "numbers of a rope scaling that isn't on": override(
        "model.rope_scaling_factor=8",
        told=("model.rope_scaling_factor=8.0", 'model.rope_scaling="none"', "clear it"),
    ),
    "rope scaling of another kind": override(
        "model.rope_scaling=longrope",
        told=('model.rope_scaling="longrope"', "'none', 'linear', 'llama3' or 'yarn'"),
    ),
    "an amplitude of another rope scaling": override(
        "model.rope_scaling=linear",
        "model.rope_scaling_factor=2",
        "model.rope_attention_factor=1.1",
        told=("model.rope_attention_factor=1.1", 'model.rope_scaling="linear"', "clear it"),
    ),
    "planes that all turn alike": override(
        "model.rope_scaling=yarn",
        "model.rope_scaling_factor=8",
        "model.rope_low_freq_factor=1",
        "model.rope_high_freq_factor=32",
        "model.rope_original_max_seq_length=8192",
        "model.rope_theta=1",
        told=("model.rope_theta=1.0", "must be above 1", "choose 10000"),
    ),
    "rope scaling upside down": override(
        "model.rope_scaling=llama3",
        "model.rope_scaling_factor=8",
        "model.rope_low_freq_factor=4",
        "model.rope_high_freq_factor=1",
        "model.rope_original_max_seq_length=8192",
        told=("model.rope_low_freq_factor=4.0", "model.rope_high_freq_factor=1.0", "1 and 4"),
    ),
    # --- Grid
    "tp that doesn't divide heads": override(
        f"{TP}=3", told=(f"{TP}=3", "model.num_heads=8", "choose 1, 2, 4 or 8")
    ),
    "tp that doesn't divide the mlp": override(
        f"{TP}=4",
        "model.ffn_hidden_size=90",
        told=(f"{TP}=4", "model.ffn_hidden_size=90", "choose 1 or 2"),
    ),
    "tp that neither divides kv heads nor is a multiple": override(
        f"{TP}=4",
        "model.num_heads=12",
        "model.num_kv_heads=6",
        "model.head_dim=4",
        "model.ffn_hidden_size=96",
        told=(f"{TP}=4", "model.num_kv_heads=6", "choose 1, 2, 3, 6 or 12"),
    ),
    "sequence that tp can't share": override(
        f"{TP}=2",
        "parallel.sequence_parallel=true",
        "train.seq_length=31",
        told=("train.seq_length=31", f"{TP}=2", "choose 30 or 32"),
    ),
    "sequence beyond the positions": override(
        "train.seq_length=33",
        told=("train.seq_length=33", "model.max_seq_length=32", "choose at most 32"),
    ),
    "sequence that cp can't share": override(
        f"{CP}=3", told=("train.seq_length=32", f"{CP}=3", "choose 30, or a smaller context")
    ),
    "sequence that cp and then tp can't share": override(
        f"{CP}=2",
        f"{TP}=4",
        "train.seq_length=28",
        "parallel.sequence_parallel=true",
        told=("train.seq_length=28", f"{CP}=2", f"{TP}=4", "choose 24 or 32"),
    ),
    "sequence far too short for cp": override(
        f"{CP}=64",
        told=(
            "train.seq_length=32",
            f"{CP}=64; choose a smaller context_parallel",
        ),
    ),
    "heads that ulysses can't share": override(
        f"{CP}=8",
        f"{TP}=2",
        "parallel.context_parallel=ulysses",
        told=(f"{CP}=8", '"ulysses"', "model.num_heads=8", "choose 1, 2 or 4", '"ring"'),
    ),
    "dropout of attention in a ring": override(
        f"{CP}=2",
        "parallel.context_parallel=ring",
        "model.family=gpt",
        "model.attention_dropout=0.1",
        told=("model.attention_dropout=0.1", '"ring"', '"all_gather"'),
    ),
    "interleaved schedule with nothing to interleave": override(
        "parallel.pipeline_schedule=Interleaved1F1B",
        told=("parallel.virtual_pipeline_size=1", '"Interleaved1F1B"', "choose 2 or more"),
    ),
    "V-shaped schedule with one chunk": override(
        "parallel.pipeline_schedule=ZBV",
        told=("parallel.virtual_pipeline_size=1", '"ZBV"', "choose 2"),
    ),
    "chunks without an interleaved schedule": override(
        "parallel.virtual_pipeline_size=2",
        told=("parallel.virtual_pipeline_size=2", '"1F1B"', "choose 1"),
    ),
    "more stages than layers": override(
        f"{PP}=8", told=(f"{PP}=8", "model.num_layers=4", "choose at most 4")
    ),
    "layers that don't add up": override(
        f"{PP}=2",
        "parallel.layers_per_stage=[1,2]",
        told=("layers_per_stage=[1, 2]", "adds up to 3", "model.num_layers=4", "add 1"),
    ),
    "too many layers": override(
        "parallel.layers_per_stage=[6]", told=("layers_per_stage=[6]", "take 2 away")
    ),
    "layers for other stages": override(
        f"{PP}=2",
        "parallel.layers_per_stage=[1,2,1]",
        told=("layers_per_stage=[1, 2, 1]", "3 entries", f"{PP}=2 = 2 stages"),
    ),
    "world that isn't the grid": override(
        f"{TP}=2",
        "parallel.data_parallel_size=2",
        told=("data_parallel_size=2", "= 4 ranks", "8 were started", "start 4"),
        world_size=8,
    ),
    "fewer ranks than the least": override(
        "parallel.data_parallel_size=4",
        "parallel.min_data_parallel_size=2",
        told=("1 ranks leave 1 for the dp axis", "min_data_parallel_size=2", "size=4"),
        world_size=1,
    ),
    "more ranks at least than there are": override(
        "parallel.data_parallel_size=2",
        "parallel.min_data_parallel_size=4",
        told=("min_data_parallel_size=4", "data_parallel_size=2", "set it to 2 or less"),
    ),
    # --- Sharding
    "switches that no order heeds": override(
        "parallel.topology_file=topology.conf",
        "parallel.rank_order=launcher",
        told=('parallel.topology_file="topology.conf"', '"launcher"', "none", '"topology"'),
    ),
    "shards of a size that nothing reads": override(
        "parallel.shard_size=2",
        told=("parallel.shard_size=2", '"FULL_SHARD"', "none", '"HYBRID_SHARD"'),
    ),
    "shards that the ranks can't form": override(
        HYBRID,
        "parallel.shard_size=3",
        told=("parallel.shard_size=3", "data_parallel_size=8", "choose 1, 2, 4 or 8"),
        world_size=8,
    ),
    "gathered weights held and let go of": override(
        "parallel.hold_for_step=true",
        "parallel.reshard_after_forward=true",
        told=("hold_for_step=true", "reshard_after_forward=true", "one of them to false"),
    ),
    "a strategy that holds, told not to": override(
        "parallel.sharding_strategy=SHARD_GRAD_OP",
        "parallel.hold_for_step=false",
        told=("hold_for_step=false", '"SHARD_GRAD_OP"', 'choose "FULL_SHARD"'),
    ),
    "a strategy that holds, told to split": override(
        "parallel.sharding_strategy=SHARD_GRAD_OP",
        "parallel.reshard_after_forward=2",
        told=("reshard_after_forward=2", '"SHARD_GRAD_OP"', 'choose "FULL_SHARD"'),
    ),
    "holding what is never gathered": override(
        "parallel.sharding_strategy=ZERO1",
        "parallel.reshard_after_forward=false",
        told=("reshard_after_forward=false", '"ZERO1"', "clear it with none"),
    ),
    "resharding to a word": override(
        "parallel.reshard_after_forward=some",
        told=('reshard_after_forward="some"', "true, false or a number of ranks"),
    ),
    "resharding to none": override(
        "parallel.reshard_after_forward=0",
        told=("reshard_after_forward=0", "true, false or a number of ranks"),
    ),
    "resharding to ranks that don't divide": override(
        "parallel.reshard_after_forward=3",
        told=("reshard_after_forward=3", "the 8 ranks", "choose 2, 4, true"),
        world_size=8,
    ),
    "resharding to all ranks": override(
        "parallel.reshard_after_forward=2",
        told=("reshard_after_forward=2", "the 2 ranks", "choose true (let go of) or false"),
        world_size=2,
    ),
    "resharding to more ranks than a shard's": override(
        HYBRID,
        "parallel.shard_size=4",
        "parallel.reshard_after_forward=8",
        told=("reshard_after_forward=8", "the 4 ranks", "choose 2, true"),
        world_size=8,
    ),
    "a unit larger than the model": override(
        "parallel.blocks_per_unit=5",
        told=("parallel.blocks_per_unit=5", "model.num_layers=4", "at most 4"),
    ),
    "a misspelt module": override(
        'parallel.unsharded_modules=["norm","layers.3.atention_norm"]',
        told=('unsharded_modules[1]="layers.3.atention_norm"', '"layers.*.attention_norm"?'),
    ),
    "a class in place of a module": override(
        "parallel.unsharded_modules=['LlamaDecoderLayer']",
        told=('[0]="LlamaDecoderLayer" names no module', "layers.*.mlp.gate_up"),
    ),
    "a layer that isn't there": override(
        "parallel.unsharded_modules=['layers.4.*']",
        told=('"layers.4.*" names no module: layers end at 3', "num_layers=4"),
    ),
    "an embedding apart that is the head of its stage": override(
        "model.tied_embeddings=true",
        "parallel.wrap_embedding=true",
        told=("parallel.wrap_embedding=true has nothing to act on", "model.tied_embeddings=true"),
    ),
    "everything kept out of sharding": override(
        "parallel.unsharded_modules=['*']", told=('["*"] leaves nothing', '"NO_SHARD"')
    ),
    "kept out of no sharding": override(
        "parallel.unsharded_modules=['norm']",
        "parallel.sharding_strategy=NO_SHARD",
        told=('unsharded_modules=["norm"]', '"NO_SHARD"', "clear it with []"),
    ),
    # --- Work
    "batch smaller than a microbatch": override(
        "train.global_batch_size=2",
        "train.micro_batch_size=4",
        told=("train.global_batch_size=2", "train.micro_batch_size=4", "choose 4"),
    ),
    "uneven microbatches": override(
        "train.micro_batch_size=3",
        told=("train.global_batch_size=8", "train.micro_batch_size=3", "choose 6 or 9"),
    ),
    "batch that dp can't share": override(
        "train.global_batch_size=6",
        told=("train.global_batch_size=6", "data_parallel_size=4", "choose 4 or 8"),
        world_size=4,
    ),
    "batch that a stated dp can't share": override(
        "parallel.data_parallel_size=3", told=("data_parallel_size=3", "choose 6 or 9")
    ),
    "more microbatches than can be listed": override(
        "train.global_batch_size=100001",
        told=("train.global_batch_size=100001", "100001 microbatches", "train.micro_batch_size=1"),
    ),
    "no length": override("train.steps=none", told=("train.steps", "train.tokens", "state one")),
    "two lengths": override(
        "train.tokens=1000", told=("train.steps=8", "train.tokens=1000", "keep one")
    ),
    "decay longer than the run": override(
        "lr_schedule.kind=wsd",
        "lr_schedule.decay_steps=9",
        told=("lr_schedule.decay_steps=9", "last step is 8", "choose at most 8"),
    ),
    "muP without AdamW": override(
        "model.mup_base_width=64",
        "optimizer.name=sgd",
        told=("model.mup_base_width=64", 'optimizer.name="sgd"', 'choose "adamw"'),
    ),
    "muP's head_dim alone": override(
        "model.mup_base_head_dim=8", told=("model.mup_base_head_dim=8", "model.mup_base_width")
    ),
    "key of another optimizer": override(
        "optimizer.name=sgd",
        "optimizer.beta1=0.8",
        told=(
            "optimizer.beta1=0.8",
            'optimizer.name="sgd"',
            'leave it out, or choose "adamw" or "muon"',
        ),
    ),
    "momentum without the optimizer that has it": override(
        "optimizer.nesterov=false", told=("optimizer.nesterov=false", 'choose "sgd" or "muon"')
    ),
    "device with an index": override(
        "train.device=cuda:0", told=('train.device="cuda:0"', 'such as "cpu" or "cuda"')
    ),
    "a device that torch has no name for": override(
        "train.device=tpu", told=('train.device="tpu"', 'choose "auto", "cpu", "cuda"')
    ),
    "precision that the device lacks": override(
        "train.precision=fp64",
        "train.device=mps",
        told=('train.precision="fp64"', 'train.device="mps"', 'or train.device="cpu"'),
    ),
    "a z-loss beyond all sense": override(
        "train.z_loss=1e300", told=("train.z_loss=1e+300", "less than or equal to 1")
    ),
    # --- Memory
    "unknown kind of recomputation": override(
        "memory.recompute=half", told=("memory.recompute", "'none', 'selective' or 'full'")
    ),
    "recomputation of some layers' parts": override(
        "memory.recompute=selective",
        "memory.recompute_interval=2",
        told=("memory.recompute_interval=2", 'memory.recompute="selective"', "choose 1"),
    ),
    "recomputation of more layers than there are": override(
        "memory.recompute=full",
        "memory.recompute_interval=5",
        told=("memory.recompute_interval=5", "model.num_layers=4", "at most 4"),
    ),
    # --- Data and files
    "documents of made-up tokens": override(
        "data.document_mask=true",
        told=("data.document_mask=true", '["synthetic"] has no documents'),
    ),
    "positions in documents of made-up tokens": override(
        "data.reset_positions=true", told=("data.reset_positions=true", "no documents")
    ),
    "weights for other paths": override(
        "data.weights=[1, 2]", told=("data.weights=[1.0, 2.0]", "1 data.paths", "one for each")
    ),
    "weights of zero": override("data.weights=[0]", told=("data.weights=[0.0]", "larger than 0")),
    "empty path": override('data.paths=[""]', told=('data.paths[0]=""', "write a prefix")),
    "masked id beyond the vocabulary": override(
        "data.mask_token_ids=[0, 61]",
        told=("data.mask_token_ids has 61", "choose ids below 61"),
    ),
    "every id masked": override(
        f"data.mask_token_ids={list(range(61))}",
        told=("data.mask_token_ids has all ids", "model.vocab_size=61"),
    ),
    "negative masked id": override(
        "data.mask_token_ids=[-100]", told=("data.mask_token_ids", "greater than or equal to 0")
    ),
    "path stated twice": override(
        'data.paths=["a", "a"]', told=('data.paths names "a" twice', "data.weights")
    ),
    "synthetic among files": override(
        'data.paths=["a", "synthetic"]', told=('["a", "synthetic"]', "one path alone")
    ),
    "no synthetic samples": override(
        'data.paths=["synthetic:0"]', told=('["synthetic:0"]', '"synthetic:N" for N samples')
    ),
    "evaluation without documents": override(
        "evaluation.interval=5",
        "data.valid_fraction=0",
        told=("evaluation.interval=5", "data.valid_fraction=0", "larger than 0"),
    ),
    "kept among those that are kept anyway": override(
        "checkpoint.keep_every=10",
        told=("checkpoint.keep_every=10", "keep_last=0", "keep_last=1 or more"),
    ),
    "kept steps that aren't saved": override(
        "checkpoint.keep_every=10",
        "checkpoint.keep_last=2",
        "checkpoint.save_interval=4",
        told=("checkpoint.keep_every=10", "checkpoint.save_interval=4", "choose 8 or 12"),
    ),
    "an export of nothing": override(
        "checkpoint.export_hf=models/x",
        "checkpoint.save_at_end=false",
        told=('checkpoint.export_hf="models/x"', "checkpoint.save_at_end=true"),
    ),
    "nowhere to write": override('logging.run_dir=""', told=('logging.run_dir=""', "runs/first")),
}


def refusal(mistake: Mistake, folder: Path) -> MegagridError:
    """The error that answers `mistake`."""
    old, new = mistake.edit
    assert old in recipe.TEXT
    path = recipe.write(folder, recipe.TEXT.replace(old, new, 1) if old else recipe.TEXT)
    with pytest.raises(MegagridError) as caught:
        check(load(path, mistake.overrides), mistake.world_size)
    return caught.value


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_answered_with_key_value_and_remedy(tmp_path, mistake):
    message = str(refusal(mistake, tmp_path))
    assert "\n" not in message
    for words in mistake.told:
        assert words in message


def test_every_rule_answers_a_mistake_of_the_table(tmp_path):
    raised = set()
    for mistake in MISTAKES.values():
        frames = traceback.extract_tb(refusal(mistake, tmp_path).__traceback__)
        raised |= {frame.name for frame in frames}
    assert {rule.__name__ for rule in RULES} <= raised


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "can't read recipe"),
        (b"\xff\xfe", "UTF-8"),
        (b"", "train.seq_length, train.global_batch_size"),
        (b"a = " + b"[" * 5000, "nests too deep"),
        (b"a = " + b"9" * 5000, "a number is too long"),
    ],
    ids=["missing", "not text", "empty", "nested", "long number"],
)
def test_a_file_that_is_no_recipe_is_named(tmp_path, content, told):
    path = tmp_path / "none.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=told) as caught:
        load(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("value", ["[" * 5000, "9" * 5000], ids=["nested", "long number"])
def test_an_override_beyond_all_sense_is_a_wrong_value(tmp_path, value):
    with pytest.raises(ConfigError, match=r"command line: train\.steps=.* must be a whole number"):
        load(recipe.write(tmp_path), [f"train.steps={value}"])


def test_all_wrong_values_of_a_recipe_are_told_at_once(tmp_path):
    with pytest.raises(ConfigError, match=r"train\.steps=0.*; .*optimizer\.lr=-1"):
        load(recipe.write(tmp_path), ["train.steps=0", "optimizer.lr=-1"])


NODE_0_OF_2 = ("--nnodes", "2", "--node-rank", "0", "--rendezvous")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["train", "recipe.toml", "optimizer.weigth_decay=0"], "did you mean"),
        (["train", "recipe.toml", f"{TP}=3", "--show-config"], "choose 1, 2, 4 or 8"),
        (["train", "recipe.toml", "--nproc", "3", f"{TP}=2"], "start a multiple of 2 ranks"),
        (["train", "recipe.toml", "--nproc", "0"], "choose at least 1"),
        (["train", "recipe.toml", "--nproc", "4096", "train.global_batch_size=4096"], "too many"),
        (["train", "recipe.toml", "--nnodes", "two"], "--nnodes two must be a number"),
        (["train", "recipe.toml", "--nnodes", "3:2"], "--nnodes 3:2 must be a number"),
        (["train", "recipe.toml", "--nnodes", "2"], "--node-rank is missing; number the nodes"),
        (["train", "recipe.toml", "--nnodes", "2", "--node-rank", "2"], "from 0 to 1"),
        (["train", "recipe.toml", "--nnodes", "2", "--node-rank", "0"], "--rendezvous is missing"),
        (["train", "recipe.toml", *NODE_0_OF_2, "no-such-host:1"], "no-such-host has no address"),
        (["train", "recipe.toml", *NODE_0_OF_2, "localhost"], "must be HOST:PORT"),
        (["train", "recipe.toml", "--max-restarts", "-1"], "must be 0 or more"),
        (["train", "recipe.toml", 'data.paths=["nowhere/x"]'], "megagrid data prepare"),
        (["train", "recipe.toml", "checkpoint.resume=nowhere"], 'checkpoint.resume="nowhere"'),
        (["train", "nowhere.toml"], "can't read recipe nowhere.toml"),
        (["train"], "required: RECIPE"),
        (["train", "recipe.toml", "--optimizer.lr=1"], "section.key=value"),
        (["trian", "recipe.toml"], "did you mean train?"),
        (["grid", "recipe.toml", "--nodes", "2", "--gpus-per-node", "3", f"{TP}=2"], "tp group"),
        (["grid", "recipe.toml"], "state --gpus-per-node G, or --hosts LIST"),
        (["grid", "recipe.toml", "--hosts", "a,b"], "--hosts needs one of --tasks-per-node"),
        (["grid", "recipe.toml", "--hosts", "n[1-2", "--gpus-per-node", "1"], "node list 'n[1-2'"),
        (
            ["grid", "recipe.toml", "--hosts", "a,b", "--tasks-per-node", "1,2,1"],
            "are 2 nodes, but",
        ),
        (
            ["grid", "recipe.toml", "--nodes", "2", "--gpus-per-node", "2", "--topology", "t"],
            "--hosts",
        ),
        (["train", "recipe.toml", "parallel.topology_file=nowhere"], "file nowhere can't be read"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_command_line_answers_a_mistake_in_one_line_and_exits_2(
    tmp_path, monkeypatch, capsys, arguments, told
):
    monkeypatch.chdir(tmp_path)
    # What would become the agent of the ranks is the process of the tests.
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("ranks were started"))
    recipe.write(tmp_path)
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    assert told in line


def test_a_mistake_ends_the_process_with_2_and_nothing_but_that_line(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "megagrid", "train", str(recipe.write(tmp_path)), "train.step=9"],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: command line: unknown key train.step; did you mean")
    assert done.stderr.count("\n") == 1
