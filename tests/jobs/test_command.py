"""`megagrid submit`: what it refuses, what it prints, and what it gives sbatch."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from megagrid.cli import main
from megagrid.jobs import command
from tests.jobs.job import RECIPE, SAVE

SBATCH = """\
#!/usr/bin/env bash
echo "$@" >>sbatch.calls
echo "$((40 + $(wc -l <sbatch.calls)));cluster"
"""

REFUSING = """\
#!/usr/bin/env bash
echo 'sbatch: error: invalid partition specified: fast
sbatch: error: Batch job submission failed: Invalid partition name specified' >&2
exit 1
"""


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


@pytest.fixture
def submit(tmp_path, monkeypatch, capsys):
    """`megagrid submit recipe.toml …` in a folder with that recipe, for 2 ranks unless stated."""
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "bin").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    sbatch(SBATCH)

    def run(*arguments: str) -> Ended:
        code = main(["submit", "recipe.toml", *arguments])
        return Ended(code, *capsys.readouterr())

    return run


def sbatch(text: str) -> None:
    """Put a command of that name on PATH."""
    path = Path("bin/sbatch")
    path.write_text(text)
    path.chmod(0o755)


def calls() -> list[str]:
    return Path("sbatch.calls").read_text().splitlines()


def options(text: str) -> set[str]:
    return set(re.findall(r"^#SBATCH (.*)$", text, re.MULTILINE))


def test_a_dry_run_prints_the_script_and_nothing_else(submit):
    Path("bin/sbatch").unlink()
    ended = submit("--nodes", "1", "--dry-run", "train.steps=4")
    assert ended.code == 0
    assert ended.out.startswith("#!/usr/bin/env bash\n# Written by `megagrid submit recipe.toml`")
    assert "arguments=(run/jobs/001/recipe.toml train.steps=4)\nrun=run\n" in ended.out
    assert re.fullmatch(r"2 ranks = tp 2 x .* on 1 nodes; .* by estimate\n", ended.err)
    assert sorted(path.name for path in Path().iterdir()) == ["bin", "recipe.toml"]


def test_script_and_recipe_lie_in_the_runs_folder_and_are_what_is_submitted(submit):
    ended = submit("--nodes", "2", "--ranks-per-node", "2")
    assert (ended.code, ended.err) == (0, "")
    assert calls() == ["--parsable run/jobs/001/job.sbatch"]
    assert Path("run/jobs/001/recipe.toml").read_text() == RECIPE
    dry = submit("--nodes", "2", "--ranks-per-node", "2", "--dry-run").out
    assert dry.replace("/002", "/001").replace("=002", "=001") == (
        Path("run/jobs/001/job.sbatch").read_text()
    )
    assert "submitted job 41\n" in ended.out
    assert "tail -F run/jobs/001/41.out\n" in ended.out
    submit("--nodes", "2", "--ranks-per-node", "2")
    assert calls()[1] == "--parsable run/jobs/002/job.sbatch"


def test_what_is_asked_of_slurm(submit):
    stated = "--partition p --account a --qos q --time 2:00:00 --constraint c --exclusive"
    stated += " --nodes 2 --gpus-per-node 4 --cpus-per-rank 3 --signal-seconds 60 --job-name long"
    stated += " --sbatch-option=--mem=0 --sbatch-option nice"
    ended = submit(*stated.split(), "--dry-run")
    wanted = "nodes=2 ntasks-per-node=4 gpus-per-node=4 cpus-per-task=3 signal=B:USR1@60 requeue "
    wanted += "open-mode=append job-name=long output=run/jobs/001/%j.out mem=0 nice partition=p "
    wanted += "account=a qos=q time=2:00:00 constraint=c exclusive"
    assert options(ended.out) == {f"--{text}" for text in wanted.split()}


def test_an_agent_a_node_has_the_cores_of_its_ranks(submit):
    stated = "--nodes 2 --ranks-per-node 4 --cpus-per-rank 3 --style nodes"
    ended = submit(*stated.split(), "--dry-run")
    assert {"--ntasks-per-node=1", "--cpus-per-task=12"} <= options(ended.out)
    assert "\nstyle=nodes\nranks_per_node=4\n" in ended.out


def test_a_chain_is_jobs_that_wait_for_each_other_and_are_not_requeued(submit):
    ended = submit("--nodes", "1", "--chain", "3")
    assert calls() == [
        "--parsable run/jobs/001/job.sbatch",
        "--parsable --dependency=afterany:41 run/jobs/001/job.sbatch",
        "--parsable --dependency=afterany:42 run/jobs/001/job.sbatch",
    ]
    assert "submitted jobs 41 42 43\n" in ended.out
    script = Path("run/jobs/001/job.sbatch").read_text()
    assert "--no-requeue" in options(script)
    assert "\nrequeue=no\n" in script


def test_an_array_is_one_job_whose_runs_have_folders_of_their_own(submit):
    ended = submit("--nodes", "1", "--array", "optimizer.lr=[1e-3,3e-4]", "logging.run_dir=all")
    assert calls() == ["--parsable all/jobs/001/job.sbatch"]
    script = Path("all/jobs/001/job.sbatch").read_text()
    assert {"--array=0-1", "--output=all/jobs/001/%A_%a.out"} <= options(script)
    for lr in ("0.001", "0.0003"):
        folder = f"all/optimizer.lr={lr}"
        assert f"optimizer.lr={lr} logging.run_dir={folder})\n    run={folder}\n" in script
        assert folder in ended.out


def test_a_folder_keeps_its_name_whatever_slurm_would_make_of_it(submit):
    ended = submit("--nodes", "1", "logging.run_dir=half%j", "--dry-run")
    assert "--output=half%%j/jobs/001/%j.out" in options(ended.out)
    assert "\nrun=half%j\n" in ended.out


MISTAKES = [
    ("--nodes 0", "--nodes 0 must be at least 1"),
    ("--nodes 2 --gpus-per-node -1", "--gpus-per-node -1 must be at least 1"),
    ("--nodes 3", "2 ranks can't be divided over --nodes 3"),
    ("--nodes 1 --sbatch-option nodes=5", "'nodes=5' is stated by --nodes"),
    ("--nodes 1 --sbatch-option signal=USR2@1", "'signal=USR2@1' is stated by --signal-seconds"),
    ("--nodes 1 --sbatch-option=-N5", "must name an option of sbatch in full"),
    ("--nodes 1 --sbatch-option =x", "'=x' must name an option of sbatch in full"),
    ("--nodes 1 --signal-seconds 100000", "--signal-seconds 100000 must be from 0 to 65535"),
    ("--nodes 1 --max-restarts 5", "--max-restarts 5 is of the agents of --style nodes"),
    ("--nodes 2 --ranks-per-node 3", "choose 6 or 9"),
    ("--nodes 2 --ranks-per-node 1", "puts tp group {0,1} on nodes 0 and 1"),
    (
        "--nodes 1 --gpus-per-node 2 --ranks-per-node 4 train.device=cuda",
        "--ranks-per-node 4 is more than --gpus-per-node 2",
    ),
    ("--nodes 1 train.stepz=1", "unknown key train.stepz"),
    ("--nodes 1 train.global_batch_size=7 train.micro_batch_size=2", "train.global_batch_size=7"),
    ('--nodes 1 data.paths=["gone"] model.vocab_size=100', 'data.paths[0]="gone"'),
    ("--nodes 1 checkpoint.resume=gone", 'checkpoint.resume="gone" isn\'t a folder'),
    ("--nodes 1 --array optimizer.lr=[1e-3,-1]", "optimizer.lr=-1"),
    ("--nodes 1 --array optimizer.lr=1", "must be a key with a list"),
    ("--nodes 1 --chain 2 --array train.seed=[1,2]", "--chain and --array don't go together"),
    ("--nodes 1 --chain 0", "--chain 0 must be at least 1"),
    ("--nodes 1 --time tomorrow", "--time tomorrow is no time"),
    ("--nodes 1 --time 10", "--time 10 is over before --signal-seconds 600"),
    ("--nodes 1 --time 5 --signal-seconds 300", "--time 5 is over before --signal-seconds 300"),
    ("--nodes 1 --signal-seconds -1", "--signal-seconds -1 must be from 0 to"),
    ("--nodes 1 logging.run_dir='a\\b'", 'logging.run_dir="a\\\\b" has a backslash'),
    ('--nodes 1 logging.run_dir="a\\nb"', 'logging.run_dir="a\\nb" has a backslash or a control'),
    ("--nodes 1 --style threads", "invalid choice: 'threads'"),
]


@pytest.mark.parametrize(("arguments", "says"), MISTAKES, ids=[text for text, _ in MISTAKES])
def test_a_mistake_is_one_line_and_nothing_is_submitted(submit, arguments, says):
    ended = submit(*arguments.split(" "))
    assert (ended.code, ended.out) == (2, "")
    assert re.fullmatch(r"error: .*\n", ended.err)
    assert says in ended.err
    assert not Path("run").exists()
    assert not Path("sbatch.calls").exists()


def test_a_folder_with_a_run_in_it_is_refused_as_the_run_would(submit):
    os.system(SAVE)
    ended = submit("--nodes", "1")
    assert ended.code == 2
    assert 'logging.run_dir="run" has a run at step 4; go on from there with' in ended.err
    assert submit("--nodes", "1", "checkpoint.resume=latest").code == 0


def test_a_dry_run_far_from_the_data_warns(submit):
    ended = submit("--nodes", "1", "--dry-run", 'data.paths=["gone"]', "model.vocab_size=100")
    assert ended.code == 0
    assert ended.err.startswith('warning: data.paths[0]="gone": gone.idx doesn\'t exist')
    assert ended.out.startswith("#!/usr/bin/env bash\n")


def test_what_sbatch_refuses_is_told_in_a_line(submit):
    sbatch(REFUSING)
    ended = submit("--nodes", "1", "--partition", "fast")
    assert ended.code == 2
    assert re.fullmatch(r"error: sbatch refuses run/jobs/001/job.sbatch: invalid .*\n", ended.err)


def test_without_slurm_it_says_where_to_submit(submit, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    ended = submit("--nodes", "1")
    assert ended.code == 2
    assert ended.err.startswith("error: sbatch isn't on PATH; submit on a machine of the cluster's")
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("time", "fits"),
    [
        ("6", True),
        ("5:01", True),
        ("4:59", False),
        ("0:05:01", True),
        ("0-1", True),
        ("0-0:5", False),
        ("1-0:0:0", True),
        ("UNLIMITED", True),
        ("0", True),
    ],
)
def test_time_limits_are_read_as_slurm_reads_them(submit, time, fits):
    seconds = ("checkpoint.seconds_to_stop=300", "--dry-run")
    assert submit("--nodes", "1", "--time", time, *seconds).code == (0 if fits else 2)


def test_a_run_is_asked_to_stop_as_early_as_it_may_take_to(submit):
    array = "checkpoint.seconds_to_stop=[40,900]"
    ended = submit("--nodes", "1", "--dry-run", "--array", array)
    assert "--signal=B:USR1@900" in options(ended.out)
    assert "warning" not in ended.err
    late = submit("--nodes", "1", "--dry-run", "--array", array, "--signal-seconds", "899")
    assert "--signal=B:USR1@899" in options(late.out)
    assert late.err.startswith(
        "warning: --signal-seconds 899 is less than checkpoint.seconds_to_stop=900: "
    )


def test_each_grid_of_an_array_is_told_with_the_most_that_a_rank_of_it_takes(submit):
    def told(*arguments: str) -> list[str]:
        return submit("--nodes", "1", "--ranks-per-node", "2", "--dry-run", *arguments).err

    (large,) = told("train.micro_batch_size=4").splitlines()
    (small,) = told("train.micro_batch_size=1").splitlines()
    (dp,) = told("parallel.tensor_parallel_size=1", "train.micro_batch_size=4").splitlines()
    assert len({large, small, dp}) == 3
    array = ("--array", "train.micro_batch_size=[4,1]")
    assert told(*array).splitlines() == [large]
    assert told(*array, "--array", "parallel.tensor_parallel_size=[1,2]").splitlines() == [
        dp,
        large,
    ]


def test_of_two_submissions_at_one_moment_each_has_a_folder(submit, monkeypatch):
    """The other one takes the number after this one has looked for a free one."""
    find = command._next_folder

    def slow(run_dirs):
        folder = find(run_dirs)
        if folder.name == "001":
            folder.mkdir(parents=True)
        return folder

    monkeypatch.setattr(command, "_next_folder", slow)
    assert submit("--nodes", "1").code == 0
    assert calls() == ["--parsable run/jobs/002/job.sbatch"]
    assert "run/jobs/002/recipe.toml" in Path("run/jobs/002/job.sbatch").read_text()


def test_a_chain_of_which_sbatch_refuses_a_part_names_the_jobs_that_are_there(submit):
    sbatch(
        SBATCH + '[[ $* != *afterany:42* ]] || { echo "sbatch: error: too many" >&2; exit 1; }\n'
    )
    ended = submit("--nodes", "1", "--chain", "4")
    assert ended.code == 2
    assert ended.err == (
        "error: sbatch refuses run/jobs/001/job.sbatch: too many; of --chain 4, 2 are submitted: "
        "let them run, or scancel 41 42\n"
    )


def test_a_run_folder_that_is_none_is_a_line(submit):
    Path("run").write_text("")
    ended = submit("--nodes", "1")
    assert ended.code == 2
    assert re.fullmatch(
        r"error: run/jobs/001 can't be written to \(.*\); name another .*\n", ended.err
    )
