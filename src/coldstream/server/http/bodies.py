"""JSON bodies of requests, read within bounds of memory and time, and large ones beside the event loop.

A body is scanned before anything is made of it, since a value of two bytes can take a hundred in memory. Its
objects, strings and values are counted then, its depth is measured, and what has too much of them is refused.
What passes is parsed and validated in a thread, one large body at a time. Unit of work: one body.
"""

import re
from collections.abc import Callable, Coroutine
from contextlib import suppress
from itertools import accumulate
from typing import Any, Final, TypeVar

import anyio
from anyio.to_thread import run_sync
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from coldstream.garbage import paused
from coldstream.server.http.fields import MAX_TEXT_CHARS
from coldstream.server.http.problems import Problem, ProblemError, refused
from coldstream.server.http.sse import CLIENT_CLOSED_REQUEST

INLINE_BYTES: Final = 1 << 14  # bodies up to this size are read without a thread, which would take longer
MAX_CONTAINERS: Final = 1 << 16  # objects and lists of a body
MAX_STRINGS: Final = 1 << 17  # keys included
MAX_VALUES: Final = (1 << 20) + (1 << 17)  # of all kinds: a context of a million token ids, and some more
MAX_DEPTH: Final = 128
MAX_DIGITS: Final = 512  # in a row
MAX_STRING_BYTES: Final = 16 << 20  # as it is written: a picture has some
MAX_BLANKS: Final = 8 << 20  # between values
_SLICE_BYTES: Final = 1 << 18  # bytes that are scanned before other threads run
_MAX_COMPLAINTS: Final = 3
_BUSY_RETRY_S: Final = 1.0
_BRACKETS: Final = b"[]{}"
_NOT_BRACKETS: Final = bytes(each for each in range(256) if each not in _BRACKETS)
_STEPS: Final = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_DIGITS: Final = bytes(ord("0") if chr(each).isdecimal() and each < 128 else ord(" ") for each in range(256))
_ESCAPED: Final = b"\0."  # for a character of two bytes: no JSON has the first one
_CONTINUATIONS: Final = bytes([0, *range(0x80, 0xC0)])  # bytes that begin no character
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
# Escapes of surrogates, in pairs or alone: clients write halves that end a text in the middle of a character.
_SURROGATE: Final = re.compile(
    rb"\\u[dD](?:[89abAB][0-9a-fA-F]{2}(\\u[dD][c-fC-F][0-9a-fA-F]{2})?|[c-fC-F][0-9a-fA-F]{2})"
)
_MAX_MENDED_BYTES: Final = 4 << 20  # size of bodies with halves of surrogate pairs
_MAX_MENDED: Final = 1 << 16  # lone surrogates in one such body

M = TypeVar("M", bound=BaseModel)


class BodyRoute(APIRoute):
    """A route whose body is read by the application's `Bodies`. It is documented as FastAPI documents it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler, which is given the body as it was read."""
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle
        model = self.body_field.field_info.annotation
        assert isinstance(model, type)
        assert issubclass(model, BaseModel)

        async def read_and_handle(request: Request) -> Response:
            bodies: Bodies = request.app.state.bodies
            try:
                body = await bodies.read(request, model)
            except ClientDisconnect:
                return Response(status_code=CLIENT_CLOSED_REQUEST)
            return await handle(_ReadRequest(request, body))

        return read_and_handle


class _ReadRequest(Request):
    """A request whose body has been read and validated."""

    def __init__(self, request: Request, body: BaseModel) -> None:
        super().__init__(request.scope, request.receive)
        self._read = body

    async def body(self) -> bytes:
        """Something, as FastAPI asks for JSON of a body that is not empty only."""
        return b"{}"

    async def json(self) -> Any:
        """The model, which validation leaves as it is."""
        return self._read


class Bodies:
    """Reads bodies. Those that are being read have at most `max_bytes` together. For one event loop."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0  # bytes of bodies that are being read
        self._large_bodies = anyio.CapacityLimiter(1)  # one at a time, because their memory would add up

    async def read(self, request: Request, model: type[BaseModel]) -> BaseModel:
        """The body as `model`. Raises ProblemError, ClientDisconnect, and what `receive` raises."""
        data, taken = bytearray(), 0
        try:
            async for part in request.stream():
                if self._num_bytes + len(part) > self._max_bytes:
                    raise ProblemError(self._full())
                data += part
                self._num_bytes += len(part)
                taken += len(part)
            if len(data) <= INLINE_BYTES:
                return validated(value_of(data), model)
            return await run_sync(_read_large, data, model, limiter=self._large_bodies)
        finally:
            self._num_bytes -= taken

    def _full(self) -> Problem:
        message = f"bodies of {self._max_bytes} bytes together are being read: try again"
        return Problem(429, message, "rate_limit_error", "bodies_full", retry_after_s=_BUSY_RETRY_S)


def _read_large(data: bytearray, model: type[BaseModel]) -> BaseModel:
    with paused():
        value = value_of(data)
        data.clear()  # validation may take as much memory as the body
        return validated(value, model)


def value_of(data: bytearray) -> Any:
    """The value of a body. Raises ProblemError for what is no JSON, or too much of it."""
    if data.startswith(_BYTE_ORDER_MARK):
        del data[: len(_BYTE_ORDER_MARK)]
    check_size(data)
    try:
        return from_json(data, cache_strings="keys")
    except ValueError as error:
        num_surrogates = data.count(b"\\ud") + data.count(b"\\uD")
        if len(data) <= _MAX_MENDED_BYTES and 0 < num_surrogates <= _MAX_MENDED:
            with suppress(ValueError):
                return from_json(_SURROGATE.sub(_whole, data), cache_strings="keys")
        raise refused(f"the body is not JSON: {error}", code="invalid_json") from error


def _whole(found: re.Match[bytes]) -> bytes:
    """U+FFFD for half of a pair; a pair, and what follows an escaped backslash, as they are."""
    backslashes, at = 0, found.start()
    while at > backslashes and found.string[at - backslashes - 1] == ord("\\"):
        backslashes += 1
    if backslashes % 2:  # the first one is no escape, and so what follows it is half of a pair
        return found[0][:6] + b"\\ufffd" if found[1] else found[0]
    return found[0] if found[1] else b"\\ufffd"


def validated(value: Any, model: type[M]) -> M:
    """A value as `model`. Raises ProblemError with the first complaints."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        complaints = error.errors(include_url=False, include_context=False, include_input=False)
        raise ProblemError(complaints_of([(each["loc"], each["msg"]) for each in complaints])) from None


def complaints_of(complaints: list[tuple[tuple[int | str, ...], str]]) -> Problem:
    """The first complaints about a body, each a place and a text, as one refusal."""
    texts, param = [], None
    for location, message in complaints[:_MAX_COMPLAINTS]:
        name = field_name(location)
        param = param or name or None
        texts.append(f"{name or 'body'}: {message}")
    return Problem(400, "; ".join(dict.fromkeys(texts)), param=param)


def field_name(location: tuple[int | str, ...]) -> str:
    """`messages[0].role` of pydantic's ("messages", 0, "role"), without members of unions."""
    name = ""
    for part in location:
        if isinstance(part, int):
            name += f"[{part}]"
        elif part.isidentifier() and part[0].islower() and part not in ("str", "int", "float", "dict"):
            name += f".{part}" if name else part
    return name[:200]


def check_size(data: bytes | bytearray) -> None:
    """Raises ProblemError for JSON that has more of something than is parsed. Other text may pass."""
    size = _Size()
    start, end = 0, 0
    while end < len(data):
        end = min(start + _SLICE_BYTES, len(data))
        part = bytes(memoryview(data)[start:end])
        if end < len(data) and (len(part) - len(part.rstrip(b"\\"))) % 2:
            end, part = end - 1, part[:-1]  # the next slice begins with the character that this one escapes
        size.add(part)
        start = end


class _Size:
    """What was counted so far."""

    def __init__(self) -> None:
        self._containers = 0
        self._strings = 0
        self._values = 1
        self._depth = 0
        self._is_inside = False  # whether the slice begins inside a string
        self._blanks = 0
        self._bytes = self._chars = 0  # bytes and characters of the string before this slice
        self._is_ascii = True
        self._digits = b""  # digits at the end of the last slice

    def add(self, part: bytes) -> None:
        """Count a slice that neither begins nor ends between a backslash and what it escapes."""
        if b"\\" in part:
            part = part.replace(b"\\\\", _ESCAPED).replace(b'\\"', _ESCAPED)
        quotes = part.count(b'"')
        self._strings += (quotes + (not self._is_inside)) // 2
        _check(self._strings, MAX_STRINGS, "strings, keys included")
        pieces = part.split(b'"')
        outside = b"".join(pieces[self._is_inside :: 2])
        if self._is_inside:
            self._go_on(pieces[0])
        self._is_inside ^= quotes % 2 == 1
        if self._is_inside and quotes:
            self._bytes, self._chars, self._is_ascii = 0, 0, True
            self._go_on(pieces[-1])
        self._blanks += len(outside) - len(outside.translate(None, b" \t\r\n"))
        _check(self._blanks, MAX_BLANKS, "blanks between values")
        self._values += outside.count(b",")
        _check(self._values, MAX_VALUES, "values")
        self._add_brackets(outside.translate(None, _NOT_BRACKETS))
        self._add_numbers(outside)

    def _go_on(self, text: bytes) -> None:
        """Of a string of several slices. One character beyond ASCII makes the others up to four bytes."""
        self._bytes += len(text)
        _check(self._bytes, MAX_STRING_BYTES, "bytes in a string")
        escapes = text.count(b"\\u")
        self._chars += len(text.translate(None, _CONTINUATIONS)) - text.count(b"\\") - 4 * escapes
        self._is_ascii = self._is_ascii and text.isascii() and not escapes
        if not self._is_ascii:
            _check(self._chars, MAX_TEXT_CHARS, "characters in a string")

    def _add_brackets(self, brackets: bytes) -> None:
        self._containers += brackets.count(b"[") + brackets.count(b"{")
        _check(self._containers, MAX_CONTAINERS, "objects and lists")
        depths = list(accumulate(map(_STEPS.__getitem__, brackets), initial=self._depth))
        _check(max(depths), MAX_DEPTH, "objects and lists inside of each other")
        self._depth = depths[-1]
        if self._depth < 0:
            raise refused("the body is not JSON: it closes more than it opens", code="invalid_json")

    def _add_numbers(self, outside: bytes) -> None:
        digits = self._digits + outside.translate(_DIGITS)
        if b"0" * (MAX_DIGITS + 1) in digits:
            raise refused(f"the body has a number of more than {MAX_DIGITS} digits", code="body_too_complex")
        self._digits = digits[-MAX_DIGITS:]


def _check(count: int, limit: int, what: str) -> None:
    if count > limit:
        raise refused(f"the body has more than {limit} {what}, which is the limit", code="body_too_complex")
