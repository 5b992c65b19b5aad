"""The scripts around the package: what they install and how they refuse."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = [
    *("launch/venv.sh", "launch/quickstart.sh", "launch/local.sh", "launch/slurm.sbatch"),
    *("tools/network_hosts.sh", "tools/slurm_cluster.sh", "tests/run.sh", ".ci/run"),
]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def direct_dependencies() -> list[str]:
    """Requirements that setup.py states, the package's and the tests'."""
    lists = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in ast.parse((ROOT / "setup.py").read_text()).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.List)
    }
    return lists["DEPENDENCIES"] + lists["TEST_DEPENDENCIES"]


def pins() -> dict[str, str]:
    lines = (ROOT / "launch/requirements.txt").read_text().splitlines()
    return dict(re.findall(r"^([\w.-]+)==(\S+)", "\n".join(lines), re.MULTILINE))


@pytest.mark.parametrize("requirement", direct_dependencies())
def test_every_dependency_is_pinned_to_a_version_that_setup_allows(requirement):
    packaging = pytest.importorskip("packaging.requirements")  # comes with pytest
    wanted = packaging.Requirement(requirement)
    assert wanted.specifier.contains(pins()[wanted.name])


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_is_executable_and_stops_at_its_first_failure(script):
    path = ROOT / script
    assert path.stat().st_mode & 0o111
    assert re.search(r"^set -E?euo pipefail$", path.read_text(), re.MULTILINE)
    assert run("bash", "-n", script).returncode == 0


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["launch/quickstart.sh", "--ranks", "3"], "--ranks 3 must be 4 or 8"),
        (["launch/quickstart.sh", "--steps", "0"], "--steps 0 is no positive number"),
        (["launch/quickstart.sh", "--steps"], "--steps needs a value"),
        (["launch/quickstart.sh", "--faster", "yes"], "unknown option --faster"),
        (["launch/local.sh"], "RANKS RECIPE"),
        (["launch/local.sh", "two", "recipes/quickstart.toml"], "RANKS RECIPE"),
    ],
)
def test_a_mistake_in_the_options_is_one_line(command, says):
    ran = run(*command)
    assert ran.returncode == 2
    assert ran.stdout == ""
    assert re.fullmatch(r"error: .*\n", ran.stderr)
    assert says in ran.stderr


def test_quickstart_help_states_its_options():
    ran = run("launch/quickstart.sh", "--help")
    assert ran.returncode == 0
    assert {"--ranks", "--steps", "--fresh"} <= set(re.findall(r"--\w+", ran.stdout))


def test_no_script_names_a_package_registry():
    """Where packages come from is for the machine's pip settings to say."""
    for script in SCRIPTS:
        assert not re.search(r"https?://|index-url|find-links", (ROOT / script).read_text())
