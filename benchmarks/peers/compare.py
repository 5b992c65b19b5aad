"""Do all systems compute the same training? Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

LOSS_TOLERANCE = 1e-4
"""Absolute, at each step. fp32 sums in another order differ by about 1e-6 here, and AdamW lets that
grow over the steps; a wrong scale, shift, mask or shard shows as 1e-2 and more."""

NORM_TOLERANCE = 1e-4
"""Relative, at each step. AdamW hides a constant factor on the gradients, their norm doesn't."""


class CurvesDifferError(Exception):
    """Two runs that started alike didn't stay alike, so their speeds can't be compared."""


def check_curves(
    name: str,
    records: Sequence[dict[str, Any]],
    reference_name: str,
    reference: Sequence[dict[str, Any]],
) -> None:
    """CurvesDifferError, with a table of the steps, if loss or gradient norm part."""
    if len(records) != len(reference):
        raise CurvesDifferError(
            f"{name} has {len(records)} steps, {reference_name} has {len(reference)}"
        )
    parted, table = False, [f"{'step':>6} {'loss':>22} {'gradient norm':>22}"]
    for ours, theirs in zip(records, reference, strict=True):
        # Written so that NaN fails.
        agrees = (
            abs(ours["loss"] - theirs["loss"]) <= LOSS_TOLERANCE
            and abs(ours["grad_norm"] - theirs["grad_norm"]) <= NORM_TOLERANCE * theirs["grad_norm"]
        )
        parted |= not agrees
        cells = (f"{ours[key]:>10.6f} {theirs[key]:>10.6f} " for key in ("loss", "grad_norm"))
        table.append(f"{ours['step']:>6} {''.join(cells)}{'' if agrees else ' <- part'}")
    if parted:
        raise CurvesDifferError(
            f"{name} (left) and {reference_name} (right) part; allowed: loss {LOSS_TOLERANCE:g}, "
            f"gradient norm {NORM_TOLERANCE:g} relative\n" + "\n".join(table)
        )


def largest_gap(records: Sequence[dict[str, Any]], reference: Sequence[dict[str, Any]]) -> float:
    """Largest difference of the losses over the steps."""
    return max(abs(a["loss"] - b["loss"]) for a, b in zip(records, reference, strict=True))
