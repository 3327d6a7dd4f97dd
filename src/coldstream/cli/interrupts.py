"""How Ctrl-C and SIGTERM end the command line, also where it computes outside of Python.

The first one raises KeyboardInterrupt or TerminatedError in the main thread, which cleans up. That has to
wait for the end of a long computation; so a thread of its own watches, and ends the process on the spot at
the second Ctrl-C, or when SIGTERM has been waiting for too long. Child processes end with their standard
input.
"""

import os
import select
import signal
import termios
import threading
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Final, NoReturn, Self

EXIT_INTERRUPTED: Final = 128 + signal.SIGINT
EXIT_TERMINATED: Final = 128 + signal.SIGTERM
GRACE_S: Final = 5.0  # what SIGTERM leaves for cleaning up
_HANDLED: Final = b"\0"  # no signal has this number
_SHOW_CURSOR: Final = b"\x1b[?25h"
_STDIN, _STDERR = 0, 2


class TerminatedError(BaseException):
    """SIGTERM asked the process to end. No Exception, so that nobody takes it for a fault of theirs."""


class Interrupts:
    """The signals of one run of the command line; a context manager, which only the main thread may enter."""

    def __init__(self) -> None:
        self._interrupted = self._terminated = False
        self._previous: dict[int, signal._HANDLER] = {}
        self._previous_wakeup = -1
        self._read = self._write = -1
        self._watcher = threading.Thread(target=self._watch, name="signals", daemon=True)
        self._terminal = _Terminal()

    def __enter__(self) -> Self:
        self._read, self._write = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._write, False)
        self._watcher.start()
        self._previous_wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number, handler in ((signal.SIGINT, self._interrupt), (signal.SIGTERM, self._terminate)):
            self._previous[number] = signal.signal(number, handler)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_wakeup)
        os.close(self._write)
        self._watcher.join()
        os.close(self._read)

    def watch_again(self) -> None:
        """Take the signals back from a line editor, which watches them in its own way while it reads."""
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)

    def forget(self) -> None:
        """The last Ctrl-C has had its effect: the next one is a first one again."""
        self._interrupted = False
        os.write(self._write, _HANDLED)  # behind the signals that have come, in their order

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if not self._interrupted:  # at the second one the watcher ends the process
            self._interrupted = True
            raise KeyboardInterrupt

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        if not self._terminated:
            self._terminated = True
            raise TerminatedError

    def _watch(self) -> None:
        interrupts = 0
        while data := os.read(self._read, 1):
            if data == _HANDLED:
                interrupts = 0
            elif data[0] == signal.SIGINT:
                interrupts += 1
                if interrupts == 2:
                    self._end(EXIT_INTERRUPTED)
            elif data[0] == signal.SIGTERM:
                is_ready, _, _ = select.select([self._read], [], [], GRACE_S)
                if is_ready and not os.read(self._read, 1):
                    return  # all is cleaned up
                self._end(EXIT_TERMINATED)

    def _end(self, code: int) -> NoReturn:
        self._terminal.restore()
        os._exit(code)


class _Terminal:
    """The terminal as it was, before a line editor or a progress bar changed it."""

    def __init__(self) -> None:
        self._settings = termios.tcgetattr(_STDIN) if os.isatty(_STDIN) else None

    def restore(self) -> None:
        with suppress(OSError, termios.error):
            # Changing them from the background would stop the process.
            if self._settings is not None and os.tcgetpgrp(_STDIN) == os.getpgrp():
                termios.tcsetattr(_STDIN, termios.TCSANOW, self._settings)
            if os.isatty(_STDERR):
                os.write(_STDERR, _SHOW_CURSOR)
