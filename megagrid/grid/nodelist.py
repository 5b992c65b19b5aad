"""Lists of nodes and of tasks as SLURM prints them. Pure, no torch.

node[01-03,07],gpu-a[1-2]-ib0,x      node01 node02 node03 node07 gpu-a1-ib0 gpu-a2-ib0 x
rack[0-1]n[8-9]                      rack0n8 rack0n9 rack1n8 rack1n9
2(x3),1                              2 2 2 1
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator

from megagrid.errors import GridError

MOST_NODES = 100_000
"""A longer list is a typing mistake, and would fill the memory before anybody reads it."""

_NAME = re.compile(r"(?:[^\[\],\s]|\[[^\[\]]*\])+")
_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_TASKS = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")


def node_names(text: str) -> list[str]:
    """The nodes of a list, in its order. A number keeps the zeros in front that its range begins
    with; of several brackets in a name, the last runs fastest.

    Raises:
        GridError: it is no such list, or it names no nodes, or one twice, or far too many.
    """
    names: list[str] = []
    for item in _items(text):
        alternatives = [_alternatives(*part.groups(), text) for part in _PART.finditer(item)]
        if len(names) + math.prod(map(len, alternatives)) > MOST_NODES:
            raise GridError(f"node list {text!r} names more than {MOST_NODES} nodes")
        names += map("".join, itertools.product(*alternatives))
    if not names or names == ["(null)"]:
        raise GridError(f"node list {text!r} names no nodes; write it like node[01-03,07],gpu1")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise GridError(f"node list {text!r} names {twice} twice")
    return names


def tasks_per_node(text: str) -> list[int]:
    """Tasks on each node: "2(x3),1" is 2 2 2 1.

    Raises:
        GridError: it isn't written so, or there are far too many nodes.
    """
    counts: list[int] = []
    for item in text.split(","):
        found = _TASKS.fullmatch(item.strip())
        if found is None or int(found[1]) == 0:
            raise GridError(f'tasks per node {text!r} must be written like "4", "2,1" or "2(x3),1"')
        repeats = int(found[2] or 1)
        if len(counts) + repeats > MOST_NODES:
            raise GridError(f"tasks per node {text!r} are of more than {MOST_NODES} nodes")
        counts += [int(found[1])] * repeats
    return counts


def _items(text: str) -> Iterator[str]:
    """What stands between the commas that are in no bracket."""
    rest = text.strip()
    while rest:
        found = _NAME.match(rest)
        end = found.end() if found else 0
        rest, separator = rest[end:].lstrip(), rest[end:].lstrip()[:1]
        if separator not in ("", ","):
            raise GridError(f"node list {text!r} can't be read from {rest!r} on")
        rest = rest[1:].lstrip()
        if found:
            yield found[0]


def _alternatives(ranges: str | None, literal: str | None, text: str) -> list[str]:
    """What may stand for one part of a name: a literal for itself, a bracket for its numbers."""
    if ranges is None:
        return [literal or ""]
    numbers: list[str] = []
    for written in ranges.split(","):
        found = _RANGE.fullmatch(written.strip())
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if found is None or last < first:
            raise GridError(f"node list {text!r} has {written!r}, which is no range like 01-03")
        if len(numbers) + last - first >= MOST_NODES:
            raise GridError(f"node list {text!r} names more than {MOST_NODES} nodes")
        numbers += [str(number).zfill(len(found[1])) for number in range(first, last + 1)]
    return numbers
