"""`megagrid VERB …`: finds the verb's module and hands it the arguments.

A verb's module offers `add_arguments(parser)` and `run(arguments) -> exit code`. It is imported
only when its verb is called, so that planning and asking for help never wait for torch.

Exit codes: 0 done; 2 a mistake of the user, told in one line on stderr; `megagrid.exit_codes` has
the others.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import re
import sys
from collections.abc import Sequence
from types import MappingProxyType
from typing import NoReturn

from megagrid import __version__
from megagrid.config.suggest import closest
from megagrid.errors import MegagridError
from megagrid.exit_codes import BROKEN_PIPE, INTERRUPTED

VERBS = MappingProxyType(
    {
        "train": ("megagrid.train.command", "train a recipe, here or as one of its ranks"),
        "submit": ("megagrid.jobs.command", "check a recipe, and submit it to SLURM"),
        "dryrun": ("megagrid.dryrun.command", "a rank's memory and messages, found without ranks"),
        "grid": ("megagrid.grid.command", "show where each rank goes, and its groups"),
        "schedule": ("megagrid.pipeline.schedules.command", "draw and check a pipeline schedule"),
        "data": ("megagrid.data.command", "turn text into token files, and look into them"),
        "ckpt": ("megagrid.checkpoint.command", "look into checkpoints, compare and reshard them"),
        "convert": ("megagrid.hf.command", "Hugging Face models to checkpoints and back"),
        "sample": ("megagrid.train.sample_command", "write text with a trained checkpoint"),
        "status": ("megagrid.train.status_command", "how a run is: step, pace, ranks, health"),
        "report": ("megagrid.train.report_command", "show a traced step, measured and simulated"),
        "compare": ("megagrid.train.compare_command", "find where two runs part: step and module"),
        "bench": ("megagrid.train.bench_command", "measure a step after warm-up"),
    }
)
"""Verb -> (module, help)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a verb and return the exit code; `argv` is without the program's name."""
    try:
        code = _dispatch(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        return code
    except MegagridError as error:
        for note in getattr(error, "__notes__", ()):  # such as the drawing of a broken schedule
            print(note, file=sys.stderr)
        print("error:", " ".join(str(error).splitlines()), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has left. The interpreter flushes stdout once more at its end,
        # which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE


def _dispatch(argv: Sequence[str]) -> int:
    if any("\0" in argument for argument in argv):
        raise MegagridError("an argument has a NUL character in it; leave it out")
    verbs = "".join(f"  {verb:<10}{text}\n" for verb, (_, text) in VERBS.items())
    parser = Parser(
        prog="megagrid",
        usage="megagrid VERB ...",
        description="The same pretraining run on every TP x PP x DP grid.",
        epilog=f"verbs:\n{verbs}\n`megagrid VERB --help` says more of each.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"megagrid {__version__}")
    parser.add_argument("verb", nargs="?", help=argparse.SUPPRESS)
    verb = parser.parse(argv[:1]).verb
    if verb is None:
        parser.print_help()
        return 0
    if verb not in VERBS:
        near = closest(verb, VERBS)
        hint = f"did you mean {near}?" if near else f"the verbs are {', '.join(VERBS)}"
        raise MegagridError(f"unknown verb {verb!r}; {hint}")
    module_name, text = VERBS[verb]
    module = importlib.import_module(module_name)
    verb_parser = Parser(prog=f"megagrid {verb}", description=module.__doc__ or text)
    module.add_arguments(verb_parser)
    try:
        return module.run(verb_parser.parse(argv[1:]))
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        raise MegagridError(f"{error.filename}: {error.strerror}; choose another") from None


class Parser(argparse.ArgumentParser):
    """argparse, but a mistake is an error like any other, and options may follow overrides."""

    _subverbs: argparse._SubParsersAction | None = None

    def error(self, message: str) -> NoReturn:
        if re.match(r"unrecognized arguments: --\w+\.", message):
            raise MegagridError(f"{message}; keys of the recipe are written section.key=value")
        raise MegagridError(f"{message}; `{self.prog} --help` shows what there is")

    def add_subparsers(self, **kwargs) -> argparse._SubParsersAction:
        self._subverbs = super().add_subparsers(**kwargs)
        return self._subverbs

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Arguments in whatever order: `RECIPE a.b=1 --flag c.d=2`.

        argparse calls that intermixed and can't do it where there are subverbs, so that what
        follows a subverb is left to the subverb's own parser.
        """
        if self._subverbs is None:
            return self.parse_intermixed_args(argv)
        subverb = self._subverbs.choices.get(argv[0]) if argv else None
        if subverb is None:
            return self.parse_args(argv)  # which asks for a subverb, or is --help
        arguments = subverb.parse(argv[1:])
        setattr(arguments, self._subverbs.dest, argv[0])
        return arguments
