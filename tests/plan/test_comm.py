"""The closed form of a step's communication, against what was published and a real step."""

from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch.distributed as dist

from megagrid.comm.ledger import Ledger
from megagrid.config.presets import PRESETS, parameter_count
from megagrid.config.schema import Config, ModelConfig
from megagrid.data import Loader, Sampler, SyntheticDataset
from megagrid.grid.placement import Coordinate, Placement
from megagrid.grid.start import grid_of
from megagrid.pipeline.schedules import generate, save
from megagrid.plan.comm import Row, as_calls, step_communication, wire_bytes
from megagrid.plan.parameters import ModelShare
from megagrid.train.build import build_engine
from megagrid.train.metrics import Stopwatch
from megagrid.train.step import apply_gradients, compute_gradients


def run(placement: Placement, family: str = "llama", **keys) -> Config:
    """A run of 5 layers with 2 samples a microbatch; `keys` are `section__key=value`."""
    sections = {
        "optimizer": {},
        "model": {
            "family": family,
            "num_layers": 5,
            "hidden_size": 32,
            "ffn_hidden_size": 64,
            "num_heads": 8,
            "num_kv_heads": 2 if family == "llama" else 8,
            "head_dim": 4,
            "vocab_size": 61,
            "max_seq_length": 16,
            "make_vocab_size_divisible_by": 8,
        },
        "parallel": {
            "tensor_parallel_size": placement.tp,
            "pipeline_parallel_size": placement.pp,
            "context_parallel_size": placement.cp,
            "data_parallel_size": placement.dp,
        },
        "train": {
            "seq_length": 16,
            "micro_batch_size": 2,
            "global_batch_size": 12,
            "steps": 1,
            "device": "cpu",
        },
        "memory": {},
        "data": {"paths": ["synthetic"]},
        "logging": {"run_dir": "unused"},
    }
    for key, value in keys.items():
        section, _, name = key.partition("__")
        sections.setdefault(section, {})[name] = value
    return Config(**sections)


def rows_of(config: Config, placement: Placement, **coordinate) -> list[Row]:
    return step_communication(
        config, placement, Coordinate(**{"pp": 0, "dp": 0, "cp": 0, "tp": 0} | coordinate)
    )


# ------------------------------------------------------------------------------------------------
# Against a real step


def count_a_step(config: Config, placement: Placement) -> tuple[Counter, Counter]:
    """What the second step of a run on this rank is counted and planned to communicate."""
    grid = grid_of(config, placement, dist.get_rank(), "cpu")
    engine = build_engine(config, grid)
    train = config.train
    data = SyntheticDataset(config.model.vocab_size, train.seq_length, train.seed)
    sampler = Sampler(train.global_batch_size, train.micro_batch_size, placement.dp)
    loader = Loader(data, sampler, grid.dp.rank)
    ledger = Ledger(grid.axes.values())
    for step in (1, 2):
        ledger.calls.clear()
        with ledger:
            batches = loader.step(train.global_batch_size * (step - 1))
            result = compute_gradients(engine, batches, step, Stopwatch())
            apply_gradients(engine, result.grad_norm, lr=1e-3)
    return ledger.calls, as_calls(step_communication(config, placement, grid.coordinate))


@dataclass(frozen=True)
class Case:
    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    family: str = "llama"
    keys: dict = field(default_factory=dict)

    @property
    def placement(self) -> Placement:
        return Placement(tp=self.tp, pp=self.pp, dp=self.dp, cp=self.cp)

    def __str__(self) -> str:
        values = (f"{key.partition('__')[2]}={value}" for key, value in self.keys.items())
        cp = [f"cp{self.cp}"] if self.cp > 1 else []
        return "-".join([self.family, f"tp{self.tp}", f"pp{self.pp}", f"dp{self.dp}", *cp, *values])


SP = {"parallel__sequence_parallel": True}
TIED = {"model__tied_embeddings": True}
BF16 = {"train__precision": "bf16"}
HYBRID = {"parallel__sharding_strategy": "HYBRID_SHARD", "parallel__shard_size": 2}
ZERO1 = {"parallel__sharding_strategy": "ZERO1"}
KEEP_NORMS = {"parallel__unsharded_modules": ["norm", "layers.*_norm", "layers.1.attention"]}
APART = {"parallel__wrap_embedding": True, "parallel__wrap_head": True}
TWO_BLOCKS = {"parallel__blocks_per_unit": 2}
KEPT = {"parallel__reshard_after_forward": False}
OVER_TWO = {"parallel__reshard_after_forward": 2}
NO_PREFETCH = {"parallel__forward_prefetch": 0, "parallel__backward_prefetch": 0}
PREFETCH = {"parallel__forward_prefetch": 2, "parallel__backward_prefetch": 3}
OFFLOAD = {"memory__cpu_offload": True}
DROPOUT = {"model__dropout": 0.1, "model__attention_dropout": 0.1}
MUON = {"optimizer__name": "muon"}
COMPILED = {"train__compile": True, "train__compile_backend": "aot_eager"}
QWEN = {"model__qkv_bias": True, "model__qk_norm": True}


def strategy(name: str) -> dict:
    return {"parallel__sharding_strategy": name}


def exchange(name: str) -> dict:
    return {"parallel__context_parallel": name}


def schedule(name: str, chunks: int = 1) -> dict:
    return {"parallel__pipeline_schedule": name, "parallel__virtual_pipeline_size": chunks}


def recompute(kind: str, interval: int = 1) -> dict:
    return {"memory__recompute": kind, "memory__recompute_interval": interval}


CASES = [
    Case(),
    Case(tp=2),
    Case(tp=2, keys=SP),
    Case(tp=2, family="gpt", keys=SP | TIED | BF16),
    Case(tp=4, keys=SP | {"train__precision": "fp64"}),
    Case(tp=2, keys={"model__num_kv_heads": 1}),
    Case(pp=2),
    Case(pp=2, family="gpt", keys=TIED),
    Case(pp=4, keys=TIED | {"parallel__pipeline_schedule": "GPipe"}),
    Case(pp=2, keys={"parallel__layers_per_stage": [5, 0]}),
    Case(dp=2),
    Case(dp=2, keys=BF16 | strategy("SHARD_GRAD_OP")),
    Case(tp=2, dp=2, keys={"train__precision": "fp16"}),
    Case(dp=3, family="gpt", keys=strategy("NO_SHARD")),
    Case(tp=2, pp=2, keys=SP | TIED),
    Case(tp=2, pp=2, keys=BF16),
    Case(tp=4, dp=2, keys=SP),
    Case(pp=2, dp=2, keys=TIED),
    Case(pp=2, dp=2, keys=strategy("SHARD_GRAD_OP")),
    Case(tp=2, dp=2, family="gpt", keys=SP | BF16),
    Case(tp=2, pp=2, dp=2, family="gpt", keys=SP | TIED | strategy("NO_SHARD")),
    Case(tp=4, pp=2, keys=SP | TIED | {"model__num_kv_heads": 1}),
    Case(tp=2, dp=2, keys=SP | COMPILED),
    Case(tp=2, keys=SP | COMPILED | {"memory__recompute": "full"}),
    Case(tp=2, pp=2, family="gpt", keys=TIED | COMPILED),
    Case(tp=2, keys=QWEN),
    Case(tp=4, pp=2, keys=QWEN | SP),
    Case(tp=2, dp=2, keys=QWEN | BF16),
    Case(pp=2, keys=TIED | schedule("Interleaved1F1B", 2)),
    Case(pp=4, keys=schedule("ZB1P")),
    Case(pp=2, keys=TIED | schedule("ZBV", 2)),
    Case(tp=2, pp=2, family="gpt", keys=SP | TIED | schedule("ZBV", 2)),
    Case(pp=2, dp=2, keys=TIED | schedule("ZB1P")),
    Case(pp=2, dp=2, keys=BF16 | schedule("ZBV", 2) | strategy("SHARD_GRAD_OP")),
    Case(pp=2, dp=2, keys=TIED | schedule("Interleaved1F1B", 2) | strategy("NO_SHARD")),
    Case(dp=4, keys=HYBRID | BF16 | {"train__micro_batch_size": 1}),
    Case(dp=4, keys=HYBRID | {"parallel__shard_size": 1, "train__micro_batch_size": 1}),
    Case(dp=4, keys=HYBRID | KEEP_NORMS | TWO_BLOCKS | {"train__micro_batch_size": 1}),
    Case(tp=2, dp=2, keys=HYBRID | SP | {"parallel__shard_size": 1}),
    Case(pp=2, dp=2, family="gpt", keys=HYBRID | TIED),
    Case(dp=3, keys=ZERO1),
    Case(dp=2, keys=ZERO1 | BF16 | TWO_BLOCKS),
    Case(tp=2, dp=2, family="gpt", keys=ZERO1 | SP | TIED | APART),
    Case(pp=2, dp=2, keys=ZERO1 | TIED | schedule("ZB1P")),
    Case(dp=2, keys=APART | TWO_BLOCKS),
    Case(dp=2, keys=APART | TIED),
    Case(pp=2, dp=2, keys=APART | TIED | KEEP_NORMS),
    Case(tp=2, dp=2, keys=KEEP_NORMS | SP | BF16),
    Case(pp=2, dp=2, keys=KEEP_NORMS | schedule("ZBV", 2) | strategy("SHARD_GRAD_OP")),
    Case(dp=2, keys=KEPT | TWO_BLOCKS),
    Case(pp=2, dp=2, keys=KEPT),
    Case(pp=2, dp=2, keys=KEPT | schedule("ZBV", 2)),
    Case(pp=2, dp=2, keys=KEPT | schedule("Interleaved1F1B", 2) | APART),
    Case(dp=4, keys=OVER_TWO | BF16 | {"train__micro_batch_size": 1}),
    Case(dp=4, keys=OVER_TWO | APART | {"train__micro_batch_size": 1}),
    Case(dp=4, keys=OVER_TWO | KEEP_NORMS | {"train__micro_batch_size": 1}),
    Case(dp=2, keys=NO_PREFETCH | APART),
    Case(pp=2, dp=2, keys=PREFETCH | APART),
    Case(pp=2, dp=2, keys=OFFLOAD | schedule("ZB1P")),
    Case(tp=2, keys=recompute("selective")),
    Case(tp=2, keys=recompute("full")),
    Case(tp=2, family="gpt", keys=SP | recompute("selective") | DROPOUT),
    Case(tp=2, family="gpt", keys=SP | recompute("full") | DROPOUT),
    Case(tp=2, pp=2, keys=SP | recompute("full", 2)),
    Case(tp=2, pp=2, keys=SP | recompute("full") | schedule("ZBV", 2)),
    Case(tp=2, pp=2, keys=SP | recompute("selective") | schedule("ZB1P")),
    Case(tp=2, keys={"train__loss_chunk_tokens": 7, "train__z_loss": 1e-3}),
    Case(tp=2, pp=2, keys=SP | TIED | BF16 | {"train__loss_chunk_tokens": 16}),
    Case(dp=2, keys=APART | {"train__loss_chunk_tokens": 8}),
    Case(dp=2, keys=APART | KEPT | {"train__loss_chunk_tokens": 8}),
    # A unit that is gathered for its backward is so for what that computes again.
    Case(dp=2, keys=BF16 | recompute("full")),
    Case(dp=2, keys=recompute("full") | TWO_BLOCKS | KEEP_NORMS),
    Case(dp=2, keys=recompute("selective") | OFFLOAD),
    Case(dp=2, keys=recompute("selective") | strategy("SHARD_GRAD_OP")),
    Case(pp=2, dp=2, keys=recompute("full", 3) | schedule("ZB1P")),
    Case(tp=2, keys=MUON | SP),
    Case(tp=4, family="gpt", keys=MUON),
    Case(tp=4, keys=MUON),
    Case(dp=3, keys=MUON | BF16),
    Case(dp=2, keys=MUON | strategy("NO_SHARD") | {"train__precision": "fp64"}),
    Case(tp=2, pp=2, dp=2, keys=MUON | schedule("ZBV", 2)),
    Case(pp=4, keys=MUON),
    Case(dp=4, keys=MUON | HYBRID | {"train__micro_batch_size": 1}),
    Case(tp=2, dp=2, keys=MUON | ZERO1),
    Case(tp=2, dp=2, keys=MUON | KEEP_NORMS),
    Case(cp=2, keys=exchange("all_gather")),
    Case(cp=2, keys=exchange("ulysses") | {"model__num_kv_heads": 1}),
    Case(cp=4, keys=exchange("ring") | BF16),
    Case(cp=2, tp=2, keys=exchange("ring") | SP | {"model__num_kv_heads": 1}),
    Case(cp=2, pp=2, family="gpt", keys=exchange("all_gather") | TIED | schedule("ZB1P")),
    Case(cp=2, dp=2, keys=exchange("ulysses") | strategy("NO_SHARD")),
    Case(cp=2, dp=2, keys=exchange("ring") | MUON | HYBRID),
    Case(cp=2, keys=exchange("all_gather") | recompute("selective")),
    Case(cp=2, keys=exchange("ring") | recompute("selective")),
    Case(cp=2, tp=2, keys=exchange("ulysses") | recompute("full", 2) | SP),
    Case(cp=2, tp=2, keys=exchange("all_gather") | SP | COMPILED),
    Case(cp=2, tp=2, keys=exchange("ring") | SP | COMPILED),
    Case(tp=2, family="gpt", keys=COMPILED | DROPOUT | recompute("selective")),
    Case(tp=2, keys=COMPILED | SP | recompute("selective")),
    Case(tp=2, pp=2, keys=SP | COMPILED | schedule("ZB1P") | recompute("selective")),
    Case(cp=2, keys=exchange("ulysses") | COMPILED | recompute("selective")),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ledger_of_a_step_equals_the_closed_form_on_every_rank(ranks, case):
    config = run(case.placement, case.family, **case.keys)
    world = case.placement.world_size
    for counted, planned in ranks.run(count_a_step, config, case.placement, world_size=world):
        assert dict(counted) == dict(planned)


def test_a_schedule_from_a_file_is_counted_like_the_same_by_name(tmp_path):
    save(generate("ZBV", 2, 6), tmp_path / "mine.txt")
    placement, chunks = Placement(pp=2), {"parallel__virtual_pipeline_size": 2}
    in_file = {"parallel__pipeline_schedule_file": str(tmp_path / "mine.txt")}
    for pp in range(2):
        by_name = rows_of(run(placement, **schedule("ZBV", 2)), placement, pp=pp)
        assert rows_of(run(placement, **chunks, **in_file), placement, pp=pp) == by_name


# ------------------------------------------------------------------------------------------------
# Against what was published


def layer_traffic(tp: int, **keys) -> float:
    """Elements on the wire along tp for one layer and microbatch of 2 x 16 x 32 elements."""
    placement = Placement(tp=tp)
    fewer, more = (
        sum(
            wire_bytes(row, tp)
            for row in rows_of(
                run(placement, model__num_layers=layers, train__global_batch_size=2, **keys),
                placement,
            )
            if row.axis == "tp" and row.what.startswith("layers")
        )
        for layers in (5, 6)
    )
    return (more - fewer) / 4


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("t", [2, 4, 8])
def test_a_layer_sends_megatrons_tensor_parallel_volume(t, sequence_parallel):
    """8 b s h (t - 1) / t elements, arXiv 2104.04473, section 3.2; as much with sequence
    parallelism, arXiv 2205.05198, section 4.2.2."""
    bsh = 2 * 16 * 32
    sent = layer_traffic(t, parallel__sequence_parallel=sequence_parallel)
    assert sent == pytest.approx(8 * bsh * (t - 1) / t, rel=1e-12)


def test_a_layer_has_four_collectives_each_microbatch():
    placement = Placement(tp=2)
    rows = [r for r in rows_of(run(placement), placement) if r.what.startswith("layers")]
    assert sum(row.calls for row in rows) == 4 * 5 * 6  # 5 layers, 6 microbatches


@pytest.mark.parametrize(("pp_rank", "neighbours"), [(0, 1), (1, 2), (3, 1)])
def test_each_boundary_has_a_message_each_way_for_each_microbatch(pp_rank, neighbours):
    placement = Placement(pp=4)
    rows = [r for r in rows_of(run(placement), placement, pp=pp_rank) if r.axis == "pp"]
    assert {row.bytes for row in rows} == {2 * 16 * 32 * 4}  # b s h, arXiv 2104.04473, section 3.2
    for direction in ("send", "recv"):
        assert sum(r.calls for r in rows if r.collective == direction) == neighbours * 6


@pytest.mark.parametrize(
    ("sharding", "volume"), [("NO_SHARD", 2), ("SHARD_GRAD_OP", 2), ("FULL_SHARD", 3)]
)
def test_data_parallel_volume_is_that_of_zero(sharding, volume):
    """2 Psi elements for DDP and stages 1 and 2, 3 Psi for stage 3 (arXiv 1910.02054, section 7);
    Psi is the padded model's parameters."""
    d = 2
    placement = Placement(dp=d)
    keys = strategy(sharding) | {"train__global_batch_size": 4, "model__vocab_size": 64}
    config = run(placement, **keys)
    rows = [r for r in rows_of(config, placement) if r.axis == "dp" and r.what != "valid tokens"]
    sent = sum(wire_bytes(row, d) for row in rows) / 4
    psi = parameter_count(config.model)
    assert sent == pytest.approx(volume * psi * (d - 1) / d, rel=1e-12)


def test_accumulation_doesnt_change_the_gradient_traffic():
    placement = Placement(dp=2)
    traffic = [
        [
            row
            for row in rows_of(run(placement, train__global_batch_size=n), placement)
            if row.collective == "reduce_scatter"
        ]
        for n in (4, 32)
    ]
    assert traffic[0] == traffic[1]


def test_evenly_sharded_70b_moves_the_gigabytes_that_are_quoted():
    """bf16 parameters: 140 GB gathered forward, 140 backward."""
    placement = Placement(dp=64)
    model = preset("llama2-70b")
    config = run(placement, train__precision="bf16", train__global_batch_size=128)
    config = config.model_copy(update={"model": model})
    gathered = sum(
        row.calls * row.bytes
        for row in rows_of(config, placement)
        if row.collective == "all_gather"
    )
    assert gathered == 2 * 2 * parameter_count(model)


# ------------------------------------------------------------------------------------------------
# Parameters


def preset(name: str) -> ModelConfig:
    shape = dict(PRESETS[name])
    shape.setdefault("num_kv_heads", shape["num_heads"])
    shape.setdefault("head_dim", shape["hidden_size"] // shape["num_heads"])
    return ModelConfig(make_vocab_size_divisible_by=1, **shape)


@pytest.mark.parametrize("name", PRESETS)
def test_local_parameters_of_one_rank_are_the_models(name):
    model = preset(name)
    share = ModelShare(model, tp=1, tp_rank=0, sequence_parallel=False)
    units = [*[share.layer()] * model.num_layers, share.ends(is_first=True, is_last=True)]
    assert sum(p.gathered(1) for unit in units for p in unit) == parameter_count(model)
