"""The server's log, and the line of each request."""

import json
import logging
import os
import re
import threading
import weakref
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from coldstream.server.access_log import AccessLog
from coldstream.server.log import MAX_LINE_CHARS, MAX_QUEUED, Log, LogHandler


class Sink:
    """A file for a log, whose lines can be read."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("log")
        weakref.finalize(self, os.close, self.descriptor)

    @property
    def text(self) -> str:
        return os.pread(self.descriptor, 1 << 24, 0).decode()

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()


def test_a_line_for_people_has_time_and_text() -> None:
    sink = Sink()
    with Log(sink.descriptor) as log:
        log.write("info", "ready", "serving demo", model="demo")
        log.write("warning", "lost", "the engine is lost")
    first, second = sink.lines
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z serving demo", first)
    assert second.endswith("Z warning: the engine is lost")


def test_a_line_for_machines_is_one_object() -> None:
    sink = Sink()
    with Log(sink.descriptor, "json") as log:
        log.write("error", "request", "GET / 500", status=500, complete=True)
    (line,) = sink.lines
    found = json.loads(line)
    assert found.pop("time").endswith("Z")
    assert found == {
        "level": "error",
        "event": "request",
        "message": "GET / 500",
        "status": 500,
        "complete": True,
    }


@pytest.mark.parametrize("kind", ["text", "json"])
def test_rq12_log_injection_is_one_escaped_line(kind: Any) -> None:
    """CR, LF and ANSI in what a client sends."""
    sink = Sink()
    with Log(sink.descriptor, kind) as log:
        log.write("info", "request", "GET /a\r\n2026 forged\x1b[31m 200")
    assert len(sink.lines) == 1
    assert "\x1b" not in sink.text
    assert "\r" not in sink.text


def test_a_line_that_is_written_in_parts_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    sink, write = Sink(), os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:7]))
    with Log(sink.descriptor) as log:
        for number in range(3):
            log.write("info", "request", f"GET /{number} 200 of a long line")
    assert [line.partition(" ")[2] for line in sink.lines] == [
        f"GET /{number} 200 of a long line" for number in range(3)
    ]


def test_pr07_a_blocked_reader_drops_lines_and_holds_up_nobody() -> None:
    """A pipe that nobody reads."""
    read, write = os.pipe()
    with os.fdopen(read) as reader, os.fdopen(write, "w") as writer:
        drained = threading.Thread(target=reader.read)
        with Log(write) as log:
            for number in range(3 * MAX_QUEUED):
                log.write("info", "request", f"{number} " + "x" * 1900)
            drained.start()
        writer.close()
        drained.join()


def test_lost_lines_are_counted_in_the_next_one() -> None:
    sink = Sink()
    log = Log(sink.descriptor, "json")
    for number in range(MAX_QUEUED + 5):  # before anything writes them
        log.write("info", "request", str(number))
    log._lines.get()
    log.write("info", "request", "next")
    log._lines.get()
    with log:
        pass
    assert json.loads(sink.lines[-1])["dropped_lines"] == 5
    with Log(sink.descriptor, "json") as log:
        log._num_dropped = 5
        for _ in range(2):
            log.write("info", "request", "after")
    assert [json.loads(line).get("dropped_lines") for line in sink.lines[-2:]] == [5, None]


def test_a_line_is_bounded_as_it_is_written() -> None:
    sink = Sink()
    with Log(sink.descriptor, "json") as log:
        log.write("info", "request", "\x1b" * 3 * MAX_LINE_CHARS)
    (line,) = sink.lines
    assert len(json.loads(line)["message"]) == MAX_LINE_CHARS


@pytest.mark.parametrize("path", ["/dev/full", "/dev/null"])
def test_pr07_a_full_disk_and_a_closed_stream_are_survived(path: str) -> None:
    descriptor = os.open(path, os.O_WRONLY if path == "/dev/full" else os.O_RDONLY)
    with Log(descriptor) as log:
        log.write("info", "a", "b")
    os.close(descriptor)
    assert log._num_dropped == 1


def test_errors_of_libraries_are_one_line() -> None:
    sink = Sink()
    with Log(sink.descriptor) as log:
        logger = logging.getLogger("test.library")
        logger.addHandler(handler := LogHandler(log))
        logger.propagate = False
        try:
            raise ValueError("two\nlines")
        except ValueError:
            logger.exception("failed")
        logger.info("not worth a line")
        logger.removeHandler(handler)
    (line,) = sink.lines
    assert line.endswith(r"Z error: test.library: failed: ValueError: two\nlines")


async def requested(path: str, *answer: Message, error: Exception | None = None) -> list[dict[str, Any]]:
    """The lines of one request that an application answers in this way."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for message in answer:
            await send(message)
        if error is not None:
            raise error

    async def receive() -> Message:
        return {"type": "http.request"}

    async def send(message: Message) -> None:
        return

    sink = Sink()
    with Log(sink.descriptor, "json") as log:
        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"key=secret"}
        try:
            await AccessLog(app, log)(scope, receive, send)
        except ValueError:
            assert error is not None
    return [json.loads(line) for line in sink.lines]


def start(status: int) -> Message:
    return {"type": "http.response.start", "status": status, "headers": []}


END: Message = {"type": "http.response.body", "body": b"x"}


async def test_rq12_a_request_is_one_line_without_its_query() -> None:
    (line,) = await requested("/v1/completions", start(200), END)
    assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/completions", 200)
    assert line["complete"]
    assert "secret" not in json.dumps(line)
    (line,) = await requested("/" + "a" * 5000, start(200), END)
    assert len(line["path"]) == 200


async def test_an_answer_that_ended_early_says_so() -> None:
    (line,) = await requested("/v1/completions", start(200), {**END, "more_body": True})
    assert not line["complete"]
    assert "cut off" in line["message"]


async def test_a_client_that_left_before_its_answer_is_499_in_the_log() -> None:
    (line,) = await requested("/v1/completions")
    assert line["status"] == 499


async def test_an_error_of_the_application_is_still_one_line() -> None:
    (line,) = await requested("/v1/completions", start(500), END, error=ValueError("x"))
    assert (line["level"], line["status"]) == ("error", 500)


@pytest.mark.parametrize("path", ["/health", "/metrics"])
async def test_machines_that_ask_all_the_time_are_logged_when_something_is_wrong(path: str) -> None:
    assert await requested(path, start(200), END) == []
    assert await requested(path, start(503), END) == []  # of an engine that loads, or is lost
    assert len(await requested(path, start(500), END)) == 1
