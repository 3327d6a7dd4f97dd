"""How Ctrl-C and SIGTERM end the command line, also where it computes outside of Python.

The first one raises KeyboardInterrupt or TerminatedError in the main thread, which cleans up. That has to
wait for the end of a long computation; so a thread of its own watches, and ends the process on the spot at
the second Ctrl-C, or when SIGTERM has been waiting for too long, because of a computation or because what it
raised was swallowed (by a finalizer, say). Child processes end with their standard input.
"""

import os
import select
import signal
import termios
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Final, NoReturn, Self

EXIT_INTERRUPTED: Final = 128 + signal.SIGINT
EXIT_TERMINATED: Final = 128 + signal.SIGTERM
GRACE_S: Final = 5.0  # for cleaning up after SIGTERM
_HANDLED: Final = b"\0"  # no signal has this number
_TERMINATED: Final = b"\xff"  # nor this one
_SIGTERM: Final = bytes([signal.SIGTERM])
_SHOW_CURSOR: Final = b"\x1b[?25h"
_STDIN, _STDERR = 0, 2


class TerminatedError(SystemExit):
    """SIGTERM asked the process to end. Not an Exception, so that no handler takes it for an error."""


class Interrupts:
    """The signals of one run of the command line; a context manager, which only the main thread may enter."""

    def __init__(self) -> None:
        self._interrupted = self._terminated = False
        self._previous: dict[int, signal._HANDLER] = {}
        self._previous_wakeup = -1
        self._leave: Callable[[], None] | None = None
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

    def defer(self, leave: Callable[[], None]) -> None:
        """Until `watch_again`, SIGTERM calls `leave` instead of raising TerminatedError.

        For a line editor, whose event loop would swallow what is raised in a callback. `leave` is called
        between two instructions of the main thread.
        """
        self._leave = leave

    def watch_again(self) -> None:
        """Take the signals back from a line editor, which watches them in its own way while it reads.

        Raises TerminatedError if SIGTERM came meanwhile.
        """
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._leave = None
        if self._terminated:
            raise TerminatedError(EXIT_TERMINATED)

    def forget(self) -> None:
        """The last Ctrl-C has had its effect: the next one is a first one again."""
        self._interrupted = False
        os.write(self._write, _HANDLED)  # after the signals that have arrived

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if not self._interrupted:  # at the second one the watcher ends the process
            self._interrupted = True
            raise KeyboardInterrupt

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        if not self._terminated:
            self._terminated = True
            os.write(self._write, _TERMINATED)  # a line editor keeps the signal itself from the watcher
            if self._leave is None:
                raise TerminatedError(EXIT_TERMINATED)
            self._leave()

    def _watch(self) -> None:
        interrupts = 0
        while data := os.read(self._read, 1):
            if data == _HANDLED:
                interrupts = 0
            elif data[0] == signal.SIGINT:
                interrupts += 1
                if interrupts == 2:
                    self._end(EXIT_INTERRUPTED)
            elif data in (_SIGTERM, _TERMINATED):
                self._await_cleanup()
                return

    def _await_cleanup(self) -> None:
        """Return when all is cleaned up; end the process at another signal, or when it takes too long."""
        deadline = time.monotonic() + GRACE_S
        while select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))[0]:
            data = os.read(self._read, 1)
            if not data:
                return
            if data not in (_HANDLED, _TERMINATED):
                break
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
