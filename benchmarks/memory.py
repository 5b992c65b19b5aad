"""Peak memory with and without each lever: `python -m benchmarks.memory`.

Three figures for the same thing, which check each other: measured on real ranks of a CPU, found by
a dry run, and in closed form. A lever is a row of `LEVERS`: keys of the recipe that it changes.
What levers have the host keep is told apart on a CPU, too, which is host and device.

    parent process     dry runs and closed forms; starts the ranks through torchrun, prints, writes
      rank 0, 1        this module again: `measure_rows`, one row after the other
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import reporting
from megagrid.config.load import load
from megagrid.config.rules import check, placement
from megagrid.config.schema import Config
from megagrid.grid.placement import Placement
from megagrid.plan.peak import host_peak_bytes, peak_bytes

RECIPES = Path(__file__).parents[1] / "recipes"


@dataclass(frozen=True)
class Lever:
    """What is done about memory.

    Attributes:
        keys: of the recipe, by what the base has.
        needs: ranks of dp that the base must have; with fewer the row is left out.
    """

    name: str
    keys: tuple[str, ...] = ()
    needs: int = 1


LEVERS = (
    Lever("(base)"),
    Lever("NO_SHARD", ('parallel.sharding_strategy="NO_SHARD"',), needs=2),
    Lever("ZERO1", ('parallel.sharding_strategy="ZERO1"',), needs=2),
    Lever("SHARD_GRAD_OP", ('parallel.sharding_strategy="SHARD_GRAD_OP"',), needs=2),
    Lever(
        "HYBRID_SHARD",
        ('parallel.sharding_strategy="HYBRID_SHARD"', "parallel.shard_size=2"),
        needs=4,
    ),
    Lever(
        "embedding, head apart",
        ("parallel.wrap_embedding=true", "parallel.wrap_head=true"),
        needs=2,
    ),
    Lever("4 layers a unit", ("parallel.blocks_per_unit=4",), needs=2),
    Lever("no prefetch", ("parallel.forward_prefetch=0", "parallel.backward_prefetch=0"), needs=2),
    Lever("recompute selective", ('memory.recompute="selective"',)),
    Lever("recompute full", ('memory.recompute="full"',)),
    Lever("… every 2nd layer", ('memory.recompute="full"', "memory.recompute_interval=2")),
    Lever("loss of 256 tokens at a time", ("train.loss_chunk_tokens=256",)),
    Lever("states on the host", ("memory.cpu_offload=true",)),
    Lever("layers on the host", ("memory.activation_offload=true",)),
    Lever("… both", ("memory.cpu_offload=true", "memory.activation_offload=true")),
    Lever("bf16", ('train.precision="bf16"',)),
    Lever("fp16", ('train.precision="fp16"',)),
    Lever("bf16 states", ('optimizer.state_dtype="bf16"',)),
    Lever("SGD", ('optimizer.name="sgd"',)),
    Lever("Muon", ('optimizer.name="muon"',)),
    *(
        Lever(
            f"context parallel, {exchange}",
            (
                "parallel.context_parallel_size=2",
                f'parallel.context_parallel="{exchange}"',
            ),
            needs=2,
        )
        for exchange in ("all_gather", "ring", "ulysses")
    ),
)


@dataclass(frozen=True)
class Setting:
    """What is measured.

    Attributes:
        recipe: of `recipes/`.
        base: its keys, for all rows.
        world: ranks.
        is_real: whether they are started.
    """

    name: str
    recipe: str
    base: tuple[str, ...]
    world: int
    is_real: bool = False

    def config(self, lever: Lever) -> Config:
        """The recipe under a lever."""
        stated = {key.partition("=")[0]: key for key in (*self.base, *lever.keys)}
        config = load(str(RECIPES / self.recipe), list(stated.values()))
        check(config, self.world)
        return config

    def levers(self) -> Iterator[Lever]:
        """Those that change something here."""
        base = self.config(LEVERS[0])
        for lever in LEVERS:
            if placement(base, self.world).dp < lever.needs:
                continue
            if not lever.keys or self.config(lever) != base:
                yield lever


def _grid(tp: int, pp: int, **keys: Any) -> tuple[str, ...]:
    return (
        f"parallel.tensor_parallel_size={tp}",
        f"parallel.pipeline_parallel_size={pp}",
        "parallel.data_parallel_size=none",
        f"parallel.sequence_parallel={'true' if tp > 1 else 'false'}",
        'parallel.sharding_strategy="FULL_SHARD"',
        *(f"train.{key}={value}" for key, value in keys.items()),
    )


SETTINGS = (
    Setting("quickstart, dp 2", "quickstart.toml", _grid(1, 1), 2, is_real=True),
    Setting("quickstart, tp 2", "quickstart.toml", _grid(2, 1), 2, is_real=True),
    Setting("quickstart, pp 2", "quickstart.toml", _grid(1, 2), 2, is_real=True),
    Setting("Llama 3 8B, dp 8", "llama3-8b.toml", _grid(1, 1, global_batch_size=16), 8),
    Setting("Llama 3 70B, tp 8 pp 4 dp 2", "llama3-70b.toml", _grid(8, 4, global_batch_size=8), 64),
)

SMOKE = (
    Setting(
        "tiny-llama, dp 2",
        "tiny-llama-tp2pp2.toml",
        _grid(1, 1, global_batch_size=4, micro_batch_size=1),
        2,
        is_real=True,
    ),
)
SMOKE_LEVERS = ("(base)", "ZERO1", "recompute full", "… both", "bf16")


@dataclass
class Row:
    """Peak bytes of rank 0 under a lever, on the device and on the host.

    Attributes:
        kinds: of the dry run's on the device, by kind.
    """

    lever: str
    dry: int
    closed: int
    kinds: dict[str, int]
    host_dry: int
    host_closed: int
    real: int | None = None
    host_real: int | None = None


# ------------------------------------------------------------------------------------------------
# On the ranks


def measure_rows(setting: Setting, levers: Sequence[Lever], output: Path) -> None:
    """Measure a step under each lever; rank 0 writes what it found."""
    import gc

    import torch.distributed as dist

    from megagrid.dryrun.measure import measure
    from megagrid.dryrun.rank import batches_of_zeros
    from megagrid.dryrun.storages import LettingGo
    from megagrid.grid.start import grid_of
    from megagrid.train.build import build_engine

    dist.init_process_group("gloo")
    found = {}
    for lever in levers:
        config = setting.config(lever)
        placed = placement(config, setting.world)
        engine = build_engine(config, grid_of(config, placed, dist.get_rank(), "cpu"))
        with LettingGo():
            step = measure(engine, batches_of_zeros(config, placed))
            found[lever.name] = step.peak.bytes, step.host_peak.bytes
        del engine
        gc.collect()
    if dist.get_rank() == 0:
        output.write_text(json.dumps(found))
    dist.destroy_process_group()


# ------------------------------------------------------------------------------------------------
# Around them


def rows_of(setting: Setting, levers: Sequence[Lever], time_limit_s: float) -> list[Row]:
    """What is found of a setting, lever by lever."""
    from megagrid.dryrun.rank import dry_run

    real = _start(setting, levers, time_limit_s) if setting.is_real else {}
    rows = []
    for lever in levers:
        config = setting.config(lever)
        placed: Placement = placement(config, setting.world)
        found = dry_run(config, placed, 0).found
        where = config, placed, placed.coordinate(0)
        rows.append(
            Row(
                lever.name,
                found.peak.bytes,
                peak_bytes(*where).total,
                found.peak.by_kind(),
                found.host_peak.bytes,
                host_peak_bytes(*where).total,
                *real.get(lever.name, ()),
            )
        )
    return rows


def _start(setting: Setting, levers: Sequence[Lever], time_limit_s: float) -> dict[str, list[int]]:
    with tempfile.TemporaryDirectory(prefix="memory-") as folder:
        output = Path(folder) / "found.json"
        torchrun = ["torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
        run = ["-m", "benchmarks.memory", "--on-rank", str(output), "--setting", setting.name]
        names = [lever.name for lever in levers]
        subprocess.run(
            [sys.executable, "-m", *torchrun, f"--nproc-per-node={setting.world}", *run, *names],
            env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            check=True,
            timeout=time_limit_s,
        )
        return json.loads(output.read_text())


KINDS = ("gathered parameters", "gradients", "activations", "communication", "temporary")


def table_of(setting: Setting, rows: Sequence[Row]) -> str:
    """A table in Markdown: peaks in MiB or GiB, and what the device's is made of in the dry run."""
    unit, size = ("MiB", 2**20) if rows[0].dry < 2**31 else ("GiB", 2**30)
    titles = ["lever", f"real, {unit}", "dry run", "closed form", "of the base", "at rest", *KINDS]
    titles += ["host, real", "dry run", "closed form"]
    lines = [f"## {setting.name}", "", _line(titles), _line(["---"] + ["---:"] * (len(titles) - 1))]
    for row in rows:
        rest = row.kinds.get("weights", 0) + row.kinds.get("optimizer states", 0)
        sizes = [row.real, row.dry, row.closed]
        hosts = [row.host_real, row.host_dry, row.host_closed]
        cells = ["" if value is None else f"{value / size:,.2f}" for value in sizes]
        kinds = [rest, *(row.kinds.get(kind, 0) for kind in KINDS)]
        cells += [f"{row.dry / rows[0].dry:.2f}", *(f"{value / size:,.2f}" for value in kinds)]
        cells += [f"{value / size:,.2f}" if value else "" for value in hosts]
        lines.append(_line([row.lever, *cells]))
    return "\n".join([*lines, ""])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser("python -m benchmarks.memory", description=__doc__)
    add = parser.add_argument
    names = [setting.name for setting in (*SETTINGS, *SMOKE)]
    add("--setting", choices=names, action="append", help="one of them alone, or more")
    add("--time-limit", type=float, default=1800.0, metavar="S", help="of the ranks (1800)")
    reporting.add_arguments(parser)
    add("--smoke", action="store_true", help="a tiny model, to see that everything runs")
    add("--on-rank", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    add("levers", nargs="*", metavar="LEVER", help="some of the rows; all without any")
    return parser.parse_args(arguments)


def main() -> int:
    """Measure, print, write."""
    options = parse()
    settings = SMOKE if options.smoke else SETTINGS
    if options.setting:
        settings = [s for s in (*SETTINGS, *SMOKE) if s.name in options.setting]
    wanted = options.levers or (SMOKE_LEVERS if options.smoke else None)
    content: dict[str, Any] = {"settings": []}
    tables = []
    for setting in settings:
        levers = [lever for lever in setting.levers() if wanted is None or lever.name in wanted]
        if options.on_rank:
            measure_rows(setting, levers, options.on_rank)
            return 0
        rows = rows_of(setting, levers, options.time_limit)
        content["settings"].append(asdict(setting) | {"rows": [asdict(row) for row in rows]})
        tables.append(table_of(setting, rows))
        print(tables[-1], flush=True)
    reporting.write(options.out, "memory", "\n".join(tables), content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
