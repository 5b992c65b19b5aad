"""What outlives the processes of a run: its tensors, how far it has come, and which run it is."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megagrid import checkpoint
from megagrid.grid.grid import Axis
from megagrid.train.build import Engine


@dataclass
class Progress:
    """Where a run is: with weights and optimizer states, all that a resumed run needs.

    There is no state of random numbers, which are functions of seed, step and sample, nor of the
    learning rate, which is one of the step.

    Attributes:
        step: optimizer steps made.
        consumed_samples: samples fed so far, and the number of the next unseen one.
        consumed_tokens: tokens of those.
    """

    step: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0


class RunState:
    """A run as its checkpoints hold it: this rank's part of the tensors, and the trainer's state.

    Args:
        fingerprint: of the data.

    Attributes:
        progress: counts the steps made.
    """

    def __init__(self, engine: Engine, fingerprint: str) -> None:
        self.progress = Progress()
        self._engine = engine
        self._identity = _identity(engine, fingerprint)

    def entries(self) -> list[checkpoint.Entry]:
        """The boxes of weights and optimizer states on this rank."""
        return checkpoint.entries(self._engine.shards, self._engine.optimizer)

    def weights(self) -> list[checkpoint.Entry]:
        """The boxes of weights alone."""
        return checkpoint.entries(self._engine.shards)

    def trainer_state(self) -> dict[str, Any]:
        """The rest, as JSON."""
        return {
            "step": self.progress.step,
            "progress": asdict(self.progress),
            "identity": self._identity,
        }

    def load(self, path: Path, world: Axis, *, by_first_rank: bool = False) -> list[str]:
        """Take the state of the checkpoint `path`, whose checksums were verified.

        Returns:
            a warning for each way in which it is another run's.
        """
        state = checkpoint.load_trainer_state(path, world)
        checkpoint.load(
            path, self.entries(), world=world, is_verified=True, by_first_rank=by_first_rank
        )
        self.progress = Progress(**state["progress"])
        self._engine.optimizer.set_step(self.progress.step)
        saved = state["identity"]
        return [
            f"{name} is {value!r}, the checkpoint was trained with {saved[name]!r}: what follows "
            "isn't the same run"
            for name, value in self._identity.items()
            if name in saved and saved[name] != value
        ]


def _identity(engine: Engine, fingerprint: str) -> dict[str, Any]:
    """What makes a run this run and no other, beside the tensors' shapes: the function that is
    computed, the data, which of it is held out, and its order."""
    config = engine.config
    model = config.model.model_dump(exclude={"preset", "make_vocab_size_divisible_by"})
    return {
        **{f"model.{key}": value for key, value in model.items()},
        "train.seed": config.train.seed,
        "data.valid_fraction": config.data.valid_fraction,
        "the data's fingerprint": fingerprint,
    }
