"""Hostile and mistaken bodies: every one is a 400 that names the field, and the server goes on."""

import json
from typing import Any

import httpx2
import pytest

from coldstream.engine import LLM, SamplingParams
from http_serving import Connect
from tests.audits.soak import BAD

JSON = {"Content-Type": "application/json"}
COMPLETION = {"prompt": "import os\n", "max_tokens": 1}
CHAT = {"messages": [{"role": "user", "content": "def"}], "max_tokens": 1}
ROUTES = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]


async def refused(http: httpx2.AsyncClient, path: str, body: Any) -> dict[str, Any]:
    """The error of a body that is refused."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = await http.post(path, content=content, headers=JSON)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    is_full = error["code"] == "context_length_exceeded"
    sizes = {"n_prompt_tokens", "n_ctx"} if is_full else set()
    assert error.keys() == {"message", "type", "param", "code"} | sizes
    assert error["type"] == ("exceed_context_size_error" if is_full else "invalid_request_error")
    return error


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b'"text"',
        b"{",
        b'{"prompt": "a"} trailing',
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b'{"n": ' + b"1" * 5000 + b"}",
        b'{"prompt": "\xff"}',
        b"\xef\xbb\xbf{}",
    ],
    ids=lambda body: repr(body[:12]),
)
async def test_rq02_bodies_that_are_no_object_are_refused(
    http: httpx2.AsyncClient, path: str, body: bytes
) -> None:
    await refused(http, path, body)


async def test_rq02_the_last_of_duplicate_keys_counts(http: httpx2.AsyncClient, llm: LLM) -> None:
    body = b'{"prompt": "def", "prompt": "import os\\n", "max_tokens": 3, "temperature": 0}'
    response = await http.post("/v1/completions", content=body, headers=JSON)
    (expected,) = llm.generate("import os\n", SamplingParams(temperature=0, max_tokens=3))
    assert response.json()["choices"][0]["text"] == expected.text


NUMBERS = [
    "n", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "repeat_penalty", "repeat_last_n", "seed",
]  # fmt: skip
VALUES = [
    "-2",
    "1e308",
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    "true",
    '"1"',
    "[]",
    "{}",
    "18446744073709551616",
]


@pytest.mark.parametrize("path", ROUTES[:2])
@pytest.mark.parametrize("name", NUMBERS)
async def test_rq03_numbers_out_of_range_are_refused_by_name(
    http: httpx2.AsyncClient, path: str, name: str
) -> None:
    own = json.dumps(COMPLETION if path == "/v1/completions" else CHAT)
    for value in VALUES:
        if value == "-2" and name.endswith(("presence_penalty", "frequency_penalty")):
            value = "-2.1"
        error = await refused(http, path, f'{own[:-1]}, "{name}": {value}}}'.encode())
        assert error["param"] == name, value


@pytest.mark.parametrize(
    "name", [*NUMBERS, "stop", "stream", "stream_options", "logit_bias", "logprobs", "model"]
)
async def test_rq03_null_means_absent(http: httpx2.AsyncClient, name: str) -> None:
    for path, body in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
        response = await http.post(
            path, json={**body, "max_tokens": 1, **({name: None} if name != "max_tokens" else {})}
        )
        assert response.status_code == 200, response.text


@pytest.mark.parametrize("stop", ["", [], ["", ""]])
async def test_empty_stop_strings_stop_nothing(connect: Connect, stop: object) -> None:
    async with connect() as http:
        answers = [
            await http.post("/v1/completions", json={**COMPLETION, "max_tokens": 4, "temperature": 0, **each})
            for each in ({}, {"stop": stop}, {"stop": ["\0", ""]})
        ]
    texts = [each.json()["choices"][0]["text"] for each in answers]
    assert texts[0]
    assert texts == texts[:1] * 3


async def test_rq03_n_has_the_servers_own_limit(connect: Connect) -> None:
    async with connect(max_n=2) as http:
        assert (await http.post("/v1/completions", json={**COMPLETION, "n": 2})).status_code == 200
        assert (await refused(http, "/v1/completions", {**COMPLETION, "n": 3}))["param"] == "n"
        assert (
            "temperature 0"
            in (await refused(http, "/v1/completions", {**COMPLETION, "n": 2, "temperature": 0}))["message"]
        )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", {"6144": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", {str(i): 1 for i in range(1025)}),
        ("logit_bias", [[1, 1]]),
        ("stop", ["a"] * 65),
        ("stop", ["", 1]),
        ("stop", "a" * 1025),
        ("stop", [1]),
        ("stop_token_ids", [6144]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [1.5]),
        ("logprobs", 21),
        ("echo", True),
        ("suffix", "x"),
        ("best_of", 2),
        ("prompt", ""),
        ("prompt", []),
        ("prompt", [[]]),
        ("prompt", [""]),
        ("prompt", ["a", ""]),
        ("prompt", ["a"] * 65),
        ("prompt", [1, 6144]),
        ("prompt", [-1]),
        ("prompt", [1.0]),
        ("prompt", [[[1]]]),
        ("prompt", {"text": "a"}),
        ("prompt", None),
        ("prompt", [1, "a"]),
    ],
    ids=lambda value: repr(value)[:24],
)
async def test_rq04_fields_that_cannot_be_served_are_refused_by_name(
    http: httpx2.AsyncClient, field: str, value: Any
) -> None:
    error = await refused(http, "/v1/completions", {**COMPLETION, field: value})
    assert error["param"] is not None
    assert error["param"].startswith(field)


USER = {"role": "user", "content": "def"}


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "a"}]}, "messages[0].role"),
        ({"messages": [USER, {"role": "user", "content": 5}]}, "messages[1].content"),
        ({"messages": [{"content": "a"}]}, "messages[0].role"),
        ({"messages": ["a"]}, "messages[0]"),
        ({"messages": [USER] * 8193}, "messages"),
        ({"messages": [{**USER, "content": [{"image_url": {"url": "a"}}]}]}, "messages[0].content"),
        ({"messages": [{**USER, "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [{}]}]}, "messages[1].tool_calls[0]"),
        ({"reasoning_effort": "frantic"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"reasoning_effort": "frantic"}}, "reasoning_effort"),
        ({"continue_final_message": True}, "continue_final_message"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
            "messages[0].tool_calls[0]",
        ),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"functions": []}, "functions"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"audio": {}}, "modalities"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"chat_template_kwargs": {"enable_thinking": "yes"}}, "chat_template_kwargs"),
    ],
    ids=lambda value: repr(value)[:40],
)
async def test_rq04_rq06_messages_and_tools_that_cannot_be_served_are_refused(
    http: httpx2.AsyncClient, changes: dict[str, Any], param: str | None
) -> None:
    error = await refused(http, "/v1/chat/completions", {**CHAT, **changes})
    assert param is None or (error["param"] or "").startswith(param), error


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "tokenize", "documents", "x"])
async def test_tm03_the_renderers_own_arguments_cannot_be_set(http: httpx2.AsyncClient, name: str) -> None:
    error = await refused(http, "/v1/chat/completions", {**CHAT, "chat_template_kwargs": {name: True}})
    assert error["param"] == "chat_template_kwargs"


@pytest.mark.parametrize(
    "changes",
    [
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": "\ud800"}}}]},
        {"tools": [{"type": "function", "function": {"name": "f", "\ud800": 1}}]},
        {"messages": [{**USER, "name": "\ud800"}]},
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [
            {"function": {"name": "f", "arguments": {"\udfff": 1}}}]}, USER]},
        {"user": "\ud800"},
        {"\ud800": 1},
        {"cache_salt": "\ud800"},
    ],
)  # fmt: skip
async def test_tk03_lone_surrogates_anywhere_are_read(
    http: httpx2.AsyncClient, changes: dict[str, Any]
) -> None:
    content = json.dumps({**CHAT, **changes}).encode()
    response = await http.post("/v1/chat/completions", content=content, headers=JSON)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "demo\x00", "a" * 1024, "gpt-4o", ""])
async def test_rq11_unknown_models_are_not_found(http: httpx2.AsyncClient, name: str) -> None:
    for path, body in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
        response = await http.post(path, json={**body, "model": name})
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "model_not_found"


@pytest.mark.sharded(of="processes")
async def test_rq07_the_limit_of_the_context_is_exact(http: httpx2.AsyncClient, llm: LLM) -> None:
    """The prompt leaves room for one token at least; an answer ends where the context does."""
    size = llm.opened.ctx_size
    for path, key in (("/v1/completions", "prompt"), ("/tokenize", "content")):
        assert (await http.post(path, json={key: "def", "max_tokens": 1})).status_code == 200
    full = {"prompt": [1] * (size - 1), "max_tokens": 50, "ignore_eos": True}
    response = await http.post("/v1/completions", json=full)
    assert response.json()["usage"]["completion_tokens"] == 1
    assert response.json()["choices"][0]["finish_reason"] == "length"
    for prompt in ([1] * size, [[1] * size], "x = 1\n" * size):
        error = await refused(http, "/v1/completions", {"prompt": prompt})
        assert error["code"] == "context_length_exceeded"
        assert error["n_ctx"] == size
        exact = len(llm.opened.tokenizer.encode(prompt)) if isinstance(prompt, str) else size
        assert error["n_prompt_tokens"] == exact
    chat = {"messages": [{"role": "user", "content": "x = 1\n" * size}]}
    assert (await refused(http, "/v1/chat/completions", chat))["code"] == "context_length_exceeded"
    assert (await refused(http, "/v1/chat/completions", {**chat, "stream": True}))["param"] == "messages"


async def test_rq10_unknown_routes_and_methods_say_nothing_of_the_machine(http: httpx2.AsyncClient) -> None:
    for method, path, status in (
        ("GET", "/v2", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("HEAD", "/v1/models", 405),
        ("TRACE", "/", 405),
        ("GET", "/docs", 404),
    ):
        response = await http.request(method, path, json={} if method == "POST" else None)
        assert response.status_code == status
        assert "server" not in response.headers
        if method != "HEAD":
            assert response.json()["error"]["type"] == "invalid_request_error"
    for path, message in (
        ("/v1/embeddings", "embeddings are not computed here"),
        ("/v1/conversations", "send all items with each request"),
        ("/api/chat", "OpenAI's is at /v1"),
        ("/v1/v1/messages", "has /v1 twice"),
        ("/v1/nothing", "no such route; GET /openapi.json lists them all"),
        ("/v1/messages/batches", "batches are not kept here"),
    ):
        response = await http.post(path, json={})
        assert (response.status_code, message in response.json()["error"]["message"]) == (404, True)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/v1/files", "files are not kept here"),
        ("/v1/audio/transcriptions", "audio is neither read nor made"),
    ],
)
async def test_an_upload_is_told_that_there_is_no_route_for_it(
    http: httpx2.AsyncClient, path: str, message: str
) -> None:
    """And not to send JSON, which would not help."""
    response = await http.post(path, files={"file": ("a.wav", b"RIFF")}, data={"model": "demo"})
    assert response.status_code == 404
    assert message in response.json()["error"]["message"]


async def test_unknown_fields_are_ignored(http: httpx2.AsyncClient) -> None:
    more = {"store": True, "metadata": {"a": "b"}, "service_tier": "auto", "wings": [1, None], "user": "me"}
    for path, body in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
        assert (await http.post(path, json={**body, **more})).status_code == 200


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "nonsense"},
        {"$ref": "#/$defs/missing"},
        {"type": "string", "pattern": "(a+" * 2000},
        {"enum": []},
        {"enum": ["x" * 100] * 10_000},
        {"type": "object", "properties": {f"p{i}": {} for i in range(5000)}},
    ],
    ids=lambda schema: json.dumps(schema)[:40],
)
async def test_gr01_schemas_that_cannot_be_kept_to_are_refused(http: httpx2.AsyncClient, schema: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
    await refused(http, "/v1/chat/completions", {**CHAT, "response_format": form})


@pytest.mark.parametrize(("path", "body", "status"), BAD)
async def test_bodies_that_the_soak_takes_for_bad_are_refused(
    http: httpx2.AsyncClient, path: str, body: bytes, status: int
) -> None:
    """With each commit, as the soak itself is long: what is allowed later would fail it unseen."""
    answer = await http.post(path, content=body, headers=JSON)
    assert answer.status_code == status
    assert "error" in answer.json()
