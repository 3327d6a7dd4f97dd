"""Bodies that would take far more memory and time than their length: what is counted, and what goes on."""

import asyncio
import json
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx2
import pytest
from fastapi.routing import APIRoute
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from coldstream.server.http import ServerSettings, bodies, create_app
from coldstream.server.http.bodies import Bodies, BodyRoute, check_size, value_of
from coldstream.server.http.completion_request import CompletionRequest
from coldstream.server.http.fields import MAX_TEXT_CHARS, Body
from coldstream.server.http.problems import ProblemError
from coldstream.server.local_client import LocalClient
from http_serving import Connect

JSON = {"Content-Type": "application/json"}
ROUTES = {
    "/v1/completions": {"prompt": "import os\n", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "def"}], "max_tokens": 1},
    "/v1/messages": {"messages": [{"role": "user", "content": "def"}], "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "def"}]},
    "/v1/responses": {"input": "def", "max_output_tokens": 1},
    "/v1/responses/input_tokens": {"input": "def"},
    "/tokenize": {"content": "def"},
    "/detokenize": {"tokens": [1]},
}
MIB = 1 << 20


def repeated(entry: str, count: int, around: str = '{"prompt": [%s]}') -> bytes:
    return (around % ",".join([entry] * count)).encode()


# Each would take many times its length, or a second for each megabyte.
KINDS: dict[str, tuple[bytes, str]] = {
    "lists": (repeated('[], ""', MIB // 4), "objects and lists"),
    "objects": (repeated("{}", MIB // 2), "objects and lists"),
    "keys": (b'{"logit_bias": {%s}}' % b",".join(b'"%d": "x"' % i for i in range(MIB // 4)), "strings"),
    "texts": (repeated('""', MIB // 2), "strings"),
    "values": (repeated("1", 2 * MIB), "values"),
    "depth of lists": (b'{"prompt": ' + b"[" * 50_000, "inside of each other"),
    "depth of objects": (b'{"a":' * 50_000, "inside of each other"),
    "digits": (b'{"n": ' + b"1" * MIB + b"}", "digits"),
    "digits of fractions": (b'{"temperature": 0.' + b"1" * MIB + b"}", "digits"),
    "wide characters": (b'{"prompt": "%s%s"}' % ("😀".encode(), b"a" * 5 * MIB), "characters"),
    "wide escapes": (b'{"prompt": "\\u4e2d%s"}' % (b"a" * 5 * MIB), "characters"),
    "closing brackets": (b"]" * MIB, "not JSON"),
    "blanks": (b" " * 9 * MIB, "blanks"),
    "a string": (b'{"prompt": "%s"}' % (b"a" * 17 * MIB), "bytes in a string"),
    "quotes": (b'"' * MIB, "strings"),
}


@pytest.mark.sharded(9)
@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("kind", KINDS)
async def test_rq02_what_would_take_more_memory_than_it_is_long_is_refused(
    http: httpx2.AsyncClient, path: str, kind: str
) -> None:
    body, what = KINDS[kind]
    response = await http.post(path, content=body, headers=JSON)
    assert response.status_code == 400
    error = response.json()["error"]
    assert what in error["message"]
    if not path.startswith("/v1/messages"):
        assert error["code"] == ("invalid_json" if what == "not JSON" else "body_too_complex")


@pytest.mark.parametrize("kind", KINDS)
def test_rq02_nothing_is_made_of_what_is_refused(kind: str) -> None:
    body = bytearray(KINDS[kind][0])
    tracemalloc.start()
    try:
        with pytest.raises(ProblemError):
            value_of(body)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 16 * MIB  # of the slice that is counted


LARGEST: dict[str, bytes] = {
    "token ids": repeated("30000", 1 << 20),
    "lists of token ids": repeated(f"[{','.join(['300'] * 16)}]", 60_000),
    "parts": repeated(
        f'{{"role": "user", "content": [{",".join(["{}"] * 1000)}]}}'.replace("{}", '{"type": "text"}'),
        60,
        '{"messages": [%s]}',
    ),
    "texts": repeated('"abcdef"', 130_000),
    "keys": b'{"prompt": "a", %s}' % b",".join(b'"k%d": 1' % i for i in range(130_000)),
}


@pytest.mark.sharded(9)
@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("kind", LARGEST)
def test_rq02_what_passes_takes_a_bounded_multiple_of_its_length(
    local_client: LocalClient, path: str, kind: str
) -> None:
    model, body = model_of(local_client, path), bytearray(LARGEST[kind])
    limit = 4 * len(body) + 64 * MIB
    tracemalloc.start()
    try:
        with suppress(ProblemError):
            bodies._read_large(body, model)
        assert tracemalloc.get_traced_memory()[1] <= limit
    finally:
        tracemalloc.stop()


def model_of(client: LocalClient, path: str) -> type[BaseModel]:
    (model,) = [route.body_field.field_info.annotation for route in body_routes(client) if route.path == path]
    return model


def body_routes(client: LocalClient) -> list[Any]:
    """The routes that take a body."""
    seen: list[Any] = []
    routers = [create_app(client, ServerSettings()).router]
    while routers:
        for route in routers.pop().routes:
            inner = getattr(route, "original_router", None)
            if inner is not None:
                routers.append(inner)
            if isinstance(route, APIRoute) and route.body_field is not None:
                seen.append(route)
    return seen


def test_every_route_with_a_body_reads_it_within_these_bounds(local_client: LocalClient) -> None:
    found = body_routes(local_client)
    assert {route.path for route in found} >= ROUTES.keys()
    for route in found:
        assert isinstance(route, BodyRoute)
        model = route.body_field.field_info.annotation
        assert issubclass(model, Body)
        assert all(each["fail_fast"] for each in lists_of(model.__pydantic_core_schema__))


def lists_of(schema: Any) -> Iterator[dict[str, Any]]:
    """The lists in a schema of pydantic's, and the dictionaries whose values are validated."""
    if isinstance(schema, dict):
        if schema.get("type") in ("list", "tuple", "set", "frozenset"):
            yield schema
        for each in schema.values():
            yield from lists_of(each)
    elif isinstance(schema, (list, tuple)):
        for each in schema:
            yield from lists_of(each)


@pytest.mark.parametrize("path", ROUTES)
def test_rq02_a_list_is_refused_for_its_first_wrong_entry(local_client: LocalClient, path: str) -> None:
    """Each error takes more memory than the entry that it is about."""
    model = model_of(local_client, path)
    found = list(lists_of(model.__pydantic_core_schema__))
    assert found or path == "/tokenize"
    assert all(each["fail_fast"] for each in found)
    for name, field in model.model_fields.items():
        wrongs: list[Any] = [[[], 1, {}], [{"a": {}}] * 3, ["", None, []]]
        for wrong in wrongs:
            once, often = (errors_of(model, field.alias or name, wrong * times) for times in (1, 300))
            assert once == often, name


def errors_of(model: type[BaseModel], name: str, value: Any) -> int:
    try:
        model.model_validate({name: value})
    except ValidationError as error:
        return len([each for each in error.errors() if each["loc"][0] == name])
    return 0


def test_rq02_no_entry_of_an_object_that_is_too_large_is_validated() -> None:
    biases = {str(token_id): "wrong" for token_id in range(100_000)}
    assert errors_of(CompletionRequest, "logit_bias", biases) == 1


async def test_rq02_a_prompt_is_what_its_first_entry_is(http: httpx2.AsyncClient) -> None:
    for prompt, message in (
        ([1, 2, "x"], "prompt[2]: Input should be a valid integer"),
        (["a", 1], "prompt[1]: Input should be a valid string"),
        ([[1], 1], "prompt[1]: Input should be a valid list"),
        ([[1], [1, "a"]], "prompt[1][1]: Input should be a valid integer"),
        ([{}], "prompt: Input should be a text, token ids, or a list of either"),
        (5, "prompt: Input should be a text, token ids, or a list of either"),
    ):
        response = await http.post("/v1/completions", json={"prompt": prompt})
        assert (response.status_code, response.json()["error"]["message"]) == (400, message)


TEXTS = st.text(st.sampled_from('a"\\[]{},:1 é😀\ud83d\ude00\n'), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXTS, inner, max_size=5),
    max_leaves=30,
)


class Counted:
    """The slow twin: what a parsed value has of everything. A list of one entry has no comma."""

    def __init__(self, value: Any) -> None:
        self.containers = self.strings = self.commas = self.depth = 0
        self._add(value, 1)

    def _add(self, value: Any, depth: int) -> None:
        if isinstance(value, str):
            self.strings += 1
        if isinstance(value, (list, dict)):
            self.containers += 1
            self.depth = max(self.depth, depth)
            self.commas += max(0, len(value) - 1)
            for each in value if isinstance(value, list) else [*value, *value.values()]:
                self._add(each, depth + 1)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
@given(
    value=VALUES, indent=st.sampled_from([None, 0, 3]), ascii=st.booleans(), slice_bytes=st.integers(2, 40)
)
def test_rq02_counts_are_those_of_the_value_wherever_slices_end(
    monkeypatch: pytest.MonkeyPatch, value: Any, indent: int | None, ascii: bool, slice_bytes: int
) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii).encode("utf-8", "replace")
    monkeypatch.setattr(bodies, "_SLICE_BYTES", slice_bytes)
    counted = Counted(value)
    limits = {
        "MAX_CONTAINERS": counted.containers,
        "MAX_STRINGS": counted.strings,
        "MAX_VALUES": counted.commas + 1,
        "MAX_DEPTH": counted.depth,
    }
    for name, limit in limits.items():
        monkeypatch.setattr(bodies, name, limit)
    check_size(text)
    for name, limit in limits.items():
        monkeypatch.setattr(bodies, name, limit - 1)
        if limit:
            with pytest.raises(ProblemError, match="more than"):
                check_size(text)
        monkeypatch.setattr(bodies, name, limit)


def test_rq02_blanks_and_bytes_of_strings_are_counted_over_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "_SLICE_BYTES", 10)
    text = b'  {"a": "%s" ,\n"b b":  "%s"}\t' % (b"a b " * 10, rb"\\\" " * 8 + b"b b ")
    for name, exact in (("MAX_BLANKS", 8), ("MAX_STRING_BYTES", 44)):
        monkeypatch.setattr(bodies, name, exact)
        check_size(text)
        monkeypatch.setattr(bodies, name, exact - 1)
        with pytest.raises(ProblemError, match="more than"):
            check_size(text)
        monkeypatch.setattr(bodies, name, 1000)


@pytest.mark.parametrize("slice_bytes", [7, 1 << 18])
def test_rq02_a_number_has_512_digits_at_most(monkeypatch: pytest.MonkeyPatch, slice_bytes: int) -> None:
    monkeypatch.setattr(bodies, "_SLICE_BYTES", slice_bytes)
    assert value_of(bytearray(b"[%s, 2]" % (b"1" * 512))) == [int("1" * 512), 2]
    with pytest.raises(ProblemError, match="digits"):
        value_of(bytearray(b"[%s, 2]" % (b"1" * 513)))


def test_rq02_a_long_text_of_ascii_passes_and_is_the_fields_affair() -> None:
    """Pictures in base64 are longer than any text may be."""
    text = "a" * (MAX_TEXT_CHARS + 1)
    assert value_of(bytearray(json.dumps(text).encode())) == text
    for ascii, count in ((True, MAX_TEXT_CHARS // 2), (False, MAX_TEXT_CHARS)):  # six bytes each, or three
        wide = "中" * count
        assert value_of(bytearray(json.dumps(wide, ensure_ascii=ascii).encode())) == wide


@given(st.text(st.sampled_from('a"\\ud83d\ud83d\ude00\udbff')))
def test_tk03_halves_of_surrogate_pairs_are_read_as_the_replacement_character(text: str) -> None:
    expected = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert value_of(bytearray(json.dumps(text).encode())) == expected


class Held:
    """Stands in the way of all reading of large bodies until `let_go`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.let_go = threading.Event()
        self.most = self.now = 0
        self.threads: set[int] = set()
        monkeypatch.setattr(bodies, "value_of", self._value_of)

    def _value_of(self, data: bytearray) -> Any:
        if len(data) > bodies.INLINE_BYTES:
            self.threads.add(threading.get_ident())
            self.now += 1
            self.most = max(self.most, self.now)
            assert self.let_go.wait(timeout=60)
            self.now -= 1
        return value_of(data)


def large(path: str) -> bytes:
    return json.dumps({**ROUTES[path], "more": "x" * bodies.INLINE_BYTES}).encode()


@pytest.mark.parametrize("path", ROUTES)
async def test_rq02_large_bodies_are_read_beside_the_event_loop_and_one_at_a_time(
    http: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    held = Held(monkeypatch)
    calls = [asyncio.create_task(http.post(path, content=large(path), headers=JSON)) for _ in range(3)]
    while not held.now:
        await asyncio.sleep(0)
    for _ in range(3):
        assert (await http.get("/health")).status_code == 200
        assert (await http.post("/v1/completions", json=ROUTES["/v1/completions"])).status_code == 200
    assert threading.get_ident() not in held.threads
    held.let_go.set()
    statuses = [response.status_code for response in await asyncio.gather(*calls)]
    assert held.most == 1
    assert statuses == [200] * 3


async def test_rq02_bodies_that_are_being_read_are_bounded_together(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, body = Held(monkeypatch), large("/v1/completions")
    async with connect(max_body_bytes=len(body)) as http:

        async def ask() -> httpx2.Response:
            return await http.post("/v1/completions", content=body, headers=JSON)

        calls = [asyncio.create_task(ask()) for _ in range(5)]
        done, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        (refused,) = [call.result() for call in done]
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "bodies_full")
        assert int(refused.headers["retry-after"]) >= 1
        held.let_go.set()
        assert sorted(response.status_code for response in await asyncio.gather(*calls)) == [*[200] * 4, 429]
        assert (await ask()).status_code == 200


async def test_what_a_body_took_is_free_however_it_ends() -> None:
    reader = Bodies(max_bytes=100)

    async def read(*parts: bytes, more: bool = False) -> None:
        messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
        messages.append(
            {"type": "http.request", "more_body": False} if not more else {"type": "http.disconnect"}
        )
        scope = {"type": "http", "method": "POST", "path": "/", "headers": []}

        async def receive() -> Any:
            return messages.pop(0)

        await reader.read(Request(scope, receive), CompletionRequest)

    for parts, more in (([b"x" * 100], False), ([b"x" * 60, b"x" * 60], False), ([b"{}" * 50], True)):
        with pytest.raises((ProblemError, ClientDisconnect)):
            await read(*parts, more=more)
    await read(b" " * 80, b'{"prompt": "a"}')
