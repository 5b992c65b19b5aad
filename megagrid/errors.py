"""What a user is told when a run can't be what they asked for.

Every class here stands for somebody's mistake outside the program: a recipe, a file, a machine. Its
message is one line that names the key or file, the values found and what would work. The command
line prints it as ``error: …`` and exits with the error's code; anything else that is raised is a
fault of megagrid and keeps its traceback.
"""

from __future__ import annotations

from megagrid.exit_codes import UNAVAILABLE, USER_MISTAKE


class MegagridError(Exception):
    """A mistake that the user can mend; the message says how.

    Attributes:
        exit_code: what the command ends with.
        is_mine_to_tell: whether this rank tells it, of all that have met it; None where they
            haven't agreed on one.
    """

    exit_code = USER_MISTAKE
    is_mine_to_tell: bool | None = None


class ConfigError(MegagridError):
    """A recipe or an override that contradicts itself, the model or the grid."""


class GridError(MegagridError):
    """Ranks, nodes or environment variables that can't form the grid asked for."""


class UnavailableError(GridError):
    """Something isn't there that may be there later: ranks that didn't come in time, a port or a
    folder that another program still has. The same command may work when it is tried again."""

    exit_code = UNAVAILABLE


class DataError(MegagridError):
    """A corpus, tokenizer or token file that is missing, damaged or doesn't fit the run."""


class CheckpointError(MegagridError):
    """A checkpoint that is missing, incomplete, damaged or of another model."""


class PeerError(Exception):
    """Another rank of the run is gone, so that this one can't go on.

    Nobody's mistake on this rank: what ended the other one is the reason, and is told elsewhere.

    Attributes:
        is_told: whether another rank has said as much, of all ranks.
    """

    is_told = False
