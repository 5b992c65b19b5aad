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

import importlib
import sys
from types import MappingProxyType, ModuleType

_MODULE_OF = MappingProxyType(
    {
        "CHECKPOINTS": "folders",
        "Entry": "layout",
        "Found": "find",
        "entries": "layout",
        "find_checkpoint": "find",
        "first_sound": "find",
        "load": "load",
        "load_trainer_state": "load",
        "newest_first": "folders",
        "on_first_rank": "together",
        "save": "save",
        "should_save": "retention",
        "step_name": "folders",
    }
)
"""Each name of the package, and the module that it is fetched from when it is first used. Most
import torch, which what only looks into checkpoints (`megagrid ckpt`) shouldn't wait for."""


class _Package(ModuleType):
    def __getattr__(self, name: str) -> object:
        if name not in _MODULE_OF:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{self.__name__}.{_MODULE_OF[name]}"), name)

    def __setattr__(self, name: str, value: object) -> None:
        # Importing a module binds it to its name in its package: `save` would be the module, not
        # the function, from the moment on that somebody imports from it.
        if not (name in _MODULE_OF and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
