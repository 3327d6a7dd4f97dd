"""`python -m coldstream`: the command line."""

import sys

from coldstream.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
