"""Rounds of runs -> ratios and one markdown table. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

MIB = 2**20


@dataclass(frozen=True)
class Run:
    """One process group's turn."""

    layout: str
    """The row of the comparison; a system without a grid ran as one process all the same."""
    system: str
    round: int
    ranks: int
    threads_per_rank: int
    load_average: float
    """Of the machine over the minute before the run: who else was at work."""
    step_times_s: list[float]
    """Of every step; the first `warmup` are not in `tokens_per_s`."""
    tokens_per_s: float
    """Of the median step after warmup, over the whole grid."""
    seconds_to_first_step: float
    peak_rss_bytes: list[int]
    """By rank."""
    losses: list[float]
    grad_norms: list[float]
    largest_loss_gap: float
    """To the first run of the comparison, over the steps."""


def ratios(runs: Sequence[Run], layout: str, system: str, other: str) -> list[float]:
    """tokens/s of `system` over `other` in each round of a layout: the rounds that both ran."""
    speeds = {(run.system, run.round): run.tokens_per_s for run in runs if run.layout == layout}
    rounds = sorted(number for name, number in speeds if name == system)
    return [
        speeds[system, number] / speeds[other, number]
        for number in rounds
        if (other, number) in speeds
    ]


def markdown(runs: Sequence[Run], systems: Sequence[str], baseline_bytes: int, title: str) -> str:
    """A row for each layout and system; the ratios are those of `systems[0]` over the row's."""
    first = systems[0]
    lines = [
        title,
        "",
        "| layout | system | ranks × threads | tokens/s, median (range) "
        f"| {first} over it, by round | peak MiB of a rank | over bare torch | first step, s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for layout in dict.fromkeys(run.layout for run in runs):
        for system in systems:
            mine = [run for run in runs if (run.layout, run.system) == (layout, system)]
            if not mine:
                continue
            speeds = [run.tokens_per_s for run in mine]
            peak = max(max(run.peak_rss_bytes, default=0) for run in mine)
            against = [f"{ratio:.2f}" for ratio in ratios(runs, layout, first, system)]
            lines.append(
                f"| {layout} | {system} | {mine[0].ranks} × {mine[0].threads_per_rank} "
                f"| {median(speeds):,.0f} ({min(speeds):,.0f}–{max(speeds):,.0f}) "
                f"| {'–' if system == first else ' '.join(against)} "
                f"| {peak / MIB:,.0f} | {(peak - baseline_bytes) / MIB:,.0f} "
                f"| {median(run.seconds_to_first_step for run in mine):.1f} |"
            )
    return "\n".join(lines) + "\n"
