"""Which architecture each family is. Shapes by name are in `megagrid.config.presets`."""

from __future__ import annotations

from megagrid.config.schema import ModelConfig
from megagrid.model.decoder import Architecture, DecoderStage, ModelAxes, StageShare
from megagrid.model.gpt import GPT
from megagrid.model.llama import LLAMA

ARCHITECTURES: dict[str, Architecture] = {"gpt": GPT, "llama": LLAMA}


def build_stage(model: ModelConfig, share: StageShare, axes: ModelAxes) -> DecoderStage:
    """The `share` of the model that one rank holds, its parameters unfilled."""
    return DecoderStage(model, ARCHITECTURES[model.family], share, axes)
