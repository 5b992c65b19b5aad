"""Checkpoints that belong to the model: named rectangles of tensors, whatever grid wrote them.

A training loop needs five names:

    boxes = entries(parameter_shards(model), optimizer)
    save(checkpoints, boxes, {"step": 100, ...}, world=grid.world)
    found = find_checkpoint("latest", checkpoints, world=grid.world)
    load(found.path, boxes, world=grid.world)
    state = load_trainer_state(found.path)

A checkpoint is a folder of safetensors files, JSON and the recipe. Nothing in it is ever executed:
no pickle is written or read. It exists once its manifest does, and the manifest is written last.
"""

from megagrid.checkpoint.find import CHECKPOINTS, Found, find_checkpoint
from megagrid.checkpoint.folders import newest_first
from megagrid.checkpoint.layout import Entry, entries
from megagrid.checkpoint.load import load, load_trainer_state
from megagrid.checkpoint.retention import should_save
from megagrid.checkpoint.save import save
from megagrid.checkpoint.together import on_first_rank

__all__ = [
    "CHECKPOINTS",
    "Entry",
    "Found",
    "entries",
    "find_checkpoint",
    "load",
    "load_trainer_state",
    "newest_first",
    "on_first_rank",
    "save",
    "should_save",
]
