import math

import pytest

from megagrid.config.presets import PRESETS, parameter_count
from megagrid.config.schema import ModelConfig

PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gpt3-175b": 174_604_259_328,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "mistral-7b": 7_248_023_552,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
}
"""Those of the released weights. GPT-3's isn't published to the digit: it is the others' closed
form at the published shape."""


def model_of(preset: str, **stated) -> ModelConfig:
    shape = dict(PRESETS[preset])
    shape.setdefault("num_kv_heads", shape["num_heads"])
    shape.setdefault("head_dim", shape["hidden_size"] // shape["num_heads"])
    return ModelConfig(**shape | stated)


@pytest.mark.parametrize(("preset", "count"), PUBLISHED.items(), ids=PUBLISHED)
def test_parameter_count_equals_the_published_one(preset, count):
    assert parameter_count(model_of(preset)) == count


@pytest.mark.parametrize("preset", PRESETS)
def test_untying_the_head_adds_exactly_one_embedding(preset):
    tied, untied = (model_of(preset, tied_embeddings=tied) for tied in (True, False))
    difference = parameter_count(untied) - parameter_count(tied)
    assert difference == tied.vocab_size * tied.hidden_size


@pytest.mark.parametrize("preset", ["tiny-gpt", "tiny-llama"])
def test_tiny_presets_divide_evenly_by_nothing_that_hides_faults(preset):
    model = model_of(preset)
    assert math.gcd(model.vocab_size, 8) == 1
    assert all(model.num_layers % stages for stages in (2, 4))
    assert model.num_heads == 8
    # Equal to kv * kv, a permutation of heads would go unseen.
    assert model.num_heads != model.num_kv_heads**2


def test_a_preset_states_the_shape_alone():
    training = {"dropout", "attention_dropout", "init_std", "make_vocab_size_divisible_by"}
    assert all(training.isdisjoint(shape) for shape in PRESETS.values())
