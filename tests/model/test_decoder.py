"""The decoder against transformers' Llama and GPT-2, and stages against the whole."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from megagrid.config.presets import PRESETS, parameter_count
from megagrid.config.schema import ModelConfig
from megagrid.grid.grid import Axis
from megagrid.model.decoder import DecoderStage, ModelAxes, StageShare
from megagrid.model.zoo import build_stage
from megagrid.nn.dropout import DropoutStreams
from megagrid.nn.init import initialise
from megagrid.nn.layout import parameter_shards
from megagrid.nn.loss import IGNORE
from tests.model.oracle import loss_of, oracle

ALONE = ModelAxes(*(Axis.single(name) for name in ("tp", "kv", "embedding", "cp")))
B, S = 3, 20


def model(family: str = "llama", **keys) -> ModelConfig:
    """5 layers, whose initial weights are large enough for attention to be far from uniform."""
    shape = {
        "family": family,
        "num_layers": 5,
        "hidden_size": 32,
        "ffn_hidden_size": 64,
        "num_heads": 8,
        "num_kv_heads": 2 if family == "llama" else 8,
        "head_dim": 4,
        "vocab_size": 61,
        "max_seq_length": 32,
        "init_std": 0.15,
        "make_vocab_size_divisible_by": 8,
    }
    return ModelConfig(**shape | keys)


def stage(
    config: ModelConfig, share: StageShare | None = None, dtype: torch.dtype = torch.float64
) -> DecoderStage:
    """One rank's `share` of the model (the whole of it) with weights that no constant hides."""
    share = share or StageShare(range(config.num_layers), is_first=True, is_last=True)
    built = build_stage(config, share, ALONE).to(dtype)
    shards = parameter_shards(built)
    initialise(shards, seed=1)
    for shard in shards:
        # Norms begin at one and biases at zero, where a swap of two of them would go unseen.
        for piece, rows in shard.boxes:
            if piece.init.std is None:
                generator = torch.Generator().manual_seed(sum(piece.name.encode()))
                shard.tensor[rows] += 0.2 * torch.randn(piece.box.sizes, generator=generator)
    return built


def whole_tensors(built: DecoderStage, *, gradients: bool = False) -> dict[str, Tensor]:
    """Weights, or gradients, by global name; one rank holds them whole."""
    return {
        piece.name: (shard.grad if gradients else shard.tensor)[rows]
        for shard in parameter_shards(built)
        for piece, rows in shard.boxes
    }


def batch(config: ModelConfig) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (B, S + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[0, :7] = labels[2, 3] = IGNORE
    return tokens[:, :-1], labels


LLAMA31 = {
    "rope_scaling": "llama3",
    "rope_scaling_factor": 4.0,
    "rope_low_freq_factor": 1.0,
    "rope_high_freq_factor": 2.0,
    "rope_original_max_seq_length": 8,
}
"""Turns of the four planes of a head of 8 in 8 positions: 1.27, 0.13, 0.01, 0.001. The first is
blended, the others are slow."""

YARN = {
    "rope_scaling": "yarn",
    "rope_scaling_factor": 4.0,
    "rope_low_freq_factor": 0.01,
    "rope_high_freq_factor": 1.0,
    "rope_original_max_seq_length": 8,
    "rope_attention_factor": 1.3,
}

MODELS = {
    "llama": model(),
    "llama tied": model(tied_embeddings=True),
    "llama mha": model(num_kv_heads=8),
    "llama mqa": model(num_kv_heads=1),
    "llama theta": model(rope_theta=500000.0),
    "llama wide heads": model(head_dim=6),
    "llama eps": model(norm_eps=0.1),
    "llama linear": model(rope_scaling="linear", rope_scaling_factor=4.0),
    "llama 3.1": model(head_dim=8, **LLAMA31),
    "llama yarn": model(head_dim=8, **YARN),
    "qwen2": model(qkv_bias=True),
    "qwen2 mqa tied": model(qkv_bias=True, num_kv_heads=1, tied_embeddings=True),
    "qwen3": model(qk_norm=True),
    "qwen3 wide heads": model(qk_norm=True, head_dim=6, norm_eps=0.1),
    "gpt": model("gpt"),
    "gpt tied": model("gpt", tied_embeddings=True),
    "gpt eps": model("gpt", norm_eps=0.1),
}

ORACLE_GRADIENT = {"llama": 2e-5, "gpt": 1e-10}
"""Relative to a tensor's largest. Both run in float64, but transformers computes rotary angles in
float32: at position 20 they are off by 20 u = 1e-6, a change that ten rotations a path add up."""


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(name):
    config = MODELS[name]
    built = stage(config)
    tokens, labels = batch(config)
    theirs, _ = loss_of(oracle(config, whole_tensors(built)), tokens, labels)
    in_float32 = stage(config, dtype=torch.float32)
    logits = in_float32(tokens).transpose(0, 1)[..., : config.vocab_size]
    assert (logits - theirs).abs().max() <= 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_every_gradient_equal_transformers(name):
    config = MODELS[name]
    built = stage(config)
    tokens, labels = batch(config)
    other = oracle(config, whole_tensors(built))
    _, expected = loss_of(other, tokens, labels)
    expected.backward()
    loss, _ = built(tokens, labels=labels)
    loss.backward()
    tolerance = ORACLE_GRADIENT[config.family]
    assert loss.item() == pytest.approx(expected.item(), rel=tolerance)
    # Their gradients by our names: load ours as weights, and the two must be equal.
    ours = dict(oracle(config, whole_tensors(built, gradients=True)).named_parameters())
    for key, parameter in other.named_parameters():
        difference = (ours[key] - parameter.grad).abs().max()
        assert difference <= tolerance * parameter.grad.abs().max() + 1e-12, key


# ------------------------------------------------------------------------------------------------
# Stages


def stages(config: ModelConfig, counts: tuple[int, ...]) -> list[DecoderStage]:
    ends = [sum(counts[:n]) for n in range(len(counts) + 1)]
    return [
        stage(config, StageShare(range(first, last), number == 0, number == len(counts) - 1))
        for number, (first, last) in enumerate(pairwise(ends))
    ]


@pytest.mark.parametrize("counts", [(3, 2), (2, 1, 1, 1), (0, 5), (5, 0), (2, 0, 3)], ids=str)
@pytest.mark.parametrize(
    "config", [model(), model("gpt", dropout=0.3, attention_dropout=0.2)], ids=["llama", "gpt"]
)
def test_stages_in_a_row_compute_the_whole_model_bit_by_bit(config, counts):
    tokens, labels = batch(config)
    streams = DropoutStreams(1, 2, torch.arange(B))
    whole = stage(config)
    expected = whole(tokens, labels=labels, streams=streams)
    expected.sum().backward()
    cut = stages(config, counts)
    x = tokens
    for part in cut:
        x = part(x, labels=labels if part.share.is_last else None, streams=streams)
        if not part.share.is_last:
            assert x.shape == part.hidden_shape(B, S)
    x.sum().backward()
    assert torch.equal(x, expected)
    found = {name: g for part in cut for name, g in whole_tensors(part, gradients=True).items()}
    gradients = whole_tensors(whole, gradients=True)
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert torch.equal(found[name], gradient), name


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_stages_have_the_names_of_the_whole_each_once(family, tied):
    config = model(family, tied_embeddings=tied)
    names = [name for part in stages(config, (2, 1, 2)) for name in whole_tensors(part)]
    expected = list(whole_tensors(stage(config)))
    # A tied table lies on both ends under one name.
    both_ends = ["embedding.weight"] if tied else []
    assert sorted(names) == sorted(expected + both_ends)


# ------------------------------------------------------------------------------------------------
# The zoo


def preset(name: str) -> ModelConfig:
    shape = dict(PRESETS[name])
    shape.setdefault("num_kv_heads", shape["num_heads"])
    shape.setdefault("head_dim", shape["hidden_size"] // shape["num_heads"])
    return ModelConfig(**shape)


@pytest.mark.parametrize("name", PRESETS)
def test_built_model_has_the_counted_parameters(name):
    """Biases, norms and a tied head included; boxes have no padding."""
    config = preset(name)
    share = StageShare(range(config.num_layers), is_first=True, is_last=True)
    with torch.device("meta"):
        built = build_stage(config, share, ALONE)
    boxes = [piece.box for shard in parameter_shards(built) for piece, _ in shard.boxes]
    assert sum(box.numel for box in boxes) == parameter_count(config)
    trained = {id(p) for shard in parameter_shards(built) for p in [shard.parameter]}
    assert trained == {id(p) for p in built.parameters()}, "a parameter states no layout"


@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_norms_and_biases_alone_are_not_decayed(family):
    shards = parameter_shards(stage(model(family)))
    undecayed = {shard.name for shard in shards if not shard.decay}
    assert undecayed == {
        shard.name for shard in shards if "norm" in shard.name or shard.name.endswith("bias")
    }


def test_residual_projections_begin_smaller():
    """By sqrt(2 L), so that the sum of 2 L branches keeps its variance."""
    config = preset("tiny-llama")
    share = StageShare(range(1), is_first=True, is_last=False)
    with torch.device("meta"):
        built = build_stage(config, share, ALONE)
    std = {
        piece.name.rpartition(".")[0].rpartition(".")[2]: piece.init.std
        for shard in parameter_shards(built)
        for piece, _ in shard.boxes
    }
    scaled = config.init_std / (2 * config.num_layers) ** 0.5
    assert {name for name, value in std.items() if value == scaled} == {"wo", "down"}
    assert {name for name, value in std.items() if value == config.init_std} == {
        "embedding",
        "wq",
        "wk",
        "wv",
        "gate",
        "up",
    }


# ------------------------------------------------------------------------------------------------
# Documents


@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_what_comes_of_a_document_depends_on_no_other(family):
    """Row D14: its loss, and the gradients that it has."""
    whole = stage(model(family))
    documents = torch.tensor([[0] * 7 + [1] * 13]).expand(B, S)
    positions = torch.tensor([[*range(7), *range(13)]]).expand(B, S)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 61, (B, S), generator=generator)
    others = tokens.clone()
    others[:, :7] = torch.randint(0, 61, (B, 7), generator=generator)
    labels = tokens.roll(-1, dims=1)
    labels[:, :7] = IGNORE

    def learnt(
        ids: Tensor, labels: Tensor = labels, **where: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        whole.zero_grad()
        loss, _ = whole(ids, labels, **where)
        loss.backward()
        return loss.detach(), [p.grad for p in whole.layers.parameters()]

    masked = {"documents": documents, "positions": positions}
    loss, gradients = learnt(tokens, **masked)
    changed_loss, changed = learnt(others, **masked)
    assert torch.equal(loss, changed_loss)
    assert all(map(torch.equal, gradients, changed))
    # As if it were alone.
    alone, of_alone = learnt(tokens[:, 7:], labels[:, 7:])
    torch.testing.assert_close(loss, alone, rtol=1e-12, atol=0.0)
    for found, right in zip(gradients, of_alone, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-12)
    # Positions alone don't keep documents apart (nanoVLM #204).
    leaking, _ = learnt(tokens, positions=positions)
    assert not torch.equal(leaking, learnt(others, positions=positions)[0])
