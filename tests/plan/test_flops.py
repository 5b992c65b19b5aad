"""FLOPs against the formulas and the measurements that were published."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megagrid.config.schema import ModelConfig
from megagrid.plan.flops import (
    RECOMPUTED_PARTS,
    head_forward_flops,
    layer_forward_flops,
    token_flops,
    utilisation,
)


def gpt(layers: int, hidden: int, heads: int, vocab: int = 51200) -> ModelConfig:
    return ModelConfig(
        family="gpt",
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=4 * hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        vocab_size=vocab,
        max_seq_length=2048,
    )


LLAMA2_7B = ModelConfig(
    num_layers=32,
    hidden_size=4096,
    ffn_hidden_size=11008,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    vocab_size=32000,
    max_seq_length=4096,
)
LLAMA3_8B = LLAMA2_7B.model_copy(
    update={"ffn_hidden_size": 14336, "num_kv_heads": 8, "vocab_size": 128256}
)


def with_a_second_forward(model: ModelConfig, s: int) -> int:
    """FLOPs per token where backward runs all layers again, to their ends: what the formulas of
    full recomputation count."""
    flops = token_flops(model, s)
    return flops.model + flops.forward - head_forward_flops(model)


@given(
    layers=st.integers(1, 128),
    head_dim=st.integers(1, 256),
    heads=st.integers(1, 128),
    vocab=st.integers(1, 200_000),
    s=st.integers(1, 8192),
    batch=st.integers(1, 4096),
)
def test_gpt_with_full_recompute_is_megatrons_formula(layers, head_dim, heads, vocab, s, batch):
    """96 B s l h^2 (1 + s/6h + V/16lh), arXiv 2104.04473, equation 3."""
    h = heads * head_dim
    flops = with_a_second_forward(gpt(layers, h, heads, vocab), s) * batch * s
    # The formula times its denominators, so that the comparison is exact.
    assert flops == 96 * batch * s * layers * h**2 + 16 * batch * s**2 * layers * h + (
        6 * batch * s * h * vocab
    )


@pytest.mark.parametrize("model", [LLAMA2_7B, LLAMA3_8B, gpt(24, 2304, 24)])
@pytest.mark.parametrize("s", [2048, 4096])
def test_model_flops_are_palms_formula(model, s):
    """6N + 12 L H Q T per token, arXiv 2204.02311, appendix B; N without embedding and norms."""
    per_layer = {
        LLAMA2_7B: 4 * 4096**2 + 3 * 4096 * 11008,
        LLAMA3_8B: 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336,
        gpt(24, 2304, 24): 12 * 2304**2,
    }[model]
    parameters = model.num_layers * per_layer + model.hidden_size * model.vocab_size
    attention = 12 * model.num_layers * model.num_heads * model.head_dim * s
    assert token_flops(model, s).model == 6 * parameters + attention


def test_matrices_are_the_published_parameter_count_without_embedding_and_norms():
    matrices = token_flops(LLAMA2_7B, 0).forward // 2
    assert matrices + 32000 * 4096 + (2 * 32 + 1) * 4096 == 6_738_415_616


def test_backward_is_twice_the_forward_and_layers_and_head_add_up():
    flops = token_flops(LLAMA3_8B, 4096)
    layer = sum(layer_forward_flops(LLAMA3_8B, 4096).values())
    assert flops.forward == 32 * layer + head_forward_flops(LLAMA3_8B)
    assert flops.backward == 2 * flops.forward


def test_causal_attention_counts_each_pair_that_the_mask_leaves():
    s = 7
    pairs = sum(range(1, s + 1))
    full, causal = (
        layer_forward_flops(LLAMA3_8B, s, causal=causal)["attention"] * s
        for causal in (False, True)
    )
    assert (full, causal) == (4 * 4096 * s * s, 4 * 4096 * pairs)


def test_recompute_adds_the_forward_of_its_parts():
    layer = layer_forward_flops(LLAMA3_8B, 4096)
    added = {kind: token_flops(LLAMA3_8B, 4096, recompute=kind) for kind in RECOMPUTED_PARTS}
    assert added["none"].hardware == added["none"].model
    assert added["selective"].recomputed == 32 * layer["attention"]
    assert added["full"].recomputed == 32 * (sum(layer.values()) - layer["down"])
    assert len({flops.model for flops in added.values()}) == 1


@pytest.mark.parametrize(("interval", "layers"), [(1, 32), (2, 16), (3, 11), (40, 1)])
def test_one_of_so_many_layers_is_recomputed(interval, layers):
    layer = layer_forward_flops(LLAMA3_8B, 4096)
    flops = token_flops(LLAMA3_8B, 4096, recompute="full", recompute_interval=interval)
    assert flops.recomputed == layers * (sum(layer.values()) - layer["down"])


@pytest.mark.parametrize(
    ("model", "ranks", "batch", "step_s", "tflops"),
    [
        (gpt(24, 2304, 24), 32, 512, 3.53, 137),
        (gpt(36, 4096, 32), 128, 512, 3.70, 142),
        (gpt(48, 8192, 64), 512, 1536, 14.45, 138),
        (gpt(80, 12288, 96), 1536, 2304, 24.8, 148),
    ],
)
def test_megatrons_table_is_reproduced(model, ranks, batch, step_s, tflops):
    """arXiv 2104.04473, table 1: achieved teraFLOP/s per GPU without decimals, seconds to 0.2 %."""
    flops = with_a_second_forward(model, 2048)
    achieved = utilisation(flops, batch * 2048 / step_s, num_ranks=ranks, peak_flops=1e12)
    assert achieved == pytest.approx(tflops, abs=0.5 + 0.002 * tflops)


@pytest.mark.parametrize(
    ("model", "ranks", "batch", "step_s", "mfu"),
    [(gpt(48, 6144, 64), 8, 4, 1.10, 0.415), (gpt(96, 12288, 96), 64, 64, 13.75, 0.514)],
)
def test_korthikantis_mfu_is_reproduced(model, ranks, batch, step_s, mfu):
    """arXiv 2205.05198, table 5: seconds with two decimals, MFU of an A100 with one."""
    flops = token_flops(model, 2048).model
    measured = utilisation(flops, batch * 2048 / step_s, num_ranks=ranks, peak_flops=312e12)
    assert measured == pytest.approx(mfu, abs=0.0005 + mfu * 0.005 / step_s)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_mfu_counts_all_ranks_against_one_devices_peak(num_ranks):
    flops = token_flops(LLAMA2_7B, 32).model
    mfu = utilisation(flops, 5.0, num_ranks=num_ranks, peak_flops=1e12)
    assert mfu == 5.0 * flops / (num_ranks * 1e12)
