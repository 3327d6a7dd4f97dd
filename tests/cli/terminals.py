"""A program on a terminal of its own, to type into and read from."""

import codecs
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

TIMEOUT_S = 60.0
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """Runs `command` with a pseudo-terminal as its standard streams. `screen` is all that it wrote."""

    def __init__(
        self,
        command: Sequence[str],
        home: str,
        columns: int = 80,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._controller, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        # Position reports come from a real terminal only; without this the line editor waits for one.
        settings = {"PROMPT_TOOLKIT_NO_CPR": "1", "TERM": "xterm", "XDG_CONFIG_HOME": home}
        self._process = subprocess.Popen(
            command,
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            env={**os.environ, **settings, **(environment or {})},
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(terminal)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
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
            assert self._read(deadline), f"{marker!r} did not come; the screen is {self.screen[-2000:]!r}"
        return found + len(marker)

    def _read(self, deadline: float) -> bool:
        """Take what the program wrote next; False if it ended."""
        ready, _, _ = select.select([self._controller], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"nothing came for {TIMEOUT_S} s; the screen is {self.screen[-2000:]!r}"
        try:
            data = os.read(self._controller, 65536)
        except OSError:  # how Linux reports that the other end is gone
            data = b""
        self.screen += self._decoder.decode(data)
        return bool(data)

    def read_to_the_end(self) -> str:
        """All that the program wrote until it ended, without what moves the cursor or sets colours."""
        deadline = time.monotonic() + TIMEOUT_S
        while self._read(deadline):
            pass
        return without_controls(self.screen)

    @property
    def pid(self) -> int:
        """Of the program."""
        return self._process.pid

    def reads_lines(self) -> bool:
        """Whether the terminal shows and edits what is typed by itself, as it does for a shell."""
        flags = termios.tcgetattr(self._controller)[3]
        return bool(flags & termios.ECHO and flags & termios.ICANON)

    def wait(self) -> int:
        """The exit code."""
        return self._process.wait(TIMEOUT_S)


def without_controls(screen: str) -> str:
    """The text of a screen, without what moves the cursor or sets colours."""
    return re.sub(r"\r*\n", "\n", _CONTROL.sub("", screen))


def _take_terminal() -> None:
    """Make standard input the controlling terminal, so that Ctrl-C is a signal to this program."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
