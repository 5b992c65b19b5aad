"""What each rank of a throughput measurement runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks.checkpoint.throughput import Setting, measure

if __name__ == "__main__":
    setting, folder, output = sys.argv[1:]
    measure(Setting(**json.loads(setting)), Path(folder), Path(output))
