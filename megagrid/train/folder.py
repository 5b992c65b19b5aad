"""A run's folder, which one run at a time writes to."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import TextIO

from megagrid.errors import MegagridError

LOCK = ".lock"


def lock_folder(folder: Path) -> TextIO:
    """Make `folder` and keep other runs out of it until what this returns is closed.

    The system lets go of the lock when the process ends, however it ends: nothing stale is left.

    Raises:
        MegagridError: another run is writing there, or nothing can be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = (folder / LOCK).open("w", encoding="utf-8")
    except OSError as error:
        raise MegagridError(
            f'logging.run_dir="{folder}" can\'t be written to ({error.strerror}); name another'
        ) from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.close()
        raise MegagridError(
            f'logging.run_dir="{folder}" belongs to a run that is still going on; wait for it, '
            "stop it, or name another folder"
        ) from None
    except OSError:
        # A file system without locks: better an unguarded run than none.
        pass
    return handle
