"""Rates of memory measured with less of it and in less time: no test depends on how exact they are.

    python -P tests/short_rates.py bench -p 8     the command line, without seconds of measuring

-P, because the folders of tests beside it have names of packages.
"""

import sys

from coldstream.__main__ import main
from coldstream.placement import hardware

SHORT = {"_BUFFER_BYTES": 2**24, "_WINDOW_S": 0.01}
PROGRAM = ("-P", __file__)  # what is given to Python

if __name__ == "__main__":
    for name, value in SHORT.items():
        setattr(hardware, name, value)
    sys.exit(main())
