"""The units that fully_shard gathers and reduces, in closed form. Pure.

    stage 0 of 2, 3 layers, blocks_per_unit=2, wrap_embedding=true
    embedding | layers.0-1 | layers.2 | the rest: norm

Made from the config alone, independently of `megagrid.data_parallel.sharding`, which makes them of
modules: each checks the other.
"""

from __future__ import annotations

from dataclasses import dataclass

from megagrid.config.schema import Config
from megagrid.plan.parameters import ModelShare, Unit, is_split

REST = "rest"
"""The name of the unit of what a stage has outside its other units."""


@dataclass(frozen=True)
class PlannedUnit:
    """A unit of a stage.

    Attributes:
        name: "embedding", "layers.4", "layers.4-7", "head", "rest".
        split: its parameters that are split as the strategy has it.
        whole: those of modules kept out of sharding.
    """

    name: str
    split: Unit
    whole: Unit

    @property
    def parameters(self) -> Unit:
        return self.split + self.whole


def stage_units(
    config: Config, share: ModelShare, layers: range, *, is_first: bool, is_last: bool
) -> list[PlannedUnit]:
    """The units of a stage that has `layers`, in the order of computation, what is left last. A
    unit without parameters is none."""
    parallel = config.parallel
    apart = set()
    if not (config.model.tied_embeddings and is_first and is_last):
        apart |= {"embedding"} if parallel.wrap_embedding else set()
        apart |= {"head"} if parallel.wrap_head else set()
    named: dict[str, list[tuple[str, Unit]]] = {}
    ends = share.ends(is_first=is_first, is_last=is_last)
    if "embedding" in apart:
        named["embedding"] = [("", tuple(p for p in ends if p.module == "embedding"))]
    layer = share.layer()
    for start in range(layers.start, layers.stop, parallel.blocks_per_unit):
        stop = min(start + parallel.blocks_per_unit, layers.stop)
        name = f"layers.{start}" + (f"-{stop - 1}" if stop - start > 1 else "")
        named[name] = [(f"layers.{n}.", layer) for n in range(start, stop)]
    if "head" in apart:
        named["head"] = [("", tuple(p for p in ends if p.module == "head"))]
    named[REST] = [("", tuple(p for p in ends if p.module not in apart))]
    found = []
    for name, parts in named.items():
        sides: dict[bool, list] = {True: [], False: []}
        for prefix, unit in parts:
            for parameter in unit:
                sides[is_split(config, prefix + parameter.module)].append(parameter)
        if sides[True] or sides[False]:
            found.append(PlannedUnit(name, tuple(sides[True]), tuple(sides[False])))
    return found
