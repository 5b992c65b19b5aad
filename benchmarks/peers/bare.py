"""A rank that only imports torch: the resident memory that every system starts with.

`python -m benchmarks.peers.bare METRICS` writes one record, as a system does, and stays long enough
to be measured.
"""

import sys
import time
from pathlib import Path

import torch

from benchmarks.peers.launch import POLL_SECONDS

torch.ones(())
Path(sys.argv[1]).write_text('{"step": 1}\n')
time.sleep(5 * POLL_SECONDS)
