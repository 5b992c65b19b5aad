from __future__ import annotations

import pytest
from pydantic import ValidationError

from megagrid.config.load import load
from megagrid.config.presets import PRESETS
from megagrid.config.rules import check
from megagrid.config.suggest import ELSEWHERE, KEYS
from megagrid.errors import ConfigError, MegagridError
from tests.config import recipe

VALUES = [
    "none", "true", "True", "-1", "0", "1", "2.5", "1e999", "nan", "-inf", "[]", "[[1]]", "[true]",
    "[nan]", '[1,"a"]', "[1e308,1e308]", "{}", "{a=1}", '"x"', "x", "é", '"', "#x", "=", "'''",
    "1979-05-27", "9" * 18, "9" * 400, "9223372036854775807", "1e308", "1e-400", "1\nb=2",
]  # fmt: skip


@pytest.fixture
def path(tmp_path):
    return recipe.write(tmp_path)


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("optimizer.lr=1e-4", 0.0001),
        ("optimizer.lr=1", 1.0),
        ("optimizer.weight_decay=0", 0.0),
        ("train.seed=7", 7),
        ("train.global_batch_size=1_6", 16),
        ("parallel.sequence_parallel=true", True),
        ("parallel.pipeline_schedule=GPipe", "GPipe"),
        ('parallel.pipeline_schedule="GPipe"', "GPipe"),
        ("parallel.layers_per_stage=[4]", [4]),
        ("logging.peak_tflops=none", None),
        ("train.steps=none", None),
        ("memory.recompute=none", "none"),
        ("model.rope_scaling=none", "none"),
        ('data.paths=["a", "b"]', ["a", "b"]),
        ("logging.run_dir=2024", "2024"),
        ("logging.wandb_name=2024-11-30", "2024-11-30"),
        ("logging.wandb_name=a=b", "a=b"),
        ('logging.wandb_name="none"', "none"),
        ('logging.wandb_name=""', ""),
        ("checkpoint.resume=latest", "latest"),
    ],
)
def test_an_override_is_read_as_toml_or_else_as_text(path, override, value):
    section, key = override.partition("=")[0].split(".")
    found = getattr(getattr(load(path, [override]), section), key)
    assert found == value
    assert type(found) is type(value)


def test_a_recipe_reads_1e_minus_4_as_a_number(tmp_path):
    path = recipe.write(tmp_path, recipe.TEXT.replace("lr = 1e-3", "lr = 1e-4"))
    assert load(path).optimizer.lr == 0.0001


def test_an_override_wins_over_the_recipe_and_the_recipe_over_the_preset(tmp_path):
    text = recipe.TEXT.replace("[model]", '[model]\npreset = "llama3-8b"')
    model = load(recipe.write(tmp_path, text), ["model.vocab_size=99"]).model
    assert (model.vocab_size, model.num_layers) == (99, 4)
    assert model.rope_theta == PRESETS["llama3-8b"]["rope_theta"]


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_a_whole_model(tmp_path, preset):
    text = f'[model]\npreset = "{preset}"\n' + recipe.TEXT[recipe.TEXT.index("[parallel]") :]
    config = load(recipe.write(tmp_path, text))
    check(config, world_size=1)
    model = config.model
    assert model.head_dim == PRESETS[preset].get("head_dim", model.hidden_size // model.num_heads)


def test_key_value_heads_and_head_dim_follow_from_heads(tmp_path):
    text = recipe.TEXT.replace("num_kv_heads = 2\n", "")
    model = load(recipe.write(tmp_path, text)).model
    assert (model.num_kv_heads, model.head_dim) == (8, 4)


def test_a_stated_head_dim_stands(path):
    assert load(path, ["model.head_dim=16", "model.num_heads=6"]).model.head_dim == 16


def test_a_recipe_may_have_a_byte_order_mark_and_windows_lines(tmp_path):
    path = tmp_path / "windows.toml"
    path.write_bytes(b"\xef\xbb\xbf" + recipe.TEXT.replace("\n", "\r\n").encode())
    assert load(path).model.num_layers == 4


def test_a_config_is_frozen(path):
    config = load(path)
    with pytest.raises(ValidationError, match="frozen"):
        config.train.steps = 9


def test_total_steps_cover_the_token_budget(path):
    steps = [
        load(path, ["train.steps=none", f"train.tokens={tokens}"]).train.total_steps
        for tokens in (1, 256, 257, 2560)
    ]
    assert steps == [1, 1, 2, 10]


def test_other_trainers_names_lead_to_keys_that_exist():
    for name, home in ELSEWHERE.items():
        section, key = home.split(".")
        assert key in KEYS[section], home
        assert all(name not in keys for keys in KEYS.values()), f"{name} is a key itself"


@pytest.mark.parametrize("section", KEYS)
def test_no_value_of_any_key_gets_more_than_one_line(path, section):
    for key in KEYS[section]:
        for value in VALUES:
            try:
                check(load(path, [f"{section}.{key}={value}"]))
            except MegagridError as error:
                assert "\n" not in str(error)
                assert key in str(error)


@pytest.mark.parametrize("section", KEYS)
def test_every_misspelt_key_is_refused_with_the_right_one(path, section):
    for key in KEYS[section]:
        for wrong in (key.replace("_", "-"), key.upper(), key + "s", key[0] + key):
            if wrong == key or wrong in KEYS[section]:
                continue
            with pytest.raises(ConfigError, match=rf"{section}\.{key}\b"):
                load(path, [f"{section}.{wrong}=1"])
