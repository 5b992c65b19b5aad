"""Two checkpoints are compared value by value in global coordinates, whatever grids cut them."""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path

import pytest
import torch

from megagrid.checkpoint import Entry, save
from megagrid.checkpoint.diff import Comparison, compare, model_order, report
from megagrid.checkpoint.manifest import read_manifest
from megagrid.checkpoint.reader import TensorReader
from megagrid.errors import CheckpointError
from megagrid.nn.layout import Box
from tests.checkpoint.cuts import GridShape, random_cut, rank_states, slices_of

GRIDS = (
    GridShape(),
    GridShape(tp=4, pp=2),
    GridShape(dp=3),
    GridShape(tp=2, pp=2, dp=2, shards=False),
)

NAN = float("nan")


def save_grid(folder: Path, grid: GridShape, **settings) -> Path:
    """The model of tests/checkpoint/cuts.py, as `grid` cuts it."""
    states = rank_states(grid)
    for state in states:
        state.fill()
    return save(folder, [e for state in states for e in state.entries], {"step": 1}, **settings)


def save_tensors(
    folder: Path, tensors: dict[str, torch.Tensor], state: dict | None = None, config: str = ""
) -> Path:
    """`tensors`, each cut at random."""
    rng = random.Random(str(folder))
    entries = [
        Entry(name, tuple(whole.shape), box, whole[slices_of(box)], True)
        for name, whole in tensors.items()
        for box in random_cut(rng, Box((0,) * whole.dim(), tuple(whole.shape)), 2)
    ]
    return save(folder, entries, state or {"step": 1}, config=config)


def compared(a: Path, b: Path, **settings) -> Comparison:
    return compare(*(TensorReader(path, read_manifest(path)) for path in (a, b)), **settings)


def compared_tensors(
    folder: Path, a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], **settings
) -> Comparison:
    return compared(save_tensors(folder / "a", a), save_tensors(folder / "b", b), **settings)


@pytest.mark.parametrize(
    ("a", "b"), [(a, b) for a, b in product(GRIDS, GRIDS) if str(a) < str(b)], ids=str
)
def test_a_model_is_equal_to_itself_on_any_other_grid(
    a: GridShape, b: GridShape, tmp_path: Path
) -> None:
    found = compared(save_grid(tmp_path / "a", a), save_grid(tmp_path / "b", b))
    assert found.is_equal
    assert (found.num_weights, found.num_states) == (11, 22)
    assert list(report(found, 10))[-1] == "A and B are equal"


def test_one_value_of_one_rank_is_found_by_its_global_index(tmp_path: Path) -> None:
    a = save_grid(tmp_path / "a", GridShape(dp=3))
    states = rank_states(GridShape(tp=4, pp=2))
    for state in states:
        state.fill()
    boxes = [entry for state in states for entry in state.entries]
    changed = [e for e in boxes if e.name == "layers.1.wk.weight" and e.box.offsets == (2, 0)]
    for entry in changed:
        entry.tensor[1, 5] *= 2
    found = compared(a, save(tmp_path / "b", boxes, {"step": 1}))
    assert [each.name for each in found.weights] == ["layers.1.wk.weight"] and not found.states
    values = found.weights[0].values
    one, other = values.values
    assert (values.count, values.of, values.index) == (1, 32, (3, 5))
    assert other == 2 * one and values.largest == one and values.relative == 0.5


@pytest.mark.parametrize("slab", [1, 3, 1 << 19])
def test_how_values_differ_doesnt_depend_on_how_they_are_read(
    slab: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megagrid.checkpoint.diff.SLAB", slab)
    a = torch.arange(1.0, 25).reshape(6, 4)
    b = a.clone()
    b[1, 2], b[4, 0], b[5, 3] = 7.5, 17.5, -24.0
    (difference,) = compared_tensors(tmp_path, {"w": a}, {"w": b}).weights
    values = difference.values
    assert (values.count, values.of, values.index, values.values) == (3, 24, (1, 2), (7.0, 7.5))
    assert (values.largest, values.relative) == (48.0, 2.0)


@pytest.mark.parametrize(
    ("a", "b", "largest"),
    [
        (NAN, NAN, None),
        (float("inf"), float("inf"), None),
        (NAN, 1.0, float("inf")),
        (float("inf"), -float("inf"), float("inf")),
        (0.0, -0.0, 0.0),
        (1.0, 1.0 + 2**-23, 2.0**-23),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_values_are_compared_by_their_bits(
    a: float, b: float, largest: float | None, dtype: torch.dtype, tmp_path: Path
) -> None:
    found = compared_tensors(
        tmp_path, *({"w": torch.tensor([1.0, x], dtype=dtype)} for x in (a, b))
    )
    if largest is None:
        assert found.is_equal
    else:
        (difference,) = found.weights
        assert difference.values.index == (1,) and difference.values.largest == largest


def test_two_kinds_of_nan_differ_bit_by_bit_but_by_no_tolerance(tmp_path: Path) -> None:
    a, b = (torch.tensor([bits], dtype=torch.int32).view(torch.float32) for bits in (-1, -2))
    (difference,) = compared_tensors(tmp_path / "1", {"w": a}, {"w": b}).weights
    assert difference.values.largest == 0.0
    assert compared_tensors(tmp_path / "2", {"w": a}, {"w": b}, tolerance=1e-9).is_equal


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64, torch.uint8])
def test_values_of_every_dtype_are_told(dtype: torch.dtype, tmp_path: Path) -> None:
    a, b = (torch.tensor([[3, 5], [7, x]]).to(dtype) for x in (9, 11))
    (difference,) = compared_tensors(tmp_path, {"w": a}, {"w": b}).weights
    assert difference.values.index == (1, 1) and difference.values.values == (9.0, 11.0)


def test_a_number_without_dims_is_compared(tmp_path: Path) -> None:
    (difference,) = compared_tensors(
        tmp_path, {"w": torch.tensor(1.0)}, {"w": torch.tensor(2.0)}
    ).weights
    assert difference.values.index == () and difference.values.of == 1


def test_a_tolerance_is_relative_to_the_largest_of_the_tensor(tmp_path: Path) -> None:
    a = torch.tensor([100.0, 1.0, 1e-9])
    b = a + torch.tensor([0.0, 1e-2, 1e-4])
    for tolerance, count in ((0.0, 2), (1e-7, 2), (5e-6, 1), (2e-4, 0)):
        folder = tmp_path / str(tolerance)
        found = compared_tensors(folder, {"w": a}, {"w": b}, tolerance=tolerance)
        assert sum(each.values.count for each in found.weights) == count, tolerance
    end = "A and B are equal, to within 0.0002 of each tensor's largest value"
    assert list(report(found, 10))[-1] == end


def test_what_one_lacks_or_has_in_another_shape_or_dtype_is_named(tmp_path: Path) -> None:
    ones = torch.ones(2, 3)
    found = compared_tensors(
        tmp_path,
        {"head.weight": ones, "norm.weight": torch.ones(4), "embedding.weight": ones},
        {"head.weight": ones.bfloat16(), "norm.weight": torch.ones(5), "other": ones},
    )
    facts = {each.name: each.facts for each in found.weights}
    assert facts == {
        "embedding.weight": ("only in A",),
        "norm.weight": ("4 in A, 5 in B",),
        "head.weight": ("float32 in A, bfloat16 in B",),
        "other": ("only in B",),
    }
    assert list(facts) == ["embedding.weight", "norm.weight", "head.weight", "other"]


def test_of_two_dtypes_the_numbers_are_compared(tmp_path: Path) -> None:
    a = torch.tensor([1.0, NAN, 1 + 2**-10])
    (difference,) = compared_tensors(tmp_path, {"w": a}, {"w": a.bfloat16()}).weights
    assert difference.values.count == 1 and difference.values.index == (2,)


def test_weights_come_in_the_order_of_the_model() -> None:
    names = [
        "embedding.weight",
        "position_embedding.weight",
        "layers.2.attention_norm.weight",
        "layers.2.attention.wq.weight",
        "layers.2.attention.wq.bias",
        "layers.2.attention.wo.weight",
        "layers.2.mlp.gate.weight",
        "layers.2.mlp.down.weight",
        "layers.10.attention_norm.weight",
        "norm.weight",
        "head.weight",
        "adapter.weight",
        "optimizer.exp_avg.embedding.weight",
        "optimizer.exp_avg_sq.embedding.weight",
        "optimizer.exp_avg.layers.2.mlp.gate.weight",
        "optimizer.exp_avg.layers.10.mlp.gate.weight",
    ]
    shuffled = random.Random(0).sample(names, len(names))
    assert sorted(shuffled, key=model_order) == names


def test_states_and_recipes_are_compared_key_by_key(tmp_path: Path) -> None:
    tensors = {"w": torch.ones(2), "optimizer.exp_avg.w": torch.ones(2)}
    other = tensors | {"optimizer.exp_avg.w": torch.zeros(2)}
    a = save_tensors(
        tmp_path / "a",
        tensors,
        {"step": 4, "progress": {"step": 4, "samples": 8}},
        '[optimizer]\nlr = 0.1\n[parallel]\n"x.y" = [1]\n',
    )
    b = save_tensors(
        tmp_path / "b",
        other,
        {"step": 5, "progress": {"step": 5, "samples": 8}, "new": None},
        "[optimizer]\nlr = 0.2\n",
    )
    found = compared(a, b)
    assert [(each.key, each.a, each.b) for each in found.trainer] == [
        ("step", "4", "5"),
        ("progress.step", "4", "5"),
        ("new", "", "null"),
    ]
    assert [(each.key, each.a, each.b) for each in found.config] == [
        ("optimizer.lr", "0.1", "0.2"),
        ("parallel.x.y", "[1]", ""),
    ]
    assert not found.is_equal
    assert compared(a, b, weights_only=True) == Comparison(weights_only=True, num_weights=1)


def test_recipes_alone_make_no_difference(tmp_path: Path) -> None:
    tensors = {"w": torch.ones(2)}
    a = save_tensors(tmp_path / "a", tensors, config="[parallel]\ntp = 1\n")
    b = save_tensors(tmp_path / "b", tensors, config="[parallel]\ntp = 2\n")
    found = compared(a, b)
    assert found.config and found.is_equal


@pytest.mark.parametrize("name", ["trainer.json", "config.toml"])
def test_a_damaged_state_or_recipe_is_told(name: str, tmp_path: Path) -> None:
    a, b = (save_tensors(tmp_path / x, {"w": torch.ones(2)}, config="[a]\n") for x in "ab")
    content = (b / name).read_bytes()
    (b / name).write_bytes(content[:-1] + b"?")
    with pytest.raises(CheckpointError, match=f"is damaged: {name} has checksum"):
        compared(a, b)
