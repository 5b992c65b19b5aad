"""Imports go one way, planning needs no torch, and one module reads the environment."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

LAYERS = (
    # Lowest first. A module belongs to the longest name that it starts with, and may import its
    # own layer and those below.
    ("errors", "terminal", "exit_codes"),
    ("config", "grid.nodelist", "grid.slurm", "grid.topology", "grid.placement", "data"),
    ("grid.bootstrap",),
    ("plan.parameters", "plan.matrices"),
    ("pipeline.schedules", "pipeline.partition", "pipeline.program"),
    ("plan",),
    ("grid",),
    ("comm",),
    ("nn",),
    ("model",),
    ("pipeline", "data_parallel", "optim", "checkpoint"),
    ("hf",),
    ("health",),
    ("launcher",),
    ("jobs",),
    ("train",),
    ("dryrun",),
    ("cli", "__main__"),
)

TORCH_FREE = ("errors", "terminal", "exit_codes", "config", "data", "plan")
TORCH_FREE += ("pipeline.schedules", "cli")
TORCH_FREE += (
    "pipeline.partition",
    "pipeline.program",
    "grid.nodelist",
    "grid.slurm",
    "grid.topology",
    "grid.placement",
    "grid.bootstrap",
)
TORCH_FREE += ("jobs",)
TORCH_FREE += ("train.command", "train.stopping", "train.trace")
TORCH_FREE += ("health.beat", "health.heart", "health.verdict", "health.watch", "train.heartbeat")
TORCH_FREE += ("health.stragglers", "train.status", "train.status_command")
TORCH_FREE += tuple(f"launcher.{n}" for n in ("launch", "nodes", "relaunch", "rounds", "watch"))
TORCH_FREE += ("train.report_command", "dryrun.command")
TORCH_FREE += ("train.report_command", "train.compare_command", "train.compare")
TORCH_FREE += ("grid.command", "hf.families", "hf.config", "hf.checks", "hf.carried", "hf.recipe")
TORCH_FREE += tuple(
    f"checkpoint.{name}" for name in ("command", "diff", "files", "folders", "manifest", "reader")
)
"""Import no torch, themselves or through others: planning is instant, and a mistake in a recipe is
told at once."""

NARROW = {
    "data": ("errors", "terminal", "config", "data"),
    "comm": ("errors", "terminal", "grid", "comm"),
    "nn": ("errors", "terminal", "grid", "comm", "nn"),
}
"""Packages that may import less than their layer: a layer of the network is given an axis and
numbers, never the recipe."""

READS_ENVIRONMENT = "grid.bootstrap"


@cache
def modules() -> dict[str, Path]:
    """Every module of the package: name without the leading "megagrid." -> file."""
    found = {}
    for path in sorted((ROOT / "megagrid").rglob("*.py")):
        parts = path.relative_to(ROOT / "megagrid").with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name:
            found[name] = path
    return found


@cache
def syntax(name: str) -> ast.Module:
    return ast.parse(modules()[name].read_text())


def is_command(name: str) -> bool:
    """Modules behind a verb of the command line: part of it, though they lie with their subject."""
    return name.split(".")[-1].endswith("command")


def starts_with(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def layer(name: str) -> int:
    if is_command(name):
        return len(LAYERS) - 1
    prefixes = [(p, i) for i, row in enumerate(LAYERS) for p in row if starts_with(name, p)]
    assert prefixes, f"megagrid.{name} has no place in LAYERS"
    return max(prefixes, key=lambda row: len(row[0]))[1]


def imports(name: str) -> Iterator[str]:
    """Modules of the package that `name` imports anywhere in its file, without "megagrid."."""
    for node in ast.walk(syntax(name)):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"megagrid.{name} has a relative import in line {node.lineno}"
            # `from megagrid.grid import bootstrap` means the module, if there is one.
            targets = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for target in targets:
            target = target.removeprefix("megagrid.")
            while target and target not in modules():
                target = target.rpartition(".")[0]
            if target:
                yield target


@pytest.mark.parametrize("name", modules())
def test_a_module_imports_only_its_layer_and_those_below(name):
    above = [target for target in imports(name) if layer(target) > layer(name)]
    assert not above, f"megagrid.{name} imports {above}, which build on it"


@pytest.mark.parametrize("package", NARROW)
def test_data_comm_and_nn_import_even_less(package):
    for name in modules():
        if starts_with(name, package) and not is_command(name):
            for target in imports(name):
                assert any(starts_with(target, allowed) for allowed in NARROW[package]), (
                    f"megagrid.{name} imports megagrid.{target}"
                )


def test_no_two_packages_import_each_other():
    edges = {
        (name.split(".")[0], target.split(".")[0])
        for name in modules()
        for target in imports(name)
        # Pure modules are layers of their own, though they lie in a package with others.
        if layer(name) == layer(target) and not is_command(name)
    }
    assert not [(a, b) for a, b in edges if a < b and (b, a) in edges]


def test_planning_data_and_starting_a_run_need_no_torch():
    pure = [name for name in modules() if any(starts_with(name, prefix) for prefix in TORCH_FREE)]
    program = """
import importlib, sys
sys.modules["torch"] = None  # importing it raises ImportError
for name in sys.argv[1:]:
    try:
        importlib.import_module("megagrid." + name)
    except ImportError as error:
        print(f"megagrid.{name}: {error}")
"""
    ran = subprocess.run(
        [sys.executable, "-c", program, *pure], cwd=ROOT, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == ""


def test_only_bootstrap_reads_the_environment():
    readers = []
    for name in modules():
        for node in ast.walk(syntax(name)):
            word = getattr(node, "attr", None) or getattr(node, "name", None)
            if word in ("environ", "environb", "getenv", "getenvb"):
                readers.append(f"megagrid.{name} line {node.lineno}")
    readers = [r for r in readers if not r.startswith(f"megagrid.{READS_ENVIRONMENT} ")]
    assert not readers


def test_importing_the_package_changes_nothing():
    """Statements at the top of a module define; they don't act."""
    defines = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
    for name in modules():
        for node in syntax(name).body:
            docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            # `if TYPE_CHECKING:` and `if __name__ == "__main__":`
            guard = isinstance(node, ast.If) and (
                "TYPE_CHECKING" in ast.unparse(node.test) or "__name__" in ast.unparse(node.test)
            )
            assert isinstance(node, defines) or docstring or guard, (
                f"megagrid.{name} line {node.lineno} acts when imported: {ast.unparse(node)}"
            )


def test_transformers_is_an_oracle_of_the_tests_alone():
    """Models are converted without it: it is no dependency of a run."""
    for name in modules():
        for node in ast.walk(syntax(name)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module]
            roots = {imported.partition(".")[0] for imported in names}
            assert "transformers" not in roots, f"megagrid.{name} line {node.lineno}"
