"""What ends a run from outside, each in one line: memory that is too small, peers that are gone, a
compiler that isn't there.

Any other fault is one of the program and keeps its traceback.
"""

from __future__ import annotations

import errno
import re
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from megagrid.config.rules import placement
from megagrid.config.schema import Config
from megagrid.errors import ConfigError, MegagridError, PeerError
from megagrid.grid import bootstrap
from megagrid.grid.bootstrap import RankEnvironment
from megagrid.grid.grid import Axis, Grid
from megagrid.plan.memory import gradient_bytes, persistent_bytes
from megagrid.train.step import peak_memory_bytes

GB = 10**9

_PEER_IS_GONE = re.compile(
    r"connection (was likely )?closed|closed the connection|connection reset|broken pipe"
    r"|socket closed|ncclRemoteError|communicator was aborted|timed out",
    re.IGNORECASE,
)
_NO_MEMORY_ON_CPU = "DefaultCPUAllocator: can't allocate memory"


# --- Memory --------------------------------------------------------------------------------------


def check_memory(config: Config, grid: Grid, neighbours: Sequence[int]) -> None:
    """Refuse a run that can't fit: whose states alone are larger than the memory they go to.

    States are weights, gradients and the optimizer's states, which are all there at the end of a
    step's backward. That activations fit beside them isn't promised.

    Args:
        neighbours: the ranks of this rank's node, itself among them.

    Raises:
        ConfigError: names the keys that make the states what they are.
    """
    home = torch.device("cpu") if config.memory.cpu_offload else grid.device
    if home.type == "cpu":
        ranks = neighbours
        room, where = bootstrap.memory_bytes(), "this machine"
    else:
        ranks = [grid.rank]
        room = torch.accelerator.get_memory_info(grid.device)[1]
        where = f"rank {grid.rank}'s {grid.device}"
    needed = sum(_state_bytes(config, grid, rank) for rank in ranks)
    if needed > room:
        keys = ("num_layers", "hidden_size", "ffn_hidden_size", "vocab_size")
        shape = ", ".join(f"model.{key}={getattr(config.model, key)}" for key in keys)
        raise ConfigError(
            f"weights, gradients and optimizer states of {shape} take {needed / GB:,.1f} GB on "
            f"{where}, which has {room / GB:,.1f} GB; make the model smaller, or {_more_room(home)}"
        )


def _state_bytes(config: Config, grid: Grid, rank: int) -> int:
    where = config, grid.placement, grid.placement.coordinate(rank)
    return persistent_bytes(*where).total + gradient_bytes(*where)


def _more_room(device: torch.device) -> str:
    """What leaves a device less of the model. The ranks of a machine share its own memory."""
    if device.type == "cpu":
        return "spread the ranks over more machines"
    return (
        "raise parallel.tensor_parallel_size, parallel.pipeline_parallel_size, or "
        'parallel.data_parallel_size under parallel.sharding_strategy="FULL_SHARD", or set '
        "memory.cpu_offload=true"
    )


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _NO_MEMORY_ON_CPU in str(error)


def _out_of_memory(config: Config, who: str, device: torch.device, error: BaseException) -> str:
    asked = re.search(r"tried to allocate ([\d.]+ \w+)", str(error), re.IGNORECASE)
    batch = config.train.micro_batch_size
    remedies = [f"lower train.micro_batch_size={batch}"] if batch > 1 else []
    remedies += [f"lower train.seq_length={config.train.seq_length}", _more_room(device)]
    return (
        f"{who} is out of memory on {device}"
        f"{f' for {asked[1]} more' if asked else ''}, having held "
        f"{peak_memory_bytes(device) / GB:,.2f} GB at most; {', '.join(remedies[:-1])}, or "
        f"{remedies[-1]}"
    )


# --- Peers ---------------------------------------------------------------------------------------


def is_lost_peer(error: BaseException) -> bool:
    """Whether it tells of a rank that has gone."""
    return isinstance(error, RuntimeError) and _PEER_IS_GONE.search(str(error)) is not None


def _lost_peer(who: str, error: BaseException) -> str:
    *_, reason = re.split(r"^\[.*?:\d+\] ", str(error).splitlines()[0], maxsplit=1)
    reason, axis = reason.partition(". ")[0], _axis(error)  # what follows is guesses of gloo's
    what = "waited too long" if "timed out" in reason.lower() else "lost a peer"
    return f"{who} {what}{f' along {axis}' if axis else ''}: {reason}"


def _axis(error: BaseException) -> str | None:
    """The axis along which the rank communicated, as the traceback shows: that of the innermost
    frame that has one. So collectives needn't carry it along in each of a step's many calls."""
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        names = frame.f_locals
        axis = names.get("axis", getattr(names.get("self"), "axis", None))
        if isinstance(axis, Axis):
            return axis.name
        if frame.f_globals.get("__name__", "").startswith("torch.distributed.fsdp"):
            return "dp"  # the only axis that it is given
    return None


# --- Compilers -----------------------------------------------------------------------------------

_NO_COMPILER = {
    "InvalidCxxCompiler": "install g++, or name a compiler by CXX",
    "CppCompileError": "mend the C++ compiler, or name another by CXX",
    "TritonMissing": "install triton",
    "GPUTooOldForTriton": "use a newer device",
}
"""Errors of torch's inductor that the machine is to blame for, and what helps."""


def _missing_compiler(error: BaseException) -> str | None:
    """What train.compile=true lacks here, with a remedy; None if it is something else."""
    for cause in (error, getattr(error, "inner_exception", None)):
        if remedy := _NO_COMPILER.get(type(cause).__name__):
            return (
                f"train.compile=true: {str(cause).splitlines()[0]}; {remedy}, or set "
                "train.compile=false"
            )
    return None


# --- Disks ---------------------------------------------------------------------------------------

UNWRITABLE = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENAMETOOLONG,
)


def _is_in(path: object, folder: str) -> bool:
    """Whether it is a file there; a disk that is full doesn't say of which file."""
    return path is None or Path(str(path)).absolute().is_relative_to(Path(folder).absolute())


# --- All -----------------------------------------------------------------------------------------


@contextmanager
def told_in_a_line(config: Config, environment: RankEnvironment) -> Iterator[None]:
    """Turn what the world does to the block into an error that says so.

    Raises:
        MegagridError: there wasn't enough memory, or the run's folder can't be written to.
        ConfigError: there is no compiler for what is to be compiled.
        PeerError: another rank is gone.
    """
    ranks = placement(config, environment.world_size)
    who = f"rank {environment.rank} ({ranks.coordinate(environment.rank)})"
    try:
        yield
    except OSError as error:
        run_dir = config.logging.run_dir
        if error.errno in UNWRITABLE and _is_in(error.filename, run_dir):
            raise MegagridError(
                f'{who} on {environment.host}: logging.run_dir="{run_dir}" can\'t be '
                f"written to ({error.strerror}); make room there, or name another"
            ) from error
        raise
    except (RuntimeError, MemoryError) as error:
        if _is_out_of_memory(error):
            device = _device_of(error)
            raise MegagridError(_out_of_memory(config, who, device, error)) from error
        if missing := _missing_compiler(error):
            raise ConfigError(missing) from error
        if environment.world_size > 1 and is_lost_peer(error):
            raise PeerError(_lost_peer(who, error)) from error
        raise


def _device_of(error: BaseException) -> torch.device:
    """Where the memory was wanted: accelerators have an error of their own for it."""
    accelerator = torch.accelerator.current_accelerator()
    if isinstance(error, torch.OutOfMemoryError) and accelerator is not None:
        return torch.device(accelerator.type, torch.accelerator.current_device_index())
    return torch.device("cpu")
