"""The console that everything is printed through."""

from __future__ import annotations

import sys

import rich.console


class Console(rich.console.Console):
    """rich's console, which leaves it to the command line what a closed pipe means."""

    def on_broken_pipe(self) -> None:
        """Pass on the BrokenPipeError that is being handled; rich would end the process itself."""
        error = sys.exc_info()[1]
        raise error if isinstance(error, BrokenPipeError) else BrokenPipeError()
