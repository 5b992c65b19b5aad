from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from megagrid.config.dump import dump, toml_value
from megagrid.config.load import load
from megagrid.config.rules import check
from tests.config import recipe

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))
GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_resolves_to_its_golden_dump(path):
    """A default that changes shows here, as a difference to review.

    Written by: megagrid train recipes/NAME.toml --show-config > tests/config/golden/NAME.toml
    """
    assert dump(load(path)) == (GOLDEN / path.name).read_text(encoding="utf-8")


def test_every_golden_dump_has_its_recipe():
    assert [path.name for path in RECIPES] == sorted(path.name for path in GOLDEN.glob("*.toml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_obeys_every_rule(path):
    check(load(path))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_dump_loads_to_the_same_config(tmp_path, path):
    config = load(path)
    assert load(recipe.write(tmp_path, dump(config))) == config


@pytest.mark.parametrize(
    "text", ["", 'a "quoted" word', "C:\\runs", "tab\tnew\nline", "bell\x07 del\x7f", "größe 模型"]
)
def test_any_text_survives_the_dump(tmp_path, text):
    config = load(recipe.write(tmp_path), [f"logging.wandb_name={toml_value(text)}"])
    assert config.logging.wandb_name == text
    assert load(recipe.write(tmp_path, dump(config))) == config


@pytest.mark.parametrize("number", [3e-4, 1e-300, 1e16, 1e22, 0.1 + 0.2, 5e-324])
def test_any_number_survives_the_dump(number):
    assert tomllib.loads(f"x = {toml_value(number)}")["x"] == number


def test_a_dump_names_the_keys_without_a_value(tmp_path):
    assert "# tokens = none\n" in dump(load(recipe.write(tmp_path)))
