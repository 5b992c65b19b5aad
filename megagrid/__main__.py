"""`python -m megagrid VERB …`, the same as the `megagrid` command."""

import sys

from megagrid.cli import main

if __name__ == "__main__":
    sys.exit(main())
