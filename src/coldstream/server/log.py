"""The server's log: one line for people or one JSON object for machines, written by a thread of its own.

A full disk or a reader that has stopped never holds up an answer. Lines that do not fit into the queue are
dropped, and counted in the next line that is written.
"""

import json
import logging
import os
import queue
import threading
from datetime import UTC, datetime
from types import TracebackType
from typing import Final, Literal, Self

from coldstream.errors import escape_controls

LogFormat = Literal["text", "json"]
LogValue = str | int | float | bool | None
MAX_QUEUED: Final = 1000
MAX_LINE_CHARS: Final = 2000
_END_S: Final = 1.0  # for what is still queued at the end


class Log:
    """Writes to a file descriptor from the start of a `with` block to its end. For any thread.

    Not to a stream of Python's, whose lock a stuck writer would hold when the interpreter leaves.
    """

    def __init__(self, descriptor: int, format: LogFormat = "text") -> None:
        self._descriptor = descriptor
        self._format = format
        self._lines: queue.Queue[str | None] = queue.Queue(MAX_QUEUED)
        self._num_dropped = 0
        self._thread = threading.Thread(target=self._write_all, name="log", daemon=True)

    def __enter__(self) -> Self:
        escape_controls("\n")  # reads the file of its codec, for which no descriptor may be left later
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._lines.put(None, timeout=_END_S)
            self._thread.join(_END_S)
        except queue.Full:
            return

    def write(self, level: str, event: str, text: str, **values: LogValue) -> None:
        """One line: `text` and no values for people, `event`, `text` and `values` for machines."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        text = escape_controls(text)[:MAX_LINE_CHARS]
        if self._num_dropped:
            values["dropped_lines"] = self._num_dropped
        if self._format == "json":
            line = json.dumps({"time": now, "level": level, "event": event, "message": text, **values})
        else:
            dropped = f" ({self._num_dropped} lines before it were lost)" if self._num_dropped else ""
            line = f"{now} {'' if level == 'info' else f'{level}: '}{text}{dropped}"
        try:
            self._lines.put_nowait(line)
            self._num_dropped = 0
        except queue.Full:
            self._num_dropped += 1

    def _write_all(self) -> None:
        while (line := self._lines.get()) is not None:
            data = memoryview(f"{line}\n".encode("utf-8", "backslashreplace"))
            try:
                while data:
                    data = data[os.write(self._descriptor, data) :]
            except OSError:  # nobody can be notified, and nothing else depends on it
                self._num_dropped += 1


class LogHandler(logging.Handler):
    """Takes the warnings and errors of libraries into the log, one line each."""

    def __init__(self, log: Log) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        what = f": {type(error).__name__}: {error}" if error is not None else ""
        self._log.write(
            record.levelname.lower(), "library", f"{record.name}: {record.getMessage().strip()}{what}"
        )
