"""Who may call the server: keys, Host and Origin headers, sizes. Over the routes that there are."""

import ast
import json
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.routing import Route

from coldstream.server import http as http_room
from coldstream.server.http import ServerSettings, create_app
from coldstream.server.http.guard import OPEN_PATHS
from coldstream.server.http.page import PAGE_FILES
from coldstream.server.local_client import LocalClient
from http_serving import URL, Connect

KEY = "correct-horse"
OTHER_KEY = "battery-staple"
BODY = {"prompt": "import os\n", "max_tokens": 1}


def routes(client: LocalClient) -> list[tuple[str, str]]:
    """Every method and path of the application."""
    paths = create_app(client, ServerSettings()).openapi()["paths"]
    found = [(method.upper(), path) for path, methods in paths.items() for method in methods]
    return [*found, ("GET", "/openapi.json"), ("GET", "/nowhere"), *(("GET", path) for path in PAGE_FILES)]


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("Authorization", f"Bearer {KEY}x")],
        [("Authorization", f"bearer{KEY}")],
        [("Authorization", f"bearer {KEY}x")],
        [("Authorization", KEY)],
        [("Authorization", f"Basic {KEY}")],
        [("Authorization", f"Bearer {KEY}"), ("Authorization", f"Bearer {KEY}")],
        [("Authorization", f"Bearer {KEY}"), ("x-api-key", "wrong")],
        [("Authorization", "Bearer "), ("x-api-key", KEY)],
        [("x-api-key", KEY.encode() + b"\xff")],
        [("x-api-key", "")],
    ],
)
async def test_au01_no_route_but_health_is_open_without_a_key(
    connect: Connect, local_client: LocalClient, headers: Any
) -> None:
    async with connect(api_keys=(KEY, OTHER_KEY)) as http:
        for method, path in routes(local_client):
            request = http.build_request(method, f"{path}?api_key={KEY}", headers=headers)
            response = await http.send(request)
            if path in OPEN_PATHS:
                assert response.status_code == 200
                continue
            assert response.status_code == 401, path
            own = "invalid_api_key" if "messages" not in path else "authentication_error"
            assert own in response.json()["error"].values()


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": f"Bearer {KEY}"},
        {"Authorization": f"Bearer {OTHER_KEY}"},
        {"Authorization": f"bearer {KEY}"},
        {"Authorization": f"BEARER  {KEY}"},
        {"x-api-key": KEY},
        {"x-api-key": KEY, "Authorization": f"Bearer {KEY}"},
    ],
)
async def test_any_of_several_keys_opens_every_route(connect: Connect, headers: dict[str, str]) -> None:
    async with connect(api_keys=(KEY, OTHER_KEY)) as http:
        assert (await http.get("/v1/models", headers=headers)).status_code == 200
        assert (await http.post("/v1/completions", json=BODY, headers=headers)).status_code == 200


async def test_prefixes_are_not_shared_between_keys_or_salts(connect: Connect) -> None:
    body = {"prompt": "import argparse\nimport collections\n" * 4, "max_tokens": 1}

    async def cached(http: httpx2.AsyncClient, key: str, **more: Any) -> int:
        headers = {"Authorization": f"Bearer {key}"}
        response = await http.post("/v1/completions", json={**body, **more}, headers=headers)
        return int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    async with connect(api_keys=(KEY, OTHER_KEY)) as http:
        await cached(http, KEY)
        await cached(http, KEY)
        assert await cached(http, KEY) > 0
        assert await cached(http, OTHER_KEY) == 0
        assert await cached(http, KEY, cache_salt="mine") == 0


def test_au02_keys_are_compared_in_constant_time_only() -> None:
    """No `==` or `in` near a key: digests of all keys meet in `hmac.compare_digest` alone."""
    source = Path(str(http_room.__file__)).with_name("guard.py").read_text()
    functions = {node.name: node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)}
    known = functions["_known"]
    assert not [node for node in ast.walk(known) if isinstance(node, ast.Compare)]
    calls = [ast.unparse(node.func) for node in ast.walk(known) if isinstance(node, ast.Call)]
    assert "hmac.compare_digest" in calls


@pytest.mark.parametrize(
    "host",
    ["evil.test", "127.0.0.1.evil.test", "localhost.", "localhost.evil.test:8080", "127.0.0.1:x", "[::1",
     "localhost:99999", "127.0.0.1:80:80", "user@127.0.0.1", "", "::1", "127.0.0.1 "],
)  # fmt: skip
async def test_au03_names_of_others_are_refused_on_loopback(connect: Connect, host: str) -> None:
    async with connect() as http:
        assert (await http.get("/v1/models", headers={"Host": host})).status_code == 403


@pytest.mark.parametrize(
    "host", ["localhost", "LocalHost:8080", "127.0.0.1", "127.3.2.1:1", "[::1]:8080", "box"]
)
async def test_au03_own_names_pass(connect: Connect, host: str) -> None:
    async with connect(allowed_hosts=("box",)) as http:
        assert (await http.get("/v1/models", headers={"Host": host})).status_code == 200


async def test_au03_beyond_loopback_the_key_decides_unless_hosts_are_listed(connect: Connect) -> None:
    headers = {"Host": "box.lan", "Authorization": f"Bearer {KEY}"}
    async with connect(host="0.0.0.0", api_keys=(KEY,)) as http:
        assert (await http.get("/v1/models", headers=headers)).status_code == 200
    async with connect(host="0.0.0.0", api_keys=(KEY,), allowed_hosts=("other.lan",)) as http:
        assert (await http.get("/v1/models", headers=headers)).status_code == 403


@pytest.mark.parametrize("origin", ["null", "http://evil.test", "file://", "https://127.0.0.1:1", "app://x"])
async def test_au04_pages_of_other_origins_are_refused(connect: Connect, origin: str) -> None:
    async with connect() as http:
        for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions"), ("OPTIONS", "/v1/models")):
            response = await http.request(method, path, headers={"Origin": origin}, json=BODY)
            assert response.status_code == 403
            assert "access-control-allow-origin" not in response.headers


async def test_au04_own_pages_and_listed_ones_may_call(connect: Connect) -> None:
    async with connect(allowed_origins=("http://ui.test",)) as http:
        own = await http.get("/v1/models", headers={"Origin": URL})
        assert own.status_code == 200
        assert "access-control-allow-origin" not in own.headers
        listed = await http.get("/v1/models", headers={"Origin": "http://ui.test"})
        assert listed.headers["access-control-allow-origin"] == "http://ui.test"
        asked = {"Origin": "http://ui.test", "Access-Control-Request-Method": "POST"}
        preflight = await http.options("/v1/chat/completions", headers=asked)
        assert preflight.headers["access-control-allow-origin"] == "http://ui.test"
        foreign = await http.options("/v1/chat/completions", headers={**asked, "Origin": "http://evil.test"})
        assert "access-control-allow-origin" not in foreign.headers


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "application/jsonx", ""])
async def test_au04_only_json_is_read(http: httpx2.AsyncClient, kind: str) -> None:
    response = await http.post("/v1/completions", content=json.dumps(BODY), headers={"Content-Type": kind})
    assert response.status_code == 415


async def test_rq02_compressed_bodies_are_refused(http: httpx2.AsyncClient) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    assert (await http.post("/v1/completions", content=b"\x1f\x8b", headers=headers)).status_code == 415


async def test_rq02_bodies_are_bounded_whatever_their_headers_say(connect: Connect) -> None:
    def parts() -> Any:
        async def chunks() -> Any:
            for _ in range(101):
                yield b" " * 10

        return chunks()

    headers = {"Content-Type": "application/json"}
    async with connect(max_body_bytes=1000) as http:
        reported = await http.post("/v1/completions", content=b" " * 1001, headers=headers)
        chunked = await http.post("/v1/completions", content=parts(), headers=headers)
        fits = await http.post(
            "/v1/completions", content=b" " * 958 + json.dumps(BODY).encode(), headers=headers
        )
        absurd = {**headers, "Content-Length": "9" * 5000}
        assert (await http.post("/v1/completions", content=b"{}", headers=absurd)).status_code == 400
    assert (reported.status_code, chunked.status_code) == (413, 413)
    assert reported.json()["error"]["code"] == chunked.json()["error"]["code"] == "body_too_large"
    assert (len(b" " * 958 + json.dumps(BODY).encode()), fits.status_code) == (1000, 200)


async def test_rq08_headers_are_bounded(connect: Connect) -> None:
    async with connect(max_headers=20, max_header_bytes=2000) as http:
        assert (await http.get("/health", headers={"X-Long": "a" * 2000})).status_code == 431
        assert (await http.get("/health", headers={f"X-{i}": "" for i in range(20)})).status_code == 431
        assert (await http.get("/health", headers={"X-Long": "a" * 1000})).status_code == 200


async def test_errors_of_anthropics_routes_have_its_shape(connect: Connect) -> None:
    async with connect(api_keys=(KEY,)) as http:
        response = await http.post("/v1/messages", json={})
    assert response.json()["error"]["type"] == "authentication_error"
    assert response.json()["type"] == "error"


def test_every_route_is_in_the_document(local_client: LocalClient) -> None:
    """The tests above iterate over the document."""
    app = create_app(local_client, ServerSettings())
    hidden = [route for route in app.routes if isinstance(route, Route) and not route.include_in_schema]
    assert {route.path for route in hidden} <= {"/openapi.json", "/health"}
