"""Train a recipe.

Started by hand, the recipe is checked here, and a grid of more than one rank is started on this
machine. Started by torchrun, or by SLURM's srun as one task of several, this is one of its ranks.

SIGTERM or SIGUSR1, to this process or to any rank, asks the run to stop: every rank ends its step,
saves it, and the exit code is 75. A run that is done ends with 0, a mistake in what was asked for
with 2, an interrupt (Ctrl-C), which saves nothing, with 130.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from megagrid.config.arguments import add_recipe_arguments, load_recipe
from megagrid.config.cautions import cautions
from megagrid.config.dump import dump, toml_value
from megagrid.config.rules import check, placement
from megagrid.config.schema import Config
from megagrid.errors import CheckpointError, DataError, GridError, MegagridError, PeerError
from megagrid.exit_codes import INTERRUPTED, PEER_LOST
from megagrid.grid import bootstrap
from megagrid.grid.bootstrap import RankEnvironment
from megagrid.grid.topology import load_topology
from megagrid.hf.checks import check_folders
from megagrid.launcher import nodes
from megagrid.launcher.launch import (
    Launch,
    check_cores,
    end_with_launcher,
    record_mistake,
    record_stop,
    start_ranks,
)
from megagrid.launcher.nodes import Nodes
from megagrid.pipeline.partition import stage_layers
from megagrid.pipeline.program import training_program
from megagrid.plan.show_units import print_units
from megagrid.terminal import warn_on_stderr
from megagrid.train.heartbeat import make_heart
from megagrid.train.stopping import StopRequest

SECONDS_FOR_RANK_0 = 10.0
"""To tell a mistake that it has probably made as well."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `megagrid train` takes."""
    add_recipe_arguments(parser)
    parser.add_argument(
        "--show-config", action="store_true", help="print every key of the run, and stop"
    )
    parser.add_argument(
        "--show-units",
        action="store_true",
        help="print what is gathered and reduced together, its bytes and its ranks, and stop",
    )
    parser.add_argument(
        "--find-nan",
        action="store_true",
        help="guard.find_nan=true: say where the first NaN or Inf of a step comes from",
    )
    nodes.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Train, or start the ranks that do."""
    if arguments.find_nan:
        arguments.overrides = [*arguments.overrides, "guard.find_nan=true"]
    there = nodes.from_arguments(arguments)
    is_rank = bootstrap.is_rank() and there.most == 1  # else a task of SLURM's that starts ranks
    if is_rank and not (arguments.show_config or arguments.show_units):
        try:
            with interrupts_win():
                return _run_rank(arguments)
        except PeerError as error:
            if not error.is_told:
                print(error, file=sys.stderr)
            # At once: a thread that writes a checkpoint may wait for the lost peer's part, and the
            # peers of this rank only learn of the loss from its end.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(PEER_LOST)
    try:
        config, world_size = _prepare(arguments, there)
    except MegagridError as error:
        if there.most > 1 and not (arguments.show_config or arguments.show_units):
            start_ranks(_launch(arguments, there, ranks=1, mistake=str(error)))
        raise
    if arguments.show_config:
        print(dump(config), end="")
        return 0
    if arguments.show_units:
        print_units(config, placement(config, world_size))
        return 0
    if world_size > 1 or there.most > 1 or there.max_restarts:
        start_ranks(_launch(arguments, there, ranks=world_size // there.most))
    with interrupts_win():
        return _train(config, StopRequest(), bootstrap.read())


def _prepare(arguments: argparse.Namespace, there: Nodes) -> tuple[Config, int]:
    """The config, checked as far as it can be without ranks, and the size of its grid.

    Raises:
        MegagridError: a mistake that every rank would make.
    """
    config = load_recipe(arguments)
    world_size = there.most * there.ranks_here(placement(config).world_size)
    grid = placement(config, world_size)
    check(config, world_size)
    _check_fewest(config, there, world_size)
    if there.node == 0:
        _warn(config)
        if not there.is_at_rendezvous:
            warn_on_stderr(
                f"--rendezvous {there.rendezvous}: this machine, node 0, has no such address; "
                "other nodes come only if that is passed on to it"
            )
    if not (arguments.show_config or arguments.show_units):
        check_inputs(config)
        stage_layers(config, grid, training_program(config, grid).placement)
        check_cores(world_size // there.most)
    return config, world_size


def _check_fewest(config: Config, there: Nodes, world_size: int) -> None:
    """Whether a job that may lose nodes can go on with as few as it says.

    Raises:
        GridError: naming what keeps it.
    """
    if there.fewest == there.most:
        return
    stated = f"--nnodes {there.fewest}:{there.most}"
    parallel = config.parallel
    if parallel.data_parallel_size is not None and parallel.min_data_parallel_size is None:
        raise GridError(
            f"{stated} may lose nodes, but parallel.data_parallel_size="
            f"{parallel.data_parallel_size} is stated; set parallel.min_data_parallel_size, or "
            "leave both out"
        )
    ranks = there.fewest * (world_size // there.most)
    try:
        check(config, ranks)
    except MegagridError as error:
        raise GridError(f"{stated} on {there.fewest} of them, {ranks} ranks: {error}") from None


def _launch(
    arguments: argparse.Namespace, there: Nodes, ranks: int, mistake: str | None = None
) -> Launch:
    return Launch(
        recipe=arguments.recipe,
        overrides=arguments.overrides,
        ranks=ranks,
        fewest=there.fewest,
        most=there.most,
        node=there.node,
        rendezvous=there.rendezvous,
        max_restarts=there.max_restarts,
        mistake=mistake,
    )


def _run_rank(arguments: argparse.Namespace) -> int:
    """One rank of a run.

    Most mistakes are met by every rank, and must be told once: by the launcher, which reads what
    ranks record, or by one of them where the launcher doesn't know us.
    """
    environment = bootstrap.read()
    stop = StopRequest()
    try:
        config = load_recipe(arguments)
        _check_grid(config, environment.world_size)
        if environment.agent is not None:
            end_with_launcher(environment.agent, config.checkpoint.seconds_to_stop)
        if environment.launcher is None and environment.rank == 0:
            _warn(config)
        code = _train(config, stop, environment)
        if environment.error_file is not None and (stop.is_made or code):
            record_stop(code, environment.error_file)
        return code
    except MegagridError as error:
        if environment.error_file is not None:
            record_mistake(error, environment.error_file)
        if environment.launcher is None and _tells(environment, error):
            raise
        return error.exit_code


def _tells(environment: RankEnvironment, error: MegagridError) -> bool:
    """Whether this rank is the one to tell a mistake. Before ranks have met, rank 0 is, unless it
    hasn't made it."""
    if error.is_mine_to_tell is not None:
        return error.is_mine_to_tell
    if environment.rank > 0 and environment.step is not None:
        time.sleep(SECONDS_FOR_RANK_0)  # SLURM ends us when rank 0 has told it
        return True
    return environment.rank == 0


def _check_grid(config: Config, world_size: int) -> None:
    """Hold the recipe against the ranks that were started.

    Raises:
        ConfigError: see `check`.
        GridError: there are others than the grid takes; says where SLURM is to start more.
    """
    try:
        placement(config, world_size)
    except GridError as error:
        if not bootstrap.is_one_per_node():
            raise
        raise GridError(
            f"{error}. This step of SLURM has one task on each of {world_size} nodes, which is a "
            "rank: srun --ntasks-per-node=N has N on each, or let it start them by --nnodes "
            f"{world_size} --node-rank $SLURM_NODEID --rendezvous HOST:PORT"
        ) from None
    check(config, world_size)


@contextmanager
def interrupts_win() -> Iterator[None]:
    """Once interrupted, the block ends by KeyboardInterrupt, whatever else the interrupt made fail.

    A rank that waits in a collective hears first that its peers are gone; and
    torch.distributed.checkpoint takes an interrupt in its midst for a failure of its own.

    A second interrupt ends the process at once, whatever it is waiting for, such as a save behind
    the training.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # whoever started us, as nohup, has decided otherwise
        return
    interrupts: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        if interrupts:
            os._exit(INTERRUPTED)
        interrupts.append(number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except Exception:
        if interrupts:
            raise KeyboardInterrupt from None
        raise
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _warn(config: Config) -> None:
    """Tell what the recipe says but hardly means."""
    for text in cautions(config):
        warn_on_stderr(text)


def _train(config: Config, stop: StopRequest, environment: RankEnvironment) -> int:
    if config.train.deterministic:
        bootstrap.make_deterministic()
    heart = make_heart(config, environment)
    with heart.beating():
        from megagrid.train.run import train  # imports torch, which the checks before it don't need

        try:
            code = train(config, stop, heart)
        except PeerError as error:
            error.is_told = heart.is_told
            raise
        heart.end(code)
        return code


def check_inputs(config: Config) -> None:
    """Whether the files that the run starts from are there, before ranks wait for each other.

    Raises:
        DataError, CheckpointError, GridError: naming the key and the path.
    """
    from megagrid.data.indexed import IndexedTokens  # numpy, which --show-config doesn't need

    for index, path in enumerate(config.data.paths if not config.data.is_synthetic else ()):
        try:
            IndexedTokens(path)
        except DataError as error:
            raise DataError(f"data.paths[{index}]={toml_value(path)}: {error}") from None
    resume = config.checkpoint.resume
    if resume not in (None, "latest") and not Path(resume).is_dir():
        raise CheckpointError(
            f"checkpoint.resume={toml_value(resume)} isn't a folder; name a checkpoint's, "
            'a run\'s, or "latest"'
        )
    if config.parallel.topology_file is not None:
        load_topology(config.parallel.topology_file)
    check_folders(config)
