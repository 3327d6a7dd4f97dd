"""The command `coldstream`, also as `python -m coldstream`.

Until the command line handles signals itself, and after it has, there is nothing to clean up, and most of the
time goes into imports, whose tracebacks say nothing to anybody: Ctrl-C and SIGTERM end the process at once.
"""

import os
import signal
from types import FrameType


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)


def main() -> int:
    """Run the command line on `sys.argv`; returns the exit code."""
    # numpy's linear algebra, which nothing here uses, starts a thread per core when it is imported, and ends
    # the process where no thread may be started.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    signal.signal(signal.SIGINT, _leave)
    signal.signal(signal.SIGTERM, _leave)
    _open_standard_streams()
    from coldstream.cli.main import main as run

    code = run()
    if code == 128 + signal.SIGINT:
        # The interpreter gives up handlers as it leaves: a second Ctrl-C would change the exit code.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    return code


def _open_standard_streams() -> None:
    """Where one is closed, the next file to be opened would take its number, and what is written to it."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


if __name__ == "__main__":
    import sys

    sys.exit(main())
