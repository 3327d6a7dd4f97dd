"""A program on a terminal of its own, to type into and read from."""

import os
import pty
import select
import subprocess
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

TIMEOUT_S = 60.0


class Terminal:
    """Runs `command` with a pseudo-terminal as its standard streams. `screen` is all that it wrote."""

    def __init__(self, command: Sequence[str], home: str) -> None:
        self._controller, terminal = pty.openpty()
        # Position reports come from a real terminal only; without this the line editor waits for one.
        settings = {"PROMPT_TOOLKIT_NO_CPR": "1", "TERM": "xterm", "XDG_CONFIG_HOME": home}
        self._process = subprocess.Popen(
            command,
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            env={**os.environ, **settings},
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(terminal)
        self.screen = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._controller)

    def type(self, text: str) -> None:
        """Press these keys."""
        os.write(self._controller, text.encode())

    def read_until(self, marker: str, start: int = 0) -> int:
        """Read until `marker` stands on the screen at or after `start`; returns where it ends."""
        deadline = time.monotonic() + TIMEOUT_S
        while (found := self.screen.find(marker, start)) < 0:
            ready, _, _ = select.select([self._controller], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{marker!r} did not come; the screen is {self.screen[-2000:]!r}"
            try:
                data = os.read(self._controller, 65536)
            except OSError:  # how Linux reports that the other end is gone
                data = b""
            assert data, f"the program ended before {marker!r}; the screen is {self.screen[-2000:]!r}"
            self.screen += data.decode(errors="replace")
        return found + len(marker)

    def wait(self) -> int:
        """The exit code."""
        return self._process.wait(TIMEOUT_S)


def _take_terminal() -> None:
    """Make standard input the controlling terminal, so that Ctrl-C is a signal to this program."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
