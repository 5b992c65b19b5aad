"""What outlives the processes of a run: its tensors, how far it has come, and which run it is."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megagrid import checkpoint
from megagrid.grid.grid import Axis
from megagrid.optim.loss_scale import LossScale
from megagrid.train.build import Engine
from megagrid.train.guards import Guard


@dataclass
class Progress:
    """Where a run is: with weights and optimizer states, all that a resumed run needs.

    There is no state of random numbers, which are functions of seed, step and sample, nor of the
    learning rate, which is one of the updates.

    Attributes:
        step: steps of the run behind it.
        consumed_samples: samples fed so far, and the number of the next unseen one.
        consumed_tokens: tokens of those.
        updates: of the weights: as many as steps, but for those that were skipped.
    """

    step: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    updates: int = 0


class RunState:
    """A run as its checkpoints hold it: this rank's part of the tensors, and the trainer's state.

    Args:
        fingerprint: of the data.

    Attributes:
        progress: counts the steps made.
        loss_scale: of the next step.
        guard: what it remembers of the last ones.
    """

    def __init__(self, engine: Engine, fingerprint: str) -> None:
        config = engine.config
        self.progress = Progress()
        self.loss_scale = LossScale(config.loss_scale if config.train.precision == "fp16" else None)
        self.guard = Guard(config.guard, self.loss_scale)
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
            "loss_scale": self.loss_scale.to_json(),
            "guard": self.guard.to_json(),
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
        # Runs that couldn't skip a step kept no count of updates, no scale and no window.
        self.progress = Progress(**{"updates": state["step"], **state["progress"]})
        self._engine.optimizer.set_step(self.progress.updates)
        if "loss_scale" in state:
            self.loss_scale.load(state["loss_scale"])
        if "guard" in state:
            self.guard.load(state["guard"])
        saved = state["identity"]
        return [
            f"{name} is {value!r}, the checkpoint was trained with {saved[name]!r}: what follows "
            "isn't the same run"
            for name, value in self._identity.items()
            if name in saved and saved[name] != value
        ]

    def roll_back(self, path: Path, world: Axis, *, by_first_rank: bool = False) -> None:
        """Take the state of an earlier checkpoint of this run, but go on with the data after what
        was consumed by now, and keep count of the run's rollbacks."""
        fed, rollbacks = self.progress, self.guard.rollbacks
        self.load(path, world, by_first_rank=by_first_rank)
        self.progress.consumed_samples = fed.consumed_samples
        self.progress.consumed_tokens = fed.consumed_tokens
        self.guard.rollbacks = rollbacks


def _identity(engine: Engine, fingerprint: str) -> dict[str, Any]:
    """What makes a run this run and no other, beside the tensors' shapes: the function that is
    computed and how it is rounded, the data, which of it is held out, and its order."""
    config = engine.config
    model = config.model.model_dump(exclude={"preset", "make_vocab_size_divisible_by"})
    return {
        **{f"model.{key}": value for key, value in model.items()},
        "train.seed": config.train.seed,
        "train.precision": config.train.precision,
        "optimizer.state_dtype": config.optimizer.state_dtype,
        "data.valid_fraction": config.data.valid_fraction,
        "the data's fingerprint": fingerprint,
    }
