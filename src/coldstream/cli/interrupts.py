"""How Ctrl-C and SIGTERM end the command line, also where it computes outside of Python.

The first one raises KeyboardInterrupt or TerminatedError in the main thread, which cleans up. That has to
wait for the end of a long computation. So a thread of its own watches. It ends the process at once at the
second Ctrl-C, or when SIGTERM has waited for too long. Python ignores what is raised in a finalizer or in a
callback of a weak reference: there it is raised again a moment later. Child processes end with their standard
input.
"""

import os
import select
import signal
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Final, NoReturn, Self

EXIT_INTERRUPTED: Final = 128 + signal.SIGINT
EXIT_TERMINATED: Final = 128 + signal.SIGTERM
GRACE_S: Final = 5.0  # for cleaning up after SIGTERM
RETRY_S: Final = 0.001  # until what a finalizer swallowed is raised again
# From one alarm to the next: one that comes right before the main thread falls asleep does not wake it.
REPEAT_S: Final = 0.1
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
        self._previous_hook = sys.unraisablehook
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
        self._previous_hook, sys.unraisablehook = sys.unraisablehook, self._ignored
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        sys.unraisablehook = self._previous_hook
        if signal.SIGALRM in self._previous:
            signal.setitimer(signal.ITIMER_REAL, 0)
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

    @contextmanager
    def lent(self) -> Iterator[None]:
        """An event loop handles the signals in this block, and gives up its handlers before the end."""
        try:
            yield
        finally:
            for number, handler in ((signal.SIGINT, self._interrupt), (signal.SIGTERM, self._terminate)):
                signal.signal(number, handler)
            signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)

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

    def _ignored(self, unraisable: "sys.UnraisableHookArgs") -> None:
        """Python's hook for exceptions that it cannot raise."""
        if issubclass(unraisable.exc_type, KeyboardInterrupt | TerminatedError):
            self._raise_later(unraisable.exc_type)
        else:
            self._previous_hook(unraisable)

    def _raise_later(self, kind: type[BaseException]) -> None:
        is_due = True

        def raise_again(number: int, frame: FrameType | None) -> None:
            nonlocal is_due
            while frame is not None:
                if frame.f_code is Interrupts._ignored.__code__:  # which cannot raise either
                    self._raise_later(kind)
                    return
                frame = frame.f_back
            signal.setitimer(signal.ITIMER_REAL, 0)
            if is_due:  # another alarm may have come by now
                is_due = False
                raise kind(EXIT_TERMINATED) if kind is TerminatedError else kind

        previous = signal.signal(signal.SIGALRM, raise_again)
        self._previous.setdefault(signal.SIGALRM, previous)
        signal.setitimer(signal.ITIMER_REAL, RETRY_S, REPEAT_S)

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
            if data[0] in (signal.SIGINT, signal.SIGTERM):
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
