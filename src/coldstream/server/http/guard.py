"""What stands before every route: limits of headers and bodies, the Host and Origin headers, API keys.

Default-deny: a route is open to those without a key only if `OPEN_PATHS` names it.
"""

import hashlib
import hmac
import time
from collections.abc import Iterable
from typing import Final
from urllib.parse import urlsplit

import anyio
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coldstream.server.http.page import PAGE_FILES
from coldstream.server.http.problems import Problem, ProblemError
from coldstream.server.http.settings import ServerSettings, is_loopback

LEAST_BODY_RATE: Final = 16 << 10  # bytes a second, on an average from the beginning of a body
OPEN_PATHS: Final = frozenset({"/health", *PAGE_FILES})
_BODY_METHODS: Final = frozenset({"POST", "PUT", "PATCH"})

Headers = Iterable[tuple[bytes, bytes]]


class Guard:
    """Passes on requests that may be served, with the `namespace` of their key in `scope["state"]`."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._settings = settings
        self._digests = [_digest(key) for key in settings.api_keys]
        self._hosts = {name.lower() for name in settings.allowed_hosts}
        self._origins = set(settings.allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            namespace = self._checked(scope)
        except ProblemError as error:
            await error.problem.response(scope["path"])(scope, receive, send)
            return
        scope.setdefault("state", {})["namespace"] = namespace
        await self._app(scope, self._bounded(receive), send)

    def _checked(self, scope: Scope) -> str:
        """The namespace of a request that may be served. Raises ProblemError for any other one."""
        headers = scope["headers"]
        self._check_sizes(headers)
        self._check_host(headers)
        self._check_origin(headers)
        namespace = self._namespace(scope["path"], headers)
        if scope["method"] in _BODY_METHODS:
            self._check_body(scope)
        return namespace

    def _check_sizes(self, headers: Headers) -> None:
        sizes = [len(name) + len(value) for name, value in headers]
        settings = self._settings
        if len(sizes) > settings.max_headers or sum(sizes) > settings.max_header_bytes:
            raise _refused(
                431,
                f"headers: {len(sizes)} of {sum(sizes)} bytes: at most {settings.max_headers} of "
                f"{settings.max_header_bytes} bytes together are read",
            )

    def _check_host(self, headers: Headers) -> None:
        if not self._settings.checks_host:
            return
        hosts = _all(headers, b"host")
        if len(hosts) != 1 or not self._is_own(_without_port(hosts[0])):
            raise _refused(
                403, "Host: not a name of this server; allow others with --allow, or use its address"
            )

    def _is_own(self, host: str) -> bool:
        return bool(host) and (is_loopback(host) or host.lower() in self._hosts)

    def _check_origin(self, headers: Headers) -> None:
        """Pages of other origins have no business here, unless they are on the list."""
        hosts = _all(headers, b"host")
        for origin in _all(headers, b"origin"):
            own = bool(hosts) and urlsplit(origin).scheme in ("http", "https")
            if origin not in self._origins and not (own and urlsplit(origin).netloc == hosts[0]):
                raise _refused(403, "Origin: pages of this origin may not call the server (--allow ORIGIN)")

    def _namespace(self, path: str, headers: Headers) -> str:
        """One for each key, so that nobody can tell by their speed what the prompts of others were."""
        if not self._digests:
            return ""
        bearer = _all(headers, b"authorization")
        given = [key for key in map(_bearer_key, bearer) if key is not None]
        others = _all(headers, b"x-api-key")
        is_plain = len(bearer) == len(given) <= 1 and len(others) <= 1 and (given or others)
        found = {self._known(key) for key in (*given, *others)} if is_plain else set()
        if is_plain and len(found) == 1 and None not in found:
            return str(found.pop())
        if path in OPEN_PATHS:
            return ""
        raise ProblemError(
            Problem(
                401,
                "a valid API key is needed: Authorization: Bearer KEY, or x-api-key: KEY",
                code="invalid_api_key",
            )
        )

    def _known(self, key: str) -> str | None:
        """The namespace of a key that is one of ours. Compares with all of them, each in constant time."""
        digest = _digest(key)
        matches = [hmac.compare_digest(digest, each) for each in self._digests]
        return digest.hex()[:32] if any(matches) else None

    def _check_body(self, scope: Scope) -> None:
        headers = scope["headers"]
        if _all(headers, b"content-encoding"):
            raise _refused(415, "Content-Encoding: bodies are read as they are, send them uncompressed")
        kinds = [value.split(";", 1)[0].strip().lower() for value in _all(headers, b"content-type")]
        if kinds != ["application/json"] and _has_route(scope):
            raise _refused(415, "Content-Type: only application/json is read: send it as a header")
        lengths = _all(headers, b"content-length")
        if any(not length.isdecimal() or len(length) > 18 for length in lengths):
            raise _refused(400, "Content-Length: not a number")
        if any(int(length) > self._settings.max_body_bytes for length in lengths):
            limit = self._settings.max_body_bytes
            raise _refused(413, f"the body is larger than {limit} bytes", "body_too_large")

    def _bounded(self, receive: Receive) -> Receive:
        """`receive`, with an error once a body is too long, whatever its headers said, or stops coming."""
        taken, is_whole, began = 0, False, time.monotonic()

        async def bounded() -> Message:
            nonlocal taken, is_whole
            if is_whole:  # what comes now is that the client has gone
                return await receive()
            slow_s = self._settings.slow_body_s
            left_s = began + slow_s + taken / LEAST_BODY_RATE - time.monotonic()
            with anyio.move_on_after(min(slow_s, left_s)) as patience:
                message = await receive()
            if patience.cancelled_caught:
                raise HTTPException(408, headers={"Connection": "close"})
            if message["type"] == "http.request":
                is_whole = not message.get("more_body", False)
                taken += len(message.get("body", b""))
                if taken > self._settings.max_body_bytes:
                    raise HTTPException(413)  # FastAPI passes no other exception on from here
            return message

        return bounded


def namespace_of(scope: Scope, salt: str | None) -> str:
    """What shares prefixes: requests of one key and, where a caller gives one, of one salt."""
    own = str(scope["state"]["namespace"])
    return own if salt is None else f"{own}/{salt}"


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _all(headers: Headers, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in headers if key.lower() == name]


def _bearer_key(value: str) -> str | None:
    """The key in an Authorization header; names of its schemes have no case."""
    scheme, _, key = value.partition(" ")
    return key.lstrip(" ") if scheme.lower() == "bearer" else None


def _without_port(host: str) -> str:
    """The name in a Host header, empty if what follows it is no port."""
    name, colon, port = host.rpartition(":")
    if not colon or host.endswith("]"):
        return host
    is_port = port.isdecimal() and len(port) <= 5 and int(port) <= 65535
    return name if is_port and (":" not in name or name.endswith("]")) else ""


def _has_route(scope: Scope) -> bool:
    """Where there is none, the router says so: a client that uploads a file has nothing else to send."""
    return any(route.matches(scope)[0] != Match.NONE for route in scope["app"].routes)


def _refused(status: int, message: str, code: str | None = None) -> ProblemError:
    return ProblemError(Problem(status, message, code=code))
