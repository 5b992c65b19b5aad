"""Ranks numbered by the network, and against it: `python -m benchmarks.placement`.

Two hosts (tools/network_hosts.sh) with a slow link between, and two ranks of the same run on each,
which a launcher has dealt to them in turn:

    host 1    rank 0, rank 2              parallel.rank_order     tp groups of the launcher's ranks
      |  1 Gbit/s                         "launcher", naive       {0, 1} {2, 3}: over the link
    host 2    rank 1, rank 3              "topology", aware       {0, 2} {1, 3}: inside hosts

The two take turns, A B A B. In steps that are not timed the bytes that a host sends are counted
three times: at its interface, by ledgers of the calls that the ranks make, and by the closed form
of `megagrid.plan.wire`, which knows only the recipe. Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from benchmarks import reporting
from benchmarks.hosts import HostsError, NetworkHosts, why_no_hosts
from benchmarks.peers.launch import environment as run_environment
from benchmarks.peers.launch import tail
from benchmarks.peers.spec import Layout
from megagrid.config.dump import dump
from megagrid.config.rules import check
from megagrid.config.schema import Config
from megagrid.grid.placement import Placement
from megagrid.grid.topology import Cluster
from megagrid.plan.wire import LIBRARIES, Sent, off_node, sent_off_node
from megagrid.train.metrics import read_records

HOST_OF_RANK = (0, 1, 0, 1)
"""As a launcher deals ranks that takes hosts in turn."""

ORDERS = {"aware": "topology", "naive": "launcher"}
"""Turn -> parallel.rank_order."""

CLUSTERS = {"aware": Cluster(tuple(sorted(HOST_OF_RANK))), "naive": Cluster(HOST_OF_RANK)}
"""Turn -> the host of each rank, by the number that it trains under."""

FIRST_COUNTED, LAST_COUNTED = 2, 4
"""Steps whose bytes are counted at the interfaces."""

GLOO = LIBRARIES["gloo"]
PORT = 29_533
POLL_SECONDS = 0.02
SETTLE_SECONDS = 0.3
"""Until nothing is on its way any more."""


class PlacementError(Exception):
    """A run that failed, or numbers that don't agree; the message says which."""


@dataclass(frozen=True)
class Setting:
    """The run and its network.

    Attributes:
        rate: of each host's link, as tc writes it.
        timed: steps that are timed, after those that are counted.
        sharding: parallel.sharding_strategy.
    """

    layout: Layout
    rate: str = "1gbit"
    rounds: int = 3
    timed: int = 10
    hidden: int = 64
    layers: int = 4
    seq_length: int = 128
    micro_batch: int = 16
    global_batch: int = 128
    sharding: str = "SHARD_GRAD_OP"

    @property
    def steps(self) -> int:
        return LAST_COUNTED + 1 + self.timed

    @property
    def placement(self) -> Placement:
        return Placement(tp=self.layout.tp, pp=self.layout.pp, dp=self.layout.dp)

    @property
    def config(self) -> Config:
        """The recipe, but for the order of ranks."""
        config = Config(
            model={
                "num_layers": self.layers,
                "hidden_size": self.hidden,
                "ffn_hidden_size": 3 * self.hidden,
                "num_heads": 4,
                "num_kv_heads": 4,
                "head_dim": self.hidden // 4,
                "vocab_size": 256,
                "max_seq_length": self.seq_length,
            },
            parallel={
                "tensor_parallel_size": self.layout.tp,
                "pipeline_parallel_size": self.layout.pp,
                "data_parallel_size": self.layout.dp,
                "sharding_strategy": self.sharding,
                "allow_tp_across_nodes": True,
            },
            train={
                "seq_length": self.seq_length,
                "micro_batch_size": self.micro_batch,
                "global_batch_size": self.global_batch,
                "steps": self.steps,
                "device": "cpu",
            },
            data={"paths": ["synthetic"], "valid_fraction": 0.0},
            checkpoint={"save_at_end": False},
            logging={"run_dir": "stated by the command"},
        )
        check(config, self.layout.world_size)
        return config


@dataclass(frozen=True)
class Turn:
    """What one run gave.

    Attributes:
        order: name in `ORDERS`.
        step_times_s: of the timed steps.
        losses: of all steps.
        at_interface: bytes that each host sent in a step, without the headers of Ethernet, IP and
            TCP; the mean of the counted steps.
        by_ledger: the same of the calls that the host's ranks made, with gloo's headers.
        by_axis: of these, along each axis, without headers, both hosts together.
        load_average: of the machine before the run.
    """

    order: str
    step_times_s: list[float]
    losses: list[float]
    at_interface: list[float]
    by_ledger: list[float]
    by_axis: dict[str, float]
    load_average: float

    @property
    def step_s(self) -> float:
        return median(self.step_times_s)


# ------------------------------------------------------------------------------------------------
# One run


def run(setting: Setting, order: str, hosts: NetworkHosts, folder: Path, limit_s: float) -> Turn:
    """Train on all ranks, and count.

    Raises:
        PlacementError: with the end of a log.
    """
    folder.mkdir()
    load = os.getloadavg()[0]
    (folder / "recipe.toml").write_text(dump(setting.config), encoding="utf-8")
    ranks = [_start(setting, order, rank, hosts, folder) for rank in range(len(HOST_OF_RANK))]
    deadline = time.monotonic() + limit_s

    def wait(event: Callable[[], bool]) -> None:
        while not event():
            codes = [process.poll() for process in ranks]
            if any(codes) or time.monotonic() > deadline:
                logs = "\n".join(tail(folder / f"rank-{rank}.log") for rank in range(len(ranks)))
                raise PlacementError(f"{order}: ranks ended with {codes}\n{logs}")
            time.sleep(POLL_SECONDS)

    try:
        counters = [
            _look(number, hosts, folder, wait) for number in (FIRST_COUNTED, LAST_COUNTED + 1)
        ]
        wait(lambda: all(process.poll() == 0 for process in ranks))
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    counted = LAST_COUNTED + 1 - FIRST_COUNTED
    before, after = counters
    records = read_records(folder / "run" / "metrics.jsonl")
    by_ledger, by_axis = _of_ledgers(folder, CLUSTERS[order])
    return Turn(
        order=order,
        step_times_s=[record.step_time_s for record in records[LAST_COUNTED + 1 :]],
        losses=[record.loss for record in records],
        at_interface=[(after[name] - before[name]).sent_payload / counted for name in hosts.names],
        by_ledger=[sent.on_gloo for sent in by_ledger],
        by_axis=by_axis,
        load_average=load,
    )


def _start(
    setting: Setting, order: str, rank: int, hosts: NetworkHosts, folder: Path
) -> subprocess.Popen:
    """A rank on its host, as a launcher would start it."""
    host = HOST_OF_RANK[rank]
    here = [other for other, at in enumerate(HOST_OF_RANK) if at == host]
    launcher = {
        "RANK": rank,
        "WORLD_SIZE": len(HOST_OF_RANK),
        "LOCAL_RANK": here.index(rank),
        "LOCAL_WORLD_SIZE": len(here),
        "GROUP_RANK": host,
        "MASTER_ADDR": hosts.addresses[0],
        "MASTER_PORT": PORT,
    }
    variables = run_environment("", threads=1) | {
        key: str(value) for key, value in launcher.items()
    }
    del variables["GLOO_SOCKET_IFNAME"]
    counted = [str(folder), str(FIRST_COUNTED), str(LAST_COUNTED)]
    command = [sys.executable, "-m", "benchmarks.placement.rank", *counted, "train"]
    command += [str(folder / "recipe.toml"), f"logging.run_dir={folder / 'run'}"]
    command += [f"parallel.rank_order={ORDERS[order]}"]
    with (folder / f"rank-{rank}.log").open("w") as log:
        return hosts.popen(
            hosts.names[host],
            command,
            env=variables,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )


def _look(number: int, hosts: NetworkHosts, folder: Path, wait: Callable):
    """The counters while all ranks wait before step `number`."""
    wait(lambda: len(list(folder.glob(f"{number}.rank-*"))) == len(HOST_OF_RANK))
    time.sleep(SETTLE_SECONDS)
    counters = hosts.counters()
    (folder / f"{number}.go").touch()
    return counters


def _of_ledgers(folder: Path, cluster: Cluster) -> tuple[list[Sent], dict[str, float]]:
    """What each host sends for the calls that its ranks have counted, and the bytes by axis."""
    by_host, by_axis = [Sent()] * cluster.num_nodes, dict[str, float]()
    for rank, host in enumerate(cluster.node_of_rank):
        counted = json.loads((folder / f"ledger-{rank}.json").read_text())
        for axis, collective, size, times in counted["calls"]:
            ranks = counted["ranks"][axis]
            peer = next(other for other in ranks if other != rank)  # a pipeline here has two ranks
            one = sent_off_node(collective, size, ranks, rank, cluster, GLOO, peer) * times
            by_host[host] += one
            if one.bytes:
                by_axis[axis] = by_axis.get(axis, 0) + one.bytes
    return by_host, by_axis


# ------------------------------------------------------------------------------------------------
# Turns, and what is made of them


@dataclass(frozen=True)
class Outcome:
    """All turns of a setting, in the order in which they were taken."""

    setting: Setting
    turns: list[Turn]

    def closed_form(self, order: str) -> dict[str, list[Sent]]:
        """See `megagrid.plan.wire.off_node`."""
        return off_node(self.setting.config, self.setting.placement, CLUSTERS[order], GLOO)

    def of(self, order: str) -> list[Turn]:
        return [turn for turn in self.turns if turn.order == order]

    @property
    def ratios(self) -> list[float]:
        """Naive over aware, of the steps' medians in each round."""
        pairs = zip(self.of("naive"), self.of("aware"), strict=True)
        return [naive.step_s / aware.step_s for naive, aware in pairs]


def compare(
    setting: Setting, hosts: NetworkHosts, folder: Path, limit_s: float, say: Callable[[str], None]
) -> Outcome:
    """Take turns.

    Raises:
        PlacementError: a run failed, or two didn't compute the same.
    """
    turns: list[Turn] = []
    for number in range(setting.rounds):
        for order in ORDERS:
            turn = run(
                setting, order, hosts, folder / f"{setting.layout}-{number}-{order}", limit_s
            )
            turns.append(turn)
            say(
                f"{setting.layout} {order:6} {turn.step_s:6.3f} s a step, "
                f"{max(turn.at_interface) / 1e6:8.3f} MB sent by a host"
            )
            if turn.losses != turns[0].losses:
                raise PlacementError(f"{setting.layout}: the orders of ranks train differently")
    return Outcome(setting, turns)


def markdown(outcomes: Sequence[Outcome]) -> str:
    """A row for each layout and order."""
    first = outcomes[0].setting
    lines = [
        f"Two hosts with {first.rate} between them, two ranks on each, dealt in turn; a Llama of "
        f"{first.layers} layers, hidden {first.hidden}, {first.global_batch} samples of "
        f"{first.seq_length} tokens a step in microbatches of {first.micro_batch}, fp32, "
        f"{first.sharding}; {first.rounds} rounds of both "
        f"orders in turn, {first.timed} steps each. MB: 10^6 bytes that a host sends in a step.",
        "",
        "| layout | parallel.rank_order | over the link | closed form | ledger | interface "
        "| step, s | naive / aware |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for outcome in outcomes:
        for order, key in ORDERS.items():
            lines.append(_row(outcome, order, key))
    lines += ["", *(_agreement(outcome) for outcome in outcomes)]
    loads = [turn.load_average for outcome in outcomes for turn in outcome.turns]
    lines.append(f"Load of the machine before each turn: {min(loads):.1f} to {max(loads):.1f}.")
    return "\n".join(lines) + "\n"


def _row(outcome: Outcome, order: str, key: str) -> str:
    turns, planned = outcome.of(order), outcome.closed_form(order)
    host = max(range(2), key=lambda host: sum(sent[host].on_gloo for sent in planned.values()))
    axes = ", ".join(
        f"{axis} {sent[host].bytes / 1e6:.3f}"
        for axis, sent in planned.items()
        if sent[host].bytes > 1e4
    )
    closed = sum(sent[host].on_gloo for sent in planned.values())
    times = sorted(turn.step_s for turn in turns)
    at_interface = [turn.at_interface[host] for turn in turns]
    ratio = ""
    if order == "naive":
        ratios = sorted(outcome.ratios)
        ratio = f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    return (
        f'| {outcome.setting.layout} | "{key}", {order} | {axes} | {closed / 1e6:.3f} '
        f"| {turns[0].by_ledger[host] / 1e6:.3f} "
        f"| {min(at_interface) / 1e6:.3f} to {max(at_interface) / 1e6:.3f} "
        f"| {median(times):.3f} ({times[0]:.3f} to {times[-1]:.3f}) | {ratio} |"
    )


def _agreement(outcome: Outcome) -> str:
    """How far the three counts are apart."""
    gaps = []
    for order in ORDERS:
        planned = outcome.closed_form(order)
        for host in range(2):
            closed = sum(sent[host].on_gloo for sent in planned.values())
            gaps += [abs(turn.by_ledger[host] - closed) / closed for turn in outcome.of(order)]
            gaps += [abs(turn.at_interface[host] - closed) / closed for turn in outcome.of(order)]
    return f"{outcome.setting.layout}: the counts are within {max(gaps):.2%} of the closed form."


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser("python -m benchmarks.placement", description=__doc__)
    add = parser.add_argument
    add("--layouts", type=Layout.parse, nargs="+", default=[Layout(tp=2, dp=2), Layout(tp=2, pp=2)])
    add("--rate", default=Setting.rate, help="of the link between hosts, as tc writes it (1gbit)")
    add("--hidden", type=int, default=Setting.hidden, help="of the model: wider ones compute more")
    add("--rounds", type=int, default=Setting.rounds)
    add("--steps", type=int, default=Setting.timed, help="timed ones, of each turn")
    add("--sharding", default=Setting.sharding, help="parallel.sharding_strategy")
    add("--smoke", action="store_true", help="a tiny model, one round: does everything run?")
    add("--time-limit", type=float, default=240.0, metavar="S", help="of each turn (240)")
    reporting.add_arguments(parser, keeps_work=True)
    return parser.parse_args(arguments)


def settings(options: argparse.Namespace) -> Iterator[Setting]:
    """One for each layout."""
    size = dict(hidden=options.hidden)
    if options.smoke:
        size = dict(hidden=32, layers=2, seq_length=32, micro_batch=1, global_batch=4)
    for layout in options.layouts:
        yield Setting(
            layout=layout,
            rate=options.rate,
            rounds=1 if options.smoke else options.rounds,
            timed=2 if options.smoke else options.steps,
            sharding=options.sharding,
            **size,
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    options = parse(arguments)
    if reason := why_no_hosts():
        print(f"error: {reason}", file=sys.stderr)
        return 2
    outcomes = []
    try:
        with (
            reporting.work_folder(options.work, "placement") as folder,
            contextlib.ExitStack() as stack,
        ):
            hosts = stack.enter_context(NetworkHosts(2, rate=options.rate))
            for setting in settings(options):
                outcomes.append(compare(setting, hosts, folder, options.time_limit, say))
    except (PlacementError, HostsError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    text = markdown(outcomes)
    print(f"\n{text}")
    content = {
        "outcomes": [
            {
                "setting": asdict(outcome.setting),
                "ratios": outcome.ratios,
                "turns": [asdict(turn) for turn in outcome.turns],
            }
            for outcome in outcomes
        ],
    }
    reporting.write(options.out, "placement", text, content)
    return 0


def say(text: str) -> None:
    """Print at once."""
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
