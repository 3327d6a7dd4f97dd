"""Runs pytest again and again, each time in a fork of this process, which has imported what takes long.

Unit of work: a line of JSON with pytest's arguments in, a line with the exit status out. What pytest prints
goes to the file named on the command line. Imports nothing of this project, so that each run reads it anew.
"""

import json
import os
import sys
from importlib import import_module
from pathlib import Path

import pytest

SLOW_IMPORTS = ("torch", "numpy", "tokenizers", "jinja2")


def run(arguments: list[str], output: Path) -> int:
    """Its exit status; negative: the number of the signal that ended it."""
    child = os.fork()
    if child == 0:
        status = 70
        try:
            with output.open("w") as stream:
                os.dup2(stream.fileno(), 1)
                os.dup2(stream.fileno(), 2)
            status = int(pytest.main(arguments))
        finally:
            sys.stdout.flush()
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> None:
    for name in SLOW_IMPORTS:
        import_module(name)
    for line in sys.stdin:
        print(run(json.loads(line), Path(sys.argv[1])), flush=True)


if __name__ == "__main__":
    main()
