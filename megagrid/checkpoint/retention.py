"""When a run is saved, and which of its checkpoints may go."""

from __future__ import annotations


def should_save(step: int, last_step: int, interval: int, at_end: bool) -> bool:
    """Whether to save after `step` of 1..`last_step`.

    Args:
        interval: steps between saves; 0: none but the last.
        at_end: save after the last step, whatever the interval.
    """
    return (interval > 0 and step % interval == 0) or (at_end and step == last_step)
