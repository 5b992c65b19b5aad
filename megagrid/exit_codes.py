"""What a command ends with, beside 0 for done."""

from __future__ import annotations

CRASHED = 1
"""A fault of megagrid with its traceback, or a rank that was killed."""

USER_MISTAKE = 2
"""Told in one line on stderr."""

PEER_LOST = 3
"""A rank that was left alone: another one ended first, and the reason is that one's."""

UNAVAILABLE = 69
"""Something that a run needs wasn't there, and may be there later; told in one line on stderr. The
number is EX_UNAVAILABLE of sysexits.h."""

STOPPED = 75
"""A signal asked a run to stop, and it is saved: start it again to go on. The number is EX_TEMPFAIL
of sysexits.h, the failure that is none if one tries again later."""

INTERRUPTED = 130

BROKEN_PIPE = 141
