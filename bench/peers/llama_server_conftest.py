"""The conftest.py of llama.cpp's server tests while they run against this package.

It takes the place of their own, which downloads models. Outcomes go to outcomes.jsonl beside it, under the
names of tests and the numbers of their cases. Tests that count what a server did, or what its cache has, get
one that no other test has used. Names of models are left out of requests: llama.cpp's server takes any name,
and `coldstream serve` refuses other names than its model's. What `llama-server` gets for all requests
(seed, temperature and length) is given with each, its own form of completions becomes OpenAI's, and the empty
text with which OpenAI's streams of chats begin becomes llama.cpp's null.
"""

import importlib
import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

HERE = Path(__file__).parent
FRESH = ("metrics", "cache", "progress", "keep_only_active")  # in names of tests that need a new server
# Tests of large models that any model must pass here, where a grammar leaves no way but the demanded call.
DEMANDED = ("test_completion_with_required_tool_real_model",)

utils = importlib.import_module("utils")  # of llama.cpp's tests, which lie beside this file
native = importlib.import_module("llama_server_native")
requests = importlib.import_module("requests")
httpx = importlib.import_module("httpx")
utils.download_file = lambda url, output_file_path=None: Path(url).name  # nothing is downloaded

send_request, send_httpx = requests.Session.request, httpx.Client.send
names: dict[str, str] = {}


def _request(session: Any, method: str, url: str, **options: Any) -> Any:
    body = options.get("json")
    if method.upper() != "POST" or not isinstance(body, dict):
        return send_request(session, method, url, **options)
    body = {name: value for name, value in body.items() if name != "model"}
    if {"prompt", "messages", "input"} & body.keys():
        body = _defaults(url) | body
    path = urlsplit(url).path
    if path not in native.ROUTES:
        response = send_request(session, method, url, **{**options, "json": body})
        if response.status_code == 200 and body.get("stream"):
            response.iter_lines = partial(native.lines_of_chat, response.iter_lines())
        return response
    url = url.replace(path, "/v1/completions")
    response = send_request(session, method, url, **{**options, "json": native.request_of(body)})
    if response.status_code == 200 and body.get("stream"):
        response.iter_lines = partial(native.lines_of, response.iter_lines())
    elif response.status_code == 200:
        response._content = json.dumps(native.answer_of(response.json())).encode()
    return response


def _defaults(url: str) -> dict[str, Any]:
    """What the command line of the server at `url` said of requests."""
    port = urlsplit(url).port
    (server,) = [each for each in utils.server_instances if each.server_port == port]
    found = {"temperature": server.temperature, "seed": server.seed}
    if urlsplit(url).path in native.ROUTES and (server.n_predict or -1) > 0:
        found["n_predict"] = server.n_predict
    return found


def _send(client: Any, request: Any, **options: Any) -> Any:
    body = json.loads(request.content or "null")
    if isinstance(body, dict) and "model" in body:
        del body["model"]
        headers = {name: value for name, value in request.headers.items() if name != "content-length"}
        more = {"json": body, "headers": headers, "extensions": request.extensions}
        request = httpx.Request(request.method, request.url, **more)
    return send_httpx(client, request, **options)


requests.Session.request, httpx.Client.send = _request, _send


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Names that hold no values of parameters: the number of the case within its test instead."""
    counts: Counter[str] = Counter()
    for item in items:
        if item.originalname in DEMANDED:
            item.own_markers = [mark for mark in item.own_markers if mark.name != "slow"]
        name = f"{item.path.stem}::{item.originalname}"
        has_cases = hasattr(item, "callspec")
        names[item.nodeid] = f"{name}[{counts[name]}]" if has_cases else name
        counts[name] += 1


def pytest_deselected(items: list[Any]) -> None:
    for item in items:
        _write(names[item.nodeid], "slow", "")


def pytest_collectreport(report: Any) -> None:
    if report.failed:
        _write(Path(report.nodeid).stem, "failed", str(report.longrepr))


def pytest_runtest_setup(item: Any) -> None:
    marker = HERE / "state" / "fresh"
    if any(part in item.nodeid for part in FRESH):
        marker.touch()
    else:
        marker.unlink(missing_ok=True)


def pytest_runtest_teardown() -> None:
    for server in set(utils.server_instances):
        server.stop()


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "call" or (report.when == "setup" and not report.passed):
        crash = getattr(report.longrepr, "reprcrash", None)
        error = "" if report.passed else str(crash.message if crash else report.longrepr)
        _write(names[report.nodeid], report.outcome, error)


def _write(name: str, outcome: str, error: str) -> None:
    with (HERE / "outcomes.jsonl").open("a") as out:
        out.write(json.dumps({"test": name, "outcome": outcome, "error": error}) + "\n")
