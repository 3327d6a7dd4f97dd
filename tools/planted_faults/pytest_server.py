"""Runs pytest again and again, each time in a fork of this process, which has imported what takes long.

Unit of work: a line of JSON with pytest's arguments in, a line with the exit status out. What pytest prints
goes to the file named on the command line. Imports nothing of this project, so that each run reads it anew.
"""

import gc
import json
import os
import sys
from importlib import import_module
from pathlib import Path

import pytest

# What the tests' settings, their models and pytest's plugins import: half of what a fork would take to begin.
SLOW_IMPORTS = (
    *("torch", "numpy", "tokenizers", "jinja2", "hypothesis", "gguf", "transformers"),
    *("pytest_asyncio.plugin", "anyio.pytest_plugin", "xdist.plugin"),
)


class FirstFailures:
    """A plugin that leaves out the other cases of a test of which one has failed."""

    def __init__(self) -> None:
        self._failed: set[str] = set()

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if item.nodeid.partition("[")[0] in self._failed:
            pytest.skip("another case has failed")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.add(report.nodeid.partition("[")[0])


def run(arguments: list[str], output: Path) -> int:
    """Its exit status; negative: the number of the signal that ended it."""
    child = os.fork()
    if child == 0:
        status = 70
        try:
            with output.open("w") as stream:
                os.dup2(stream.fileno(), 1)
                os.dup2(stream.fileno(), 2)
            status = int(pytest.main(arguments, plugins=[FirstFailures()]))
        finally:
            sys.stdout.flush()
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> None:
    for name in SLOW_IMPORTS:
        import_module(name)
    gc.freeze()  # a fork that looks for garbage neither goes through all this nor copies its pages
    for line in sys.stdin:
        print(run(json.loads(line), Path(sys.argv[1])), flush=True)


if __name__ == "__main__":
    main()
