"""A local imitation of the few answers that `huggingface_hub` asks the hub for, and of how they go wrong."""

import hashlib
import json
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from urllib.parse import unquote, urlsplit

REPO = "org/tiny-GGUF"


class HubServer:
    """Serves one repository on 127.0.0.1; a context manager. Its fields may be changed while it runs.

    `listed` is what the hub claims to have (path → size), by default what it has; `answer` replaces the claim
    whole. `status` answers everything with that code. `drop_after` ends the next download after that many
    bytes, and `status_after_drop` is the `status` from then on. `stall_after` does not end it but waits
    there, until the server is closed. `etags` are other ETags than the SHA-256 of a file, `ignores_ranges`
    sends all of it always, `busy` are headers of refusals before the next downloads, `surplus` sends more
    than was announced, `storage` redirects downloads to another server, `repos` are the owner's.
    """

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.listed: dict[str, int] = {path: len(data) for path, data in files.items()}
        self.answer: object = None
        self.commit = "0123456789abcdef0123456789abcdef01234567"
        self.status: int | None = None
        self.drop_after: int | None = None
        self.status_after_drop: int | None = None
        self.stall_after: int | None = None
        self.etags: dict[str, str] = {}
        self.ignores_ranges = False
        self.busy: list[dict[str, str]] = []
        self.surplus = 0
        self.storage: HubServer | None = None
        self.repos: list[str] = []
        self.tokens: list[str | None] = []
        self.closing = threading.Event()
        self.requests: list[tuple[str, str, str | None]] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_for(self))
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def downloads(self) -> list[tuple[str, str | None]]:
        """Path and `Range` of every download so far."""
        return [
            (path, span) for method, path, span in self.requests if method == "GET" and "/resolve/" in path
        ]

    def __enter__(self) -> "HubServer":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.closing.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def info(self) -> object:
        siblings = [
            {"rfilename": path, "size": size, "lfs": {"size": size, "sha256": digest, "pointerSize": 1}}
            for path, size in self.listed.items()
            if (digest := hashlib.sha256(self.files.get(path, b"")).hexdigest())
        ]
        return {"id": REPO, "siblings": siblings} if self.answer is None else self.answer


def _handler_for(hub: HubServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *arguments: object) -> None:
            """Quiet."""

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, with_body: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append((self.command, path, self.headers.get("Range")))
            hub.tokens.append(self.headers.get("Authorization"))
            if hub.status is not None:
                return self._send(hub.status, b"{}", with_body)
            if path == f"/api/models/{REPO}":
                return self._send(200, json.dumps(hub.info()).encode(), with_body)
            if path == "/api/models":
                body = json.dumps([{"id": repo} for repo in hub.repos]).encode()
                return self._send(200, body, with_body)
            prefix = f"/{REPO}/resolve/main/"
            data = hub.files.get(path.removeprefix(prefix)) if path.startswith(prefix) else None
            if data is None:
                return self._send(404, b"{}", with_body)
            if with_body and hub.busy:
                return self._send(429, b"{}", with_body, **hub.busy.pop(0))
            if hub.storage is not None and with_body:
                return self._send(302, b"", with_body, Location=hub.storage.endpoint + self.path)
            self._send_file(path.removeprefix(prefix), data, with_body)

        def _send(self, status: int, body: bytes, with_body: bool, **headers: str) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def _send_file(self, path: str, data: bytes, with_body: bool) -> None:
            etag = f'"{hub.etags.get(path) or hashlib.sha256(data).hexdigest()}"'
            headers = {"X_Repo_Commit": hub.commit, "ETag": etag, "Accept_Ranges": "bytes"}
            start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])
            if with_body and hub.surplus:
                self.send_response(200)
                self.end_headers()
                self.close_connection = True
                with suppress(ConnectionError):  # once the client has had enough
                    self.wfile.write(data)
                    for _ in range(hub.surplus):
                        self.wfile.write(b"more")
            elif with_body and hub.drop_after is not None:
                end, hub.drop_after, hub.status = hub.drop_after, None, hub.status_after_drop
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data[:end])
                self.close_connection = True
            elif with_body and hub.stall_after is not None:
                stall, hub.stall_after = hub.stall_after, None
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data[:stall])
                hub.closing.wait()
                self.close_connection = True
            elif start and not hub.ignores_ranges:
                span = f"bytes {start}-{len(data) - 1}/{len(data)}"
                self._send(206, data[start:], with_body, Content_Range=span, **headers)
            else:
                self._send(200, data, with_body, **headers)

    return Handler
